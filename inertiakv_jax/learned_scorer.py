"""The learned scorer's weights as a file: one small safetensors, the same for all layers."""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from inertiakv_jax.scoring import LearnedParams
from inertiakv_jax.typing import Model


def load_learned(path: str, model: Model) -> LearnedParams:
    """Read W_q and W_k.

    Args:
      path: a file of ``save_learned``.
      model: the model that they were trained for.

    Returns:
      [N, D, features] and [K, D, features] float32. Read again only when the file has changed.

    Raises:
      ValueError: there is no such file, it is not one, its shapes are not the model's, or it holds
        numbers that are not finite.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise ValueError(f"no scorer weights at {path!r}: {error.strerror}") from error
    heads = (model.num_heads, model.num_kv_heads, model.head_dim)
    # The inode too: two files may be written within one tick of the clock.
    version = (status.st_mtime_ns, status.st_size, status.st_ino)
    query, key = _load(path, version, heads)
    # Outside the cached function: under a trace these are tracers, which must not be kept.
    return LearnedParams(jnp.asarray(query), jnp.asarray(key))


@functools.lru_cache(maxsize=8)
def _load(
    path: str, version: tuple[int, ...], heads: tuple[int, int, int]
) -> tuple[np.ndarray, np.ndarray]:
    del version  # part of the key
    try:
        with safe_open(path, framework="numpy") as file:
            _check_header(path, file.keys(), file.get_slice, heads)
            query, key = file.get_tensor("query"), file.get_tensor("key")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error
    if not (np.isfinite(query).all() and np.isfinite(key).all()):
        raise ValueError(f"{path} holds NaN or infinity: no scorer weights")
    return query, key


def _check_header(
    path: str,
    names: list[str],
    slice_of: Callable[[str], Any],
    heads: tuple[int, int, int],
) -> None:
    """Raise ValueError unless the file holds the two arrays of a model, before they are read."""
    num_heads, num_kv_heads, head_dim = heads
    found = {name: (slice_of(name).get_dtype(), *slice_of(name).get_shape()) for name in names}
    features = found.get("query", (0,))[-1]
    expected = {
        "query": ("F32", num_heads, head_dim, features),
        "key": ("F32", num_kv_heads, head_dim, features),
    }
    if found != expected or not features:
        raise ValueError(
            f"{path}: scorer weights of this model are query {('F32', num_heads, head_dim, 'f')} "
            f"and key {('F32', num_kv_heads, head_dim, 'f')}, got {found}"
        )


def save_learned(path: str, params: LearnedParams) -> None:
    """Write W_q and W_k; the file is whole or not there, and the same for the same weights."""
    part = f"{path}.part"
    arrays = {"query": params.query, "key": params.key}
    save_file(
        {name: np.ascontiguousarray(array, np.float32) for name, array in arrays.items()}, part
    )
    os.replace(part, path)
