"""The eviction step on a TPU: each row is read and written once.

XLA makes four passes of it, for every reduction waits for the one before. Here a block of whole
rows stays in VMEM between them. A slot costs 20 bytes of traffic: scores, increment and positions
in, scores and positions out.

Compiled ahead of time for v5e, v5p and v6e, numbers checked in interpret mode; never run on a TPU.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

_LANES = 128
_SUBLANES = 8
_BLOCK_BYTES = 1024 * 1024  # of one array; enough to hide what a grid step costs
# Five arrays, each held twice, and what the kernel computes on the way.
_ARRAYS_IN_VMEM = 18
_VMEM_BUDGET = 40 * 1024 * 1024
_LAST_POSITION = jnp.iinfo(jnp.int32).max


def refusal(shape: tuple[int, ...]) -> str | None:
    """Why utilities of a shape [..., S] cannot be taken; None where they can.

    >>> refusal((32, 65536)) is None
    True
    >>> refusal((32, 131072))
    'the TPU kernel holds whole rows in VMEM: 8 rows of 131072 slots do not fit'
    """
    rows, rank = _block_rows(shape)[1], len(shape)
    if rank > 2 and _whole_sublanes(shape[-2]) != shape[-2]:
        # XLA lays such arrays out with another axis beside the slots, and would copy them.
        return (
            f"the TPU kernel takes 1, 2, 4 or a multiple of 8 of the last leading axis, got {shape}"
        )
    if _ARRAYS_IN_VMEM * _block_bytes(1, rows, shape[-1]) > _VMEM_BUDGET:
        return (
            f"the TPU kernel holds whole rows in VMEM: {rows} rows of {shape[-1]} slots do not fit"
        )
    return None


def _block_rows(shape: tuple[int, ...]) -> tuple[int, int]:
    """Extents of a block over the leading axes, taken as (all but the last, the last)."""
    outer, rows, slots = math.prod(shape[:-2]), shape[-2], shape[-1]
    if rows > _SUBLANES and _block_bytes(1, rows, slots) > _BLOCK_BYTES:
        rows = _SUBLANES
    return min(outer, max(_BLOCK_BYTES // _block_bytes(1, rows, slots), 1)), rows


def _block_bytes(outer: int, rows: int, slots: int) -> int:
    return outer * _whole_sublanes(rows) * (-(-slots // _LANES) * _LANES) * 4


def _whole_sublanes(rows: int) -> int:
    """Rows that an array takes up: tiles of fewer than 8 are powers of two."""
    tile = min(1 << (rows - 1).bit_length(), _SUBLANES)
    return -(-rows // tile) * tile


def evict(
    scores: Array,
    increment: Array | None,
    positions: Array,
    next_position: Array,
    budget: Array,
    active: Array,
    decay: Array,
    protect_first: Array,
    protect_recent: Array,
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Array, Array, Array]:
    """Age and evict; see ``api.evict`` for the meaning and the shapes."""
    refused = refusal(scores.shape)
    if refused is not None:
        raise ValueError(refused)
    # The last leading axis stays, for on a TPU it is tiled together with the slots.
    shape = (math.prod(scores.shape[:-2]), *scores.shape[-2:])
    outer, rows = _block_rows(scores.shape)
    limits = jnp.where(active, next_position - protect_recent, 0)
    per_row = jnp.stack([limits, budget, active.astype(jnp.int32)], axis=-1)
    wide = pl.BlockSpec((outer, rows, shape[2]), lambda i, j: (i, j, 0))
    inputs = [per_row.reshape(*shape[:2], 3), scores.reshape(shape), positions.reshape(shape)]
    if increment is not None:
        inputs.append(increment.reshape(shape))
    scalar = pl.BlockSpec(memory_space=pltpu.SMEM)
    block_bytes = _block_bytes(outer, rows, shape[2])
    aged, left, slot = pl.pallas_call(
        _kernel,
        grid=(pl.cdiv(shape[0], outer), pl.cdiv(shape[1], rows)),
        in_specs=[
            scalar,
            scalar,
            pl.BlockSpec((outer, rows, 3), lambda i, j: (i, j, 0)),
            *[wide] * (len(inputs) - 1),
        ],
        out_specs=[wide, wide, pl.BlockSpec((outer, rows, 1), lambda i, j: (i, j, 0))],
        out_shape=[
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.int32),
            jax.ShapeDtypeStruct((*shape[:2], 1), jnp.int32),
        ],
        input_output_aliases={3: 0, 4: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"),
            vmem_limit_bytes=max(_ARRAYS_IN_VMEM * block_bytes, 16 * 1024 * 1024),
        ),
        cost_estimate=pl.CostEstimate(
            flops=10 * scores.size,
            transcendentals=0,
            bytes_accessed=4 * scores.size * (len(inputs) + 1),
        ),
        interpret=interpret,
        name="evict",
    )(decay.reshape(1), protect_first.reshape(1), *inputs)
    return aged.reshape(scores.shape), left.reshape(scores.shape), slot.reshape(scores.shape[:-1])


def _kernel(decay, protect_first, per_row, scores, positions, *rest):
    # per_row [outer, rows, 3] int32: limit, budget, active
    # scores, positions, increment and the outputs but the last: [outer, rows, S]
    increment, (aged, left, slot) = rest[:-3], rest[-3:]
    limit, budget, active = (per_row[:, :, i : i + 1] for i in range(3))
    utility, position = scores[...], positions[...]
    if increment:
        utility = jnp.where(active != 0, decay[0] * utility + increment[0][...], utility)
    held = (position >= 0).astype(jnp.int32)
    held = jnp.sum(held, axis=2, keepdims=True, dtype=jnp.int32)
    limit = jnp.where(held > budget, limit, 0)
    candidates = (position >= protect_first[0]) & (position < limit)
    ranked = jnp.where(candidates, utility, jnp.inf)
    tied = candidates & (ranked == jnp.min(ranked, axis=2, keepdims=True))
    first = jnp.min(jnp.where(tied, position, _LAST_POSITION), axis=2, keepdims=True)
    freed = tied & (position == first)
    aged[...] = jnp.where(freed, 0.0, utility)
    left[...] = jnp.where(freed, -1, position)
    index = jax.lax.broadcasted_iota(jnp.int32, position.shape, 2)
    slot[...] = jnp.min(jnp.where(freed, index, position.shape[2]), axis=2, keepdims=True)
