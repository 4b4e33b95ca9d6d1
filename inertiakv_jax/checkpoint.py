"""Parameters as orbax checkpoints: written once, restored straight into any sharding.

A checkpoint is a folder with ``config.json`` and the tokenizer as Hugging Face has them, the
parameters below ``params/``, and ``inertiakv.json``, which says how those are stored.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from inertiakv_jax.language_model import LanguageModel
from inertiakv_jax.models.decoder import DecoderModel
from inertiakv_jax.typing import Params
from inertiakv_jax.weights.hf_export import new_folder, write_description
from inertiakv_jax.weights.params import checked_dtype, checked_quantization
from inertiakv_jax.weights.safetensors_files import read_json

PARAMS, DESCRIPTION = "params", "inertiakv.json"
FORMAT = 1
FLOAT32_BYTES = 4


def save(lm: LanguageModel, folder: str | os.PathLike[str]) -> None:
    """Write a checkpoint that ``load`` reads.

    Args:
        lm: parameters may lie on any devices, int8 ones included.
        folder: made here; must not exist, or be empty. It appears when it is complete.

    Raises:
        ValueError: the folder has files, or orbax is not installed.
    """
    orbax = check_orbax()
    description = {
        "format": FORMAT,
        "dtype": str(lm.model.dtype),
        "quantization": getattr(lm.model, "quantization", None),
    }
    with new_folder(Path(folder)) as made:
        write_description(lm, made)
        (made / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n")
        with _checkpointer(orbax, lm.params) as checkpointer:
            checkpointer.save(made.resolve() / PARAMS, lm.params)


def is_checkpoint(folder: Path) -> bool:
    """Whether ``save`` wrote the folder."""
    return (folder / DESCRIPTION).is_file()


def stored_quantization(folder: Path, wanted: str | None) -> str | None:
    """How the projections of a checkpoint are stored: None or "int8".

    Raises:
        ValueError: the description is not one, or ``wanted`` asks for another kind.
    """
    path = folder / DESCRIPTION
    description = read_json(path)
    if description.get("format") != FORMAT:
        raise ValueError(f"{path}: format {description.get('format')!r}, expected {FORMAT}")
    try:
        stored = checked_quantization(description.get("quantization"))
        checked_dtype(str(description.get("dtype")))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if wanted not in (None, stored):
        raise ValueError(
            f"{folder} has weights that are not {wanted}: quantise while converting "
            "(inertiakv convert --quantize int8), or load the original"
        )
    return stored


def restore_params(folder: Path, model: DecoderModel, shardings: Params | None = None) -> Params:
    """Read the parameters of a checkpoint, each process only its own shards.

    Args:
        folder: what ``save`` wrote.
        model: its decoder; float parameters come in its dtype.
        shardings: a pytree of ``jax.sharding.Sharding`` of the parameters' structure; None puts
            them on the default device.

    Raises:
        ValueError: the checkpoint is damaged, its parameters are not those of ``model``, or orbax
            is not installed.
    """
    orbax = check_orbax()
    path = folder.resolve() / PARAMS
    target = jax.eval_shape(model.init, jax.random.key(0))
    if shardings is None:
        device = SingleDeviceSharding(jax.devices()[0])
        shardings = jax.tree.map(lambda _: device, target)
    target = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        target,
        shardings,
    )
    with _checkpointer(orbax, target) as checkpointer:
        try:
            stored = checkpointer.metadata(path).item_metadata.tree
        except Exception as error:  # orbax raises many types for a missing or broken file
            raise ValueError(f"{path} is not a complete orbax checkpoint: {error}") from error
        _check(path, _shapes(stored), _shapes(target))
        try:
            return checkpointer.restore(path, target)
        except Exception as error:  # as above
            raise ValueError(f"{path} cannot be restored: {error}") from error


def _checkpointer(orbax: ModuleType, params: Params) -> Any:
    """A checkpointer that copies about 1 GB to the host at a time; orbax's own takes 96."""
    largest = max(leaf.size for leaf in jax.tree.leaves(params)) * FLOAT32_BYTES
    limit = -(-largest // 10**9)  # whole GB; orbax refuses a parameter that alone exceeds it
    return orbax.StandardCheckpointer(save_concurrent_gb=limit, restore_concurrent_gb=limit)


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    return {
        "/".join(str(getattr(key, "key", key)) for key in path): tuple(leaf.shape)
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def _check(
    path: Path, stored: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]
) -> None:
    """Raise ValueError naming the first parameters that differ."""
    for what, names in (
        ("has no", sorted(wanted.keys() - stored.keys())),
        ("has, and the config does not ask for,", sorted(stored.keys() - wanted.keys())),
    ):
        if names:
            raise ValueError(f"{path} {what} {len(names)} parameters: {', '.join(names[:8])}")
    for name, shape in wanted.items():
        if stored[name] != shape:
            raise ValueError(
                f"{path}: parameter {name} has shape {stored[name]}, the config asks for {shape}"
            )


def check_orbax() -> ModuleType:
    """The orbax package; ValueError with what to install where it is missing."""
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ValueError(
            "orbax checkpoints need an extra: pip install 'inertiakv-jax[checkpoint]'"
        ) from error
    return orbax.checkpoint
