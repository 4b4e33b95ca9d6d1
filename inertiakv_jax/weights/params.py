"""From a checkpoint to the decoder's parameters, one tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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


def load_params(source: TensorSource, config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Build the parameters of ``models.decoder.DecoderModel`` from a checkpoint.

    Each tensor is read block by block into one buffer of the final dtype and layout, which then
    becomes (CPU) or is copied to (accelerator) a device array. Beyond the result, the host holds
    one tensor at most.

    Args:
        source: an opened checkpoint.
        config: the decoder's sizes.
        dtype: "float32" or "bfloat16".

    Returns:
        Nested dict of arrays on the default device.

    Raises:
        ValueError: tensors missing, unknown or of another shape than ``config`` asks for; raised
            before any of them is read.
    """
    numpy_dtype = checked_dtype(dtype)
    if config.num_layers > len(source.shapes):  # a corrupt config must not make a list of billions
        raise ValueError(
            f"the config has {config.num_layers} layers, but there are {len(source.shapes)} tensors"
        )
    tensors = list(expected_tensors(config))
    check_tensors(source, config, tensors)
    params: dict[str, Any] = {}
    for tensor in tensors:
        parent = params
        for part in tensor.path[:-1]:
            parent = parent.setdefault(part, {})
        parent[tensor.path[-1]] = jax.device_put(read_tensor(source, tensor, numpy_dtype))
    return params


def check_tensors(source: TensorSource, config: ModelConfig, tensors: list[Tensor]) -> None:
    """Raise ValueError unless ``source`` has exactly ``tensors``, in their shapes."""
    shapes = source.shapes
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


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def read_tensor(source: TensorSource, tensor: Tensor, dtype: np.dtype) -> np.ndarray:
    """Read one tensor into a new host array of its final dtype and layout."""
    shape = tensor.shape[::-1] if tensor.transpose else tensor.shape
    result = aligned_empty(shape, dtype)
    # Strided writes of bfloat16 are slow in NumPy; integers of its size copy the same bits.
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
    return result


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
