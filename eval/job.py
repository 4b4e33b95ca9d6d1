"""What the processes of a job tell each other about the run that they share."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from inertiakv_jax.distributed import gather, together
from inertiakv_jax.eval import records


@dataclasses.dataclass(frozen=True)
class Share:
    """This process' part of a run.

    Attributes:
      shard: which of ``shards`` parts.
      shards: how many there are.
      lockstep: other processes do the same part with it: their devices form one mesh.
      writes: this one of them writes the records.
    """

    shard: int
    shards: int
    lockstep: bool = False
    writes: bool = True

    def do(self, work: Callable[[], None]) -> None:
        """Do the part, and wait for those of the others.

        In lockstep a process that fails does not wait: the others may stand still in the middle of
        a step, which it would have to do with them. jax ends them minutes after this one's exit.
        """
        if self.lockstep:
            work()
        else:
            together(work)


def share_of(mesh: Mesh | None) -> Share:
    """What a process of the job does of a run, given the mesh of its model."""
    index, count = jax.process_index(), jax.process_count()
    members = 1 if mesh is None else len({device.process_index for device in mesh.devices.flat})
    return Share(
        shard=index // members,
        shards=count // members,
        lockstep=members > 1,
        writes=index % members == 0,
    )


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
