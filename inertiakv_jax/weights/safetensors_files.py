"""Checkpoints of one or several ``*.safetensors`` files, checked before anything is read.

The format: 8 bytes header length (little-endian), a JSON header, then the tensors end to end.
The header is parsed here and not by the safetensors package, which reads whole tensors only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import jax.numpy as jnp
import numpy as np

from inertiakv_jax.weights.tensor_source import Block, file_size, read_bytes, row_blocks

MAX_HEADER_BYTES = 100_000_000  # the limit of the format's reference implementation
INDEX_NAME = "model.safetensors.index.json"

DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
FLOAT_DTYPES = {
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies: file, dtype name, shape and absolute byte offset."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class SafetensorsSource:
    """A ``TensorSource`` over safetensors files."""

    entries: Mapping[str, Entry]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor by name."""
        return {name: entry.shape for name, entry in self.entries.items()}

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self.entries[name].path

    def blocks(self, name: str) -> Iterator[Block]:
        """Yield ``(rows, values)`` in the file's own dtype."""
        entry = self.entries[name]
        if entry.dtype not in FLOAT_DTYPES:
            raise ValueError(
                f"{entry.path}: tensor {name!r} has dtype {entry.dtype}; supported: "
                f"{', '.join(FLOAT_DTYPES)}"
            )
        dtype = FLOAT_DTYPES[entry.dtype]
        row_bytes = math.prod(entry.shape[1:]) * dtype.itemsize
        for start, stop in row_blocks(entry.shape):
            raw = read_bytes(
                entry.path, entry.offset + start * row_bytes, (stop - start) * row_bytes
            )
            values = raw.view(dtype.newbyteorder("<") if dtype.kind == "f" else dtype)
            yield slice(start, stop), values.reshape(stop - start, *entry.shape[1:])


def open_safetensors(folder: Path) -> SafetensorsSource:
    """Find the safetensors files of a folder and check all their headers.

    An index (``model.safetensors.index.json``) says which files belong; without one it is
    ``model.safetensors``, or the folder's only ``*.safetensors`` file.

    Raises:
        ValueError: no weights, an unclear set of files, a truncated or corrupt file.
    """
    index_path = folder / INDEX_NAME
    if index_path.is_file():
        return _open_sharded(folder, index_path)
    single = folder / "model.safetensors"
    if single.is_file():
        return SafetensorsSource(read_header(single))
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return SafetensorsSource(read_header(found[0]))
    if found:
        raise ValueError(
            f"{folder} has {len(found)} *.safetensors files but neither {INDEX_NAME} nor "
            "model.safetensors, so it is not clear which belong together"
        )
    others = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pth", ".pt"))
    gguf = sorted(p.name for p in folder.glob("*.gguf"))
    hint = ""
    if gguf:
        hint = f"; to load {gguf[0]}, give the path of that file"
    elif others:
        hint = f"; {others[0]} is a pickle and is never loaded: convert it to safetensors"
    raise ValueError(f"{folder} has no weights: expected *.safetensors files{hint}")


def _open_sharded(folder: Path, index_path: Path) -> SafetensorsSource:
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index_path}: weight_map must be a non-empty object")
    entries: dict[str, Entry] = {}
    for file_name in sorted(set(map(str, weight_map.values()))):
        # A name from a file must not lead out of the folder.
        if Path(file_name).name != file_name or "\\" in file_name:
            raise ValueError(f"{index_path}: {file_name!r} is not a plain file name")
        path = folder / file_name
        if not path.is_file():
            raise ValueError(f"{index_path} names {file_name}, which is not in the folder")
        for name, entry in read_header(path).items():
            if name in entries:
                raise ValueError(
                    f"tensor {name!r} is in both {entries[name].path.name} and {file_name}"
                )
            entries[name] = entry
    missing = sorted(name for name in weight_map if name not in entries)
    if missing:
        raise ValueError(
            f"{index_path} names {len(missing)} tensors that no file has: {', '.join(missing[:5])}"
        )
    return SafetensorsSource(entries)


def read_header(path: Path) -> dict[str, Entry]:
    """Parse and check the header of one safetensors file.

    Raises:
        ValueError: the file is truncated or corrupt; the message names file and tensor.
    """
    size = file_size(path)
    if size < 8:
        raise ValueError(f"{path}: {size} bytes are too few for a safetensors file")
    length = int(read_bytes(path, 0, 8).view("<u8")[0])
    if length > min(size - 8, MAX_HEADER_BYTES):
        raise ValueError(
            f"{path}: header length {length} does not fit the file of {size} bytes (limit "
            f"{MAX_HEADER_BYTES}): truncated or not a safetensors file"
        )
    header = parse_json(read_bytes(path, 8, length).tobytes(), f"{path}: header")
    header.pop("__metadata__", None)
    data_start, data_bytes = 8 + length, size - 8 - length
    entries, ranges = {}, []
    for name, fields in header.items():
        dtype, shape, begin, end = _checked_fields(path, name, fields, data_bytes)
        entries[name] = Entry(path, dtype, shape, data_start + begin)
        ranges.append((begin, end, name))
    position = 0
    for begin, end, name in sorted(ranges):
        if begin != position:
            raise ValueError(
                f"{path}: tensor {name!r} begins at byte {begin}, expected {position}: tensors "
                "must follow each other without gaps or overlaps"
            )
        position = end
    if position != data_bytes:
        raise ValueError(f"{path}: {data_bytes} bytes of data, but tensors cover {position}")
    return entries


def _checked_fields(
    path: Path, name: str, fields: Any, data_bytes: int
) -> tuple[str, tuple[int, ...], int, int]:
    where = f"{path}: tensor {name!r}"
    if not isinstance(fields, dict):
        raise ValueError(f"{where}: expected an object, got {fields!r:.80}")
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise ValueError(f"{where}: dtype {dtype!r:.80} is not one of {', '.join(DTYPE_BYTES)}")
    if not _naturals(shape):
        raise ValueError(f"{where}: shape {shape!r:.80} is not a list of sizes")
    if not _naturals(offsets) or len(offsets) != 2:
        raise ValueError(f"{where}: data_offsets {offsets!r:.80} is not a pair of offsets")
    begin, end = offsets
    expected = math.prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != expected:
        raise ValueError(
            f"{where}: {dtype} {tuple(shape)} takes {expected} bytes, data_offsets {offsets} span "
            f"{end - begin}"
        )
    if end > data_bytes:
        raise ValueError(
            f"{where}: ends at byte {end} of the data, the file has {data_bytes}: it is truncated"
        )
    return dtype, tuple(shape), begin, end


def _naturals(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 62 for v in values)


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON file that holds an object; ValueError naming the file otherwise."""
    return parse_json(path.read_bytes(), str(path))


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object; ValueError beginning with ``where`` for anything else."""
    try:
        parsed = json.loads(data.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{where} is not a JSON object")
    return parsed


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    parsed = dict(pairs)
    if len(parsed) != len(pairs):
        raise ValueError("a key appears twice")
    return parsed
