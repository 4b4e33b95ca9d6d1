"""Processes on several hosts that share a job: find each other, and exchange results."""

import json
import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import numpy as np

T = TypeVar("T")
AUTOMATIC = "auto"
HEARTBEAT_S = 60
"""Seconds without a sign of life after which a process counts as dead, and jax ends the others."""
_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def join(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat_s: int = HEARTBEAT_S,
) -> None:
    """Make this process one of those that share a job; before anything else is done with jax.

    Without arguments and variables it stays alone. What is not given is read from the environment:
    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID.

    Args:
      coordinator: "host:port" of process 0, which the others can reach; or "auto", where jax knows
        the job by itself (TPU pods, Slurm, Open MPI, Kubernetes).
      num_processes: how many there are.
      process_id: which of them this one is, from 0.
      heartbeat_s: if a process dies, the others end so many seconds later, with a message.

    Raises:
      ValueError: some of the three are missing, or out of range.
    """
    found = [os.environ.get(name) for name in _VARIABLES]
    coordinator = coordinator if coordinator is not None else found[0]
    if coordinator is None and num_processes is None and process_id is None:
        return
    if coordinator == AUTOMATIC:
        jax.distributed.initialize(heartbeat_timeout_seconds=heartbeat_s)
        return
    count = _number(num_processes, _VARIABLES[1], found[1])
    index = _number(process_id, _VARIABLES[2], found[2])
    if coordinator is None or count is None or index is None:
        raise ValueError(
            "a job of several processes needs coordinator, num_processes and process_id (or "
            f"{', '.join(_VARIABLES)}), got {coordinator}, {count} and {index}; "
            f"coordinator={AUTOMATIC!r} lets jax find them, on TPU pods and under Slurm"
        )
    if not 0 <= index < count:
        raise ValueError(f"process_id must be in 0 .. {count - 1}, got {index}")
    if ":" not in coordinator:
        raise ValueError(f"coordinator must be host:port, got {coordinator!r}")
    jax.distributed.initialize(coordinator, count, index, heartbeat_timeout_seconds=heartbeat_s)


def _number(given: int | None, variable: str, text: str | None) -> int | None:
    if given is not None or text is None:
        return given
    if not text.isdecimal():
        raise ValueError(f"{variable} must be a number, got {text!r}")
    return int(text)


def mesh_devices(needed: int) -> list[Any]:
    """Devices for the mesh of this process: its own, or those of a group of processes.

    Groups are of neighbours, all of one size; the processes of a group must do the same work.

    Args:
      needed: devices of the mesh, at least 1.

    Returns:
      This process' devices if they are enough, or if it is alone; else all of its group's.

    Raises:
      ValueError: the mesh does not take whole processes, or they are no whole groups.
    """
    own, count = jax.local_devices(), jax.process_count()
    if needed <= len(own) or count == 1:
        return own
    members = needed // len(own)
    if needed % len(own) or count % members:
        whole = [str(n * len(own)) for n in range(2, count + 1) if count % n == 0]
        raise ValueError(
            f"a mesh of {needed} devices does not divide {count} processes of {len(own)} devices "
            f"each; expected at most {len(own)}, or {' or '.join(whole)}"
        )
    group = jax.process_index() // members
    return [device for device in jax.devices() if device.process_index // members == group]


def fetch(array: Any) -> np.ndarray:
    """``np.asarray``, also of an array of which other processes hold parts; all these must call it.

    On one process, and of an array that each process has whole, nothing is exchanged.
    """
    if isinstance(array, jax.Array) and not (
        array.is_fully_addressable or array.is_fully_replicated
    ):
        from jax.experimental.multihost_utils import process_allgather

        return np.asarray(process_allgather(array, tiled=True))
    return np.asarray(array)


def gather(value: Any) -> list[Any]:
    """What each process gives, in their order; all must call it. JSON values only.

    Alone, that is a list of one value.
    """
    if jax.process_count() == 1:
        return [value]
    from jax.experimental.multihost_utils import process_allgather

    content = np.frombuffer(json.dumps(value, ensure_ascii=False).encode(), np.uint8)
    sizes = process_allgather(np.asarray(len(content), np.int32))
    padded = np.zeros(int(np.max(sizes)), np.uint8)
    padded[: len(content)] = content
    rows = np.asarray(process_allgather(padded))
    return [
        json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes.tolist(), strict=True)
    ]


class PeerError(ConnectionError):
    """Another process of the job has failed."""


def together(work: Callable[[], T]) -> T:
    """Do ``work`` on every process, and wait for all: where one fails, all do.

    So nobody waits for a process that is gone.

    Returns:
      What this process' work gave.

    Raises:
      PeerError: another process failed; the message says which, and how.
    """
    result, failure = None, None
    try:
        result = work()
    except Exception as error:
        failure = error
    said = gather(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    failed = [f"process {index} of {len(said)}: {text}" for index, text in enumerate(said) if text]
    if failed:
        raise PeerError("another process failed. " + "\n".join(failed))
    return cast(T, result)
