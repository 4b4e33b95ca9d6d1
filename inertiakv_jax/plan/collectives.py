"""What devices send to each other in a compiled program, read from its text."""

import dataclasses
import re
from collections.abc import Iterator

BYTES = {
    **dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn", "f8e5m2"), 1),
    **dict.fromkeys(("bf16", "f16", "s16", "u16"), 2),
    **dict.fromkeys(("f32", "s32", "u32"), 4),
    **dict.fromkeys(("f64", "s64", "u64"), 8),
}
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_INSTRUCTION = re.compile(rf" = (\(.*?\)|\S+) ({'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One instruction.

    Attributes:
      kind: one of ``KINDS``.
      bytes: of its result on one device.
      repeated: it stands in a loop, so that it runs more than once.
    """

    kind: str
    bytes: int
    repeated: bool


def collectives(text: str) -> list[Collective]:
    """All of a program, in the order of its optimised HLO."""
    return list(_instructions(text))


def _instructions(text: str) -> Iterator[Collective]:
    entry = False
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            entry = line.startswith("ENTRY")
        elif match := _INSTRUCTION.search(line):
            result, kind, asynchronous = match.groups()
            yield Collective(kind, _result_bytes(result, kind, bool(asynchronous)), not entry)


def _result_bytes(result: str, kind: str, asynchronous: bool) -> int:
    """Of a started one, whose result names its operands, too, the latter half."""
    sizes = [
        BYTES.get(dtype, 4) * _product(dimensions) for dtype, dimensions in _ARRAY.findall(result)
    ]
    if asynchronous and kind != "all-reduce":
        sizes = sizes[:2] if kind == "collective-permute" else sizes
        sizes = sizes[len(sizes) // 2 :]
    return sum(sizes)


def _product(dimensions: str) -> int:
    product = 1
    for dimension in filter(None, dimensions.split(",")):
        product *= int(dimension)
    return product


def sent(kind: str, result_bytes: float, devices: int) -> float:
    """Bytes that each of the devices sends, by the best algorithm on a ring."""
    if kind == "collective-permute":
        return result_bytes
    others = (devices - 1) / devices
    if kind == "all-reduce":
        return 2 * others * result_bytes
    if kind == "reduce-scatter":
        return (devices - 1) * result_bytes
    return others * result_bytes
