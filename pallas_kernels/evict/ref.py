"""Plain JAX eviction step: the reference of the kernel, and the path that runs elsewhere."""

import jax.numpy as jnp
from jax import Array

_LAST_POSITION = jnp.iinfo(jnp.int32).max


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
) -> tuple[Array, Array, Array]:
    """Age and evict; see ``api.evict`` for the meaning and the shapes."""
    if increment is not None:
        scores = jnp.where(active[..., None], decay * scores + increment, scores)
    held = jnp.sum(positions >= 0, axis=-1, dtype=jnp.int32)
    limit = jnp.where(active & (held > budget), next_position - protect_recent, 0)
    candidates = (positions >= protect_first) & (positions < limit[..., None])
    utility = jnp.where(candidates, scores, jnp.inf)
    tied = candidates & (utility == jnp.min(utility, axis=-1, keepdims=True))
    position = jnp.where(tied, positions, _LAST_POSITION)
    freed = tied & (position == jnp.min(position, axis=-1, keepdims=True))
    slots = scores.shape[-1]
    slot = jnp.where(jnp.any(freed, axis=-1), jnp.argmax(freed, axis=-1).astype(jnp.int32), slots)
    return jnp.where(freed, 0.0, scores), jnp.where(freed, -1, positions), slot
