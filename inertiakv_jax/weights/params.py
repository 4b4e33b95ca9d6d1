"""From a checkpoint to the decoder's parameters, one tensor at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from inertiakv_jax.config import ModelConfig
from inertiakv_jax.models.hf_names import Tensor, expected_tensors, is_harmless_extra
from inertiakv_jax.weights.tensor_source import TensorSource

DTYPES: Mapping[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(jnp.bfloat16),
}
ALIGNMENT = 64  # bytes; jax takes over a host buffer of this alignment without copying it
MAX_NAMES = 8  # names listed in an error message
TRANSPOSE_ROWS = 16  # rows written at a time: one cache line of float32 in the result


def checked_dtype(dtype: str) -> np.dtype:
    """The NumPy dtype of "float32" or "bfloat16"; ValueError listing the two otherwise."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    return DTYPES[dtype]


def load_params(
    source: TensorSource, config: ModelConfig, dtype: str, shardings: Any = None
) -> dict[str, Any]:
    """Build the parameters of ``models.decoder.DecoderModel`` from a checkpoint.

    Each parameter is read block by block into one buffer of its final dtype and layout, which then
    becomes (CPU) or is copied to (accelerator) a device array. Beyond the result, the host holds
    one parameter at most: the largest tensor, or the same matrix of all experts of a layer.

    Args:
        source: an opened checkpoint.
        config: the decoder's sizes.
        dtype: "float32" or "bfloat16".
        shardings: a pytree of ``jax.sharding.Sharding`` of the parameters' structure; None puts
            them on the default device. Each process fills the shards of its own devices.

    Returns:
        Nested dict of arrays.

    Raises:
        ValueError: tensors missing, unknown or of another shape than ``config`` asks for; raised
            before any of them is read.
    """
    numpy_dtype = checked_dtype(dtype)
    params: dict[str, Any] = {}
    for path, group in _by_path(checked_tensors(source, config)):
        host = read_parameter(source, group, numpy_dtype)
        sharding = None if shardings is None else _at(shardings, path)
        parent = params
        for part in path[:-1]:
            parent = parent.setdefault(part, {})
        # Waits, lest the next buffers pile up behind a slow copy to the device.
        parent[path[-1]] = jax.block_until_ready(_placed(host, sharding))
    return params


def _by_path(tensors: list[Tensor]) -> Iterator[tuple[tuple[str, ...], list[Tensor]]]:
    for path, group in itertools.groupby(tensors, key=lambda tensor: tensor.path):
        yield path, list(group)


def _at(tree: Any, path: Sequence[str]) -> Any:
    for part in path:
        tree = tree[part]
    return tree


def _placed(host: np.ndarray, sharding: Sharding | None) -> jax.Array:
    if sharding is None:
        return jax.device_put(host)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def checked_tensors(source: TensorSource, config: ModelConfig) -> list[Tensor]:
    """The tensors that ``config`` asks for; ValueError unless ``source`` has exactly these."""
    shapes = source.shapes
    # A corrupt config must not make a list of billions.
    enough = 2 * len(shapes) + 1000
    tensors = list(itertools.islice(expected_tensors(config), enough))
    expected = {tensor.name for tensor in tensors}
    missing = [tensor.name for tensor in tensors if tensor.name not in shapes]
    if missing:
        raise ValueError(f"{len(missing)} tensors are missing: {_listed(missing)}")
    extra = [
        name for name in shapes if name not in expected and not is_harmless_extra(name, config)
    ]
    if extra:
        raise ValueError(
            f"{len(extra)} tensors have no place in a {config.family} model of this config: "
            f"{_listed(extra)}"
        )
    for tensor in tensors:
        if shapes[tensor.name] != tensor.shape:
            raise ValueError(
                f"{source.file_of(tensor.name)}: tensor {tensor.name!r} has shape "
                f"{shapes[tensor.name]}, the config asks for {tensor.shape}"
            )
    return tensors


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def read_parameter(source: TensorSource, tensors: list[Tensor], dtype: np.dtype) -> np.ndarray:
    """Read the tensors of one parameter into a new host array of its final dtype and layout."""
    first = tensors[0]
    shape = first.shape[::-1] if first.transpose else first.shape
    if first.expert is None:
        result = aligned_empty(shape, dtype)
        _read_into(result, source, first)
        return result
    result = aligned_empty((len(tensors), *shape), dtype)
    for tensor in tensors:
        _read_into(result[tensor.expert], source, tensor)
    return result


def _read_into(result: np.ndarray, source: TensorSource, tensor: Tensor) -> None:
    # Strided writes of bfloat16 are slow in NumPy; integers of its size copy the same bits.
    dtype = result.dtype
    bits = result.view(np.uint16) if dtype.itemsize == 2 else result
    for rows, values in source.blocks(tensor.name):
        block = values.astype(dtype, copy=False)
        block = block.view(np.uint16) if dtype.itemsize == 2 else block
        if not tensor.transpose:
            bits[rows] = block
            continue
        for start in range(0, len(block), TRANSPOSE_ROWS):
            part = slice(start, start + TRANSPOSE_ROWS)
            bits[:, _part_of(rows, part, len(block))] = block[part].T


def _part_of(rows: slice | np.ndarray, part: slice, length: int) -> slice | np.ndarray:
    if isinstance(rows, np.ndarray):
        return rows[part]
    return slice(rows.start + part.start, rows.start + min(part.stop, length))


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Uninitialised array whose first byte lies on a multiple of ``ALIGNMENT``."""
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    buffer = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + num_bytes].view(dtype).reshape(shape)
