"""The KV cache as an immutable pytree of static shape, with the utilities that rank its tokens."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from inertiakv_jax.typing import Model

FREE_POSITION = -1
"""What ``positions`` and ``scores`` (as 0) show in a slot that holds no token."""

NO_EVICTION = 2**31 - 1
"""A budget that is never reached: the full cache."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVState:
    """Everything decoding carries from one step to the next. Only functions make new ones.

    Invariants:
      * Slot s of row b holds a token if and only if ``valid[b, s]``; its keys are rotated by
        ``positions[b, s]``, the token's place in the text, and never re-rotated.
      * The next token of a row goes to its first slot that is not valid. At its budget a row has
        one slot more than tokens, so this is the slot of the token just evicted: nothing moves.
      * ``scores`` is 0 and ``positions`` is -1 where ``valid`` is False; ``keys`` and ``values``
        may hold anything there, NaN included.
      * A row that is ``finished`` never changes again.
      * Shapes, dtypes and structure change once, at decode step 1 (``kept_slots``), then never.
    """

    keys: tuple[Array, ...]  # L x [B, K, S, D] model dtype, rotated by absolute position
    values: tuple[Array, ...]  # L x [B, K, S, D] model dtype
    scores: Array  # [B, S] float32, utility m: the aggregated attention of the token, higher stays
    valid: Array  # [B, S] bool, the slot holds a token
    positions: Array  # [B, S] int32, place of the token in the text, counted from 0; -1 where free
    next_position: Array  # [B] int32, tokens seen so far: the place of the next one
    budget: Array  # [B] int32, tokens a row may hold after a step (R); NO_EVICTION for no limit
    finished: Array  # [B] bool, the row has emitted a stop token
    finite: Array  # [B] bool, False once the row's logits held NaN or infinity
    step: Array  # [] int32, decode steps taken since prefill (t is step + 1 inside a step)
    kept_slots: int | None = dataclasses.field(metadata={"static": True}, default=None)
    """Slots that decode step 1 shrinks the cache to; None after it, or if nothing is evicted."""

    @property
    def num_slots(self) -> int:
        """S, the capacity of every row."""
        return self.valid.shape[1]

    @property
    def num_held(self) -> Array:
        """[B] int32, tokens held by each row."""
        return jnp.sum(self.valid, axis=1, dtype=jnp.int32)

    @property
    def free_slot(self) -> Array:
        """[B] int32, where each row's next token goes; S for a row that has no room."""
        return jnp.where(
            jnp.all(self.valid, axis=1),
            jnp.int32(self.num_slots),
            jnp.argmin(self.valid, axis=1).astype(jnp.int32),
        )

    def kv_bytes(self) -> int:
        """Bytes of all keys and values, free slots included."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in (*self.keys, *self.values))


def init(
    model: Model,
    batch: int,
    slots: int,
    *,
    budget: Array,
    kept_slots: int | None = None,
    dtype: DTypeLike | None = None,
) -> KVState:
    """Make an empty state.

    Args:
      model: gives L, K, D and the dtype of keys and values.
      batch: B, at least 1.
      slots: S, at least 1.
      budget: [B] int32, each row's R; ``NO_EVICTION`` for no limit.
      kept_slots: slots to shrink to at decode step 1; None to stay.
      dtype: of keys and values; None means the model's.

    Returns:
      A state that holds no token.

    Raises:
      ValueError: ``batch`` or ``slots`` below 1, or ``budget`` of another shape.
    """
    if batch < 1 or slots < 1:
        raise ValueError(f"batch and slots must be at least 1, got {batch=} and {slots=}")
    if budget.shape != (batch,):
        raise ValueError(f"budget must have shape ({batch},), got {budget.shape}")
    shape = (batch, model.num_kv_heads, slots, model.head_dim)
    dtype = model.dtype if dtype is None else dtype
    return KVState(
        keys=tuple(jnp.zeros(shape, dtype) for _ in range(model.num_layers)),
        values=tuple(jnp.zeros(shape, dtype) for _ in range(model.num_layers)),
        scores=jnp.zeros((batch, slots), jnp.float32),
        valid=jnp.zeros((batch, slots), jnp.bool_),
        positions=jnp.full((batch, slots), FREE_POSITION, jnp.int32),
        next_position=jnp.zeros((batch,), jnp.int32),
        budget=budget.astype(jnp.int32),
        finished=jnp.zeros((batch,), jnp.bool_),
        finite=jnp.ones((batch,), jnp.bool_),
        step=jnp.zeros((), jnp.int32),
        kept_slots=kept_slots,
    )


def slots_for(tokens: int, *, multiple: int) -> int:
    """Round a token count up to a capacity that programs share.

    Capacities go up in eighths of a power of two, so at most an eighth is spare and eight
    programs serve a doubling; never finer than ``multiple``, a power of two.

    >>> [slots_for(n, multiple=64) for n in (1, 65, 410, 1025, 4097)]
    [64, 128, 448, 1152, 4608]
    """
    step = max(multiple, 1 << max((tokens - 1).bit_length() - 4, 0))
    return -(-tokens // step) * step
