"""Which tokens go: pure selection over slots, by utility, with ties broken by position.

Nothing here moves a key or a value. Selection reads positions, never slot numbers, so the same
tokens in other slots give the same survivors. Leading axes are one ranking each: [B] where layers
and heads share it, [E, B] for one a layer, [E, B, K] for one a kv head.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from inertiakv_jax.pallas_kernels.evict import api
from inertiakv_jax.sharding import SCALAR, ranking_spec

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


def evict_lowest(
    scores: Array,
    increment: Array | None,
    positions: Array,
    next_position: Array,
    budget: Array,
    active: Array,
    *,
    decay: Array | float,
    protect_first: Array | int = 0,
    protect_recent: Array | int = 0,
    implementation: str | None = None,
    mesh: Mesh | None = None,
) -> tuple[Array, Array]:
    """Age the utilities, then drop the lowest token of each ranking that is over its budget.

    Args:
      scores: [..., S] float32; 0 in free slots.
      increment: [..., S] float32, or None for a step that does not score.
      positions: [..., S] int32; -1 in free slots.
      next_position: [...] int32, tokens seen, the newest held one included.
      budget: [...] int32, tokens to leave.
      active: [...] bool, rankings of rows that take the step; the others come back bit for bit.
      decay: scalar, as in ``aggregation``.
      protect_first: as in ``evictable``.
      protect_recent: likewise.
      implementation: static, "xla" for plain JAX; else the kernel where there is one.
      mesh: static, the layout that rows and, where each has its own ranking, heads lie on.

    Returns:
      scores and positions, 0 and -1 in the slot that was freed.

    Source: arXiv 2609.03515 section 3.2, eq. 4; the tie rule is ours.
    """
    evict = functools.partial(api.evict, implementation="xla" if implementation == "xla" else None)
    knobs = (decay, protect_first, protect_recent)
    operands = (scores, increment, positions, next_position, budget, active)

    def run(operands, knobs):
        decay, protect_first, protect_recent = knobs
        scores, positions, _ = evict(
            *operands, decay=decay, protect_first=protect_first, protect_recent=protect_recent
        )
        return scores, positions

    if mesh is not None:
        slots, rows = ranking_spec(scores.ndim)
        run = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=((slots, slots, slots, rows, rows, rows), SCALAR),
            out_specs=(slots, slots),
            check_vma=False,  # a Pallas kernel does not say how its outputs vary
        )
    return run(operands, knobs)


def select_kept(
    scores: Array, positions: Array, valid: Array, candidates: Array, budget: Array
) -> Array:
    """Mask of the tokens left when the lowest are dropped until ``budget`` remain.

    Same result as dropping the lowest one at a time, of equals the lowest position; one sort, for
    step 1, where most of the prompt goes at once.

    Args:
      scores: [..., S] float32.
      positions: [..., S] int32, distinct among the candidates of a ranking.
      valid: [..., S] bool, tokens held.
      candidates: [..., S] bool, those of them that may go.
      budget: [...] int32, tokens to leave.

    Returns:
      [..., S] bool; a ranking with fewer candidates than it would have to drop keeps the others.

    Source: arXiv 2609.03515 section 3.2; the tie rule is ours.
    """
    utility = jnp.where(candidates, scores, jnp.inf)
    position = jnp.where(candidates, positions, _LAST_POSITION)
    slot = jax.lax.broadcasted_iota(jnp.int32, valid.shape, valid.ndim - 1)
    _, _, order = jax.lax.sort((utility, position, slot), dimension=-1, num_keys=2)
    excess = jnp.sum(valid, axis=-1, dtype=jnp.int32) - budget
    dropped_in_order = slot < excess[..., None]
    dropped = jnp.put_along_axis(
        jnp.zeros_like(valid), order, dropped_in_order, axis=-1, inplace=False
    )
    return valid & ~(dropped & candidates)


def compaction(kept: Array, positions: Array, slots: int) -> tuple[Array, Array]:
    """Source slots that bring the kept tokens to the front, ordered by position.

    Args:
      kept: [..., S] bool, at most ``slots`` True in each.
      positions: [..., S] int32.
      slots: static, capacity of the smaller cache.

    Returns:
      source: [..., slots] int32, for each new slot the old one to copy from.
      valid: [..., slots] bool, the new slots that hold a token.
    """
    order = jnp.argsort(jnp.where(kept, positions, _LAST_POSITION), axis=-1, stable=True)
    held = jnp.sum(kept, axis=-1, dtype=jnp.int32)
    place = jax.lax.broadcasted_iota(jnp.int32, (*held.shape, slots), held.ndim)
    valid = place < held[..., None]
    return order[..., :slots].astype(jnp.int32), valid
