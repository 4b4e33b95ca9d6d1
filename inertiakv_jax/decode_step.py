"""One decode step as a pure function: insert, attend, score, aggregate, evict."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from inertiakv_jax import aggregation, eviction
from inertiakv_jax.attention import (
    ON_THIS_MACHINE,
    DecodeCache,
    Execution,
    Ranking,
    empty_increment,
)
from inertiakv_jax.budget import tokens_kept_of_seen
from inertiakv_jax.decode_input import checked_token
from inertiakv_jax.policy import Knobs, Policy
from inertiakv_jax.sharding import layout
from inertiakv_jax.shrinking import drop, shrink
from inertiakv_jax.state import KVState
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

    Raises:
      ValueError: an argument of another kind or shape, or a state of another policy's.

    Source: arXiv 2609.03515 sections 3.1, 3.2, appendix E.
    """
    token = jnp.asarray(checked_token(model, state, policy, "token", token), jnp.int32)
    execution = Execution(implementation, layout(mesh, model))
    knobs = policy.knobs(model)
    take = functools.partial(
        first_step if state.kept_slots is not None else later_step,
        model,
        params,
        knobs=knobs,
        ranking=policy.ranking,
        execution=execution,
    )
    if state.kept_slots is not None:
        return take(state, token)

    def body(carry, *, rescore):
        return take(carry[0], token, rescore=rescore)

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
    model: Model,
    params: Params,
    state: KVState,
    token: Array,
    knobs: Knobs,
    ranking: Ranking,
    *,
    rescore: bool,
    execution: Execution = ON_THIS_MACHINE,
) -> tuple[KVState, Array]:
    """A step of a state whose shape stays: at most one token of a ranking is evicted.

    Args:
      model: the decoder.
      params: its parameters.
      state: after step 1.
      token: [B] int32.
      knobs: of the policy, traced.
      ranking: of the policy, static.
      rescore: static, whether the step scores.
      execution: static.

    Returns:
      The state of the same type, and logits [B, V] float32.
    """
    state, cache, active, logits = insert_and_attend(
        model, params, state, token, knobs, ranking, rescore=rescore, execution=execution
    )
    scores, positions = eviction.evict_lowest(
        state.scores,
        cache.total_increment if rescore else None,
        state.positions,
        _evictable_until(state, knobs),
        state.budget,
        state.per_ranking(active),
        decay=knobs.decay,
        protect_first=knobs.protect_first,
        implementation=execution.implementation,
        mesh=execution.mesh,
    )
    state = dataclasses.replace(state, scores=scores, positions=positions, valid=positions >= 0)
    return state, logits


def first_step(
    model: Model,
    params: Params,
    state: KVState,
    token: Array,
    knobs: Knobs,
    ranking: Ranking,
    *,
    execution: Execution = ON_THIS_MACHINE,
) -> tuple[KVState, Array]:
    """Step 1: attend to the whole prompt, evict down to the budget, shrink the cache."""
    state, logits = attend_to_prompt(
        model, params, state, token, knobs, ranking, execution=execution
    )
    return evict_to_budget(state, knobs, model.sliding_windows), logits


def attend_to_prompt(
    model: Model,
    params: Params,
    state: KVState,
    token: Array,
    knobs: Knobs,
    ranking: Ranking,
    *,
    execution: Execution = ON_THIS_MACHINE,
) -> tuple[KVState, Array]:
    """Step 1 up to eviction; the state keeps its type, so a program can donate it."""
    state, cache, active, logits = insert_and_attend(
        *(model, params, state, token, knobs, ranking),
        rescore=True,
        execution=execution.of_full_cache(),
    )
    aged = aggregation.aggregate(state.scores, cache.total_increment, knobs.decay)
    scores = jnp.where(state.per_ranking(active)[..., None], aged, state.scores)
    return dataclasses.replace(state, scores=scores), logits


def evict_to_budget(state: KVState, knobs: Knobs, windows: tuple[int | None, ...]) -> KVState:
    """Drop the lowest tokens of each ranking at once, and shrink the cache to ``kept_slots``."""
    candidates = eviction.evictable(
        state.valid, state.positions, _evictable_until(state, knobs), knobs.protect_first, 0
    )
    kept = eviction.select_kept(
        state.scores, state.positions, state.valid, candidates, state.budget
    )
    state = drop(state, kept)
    slots = state.num_slots if state.kept_slots is None else state.kept_slots
    return dataclasses.replace(shrink(state, slots, windows), kept_slots=None)


def insert_and_attend(
    model: Model,
    params: Params,
    state: KVState,
    token: Array,
    knobs: Knobs,
    ranking: Ranking,
    *,
    rescore: bool,
    execution: Execution = ON_THIS_MACHINE,
    record: tuple[str, ...] = (),
) -> tuple[KVState, DecodeCache, Array, Array]:
    """What every step begins with: insert the token, attend, score.

    ``record`` names scorers whose numbers are wanted layer by layer, besides the policy's own; the
    other arguments are those of ``later_step``.

    Returns:
      The state with the new token, its utilities not yet aged; the cache as the layers left it
      (``increment``, ``recorded``); which rows took the step [B]; and the logits [B, V].
    """
    active = ~state.finished
    inserted_here = state.per_ranking(active)
    slot = jnp.where(inserted_here, state.free_slot, state.num_slots)
    inserted = jax.lax.broadcasted_iota(jnp.int32, state.valid.shape, state.valid.ndim - 1)
    inserted = inserted == slot[..., None]
    prior = aggregation.mean_utility(state.scores, state.valid)
    scores = jnp.where(inserted, prior[..., None], state.scores)
    valid = state.valid | inserted
    place = state.per_ranking(state.next_position)[..., None]
    positions = jnp.where(inserted, place, state.positions)
    cache = DecodeCache(
        keys=state.keys,
        values=state.values,
        slot=slot,
        valid=valid,
        positions=positions,
        position=state.next_position,
        active=active,
        row=state.row,
        layer_weights=knobs.layer_weights,
        increment=empty_increment(scores, ranking, execution) if rescore else None,
        seed=knobs.seed,
        learned=knobs.learned,
        windows=model.sliding_windows,
        ranking=ranking,
        record=record,
        execution=execution,
    )
    hidden, cache = model.hidden(params, token[:, None], state.next_position[:, None], cache)
    logits = model.logits(params, hidden[:, 0])
    next_position = state.next_position + active.astype(jnp.int32)
    state = dataclasses.replace(
        state,
        keys=cache.keys,
        values=cache.values,
        scores=scores,
        valid=valid,
        positions=positions,
        budget=_budget(state, knobs, next_position),
        next_position=next_position,
        finite=state.finite & (jnp.isfinite(logits).all(axis=-1) | ~active),
        step=state.step + 1,
    )
    return state, cache, active, logits


def _budget(state: KVState, knobs: Knobs, next_position: Array) -> Array:
    """The budget of a step: as it was, or the ratio of all tokens seen."""
    of_seen = tokens_kept_of_seen(state.per_ranking(next_position), knobs.ratio_of_seen)
    return jnp.where(knobs.ratio_of_seen[0] > 0, of_seen, state.budget)


def _evictable_until(state: KVState, knobs: Knobs) -> Array:
    """[...] int32, the first of the latest positions that are protected."""
    share = (knobs.recent_fraction * state.budget.astype(jnp.float32)).astype(jnp.int32)
    return state.per_ranking(state.next_position - knobs.protect_recent) - share
