"""What a report needs of the files of a run, checked before it is made: they may be edited."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from inertiakv_jax.checks import is_a

_DESCRIPTION: Mapping[str, Any] = {
    "settings": {"policies": list, "model": str},
    "model": {"dtype": str},
    "examples": dict,
    "versions": dict,
    "device": {"count": int, "kind": str},
    "report": {"name": str},
}
_RECORD: Mapping[str, Any] = {
    **dict.fromkeys(("example", "variant", "benchmark", "group", "policy"), str),
    **dict.fromkeys(("options", "scores", "tags"), dict),
    **dict.fromkeys(("kept_fraction", "evicted", "kv_bytes_full", "kv_bytes_kept"), Real),
    "cost": {"prefill_s": Real, "peak_bytes": dict},
}
_SAID = {str: "a text", dict: "an object", list: "a list", int: "an integer", Real: "a number"}


def check_run(
    folder: Path, description: Mapping[str, Any], records: Sequence[Mapping[str, Any]]
) -> None:
    """Raise ValueError, naming the file and the field, for what no run of ours has written.

    Args:
      folder: of the run, for the message.
      description: run.json.
      records: of all hosts.
    """
    for problem in _problems(description, _DESCRIPTION):
        raise ValueError(f"{folder}/run.json: {problem}")
    for record in records:
        for problem in _problems(record, _RECORD):
            where = f"the record of {record['example']} with {record['variant']}"
            raise ValueError(f"{folder}: {where}: {problem}")
        if not record["scores"] or not all(is_a(x, Real) for x in record["scores"].values()):
            raise ValueError(f"{folder}: {record['example']}: scores must be numbers")


def _problems(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterable[str]:
    for key, expected in wanted.items():
        value = found.get(key)
        kind: Any = dict if isinstance(expected, Mapping) else expected
        if not is_a(value, kind):
            yield f"{key} must be {_SAID[kind]}, got {value!r:.60}"
        elif isinstance(expected, Mapping) and isinstance(value, Mapping):
            yield from (f"{key}.{problem}" for problem in _problems(value, expected))
