"""Checkpoints of a training run: whole or not there, and refused by any other run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax

try:
    import orbax.checkpoint as ocp
except ImportError as error:
    raise ImportError(
        "training the scorer needs orbax-checkpoint: pip install 'inertiakv-jax[train]'"
    ) from error

KEPT = 2
"""Latest checkpoints that are kept."""

_State = TypeVar("_State")


class Checkpoints:
    """The checkpoints of one run, in a folder. A context manager.

    Orbax writes each beside its place and moves it there when whole, so a kill at any moment leaves
    the ones before it.

    Attributes:
      run: what the run is, as JSON can hold it: one level of groups, of names and values.
    """

    def __init__(self, folder: Path, run: Mapping[str, Mapping[str, Any]]):
        """Open or make the folder.

        Raises:
          ValueError: it cannot be written to, or its checkpoints are of another run.
        """
        self.run = run
        self._folder = folder.resolve()  # orbax takes absolute paths only
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / ".writable").touch()
            (self._folder / ".writable").unlink()
        except OSError as error:
            raise ValueError(
                f"checkpoints cannot be written to {folder}: {error.strerror}"
            ) from error
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=KEPT,
                # A megabyte: a thread would cost more than it saves.
                enable_async_checkpointing=False,
                cleanup_tmp_directories=True,
            ),
        )
        if self.latest is not None:
            self._check_run(self.latest)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    @property
    def latest(self) -> int | None:
        """Step of the newest checkpoint."""
        return self._manager.latest_step()

    def restore(self, fresh: _State) -> _State:
        """The newest state, or ``fresh``, of the same structure, where there is none."""
        if self.latest is None:
            return fresh
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, fresh)
        return self._read(self.latest, "state", ocp.args.StandardRestore(target))

    def save(self, step: int, state: Any) -> None:
        """Write a checkpoint; nothing if there is one of this step."""
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(dict(self.run))
            ),
        )

    def _check_run(self, step: int) -> None:
        theirs = self._read(step, "run", ocp.args.JsonRestore())
        differences = [
            f"{group}.{name} is {_value(theirs, group, name)!r} there, {value!r} here"
            for group, values in self.run.items()
            for name, value in values.items()
            if _value(theirs, group, name) != value
        ]
        if differences:
            self._manager.close()
            raise ValueError(
                f"the checkpoints in {self._folder} are of another run: {'; '.join(differences)}. "
                "Name another folder, or delete this one."
            )

    def _read(self, step: int, item: str, restore: Any) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**{item: restore}))[item]
        except Exception as error:  # orbax and what it builds on raise many kinds
            raise ValueError(
                f"the checkpoint {self._folder / str(step)} cannot be read "
                f"({type(error).__name__}: {error}); delete it to go on from the one before"
            ) from error


def _value(run: Any, group: str, name: str) -> Any:
    """An entry of a description that someone else may have written."""
    values = run.get(group) if isinstance(run, dict) else None
    return values.get(name) if isinstance(values, dict) else None
