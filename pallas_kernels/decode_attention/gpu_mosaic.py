"""Decode attention on Hopper GPUs (compute capability 9.0), by way of Pallas-Mosaic-GPU.

A thread block, one warpgroup, reads the keys and values of one kv head in one split of its row:
TMA fills a ring of stages in shared memory, block by block, while an online softmax runs in
registers. ``gpu_merge`` does the rest.

wgmma multiplies at least 64 rows by 8 columns. So slots are the rows and the query heads of the
group the columns, and all is transposed:

    logits [slots, G] = keys [slots, D] @ query [D, G]
    output [D, G] += values [D, slots] @ weights [slots, G]

With the query heads as rows, 60 of 64 would be padding at G = 4, in registers as in products.

TMA reads zeros beyond S and beyond G, and writes nothing there: no array is padded. It reads dead
slots, too; where a block has some, its values are cleared in shared memory.

With D = 128, G = 4 and bfloat16 ptxas reports 112 registers a thread with mass and 103 without
(jax 0.10.2: 117 and 111), no spills, and Mosaic 107 KiB of shared memory: two thread blocks an SM,
with six blocks of 32 KiB on their way or in use. Compiled ahead of time for H100, numbers and races
checked in interpret mode; never run on a GPU.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mgpu

from inertiakv_jax.numerics import MASK_VALUE
from inertiakv_jax.pallas_kernels.decode_attention import gpu_merge
from inertiakv_jax.pallas_kernels.decode_attention.gpu_merge import Logits, Partition

_ROWS = 64  # of a warpgroup's matrix product
_COLUMNS = 8  # the fewest, and steps, of a matrix product
_WORD = 32  # bits
_SHARED_BYTES = 225 * 1024  # of an SM, less what the system keeps for each thread block
_SHARED_SLACK = 4 * 1024  # for reductions, barriers and alignment
_SWIZZLE = 128  # bytes


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the work is cut. No effect on numbers beyond rounding, much on speed."""

    slots: int
    """Of one block; a multiple of 64. Need not divide S."""
    splits: int
    """Of a row, at most; at least 1."""
    stages: int = 3
    """Blocks of keys and values in shared memory; at least 1."""

    def __post_init__(self):
        if self.slots < _ROWS or self.slots % _ROWS:
            raise ValueError(f"slots must be a multiple of {_ROWS}, got {self.slots}")
        if self.splits < 1 or self.stages < 1:
            raise ValueError(
                f"splits and stages must be at least 1, got {self.splits}, {self.stages}"
            )


def choose_tiles(
    batch: int,
    num_kv_heads: int,
    group: int,
    slots: int,
    head_dim: int,
    itemsize: int,
    *,
    cores: int,
) -> Tiles:
    """Tiles for a shape, letters B, K, G, S, D; ``itemsize`` in bytes, ``cores`` the GPU's SMs.

    >>> choose_tiles(1, num_kv_heads=8, group=4, slots=6656, head_dim=128, itemsize=2, cores=132)
    Tiles(slots=64, splits=26, stages=3)
    """
    block = 2 * _ROWS if head_dim <= 64 else _ROWS
    columns = -(-group // _COLUMNS) * _COLUMNS
    # Queries, weights, codes and the float32 output beside the keys and values of the stages.
    rest = columns * ((head_dim + 2 * block) * itemsize + head_dim * 4) + _SHARED_SLACK
    stage = 2 * block * head_dim * itemsize
    resident = 2 if 2 * (rest + 2 * stage) <= _SHARED_BYTES else 1
    stages = max((_SHARED_BYTES // resident - rest) // stage, 1)
    splits = gpu_merge.choose_splits(batch * num_kv_heads, slots, block, resident * cores)
    return Tiles(block, splits, stages)


def why_not(group: int, keys: Array | jax.ShapeDtypeStruct) -> str | None:
    """Why the kernel cannot take G query heads on keys [B, K, S, D]; None if it can."""
    slots, head_dim = keys.shape[2:]
    if keys.dtype not in (jnp.bfloat16, jnp.float16):
        return f"wgmma multiplies bfloat16 and float16, not {keys.dtype}"
    if head_dim not in (64, 128, 256):
        return f"head_dim must be 64, 128 or 256, got {head_dim}"
    if slots % 8:
        return f"S must be a multiple of 8, as TMA's tiles are, got {slots}"
    if group > 8 and group % 8:
        return f"G must be below 8 or a multiple of 8, as TMA's tiles are, got {group}"
    return None


def decode_attention(
    query: Array,
    keys: Array,
    values: Array,
    valid: Array,
    *,
    scale: float,
    soft_cap: float | None,
    return_mass: bool,
    tiles: Tiles,
    interpret: Any = False,
) -> tuple[Array, Array | None]:
    """Attend and score; see ``api.decode_attention`` for the mathematics and the shapes.

    Args:
      query: [B, N, D] in the dtype of keys and values, which is bfloat16 or float16; D is 64, 128
        or 256.
      keys: [B, K, S, D], S a multiple of 8.
      values: [B, K, S, D].
      valid: [B, S] or [B, K, S] bool.
      scale: of the logits.
      soft_cap: of the logits, or None.
      return_mass: False switches that output off.
      tiles: as of ``choose_tiles``.
      interpret: run on the CPU, with copies and barriers simulated; needs jax 0.12. True, or the
        ``InterpretGPUParams`` to do it with.

    Returns:
      output: [B, N, D], dtype of ``query``.
      mass: [B, K, S] float32, or None.

    Raises:
      ValueError: what ``why_not`` says, or there is no interpreter (while tracing).
    """
    batch, num_heads, head_dim = query.shape
    num_kv_heads, slots = keys.shape[1:3]
    group = num_heads // num_kv_heads
    reason = why_not(group, keys)
    if reason is not None:
        raise ValueError(reason)
    if interpret and jax.__version_info__ < (0, 12):
        raise ValueError(f"interpreting wgmma needs jax 0.12, got {jax.__version__}")
    partition = gpu_merge.cut(slots, tiles.slots, tiles.splits)
    logits = Logits(scale, soft_cap)
    spec = _Spec(logits, group, head_dim, partition, tiles.stages)
    grouped = query.reshape(batch, num_kv_heads, group, head_dim)
    shapes = gpu_merge.partial_shapes(query, num_kv_heads, partition, mass=return_mass)
    # A group's sums of all splits in one axis: TMA stores a matrix, so the split cannot lie
    # between its axes.
    flat = jax.ShapeDtypeStruct((*shapes[0].shape[:3], partition.splits * head_dim), jnp.float32)
    kernel = mgpu.kernel(
        functools.partial(_kernel, spec),
        out_type=(flat, *shapes[1:]),
        grid=(batch, num_kv_heads, partition.splits),
        grid_names=("batch", "kv_head", "split"),
        scratch_types=_scratch(spec, query.dtype, mass=return_mass),
        compiler_params=mgpu.CompilerParams(approx_math=True),
        kernel_name="decode_attention",
        interpret=mgpu.InterpretGPUParams() if interpret is True else interpret or None,  # pyright: ignore
    )
    partials = kernel(grouped, keys, values, _pack_bits(valid, partition))
    partials = (partials[0].reshape(shapes[0].shape), *partials[1:])
    return gpu_merge.merge(partials, partition, logits, query.dtype)


@dataclasses.dataclass(frozen=True)
class _Spec:
    """What the kernel knows while it is traced."""

    logits: Logits
    group: int  # G
    head_dim: int  # D
    partition: Partition
    stages: int

    @property
    def columns(self) -> int:
        """G rounded up to what a matrix product can have."""
        return -(-self.group // _COLUMNS) * _COLUMNS

    @property
    def words(self) -> int:
        """32-bit words that hold the mask of a block."""
        return self.partition.block // _WORD


def _pack_bits(valid: Array, partition: Partition) -> Array:
    """[..., S] bool as [..., words] int32, lowest bit first; slots beyond S are dead.

    The kernel reads the mask as scalars: its place in registers would not be that of the logits.
    """
    missing = partition.blocks * partition.block - valid.shape[-1]
    valid = jnp.pad(valid, [(0, 0)] * (valid.ndim - 1) + [(0, missing)])
    bits = valid.reshape(*valid.shape[:-1], -1, _WORD).astype(jnp.uint32)
    shifts = jnp.arange(_WORD, dtype=jnp.uint32).reshape((1,) * valid.ndim + (_WORD,))
    words = jnp.sum(bits << shifts, axis=-1, dtype=jnp.uint32)
    return jax.lax.bitcast_convert_type(words, jnp.int32)


def _scratch(spec: _Spec, dtype: jnp.dtype, *, mass: bool) -> dict[str, Any]:
    """Shared memory, and the barriers that say that a copy into it is complete."""

    def shared(shape, dtype):
        tile = (8, _SWIZZLE // jnp.dtype(dtype).itemsize)
        transforms = (mgpu.TilingTransform(tile), mgpu.SwizzleTransform(_SWIZZLE))
        return mgpu.SMEM(shape, dtype, transforms=transforms)

    block, head_dim, columns = spec.partition.block, spec.head_dim, spec.columns
    scratch = {
        "query_s": shared((columns, head_dim), dtype),
        "keys_s": shared((spec.stages, block, head_dim), dtype),
        "values_s": shared((spec.stages, block, head_dim), dtype),
        "weights_s": shared((columns, block), dtype),
        "output_s": shared((columns, head_dim), jnp.float32),
        "row_s": mgpu.SMEM((columns,), jnp.float32),
        "query_here": mgpu.Barrier(),
        "keys_here": mgpu.Barrier(num_barriers=spec.stages),
        "values_here": mgpu.Barrier(num_barriers=spec.stages),
    }
    if mass:
        scratch["codes_s"] = shared((columns, block), jnp.int16)
    return scratch


@dataclasses.dataclass(frozen=True)
class _Row:
    """What a thread block works with: one kv head of one row of the batch, and shared memory."""

    keys: Any  # [S, D]
    values: Any  # [S, D]
    words: Any  # [words]
    mass: tuple[Any, ...]  # codes [G, slots], tops [G, blocks]; or nothing
    shared: dict[str, Any]


def _kernel(spec: _Spec, query, keys, values, words, sums, maxima, totals, *mass, **shared):
    # query [B, K, G, D]; keys, values [B, K, S, D]; words [B, words] or [B, K, words]
    # sums [B, K, G, P * D]; maxima, totals [B, K, G, P]
    # mass: codes [B, K, G, slots], tops [B, K, G, blocks]
    batch, head, split = (jax.lax.axis_index(name) for name in ("batch", "kv_head", "split"))
    first = split * spec.partition.blocks_per_split
    last = jnp.minimum(first + spec.partition.blocks_per_split, spec.partition.blocks)
    at = (batch, head)
    words = words.at[batch] if len(words.shape) == 2 else words.at[at]
    row = _Row(keys.at[at], values.at[at], words, tuple(ref.at[at] for ref in mass), shared)
    query = query.at[(*at, _group(spec, split))]
    mgpu.copy_gmem_to_smem(query, shared["query_s"], shared["query_here"])
    for stage in range(spec.stages):
        pl.when(first + stage < last)(functools.partial(_fetch, spec, row, first + stage, stage))
    mgpu.barrier_wait(shared["query_here"])

    def step(i, carry):
        stage = jax.lax.rem(i - first, spec.stages)
        carry = _step(spec, row, i, stage, carry)
        later = i + spec.stages
        pl.when(later < last)(functools.partial(_fetch, spec, row, later, stage))
        return carry

    top, total, output = jax.lax.fori_loop(first, last, step, _start(spec))
    for value, ref in ((top, maxima), (jnp.sum(total, axis=0), totals)):
        _store_scalars(spec, shared["row_s"], value, ref.at[at], split)
    _store_transposed(shared["output_s"], output)
    mgpu.commit_smem()
    own = pl.ds(split * spec.head_dim, spec.head_dim)
    mgpu.copy_smem_to_gmem(shared["output_s"], sums.at[(*at, _group(spec, split), own)])
    mgpu.wait_smem_to_gmem(0)


def _slots(spec: _Spec, i):
    return pl.ds(i * spec.partition.block, spec.partition.block)


def _group(spec: _Spec, anything: Array):
    """The rows of an array [G, ...] that are the columns here; beyond G, TMA reads 0 and skips.

    A start that is not known while tracing, for Pallas refuses a known slice that is too long.
    """
    return pl.ds(anything * 0, spec.columns)


def _fetch(spec: _Spec, row: _Row, i, stage) -> None:
    """Start to copy block i into a stage. What lies beyond S is filled with zeros."""
    for source, name in ((row.keys, "keys"), (row.values, "values")):
        to, here = row.shared[f"{name}_s"].at[stage], row.shared[f"{name}_here"].at[stage]
        mgpu.copy_gmem_to_smem(source.at[_slots(spec, i)], to, here)


def _start(spec: _Spec) -> tuple[Array, Array, Array]:
    """Running maximum [columns], weights [slots, columns], weighted values [D, columns]."""
    matrix, row = mgpu.Layout.WGMMA, mgpu.Layout.WGMMA.reduce(0)
    block, head_dim, columns = spec.partition.block, spec.head_dim, spec.columns
    return (
        mgpu.layout_cast(jnp.full((columns,), MASK_VALUE, jnp.float32), row),
        mgpu.layout_cast(jnp.zeros((block, columns), jnp.float32), matrix),
        mgpu.layout_cast(jnp.zeros((head_dim, columns), jnp.float32), matrix),
    )


def _step(spec: _Spec, row: _Row, i, stage, carry):
    """Take block i into the online softmax."""
    top, total, output = carry
    shared = row.shared
    held = [row.words[i * spec.words + j] for j in range(spec.words)]
    mgpu.barrier_wait(shared["keys_here"].at[stage])
    logits = _matmul(shared["keys_s"].at[stage], shared["query_s"].T)
    logits = spec.logits.of(logits)
    live = _bits(held, logits.shape)  # pyright: ignore
    logits = jnp.where(live, logits, MASK_VALUE)
    new_top = jnp.maximum(top, jnp.max(logits, axis=0))
    exponents = (logits - _down(new_top, logits)) * spec.logits.factor
    weights = jnp.where(live, jnp.exp2(exponents), 0.0)
    decay = jnp.exp2((top - new_top) * spec.logits.factor)
    _store_transposed(shared["weights_s"], weights.astype(shared["weights_s"].dtype))
    if row.mass:
        # The copy of the last block's codes has to be through with them.
        mgpu.wait_smem_to_gmem(0, wait_read_only=True)
        _store_transposed(shared["codes_s"], gpu_merge.encode(exponents, live, jnp.int16))
        _store_scalars(spec, shared["row_s"], new_top, row.mass[1], i)
    mgpu.barrier_wait(shared["values_here"].at[stage])
    _clear_dead(shared["values_s"].at[stage], held)
    mgpu.commit_smem()
    if row.mass:
        codes = row.mass[0].at[_group(spec, i), _slots(spec, i)]
        mgpu.copy_smem_to_gmem(shared["codes_s"], codes)
    add = _matmul(shared["values_s"].at[stage].T, shared["weights_s"].T)
    total = total * _down(decay, total) + weights
    return new_top, total, output * _down(decay, output) + add


def _matmul(a, b) -> Array:
    def multiply(accumulator):
        mgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    shape = (a.shape[0], b.shape[1])
    return pl.run_scoped(multiply, mgpu.ACC(shape, jnp.float32))  # pyright: ignore


def _down(row: Array, like: Array) -> Array:
    """[columns] repeated for each row."""
    return jax.lax.broadcast_in_dim(row, like.shape, [1])


def _bits(words: list[Array], shape: tuple[int, int]) -> Array:
    """Bool of a shape whose rows are slots: the mask of each."""
    slot = mgpu.broadcasted_iota(jnp.int32, shape, 0, layout=mgpu.Layout.WGMMA)
    word = jnp.full(shape, words[-1], jnp.int32)
    for j in reversed(range(len(words) - 1)):
        word = jnp.where(slot < (j + 1) * _WORD, words[j], word)
    shift = jnp.bitwise_and(slot, _WORD - 1)
    return jnp.bitwise_and(jax.lax.shift_right_logical(word, shift), 1) == 1


def _clear_dead(values, words: list[Array]) -> None:
    """Zero the dead slots of a block in shared memory, if it has any.

    A weight of 0 does not hide a NaN, and wgmma reads values from shared memory. Blocks without a
    dead slot, nearly all of them while decoding with a full budget, skip this.
    """

    def clear():
        block = values[...]
        values[...] = jnp.where(_bits(words, block.shape), block, jnp.zeros_like(block))

    full = functools.reduce(jnp.bitwise_and, words) == -1
    pl.when(jnp.logical_not(full))(clear)


def _store_transposed(ref, value: Array) -> None:
    """Store [rows, columns] in shared memory [columns, rows]."""
    ref.T[...] = mgpu.layout_cast(value, mgpu.Layout.WGMMA_TRANSPOSED)


def _store_scalars(spec: _Spec, shared, value: Array, ref, column) -> None:
    """Store the first G of [columns] as one column of [G, n]: too thin for TMA."""
    shared[...] = value
    for g in range(spec.group):
        ref[g, column] = shared[g]
