"""From a checkpoint to the decoder's parameters, one tensor at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from inertiakv_jax.config import ModelConfig
from inertiakv_jax.models.decoder import DecoderModel
from inertiakv_jax.models.hf_names import Tensor, expected_tensors, is_harmless_extra
from inertiakv_jax.typing import Params
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


def checked_quantization(quantize: str | None) -> str | None:
    """None or "int8"; ValueError otherwise."""
    if quantize not in (None, "int8"):
        raise ValueError(f"quantize {quantize!r} is not supported; supported: None, 'int8'")
    return quantize


def load_params(
    source: TensorSource, model: DecoderModel, shardings: Params | None = None
) -> dict[str, Any]:
    """Build the parameters of a decoder from a checkpoint.

    Each parameter is read block by block into one buffer of its final dtype and layout, which then
    becomes (CPU) or is copied to (accelerator) a device array. Beyond the result, the host holds
    one parameter at most: the largest tensor, or the same matrix of all experts of a layer.

    Args:
        source: an opened checkpoint.
        model: says the sizes, the dtype and whether projections become int8.
        shardings: a pytree of ``jax.sharding.Sharding`` of the parameters' structure; None puts
            them on the default device. Each process fills the shards of its own devices.

    Returns:
        Nested dict of arrays.

    Raises:
        ValueError: tensors missing, unknown or of another shape than the config asks for (raised
            before any of them is read), or a weight that int8 cannot hold.
    """
    dtype, int8 = DTYPES[model.dtype], model.quantization == "int8"
    params: dict[str, Any] = {}
    tensors = checked_tensors(source, model.config)
    for path, group in itertools.groupby(tensors, key=lambda tensor: tensor.path):
        *parents, name = path
        parent, sharding = params, shardings
        for part in parents:
            parent = parent.setdefault(part, {})
            sharding = sharding and sharding[part]
        group = list(group)
        if int8 and group[0].is_projection:
            leaves = read_int8(source, group)
        else:
            leaves = {name: read_parameter(source, group, dtype)}
        for name, leaf in leaves.items():
            # Waits, lest the next buffers pile up behind a slow copy to the device.
            placed = _placed(leaf, sharding and sharding[name])
            parent[name] = jax.block_until_ready(placed)
    return params


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
    result = aligned_empty(_shape(tensors), dtype)
    for tensor, part in zip(tensors, _parts(result, tensors), strict=True):
        for rows, values in source.blocks(tensor.name):
            _write(part, rows, values.astype(dtype, copy=False), tensor.transpose)
    return result


def read_int8(source: TensorSource, tensors: list[Tensor]) -> dict[str, np.ndarray]:
    """Read a projection as int8 numbers times one float32 scale per output.

    An output's scale is its largest weight over 127; the error of a weight is half a scale at most.

    Returns:
        "kernel" [..., in, out] int8 and "scale" [..., out] float32.

    Raises:
        ValueError: a weight is not finite.
    """
    shape = _shape(tensors)
    kernel = aligned_empty(shape, np.dtype(np.int8))
    scale = aligned_empty((*shape[:-2], shape[-1]), np.dtype(np.float32))
    parts = zip(tensors, _parts(kernel, tensors), _parts(scale, tensors), strict=True)
    for tensor, kernel_part, scale_part in parts:
        for rows, values in source.blocks(tensor.name):  # a block has whole rows: whole outputs
            values = values.astype(np.float32, copy=False)
            peak = np.abs(values).max(axis=1)
            if not np.isfinite(peak).all():
                raise ValueError(
                    f"{source.file_of(tensor.name)}: tensor {tensor.name!r} has weights that are "
                    "not finite; int8 cannot hold them"
                )
            step = np.where(peak > 0.0, peak / np.float32(127.0), np.float32(1.0))
            scale_part[rows] = step
            _write(kernel_part, rows, np.rint(values / step[:, None]).astype(np.int8), True)
    return {"kernel": kernel, "scale": scale}


def _shape(tensors: list[Tensor]) -> tuple[int, ...]:
    first = tensors[0]
    shape = first.shape[::-1] if first.transpose else first.shape
    return shape if first.expert is None else (len(tensors), *shape)


def _parts(result: np.ndarray, tensors: list[Tensor]) -> Iterable[np.ndarray]:
    """Where each of a parameter's tensors goes."""
    return [result] if tensors[0].expert is None else result


def _write(
    result: np.ndarray, rows: slice | np.ndarray, block: np.ndarray, transpose: bool
) -> None:
    # Strided writes of bfloat16 are slow in NumPy; integers of its size copy the same bits.
    if result.dtype.itemsize == 2:
        result, block = result.view(np.uint16), block.view(np.uint16)
    if not transpose:
        result[rows] = block
        return
    for start in range(0, len(block), TRANSPOSE_ROWS):
        part = slice(start, start + TRANSPOSE_ROWS)
        result[:, _part_of(rows, part, len(block))] = block[part].T


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
