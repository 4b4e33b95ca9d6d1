"""What the GPU kernels share: how a row is split, what a split leaves behind, how that is merged.

A GPU is filled by giving the slots of one row and kv head to several thread blocks (flash decoding,
as in jax.experimental.pallas.ops.gpu.decode_attention). For each query head a split leaves its
largest logit and, relative to that, the sums of its weights and of its weighted values. (The log of
the sum of weights would be one number for two, but rounded to 2**-24 of the largest logit.) If the
mass is wanted it also leaves, for each slot, how far the log2 of its weight lies below the running
maximum, and for each block of slots that maximum: with the final sums these give the mass without
reading K again.

For 16-bit inputs the distance is a 16-bit fixed-point number, 1024 steps an octave, down to 2**-64:
a relative error of at most 2**(1/2048) - 1 = 3.4e-4 of each weight, whatever its size. (A float16
weight would have 4.9e-4, and nothing below 6e-8 of the maximum; behind an attention sink that is
most of a long text, and what is evicted is chosen among the smallest.) For float32 inputs it is
float32. Extra bytes per slot and kv head: G * 2 written, G * 2 read, 4 of mass; with D = 128, G = 4
and 16-bit inputs 20 on top of 512 of keys and values, 3.9%, and the 16 are met in the L2 cache as
long as the row fits there.

The merge is plain JAX. It moves the same bytes as a kernel of its own would, for XLA fuses it into
one kernel for the output and two for the mass (three where a row has many blocks). Nothing here
knows which kernel left the partial results.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from inertiakv_jax.numerics import MASK_VALUE

LOG2_E = 1.4426950408889634  # kernels work with powers of two; GPUs have an instruction for them
MOST_SPLITS = 256
_STEPS = 1024.0  # fixed-point steps in a factor of two
_TOP = 32767  # the code of a weight that equals the running maximum
_DEAD = -32768  # the code of a dead slot, or of a weight below 2**-64 of the maximum
_START = 2  # cost of starting a split, in blocks: an estimate, of the time until the first data


@dataclasses.dataclass(frozen=True)
class Partition:
    """Slots cut into blocks, blocks dealt to splits: all get the same number, the last the rest."""

    slots: int
    """S."""
    block: int
    """Slots of a block; need not divide S."""
    blocks_per_split: int

    @property
    def blocks(self) -> int:
        """All of them, the ragged last one included."""
        return -(-self.slots // self.block)

    @property
    def splits(self) -> int:
        """P, none of them empty."""
        return -(-self.blocks // self.blocks_per_split)

    @property
    def padded_blocks(self) -> int:
        """P times the blocks of a split; those beyond ``blocks`` are never written nor read."""
        return self.splits * self.blocks_per_split


@dataclasses.dataclass(frozen=True)
class Logits:
    """Logits in a unit of their own: a weight is 2 ** (factor * (logit - maximum)).

    Scaled last, equal logits give exactly 1, however large they are. Scaled first, the compiler
    makes one fused instruction of product and difference, without the rounding that the maximum
    had.
    """

    scale: float
    soft_cap: float | None

    @property
    def factor(self) -> float:
        """At least 0."""
        return LOG2_E * (abs(self.scale) if self.soft_cap is None else self.soft_cap)

    def of(self, products: Array) -> Array:
        """Logits of float32 products of queries and keys; to be called in a kernel."""
        if self.soft_cap is None:
            return products if self.scale >= 0.0 else -products
        # tanh(x) = 1 - 2 / (1 + e**2x): the instruction for tanh has an error of 2**-11.
        power = jnp.exp2(products * (self.scale / self.soft_cap * 2.0 * LOG2_E))
        return 1.0 - 2.0 / (1.0 + power)


def cut(slots: int, block: int, splits: int) -> Partition:
    """The partition into at most ``splits`` splits.

    >>> cut(slots=6402, block=64, splits=27)
    Partition(slots=6402, block=64, blocks_per_split=4)
    >>> _.splits
    26
    """
    blocks = -(-slots // block)
    return Partition(slots, block, -(-blocks // splits))


def choose_splits(rows: int, slots: int, block: int, resident: int) -> int:
    """How many splits to make of a row.

    Args:
      rows: B * K.
      slots: S.
      block: slots of a block.
      resident: thread blocks that the whole GPU runs at a time.

    Returns:
      From 1 to ``MOST_SPLITS``; the fewest that finish first if all thread blocks of a wave take
      as long as their splits have blocks.

    >>> choose_splits(rows=8, slots=6402, block=64, resident=216)
    26
    >>> choose_splits(rows=256, slots=1024, block=64, resident=216)
    2
    """

    def time(partition: Partition) -> tuple[int, int]:
        waves = -(-rows * partition.splits // resident)
        return waves * (partition.blocks_per_split + _START), partition.splits

    blocks = -(-slots // block)
    candidates = [cut(slots, block, n) for n in range(1, min(blocks, MOST_SPLITS) + 1)]
    return min(candidates, key=time).splits


def partial_shapes(
    query: jax.ShapeDtypeStruct | Array, num_kv_heads: int, partition: Partition, *, mass: bool
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """What a kernel leaves: sums, maxima, totals and, for the mass, codes and tops.

    sums [B, K, G, P, D] float32, of weighted values; maxima [B, K, G, P] float32, of ``Logits``,
    ``MASK_VALUE`` for a split without a valid slot; totals [B, K, G, P] float32, of weights; codes
    [B, K, G, slots] int16 or float32; tops [B, K, G, blocks] float32, the last two of all padded
    blocks.
    """
    batch, num_heads, head_dim = query.shape
    lead = (batch, num_kv_heads, num_heads // num_kv_heads)
    struct = jax.ShapeDtypeStruct
    shapes = (
        struct((*lead, partition.splits, head_dim), jnp.float32),
        struct((*lead, partition.splits), jnp.float32),
        struct((*lead, partition.splits), jnp.float32),
    )
    if not mass:
        return shapes
    code = jnp.float32 if query.dtype == jnp.float32 else jnp.int16
    return (
        *shapes,
        struct((*lead, partition.padded_blocks * partition.block), code),
        struct((*lead, partition.padded_blocks), jnp.float32),
    )


def encode(exponents: Array, held: Array, dtype: jnp.dtype) -> Array:
    """Codes of weights 2**exponents, exponents <= 0; to be called inside a kernel."""
    if dtype == jnp.float32:
        return jnp.where(held, exponents, MASK_VALUE)
    # Shifted to be positive, for the conversion truncates; the half makes it round.
    steps = jnp.maximum(exponents * _STEPS + (_TOP - _DEAD + 0.5), 0.0)
    steps = jnp.where(held, steps, 0.0).astype(jnp.int32)
    return (steps + _DEAD).astype(dtype)


def decode(codes: Array) -> Array:
    """The weights as float32, at most 1; exactly 0 for a dead slot."""
    if codes.dtype == jnp.float32:
        return jnp.exp2(codes)
    weights = jnp.exp2((codes.astype(jnp.float32) - _TOP) * (1.0 / _STEPS))
    return jnp.where(codes == _DEAD, 0.0, weights)


def merge(
    partials: tuple[Array, ...], partition: Partition, logits: Logits, dtype: jnp.dtype
) -> tuple[Array, Array | None]:
    """Output [B, N, D] in ``dtype``, and mass [B, K, S] float32 or None, of all splits.

    Args:
      partials: arrays as in ``partial_shapes``.
      partition: the splits.
      logits: what the maxima are of.
      dtype: of the output.
    """
    sums, maxima, totals, *rest = partials
    batch, num_kv_heads, group, _, head_dim = sums.shape
    shares = jnp.exp2((maxima - jnp.max(maxima, axis=-1, keepdims=True)) * logits.factor)
    total = jnp.sum(totals * shares, axis=-1, keepdims=True)
    shares = shares / jnp.where(total > 0.0, total, 1.0)
    output = jnp.sum(sums * shares[..., None], axis=3)
    output = output.reshape(batch, num_kv_heads * group, head_dim).astype(dtype)
    if not rest:
        return output, None
    codes, tops = rest
    # Once more, in one reduction, and behind a barrier: XLA makes one kernel of the lines above,
    # but four where the softmax has a second reader.
    maxima, totals = jax.lax.optimization_barrier((maxima, totals))
    maximum, total = _reduce(maxima, totals, logits)
    scale = jnp.exp2((tops - maximum[..., None]) * logits.factor)
    scale = scale / jnp.where(total > 0.0, total, 1.0)[..., None]
    weights = decode(codes).reshape(*tops.shape, partition.block)
    mass = jnp.sum(weights * scale[..., None], axis=2)
    return output, mass.reshape(batch, num_kv_heads, -1)[..., : partition.slots]


def _reduce(maxima: Array, totals: Array, logits: Logits) -> tuple[Array, Array]:
    """Largest of the maxima [..., P], and the sum of the totals relative to it."""

    def join(a, b):
        maximum = jnp.maximum(a[0], b[0])
        shares = [jnp.exp2((x[0] - maximum) * logits.factor) for x in (a, b)]
        return maximum, a[1] * shares[0] + b[1] * shares[1]

    nothing = (jnp.float32(MASK_VALUE), jnp.float32(0.0))
    return jax.lax.reduce((maxima, totals), nothing, join, (maxima.ndim - 1,))
