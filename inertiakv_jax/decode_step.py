"""One decode step as a pure function: insert, attend, score, aggregate, evict."""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from inertiakv_jax import aggregation, eviction
from inertiakv_jax.attention import DecodeCache, Execution
from inertiakv_jax.policies import Knobs, Policy, check_policy
from inertiakv_jax.sharding import model_devices
from inertiakv_jax.state import FREE_POSITION, KVState
from inertiakv_jax.typing import Model, Params

_Carry = TypeVar("_Carry")


def step(
    model: Model,
    params: Params,
    state: KVState,
    token: Array,
    policy: Policy,
    *,
    implementation: str | None = None,
    mesh: Mesh | None = None,
) -> tuple[KVState, Array]:
    """Take one decode step. Pure and traceable: for your own ``jit`` or ``scan``.

    In this order: insert the token with the mean utility of those held; attend; where the step
    is a refresh, score and aggregate; evict down to the budget. Of a state fresh from prefill it
    also shrinks the cache (``state.kept_slots``); of any other it returns exactly the structure,
    shapes and dtypes it was given.

    Args:
      model: the decoder.
      params: its parameters.
      state: the cache.
      token: [B] int32, the token to insert, at each row's ``next_position``. A row without a free
        slot (only where nothing is evicted) drops it.
      policy: static, the one given to ``prefill``.
      implementation: static, of the attention kernel; see ``decode``.
      mesh: static, the devices; see ``decode``.

    Returns:
      The new state, and logits [B, V] float32 for the token after. A finished row's state comes
      back bit for bit.

    Source: arXiv 2609.03515 sections 3.1, 3.2, appendix E.
    """
    check_policy(policy)
    execution = Execution(implementation, mesh)
    knobs = policy.knobs(model.num_layers)
    if state.kept_slots is not None:
        return first_step(model, params, state, token, knobs, execution=execution)

    def body(carry, *, rescore):
        return later_step(
            model, params, carry[0], token, knobs, rescore=rescore, execution=execution
        )

    bodies = step_kinds(policy)
    if len(bodies) == 1:
        return body((state,), rescore=bodies[0])
    logits = jax.eval_shape(lambda: body((state,), rescore=False)[1])
    carry = (state, jnp.zeros(logits.shape, logits.dtype))
    return run_due_body(body, carry, bodies, due=refresh_due(state, knobs), running=True)


def step_kinds(policy: Policy) -> tuple[bool, ...]:
    """Which kinds of step the program must hold after step 1: True rescores, False does not."""
    return (True,) * policy.scores_some_steps + (False,) * policy.skips_some_steps


def refresh_due(state: KVState, knobs: Knobs) -> Array:
    """Whether the next step rescores: (t - 1) % refresh == 0 (eq. 6)."""
    return state.step % knobs.refresh == 0


def run_due_body(
    body: Callable[..., _Carry],
    carry: _Carry,
    bodies: tuple[bool, ...],
    *,
    due: Array,
    running: Array | bool,
) -> _Carry:
    """Run the one body that is due, or none if not ``running``.

    By loops of at most one trip: XLA copies the cache into and out of a ``lax.cond``, while a
    loop updates it in place.
    """
    for rescore in bodies:
        wanted = running if len(bodies) == 1 else running & (due if rescore else ~due)
        _, carry = jax.lax.while_loop(
            lambda loop: loop[0],
            lambda loop, rescore=rescore: (jnp.bool_(False), body(loop[1], rescore=rescore)),
            (jnp.asarray(wanted), carry),
        )
    return carry


def later_step(
    model, params, state, token, knobs, *, rescore: bool, execution: Execution
) -> tuple[KVState, Array]:
    """A step of a state whose shape stays: at most one token a row is evicted."""
    state, active, logits = _insert_attend_aggregate(
        model, params, state, token, knobs, rescore=rescore, execution=execution
    )
    over_budget = active & (state.num_held > state.budget)
    candidates = _candidates(state, knobs) & over_budget[:, None]
    evicted = eviction.lowest(state.scores, state.positions, candidates)
    return _drop(state, evicted), logits


def first_step(
    model, params, state, token, knobs, *, execution: Execution
) -> tuple[KVState, Array]:
    """Step 1: attend to the whole prompt, evict down to the budget, shrink the cache."""
    state, _, logits = _insert_attend_aggregate(
        model, params, state, token, knobs, rescore=True, execution=execution
    )
    kept = eviction.select_kept(
        state.scores, state.positions, state.valid, _candidates(state, knobs), state.budget
    )
    state = _drop(state, state.valid & ~kept)
    if state.kept_slots == state.num_slots:
        return dataclasses.replace(state, kept_slots=None), logits
    return _compact(state), logits


def _insert_attend_aggregate(
    model, params, state, token, knobs, *, rescore, execution
) -> tuple[KVState, Array, Array]:
    """Everything of a step but eviction. Also which rows took it [B], and the logits [B, V]."""
    active = ~state.finished
    slot = jnp.where(active, state.free_slot, state.num_slots)
    inserted = jnp.arange(state.num_slots, dtype=jnp.int32)[None] == slot[:, None]
    prior = aggregation.mean_utility(state.scores, state.valid)
    scores = jnp.where(inserted, prior[:, None], state.scores)
    valid = state.valid | inserted
    cache = DecodeCache(
        keys=state.keys,
        values=state.values,
        slot=slot,
        valid=valid,
        layer_weights=knobs.layer_weights,
        increment=(
            jnp.zeros((model_devices(execution.mesh), *scores.shape), jnp.float32)
            if rescore
            else None
        ),
        execution=execution,
    )
    hidden, cache = model.hidden(params, token[:, None], state.next_position[:, None], cache)
    logits = model.logits(params, hidden[:, 0])
    if rescore:
        aged = aggregation.aggregate(scores, cache.increment.sum(axis=0), knobs.decay)
        scores = jnp.where(active[:, None], aged, scores)
    state = dataclasses.replace(
        state,
        keys=cache.keys,
        values=cache.values,
        scores=scores,
        valid=valid,
        positions=jnp.where(inserted, state.next_position[:, None], state.positions),
        next_position=state.next_position + active.astype(jnp.int32),
        finite=state.finite & (jnp.isfinite(logits).all(axis=-1) | ~active),
        step=state.step + 1,
    )
    return state, active, logits


def _candidates(state: KVState, knobs: Knobs) -> Array:
    return eviction.evictable(
        state.valid,
        state.positions,
        state.next_position,
        knobs.protect_first,
        knobs.protect_recent,
    )


def _drop(state: KVState, evicted: Array) -> KVState:
    """Free the slots marked in [B, S]; keys and values stay where they are, dead."""
    return dataclasses.replace(
        state,
        scores=jnp.where(evicted, 0.0, state.scores),
        valid=state.valid & ~evicted,
        positions=jnp.where(evicted, FREE_POSITION, state.positions),
    )


def _compact(state: KVState) -> KVState:
    """Gather the held tokens into ``kept_slots`` slots: the one time keys and values move."""
    assert state.kept_slots is not None
    source, valid = eviction.compaction(state.valid, state.positions, state.kept_slots)

    def gather(leaf):
        # An index for every head, no bounds checks: XLA:TPU then gathers 2.3 times as fast, by its
        # cost model.
        batch, num_kv_heads = leaf.shape[:2]
        index = jnp.broadcast_to(
            source[:, None, :, None], (batch, num_kv_heads, source.shape[1], 1)
        )
        return jnp.take_along_axis(leaf, index, axis=2, mode="promise_in_bounds")

    def gather_row(leaf, empty):
        return jnp.where(valid, jnp.take_along_axis(leaf, source, axis=1), empty)

    return dataclasses.replace(
        state,
        keys=tuple(map(gather, state.keys)),
        values=tuple(map(gather, state.values)),
        scores=gather_row(state.scores, 0.0),
        valid=valid,
        positions=gather_row(state.positions, FREE_POSITION),
        kept_slots=None,
    )
