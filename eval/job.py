"""What the processes of a job tell each other about the run that they share."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from inertiakv_jax.distributed import gather
from inertiakv_jax.eval import records


def check_alike(described: Mapping[str, Any]) -> None:
    """Raise ValueError unless all processes have the same model, examples and libraries.

    Args:
      described: what this process' run.json says.
    """
    described = {key: value for key, value in described.items() if key != records.NOT_COMPARED}
    first, *others = gather(described)
    for index, other in enumerate(others, 1):
        differing = [key for key in first if first[key] != other.get(key)]
        if differing:
            raise ValueError(
                f"process {index} has other {', '.join(differing)} than process 0; all need the "
                "same command, data and versions"
            )


def known_to_any(found: Iterable[Mapping[str, Any]]) -> set[tuple[str, ...]]:
    """Keys of the records that any process has, from those that this one ``found``."""
    return {tuple(key) for keys in gather(list(map(records.record_key, found))) for key in keys}


def put_together(folder: Path, order: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Have process 0 write the records of all processes into one file of its folder.

    Args:
      folder: of this process.
      order: keys in which one process writes them; others, of earlier settings, come last.

    Returns:
      All records, on each process.
    """
    by_key = {
        records.record_key(record): record
        for part in gather(records.read_records(folder))
        for record in part
    }
    first = [by_key.pop(key) for key in order if key in by_key]
    found = [*first, *by_key.values()]
    several = jax.process_count() > 1 or len(records.record_files(folder)) > 1
    if jax.process_index() == 0 and several:
        records.write_as_one(folder, found)
    return found
