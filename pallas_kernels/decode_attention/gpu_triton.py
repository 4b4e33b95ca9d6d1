"""Decode attention on NVIDIA GPUs from Ampere on, by way of Pallas-Triton.

A thread block reads the keys and values of one kv head in one split of its row, block by block
through shared memory (cp.async, two blocks ahead), with an online softmax in registers. The query
heads of the group are the rows of both matrix products. ``gpu_merge`` does the rest.

Loads of keys and values carry the mask of the slots: a dead slot, or one beyond S, is not read but
0. Nothing has to be cleared afterwards, and dead slots cost no bytes.

With D = 128, G = 4 and bfloat16 ptxas reports, with mass and without, 72 and 72 registers a thread
on A100 and 72 and 64 on H100 (jax 0.10.2: 96 and 72, 80 and 72), no spills, and 66 KiB of shared
memory: two thread blocks an SM. float32 products run on the ordinary cores, for TF32 would lose 13
bits; they fit up to G = 32. Compiled ahead of time for A100 and H100, numbers checked in interpret
mode; never run on a GPU.

Triton before jax 0.12 checks no bounds: every load and store here has a mask, or cannot leave its
array.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from inertiakv_jax.numerics import MASK_VALUE
from inertiakv_jax.pallas_kernels.decode_attention import gpu_merge
from inertiakv_jax.pallas_kernels.decode_attention.gpu_merge import Logits, Partition

_BLOCK_BYTES = 16 * 1024  # of keys, and as many of values
_FEWEST_SLOTS, _MOST_SLOTS = 16, 128
_RESIDENT = 2  # thread blocks that an SM holds at a time


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the work is cut. No effect on numbers beyond rounding, much on speed."""

    slots: int
    """Of one block; a power of two, at least 16. Need not divide S."""
    splits: int
    """Of a row, at most; at least 1."""
    num_warps: int = 4
    """Of a thread block; a power of two."""
    num_stages: int = 3
    """Blocks in the pipeline, the one that is computed included; at least 1."""

    def __post_init__(self):
        if self.slots < _FEWEST_SLOTS or self.slots & (self.slots - 1):
            raise ValueError(
                f"slots must be a power of two, at least {_FEWEST_SLOTS}, got {self.slots}"
            )
        if self.num_warps < 1 or self.num_warps & (self.num_warps - 1):
            raise ValueError(f"num_warps must be a power of two, got {self.num_warps}")
        if self.splits < 1 or self.num_stages < 1:
            raise ValueError(
                f"splits and num_stages must be at least 1, got {self.splits}, {self.num_stages}"
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

    >>> choose_tiles(1, num_kv_heads=8, group=4, slots=6402, head_dim=128, itemsize=2, cores=108)
    Tiles(slots=64, splits=26, num_warps=4, num_stages=3)
    """
    rows = pl.next_power_of_2(group)
    block = _BLOCK_BYTES // (pl.next_power_of_2(head_dim) * itemsize)
    num_warps = 8 if head_dim > 128 or rows > 16 else 4
    if itemsize == 4 and rows >= 8:
        # float32 products are not for tensor cores: operands live in registers, and spill. These
        # sizes, found by trial, do not: G up to 32, jax 0.10.2 and 0.12.0.1 (tests/aot).
        block, num_warps = block // 2 if rows <= 16 else min(block, 32), 8
    block = min(max(block, _FEWEST_SLOTS), _MOST_SLOTS)
    splits = gpu_merge.choose_splits(batch * num_kv_heads, slots, block, _RESIDENT * cores)
    return Tiles(block, splits, num_warps)


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
    interpret: bool = False,
) -> tuple[Array, Array | None]:
    """Attend and score; see ``api.decode_attention`` for the mathematics and the shapes.

    Args:
      query: [B, N, D], D a multiple of 16.
      keys: [B, K, S, D].
      values: [B, K, S, D].
      valid: [B, S] or [B, K, S] bool.
      scale: of the logits.
      soft_cap: of the logits, or None.
      return_mass: False switches that output off.
      tiles: as of ``choose_tiles``.
      interpret: run on the CPU.

    Returns:
      output: [B, N, D], dtype of ``query``.
      mass: [B, K, S] float32, or None.

    Raises:
      ValueError: D is no multiple of 16 (while tracing).
    """
    batch, num_heads, head_dim = query.shape
    if head_dim % 16:
        raise ValueError(f"head_dim must be a multiple of 16, got {head_dim}")
    num_kv_heads, slots = keys.shape[1:3]
    partition = gpu_merge.cut(slots, tiles.slots, tiles.splits)
    logits = Logits(scale, soft_cap)
    spec = _Spec(logits, num_heads // num_kv_heads, head_dim, partition)
    grouped = query.reshape(batch, num_kv_heads, spec.group, head_dim)
    out_shape = gpu_merge.partial_shapes(query, num_kv_heads, partition, mass=return_mass)
    rows = spec.rows

    def per_head(*shape):
        return pl.BlockSpec((None, None, *shape), lambda b, k, p: (b, k, *(0 for _ in shape)))

    out_specs = [
        pl.BlockSpec((None, None, rows, None, head_dim), lambda b, k, p: (b, k, 0, p, 0)),
        *[pl.BlockSpec((None, None, rows, None), lambda b, k, p: (b, k, 0, p))] * 2,
        *(per_head(rows, x.shape[3]) for x in out_shape[3:]),
    ]
    shared = pl.BlockSpec((None, slots), lambda b, k, p: (b, 0))
    partials = pl.pallas_call(
        functools.partial(_kernel, spec),
        grid=(batch, num_kv_heads, partition.splits),
        in_specs=[
            per_head(rows, head_dim),
            per_head(slots, head_dim),
            per_head(slots, head_dim),
            shared if valid.ndim == 2 else per_head(slots),
        ],
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name="decode_attention",
    )(grouped, keys, values, valid)
    return gpu_merge.merge(tuple(partials), partition, logits, query.dtype)


@dataclasses.dataclass(frozen=True)
class _Spec:
    """What the kernel knows while it is traced."""

    logits: Logits
    group: int  # G
    head_dim: int  # D
    partition: Partition

    @property
    def rows(self) -> int:
        """G rounded up to a power of two: Triton knows no other sizes."""
        return pl.next_power_of_2(self.group)

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """Start and width of D's parts that are powers of two, the binary digits of D."""
        bits = [1 << i for i in reversed(range(self.head_dim.bit_length()))]
        widths = [bit for bit in bits if self.head_dim & bit]
        return [(sum(widths[:i]), width) for i, width in enumerate(widths)]


def _kernel(spec: _Spec, query, keys, values, valid, sums, maxima, totals, *mass):
    # query [rows, D], of which G count; keys, values [S, D]; valid [S]
    # sums [rows, D], maxima [rows], totals [rows]; mass: codes [rows, slots], tops [rows, blocks]
    rows = (spec.rows, 1)
    real = jnp.arange(spec.rows)[:, None] < spec.group
    parts = [plt.load(query.at[:, pl.ds(*p)], mask=_wide(real, p[1]), other=0) for p in spec.pieces]
    first = pl.program_id(2) * spec.partition.blocks_per_split
    last = jnp.minimum(first + spec.partition.blocks_per_split, spec.partition.blocks)

    def step(i, carry):
        top, total, output = carry
        held = _held(spec, valid, i)
        logits = _logits(spec, parts, keys, held, i)
        new_top = jnp.maximum(top, jnp.max(logits, axis=1, keepdims=True))
        exponents = (logits - new_top) * spec.logits.factor
        live = jnp.broadcast_to(held[None], exponents.shape)
        if mass:  # before the values: what is stored need not wait in registers, which can spill
            codes, tops = mass
            code = gpu_merge.encode(exponents, live, codes.dtype)
            plt.store(codes.at[:, _slots(spec, i)], code, mask=_wide(real, code.shape[1]))
            plt.store(tops.at[:, pl.ds(i, 1)], new_top, mask=real)
        weights = jnp.where(live, jnp.exp2(exponents), 0.0)
        decay = jnp.exp2((top - new_top) * spec.logits.factor)
        total = total * decay + jnp.sum(weights, axis=1, keepdims=True)
        output = [
            old * decay + _dot(weights.astype(values.dtype), _load(spec, values, held, i, p), 0)
            for old, p in zip(output, spec.pieces, strict=True)
        ]
        return new_top, total, output

    start = (
        jnp.full(rows, MASK_VALUE, jnp.float32),
        jnp.zeros(rows, jnp.float32),
        [jnp.zeros((spec.rows, width), jnp.float32) for _, width in spec.pieces],
    )
    top, total, output = jax.lax.fori_loop(first, last, step, start)
    for (begin, width), part in zip(spec.pieces, output, strict=True):
        plt.store(sums.at[:, pl.ds(begin, width)], part, mask=_wide(real, width))
    plt.store(maxima, top[:, 0], mask=real[:, 0])
    plt.store(totals, total[:, 0], mask=real[:, 0])


def _slots(spec: _Spec, i):
    return pl.ds(i * spec.partition.block, spec.partition.block)


def _held(spec: _Spec, valid, i) -> Array:
    """[slots] bool of block i; False beyond S, where nothing may be read."""
    slot = i * spec.partition.block + jnp.arange(spec.partition.block)
    inside = slot < spec.partition.slots
    return plt.load(valid.at[_slots(spec, i)], mask=inside, other=False)


def _load(spec: _Spec, array, held, i, piece: tuple[int, int]) -> Array:
    """[slots, width] of block i; dead slots are not read but 0, whatever they hold."""
    begin, width = piece
    where = array.at[_slots(spec, i), pl.ds(begin, width)]
    return plt.load(where, mask=_wide(held[:, None], width), other=0)


def _logits(spec: _Spec, parts: list[Array], keys, held, i) -> Array:
    """[rows, slots] float32, as of ``gpu_merge.Logits``; ``MASK_VALUE`` in dead slots."""
    products = [
        _dot(part, _load(spec, keys, held, i, piece), 1)
        for part, piece in zip(parts, spec.pieces, strict=True)
    ]
    logits = spec.logits.of(sum(products[1:], products[0]))
    return jnp.where(jnp.broadcast_to(held[None], logits.shape), logits, MASK_VALUE)


def _dot(a: Array, b: Array, axis: int) -> Array:
    """Sum over the last axis of ``a`` and ``axis`` of ``b``, in float32."""
    return jax.lax.dot_general(
        a,
        b,
        (((1,), (axis,)), ((), ())),
        # Otherwise float32 becomes TF32, with 10 bits after the point.
        precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _wide(mask: Array, width: int) -> Array:
    return jnp.broadcast_to(mask, (mask.shape[0], width))
