"""The KV cache as an immutable pytree of static shape, with the utilities that rank its tokens."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from inertiakv_jax.typing import Model

FREE_POSITION = -1
"""What ``positions`` and ``scores`` (as 0) show in a slot that holds no token."""

NO_EVICTION = 2**31 - 1
"""A budget that is never reached: the full cache."""

SHARED, PER_LAYER, PER_HEAD = "shared", "per_layer", "per_head"
RETENTIONS = (SHARED, PER_LAYER, PER_HEAD)
"""One ranking for all layers, so the same tokens everywhere; one a layer; one a kv head."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVState:
    """Everything decoding carries from one step to the next. Only functions make new ones.

    Leading axes ``...`` are [B] where all layers share a ranking, [E, B] for one a layer, [E, B, K]
    for one a kv head. E counts the layers without a sliding window; one with a window W has a ring
    of W slots, in which the token at position p lies in slot p % W, and nothing else below is said
    of it.

    Invariants:
      * Slot s of a ranking holds a token if and only if ``valid[..., s]``; its keys are rotated by
        ``positions[..., s]``, the token's place in the text, and never re-rotated.
      * The next token of a row goes to its first slot that is not valid. At its budget a row has
        one slot more than tokens, so this is the slot of the token just evicted: nothing moves.
      * ``scores`` is 0 and ``positions`` is -1 where ``valid`` is False; ``keys`` and ``values``
        may hold anything there, NaN included.
      * A row that is ``finished`` never changes again.
      * Shapes, dtypes and structure change once, at decode step 1 (``kept_slots``), then never.
    """

    keys: tuple[Array, ...]  # L x [B, K, S, D] (or W for S) model dtype, rotated by position
    values: tuple[Array, ...]  # L x [B, K, S, D] (or W for S) model dtype
    scores: Array  # [..., S] float32, utility m: the aggregated score of the token, higher stays
    valid: Array  # [..., S] bool, the slot holds a token
    positions: Array  # [..., S] int32, place of the token in the text, from 0; -1 where free
    budget: Array  # [...] int32, tokens it may hold after a step (R); NO_EVICTION for no limit
    next_position: Array  # [B] int32, tokens seen so far: the place of the next one
    row: Array  # [B] int32, number of the row, which random evictions are drawn for
    finished: Array  # [B] bool, the row has emitted a stop token
    finite: Array  # [B] bool, False once the row's logits held NaN or infinity
    step: Array  # [] int32, decode steps taken since prefill (t is step + 1 inside a step)
    kept_slots: int | None = dataclasses.field(metadata={"static": True}, default=None)
    """Slots that decode step 1 shrinks the cache to; None after it, or if nothing is evicted."""

    @property
    def num_slots(self) -> int:
        """S, the capacity of every layer without a sliding window."""
        return self.valid.shape[-1]

    @property
    def num_held(self) -> Array:
        """[...] int32, tokens held."""
        return jnp.sum(self.valid, axis=-1, dtype=jnp.int32)

    @property
    def free_slot(self) -> Array:
        """[...] int32, where the next token goes; S where there is no room."""
        return jnp.where(
            jnp.all(self.valid, axis=-1),
            jnp.int32(self.num_slots),
            jnp.argmin(self.valid, axis=-1).astype(jnp.int32),
        )

    def per_ranking(self, x: Array) -> Array:
        """[B], one number a row, given to each of its rankings: [...]."""
        return spread(x, self.valid.shape[:-1])

    def kv_bytes(self) -> int:
        """Bytes of all keys and values, free slots included."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in (*self.keys, *self.values))


def init(
    model: Model,
    batch: int,
    slots: int,
    *,
    budget: Array,
    retention: str = SHARED,
    kept_slots: int | None = None,
) -> KVState:
    """Make an empty state.

    Args:
      model: gives the layers, K, D and the dtype of keys and values.
      batch: B, at least 1.
      slots: S, at least 1.
      budget: [B] int32, each row's R, or [...] for one a ranking; ``NO_EVICTION`` for no limit.
      retention: one of ``RETENTIONS``.
      kept_slots: slots to shrink to at decode step 1; None to stay.

    Returns:
      A state that holds no token.

    Raises:
      ValueError: ``batch`` or ``slots`` below 1, or ``budget`` of another shape.
    """
    if batch < 1 or slots < 1:
        raise ValueError(f"batch and slots must be at least 1, got {batch=} and {slots=}")
    lead = ranking_shape(model, batch, retention)
    if budget.shape not in ((batch,), lead):
        expected = " or ".join(map(str, dict.fromkeys([(batch,), lead])))
        raise ValueError(f"budget must have shape {expected}, got {budget.shape}")
    if budget.shape != lead:
        budget = spread(budget, lead)

    def caches():
        sizes = [slots if window is None else window for window in model.sliding_windows]
        shapes = [(batch, model.num_kv_heads, size, model.head_dim) for size in sizes]
        return tuple(jnp.zeros(shape, model.dtype) for shape in shapes)

    return KVState(
        keys=caches(),
        values=caches(),
        scores=jnp.zeros((*lead, slots), jnp.float32),
        valid=jnp.zeros((*lead, slots), jnp.bool_),
        positions=jnp.full((*lead, slots), FREE_POSITION, jnp.int32),
        budget=budget.astype(jnp.int32),
        next_position=jnp.zeros((batch,), jnp.int32),
        row=jnp.arange(batch, dtype=jnp.int32),
        finished=jnp.zeros((batch,), jnp.bool_),
        finite=jnp.ones((batch,), jnp.bool_),
        step=jnp.zeros((), jnp.int32),
        kept_slots=kept_slots,
    )


def spread(x: Array, shape: tuple[int, ...]) -> Array:
    """What is said of each row, [B] or [B, S], said of each of its rankings: [...] or [..., S]."""
    added = len(shape) - x.ndim
    if added:
        x = x[None] if added == 1 else x[None, :, None]
    return jnp.broadcast_to(x, shape)


def num_eligible(model: Model) -> int:
    """E, the layers that keep the whole text and are evicted from."""
    return sum(window is None for window in model.sliding_windows)


def ranking_shape(model: Model, batch: int, retention: str) -> tuple[int, ...]:
    """Leading axes of what is said of every slot: [B], [E, B] or [E, B, K]."""
    eligible = num_eligible(model)
    return {
        SHARED: (batch,),
        PER_LAYER: (eligible, batch),
        PER_HEAD: (eligible, batch, model.num_kv_heads),
    }[retention]


def slots_for(tokens: int, *, multiple: int) -> int:
    """Round a token count up to a capacity that programs share.

    Capacities go up in eighths of a power of two, so at most an eighth is spare and eight
    programs serve a doubling; never finer than ``multiple``, a power of two.

    >>> [slots_for(n, multiple=64) for n in (1, 65, 410, 1025, 4097)]
    [64, 128, 448, 1152, 4608]
    """
    step = max(multiple, 1 << max((tokens - 1).bit_length() - 4, 0))
    return -(-tokens // step) * step
