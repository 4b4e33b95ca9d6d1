"""Which tokens go: pure selection over slots, by utility, with ties broken by position.

Nothing here moves a key or a value. Selection reads positions, never slot numbers, so the same
tokens in other slots give the same survivors.
"""

import jax
import jax.numpy as jnp
from jax import Array

_LAST_POSITION = jnp.iinfo(jnp.int32).max


def evictable(
    valid: Array,
    positions: Array,
    next_position: Array,
    protect_first: Array | int,
    protect_recent: Array | int,
) -> Array:
    """Mask of the tokens that may be evicted.

    Args:
      valid: [..., S] bool.
      positions: [..., S] int32.
      next_position: [...] int32, tokens seen, the newest held one included.
      protect_first: positions 0 .. protect_first-1 stay.
      protect_recent: the latest protect_recent positions stay.

    Returns:
      [..., S] bool. A mask, never a doctored score, so no tie can break the protection.

    Source: arXiv 2609.03515, static-reserve ablation; ours as an option of any policy.
    """
    recent = positions >= (next_position - protect_recent)[..., None]
    return valid & (positions >= protect_first) & ~recent


def lowest(scores: Array, positions: Array, candidates: Array) -> Array:
    """One-hot mask of the candidate with the lowest utility; of equals, the lowest position.

    Args:
      scores: [..., S] float32.
      positions: [..., S] int32, distinct among the candidates of a row.
      candidates: [..., S] bool.

    Returns:
      [..., S] bool with one True a row, or none where there is no candidate.

    Source: arXiv 2609.03515 section 3.2; the tie rule is ours.
    """
    utility = jnp.where(candidates, scores, jnp.inf)
    tied = candidates & (utility == jnp.min(utility, axis=-1, keepdims=True))
    position = jnp.where(tied, positions, _LAST_POSITION)
    return tied & (position == jnp.min(position, axis=-1, keepdims=True))


def select_kept(
    scores: Array, positions: Array, valid: Array, candidates: Array, budget: Array
) -> Array:
    """Mask of the tokens left when the lowest are dropped until ``budget`` remain.

    Same result as dropping ``lowest`` one at a time; one sort, for step 1, where most of the
    prompt goes at once.

    Args:
      scores: [B, S] float32.
      positions: [B, S] int32.
      valid: [B, S] bool, tokens held.
      candidates: [B, S] bool, those of them that may go.
      budget: [B] int32, tokens to leave.

    Returns:
      [B, S] bool; a row with fewer candidates than it would have to drop keeps the others.
    """
    slots = valid.shape[-1]
    utility = jnp.where(candidates, scores, jnp.inf)
    position = jnp.where(candidates, positions, _LAST_POSITION)
    slot = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), valid.shape)
    _, _, order = jax.lax.sort((utility, position, slot), dimension=-1, num_keys=2)
    excess = jnp.sum(valid, axis=-1, dtype=jnp.int32) - budget
    dropped_in_order = slot < excess[..., None]
    rows = jnp.arange(valid.shape[0])[:, None]
    dropped = jnp.zeros_like(valid).at[rows, order].set(dropped_in_order, unique_indices=True)
    return valid & ~(dropped & candidates)


def compaction(kept: Array, positions: Array, slots: int) -> tuple[Array, Array]:
    """Source slots that bring the kept tokens to the front, ordered by position.

    Args:
      kept: [B, S] bool, at most ``slots`` True a row.
      positions: [B, S] int32.
      slots: static, capacity of the smaller cache.

    Returns:
      source: [B, slots] int32, for each new slot the old one to copy from.
      valid: [B, slots] bool, the new slots that hold a token.
    """
    order = jnp.argsort(jnp.where(kept, positions, _LAST_POSITION), axis=-1, stable=True)
    held = jnp.sum(kept, axis=-1, dtype=jnp.int32)
    valid = jnp.arange(slots, dtype=jnp.int32)[None] < held[:, None]
    return order[:, :slots].astype(jnp.int32), valid
