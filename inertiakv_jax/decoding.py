"""The decode step and the loop around it: insert, attend, score, aggregate, evict."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from inertiakv_jax import aggregation, eviction
from inertiakv_jax.attention import DecodeCache
from inertiakv_jax.policies import Knobs, Policy
from inertiakv_jax.sampling import Sampling, sample
from inertiakv_jax.state import FREE_POSITION, KVState
from inertiakv_jax.typing import Model, Params

NO_TOKEN = -1
"""What the returned tokens show for a row that has already finished."""

_Carry = TypeVar("_Carry")


def step(
    model: Model, params: Params, state: KVState, token: Array, policy: Policy
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

    Returns:
      The new state, and logits [B, V] float32 for the token after. A finished row's state comes
      back bit for bit.

    Source: arXiv 2609.03515 sections 3.1, 3.2, appendix E.
    """
    knobs = policy.knobs(model.num_layers)
    if state.kept_slots is not None:
        return _first_step(model, params, state, token, knobs)

    def body(carry, *, rescore):
        del carry
        return _step(model, params, state, token, knobs, rescore=rescore)

    bodies = _bodies(policy)
    if len(bodies) == 1:
        return body(None, rescore=bodies[0])
    shape = jax.eval_shape(lambda: body(None, rescore=False)[1])
    carry = (state, jnp.zeros(shape.shape, shape.dtype))
    return _run_due_body(body, carry, bodies, due=_refresh_due(state, knobs), running=True)


def decode(
    model: Model,
    params: Params,
    state: KVState,
    first_token: Array,
    *,
    steps: int,
    policy: Policy,
    sampling: Sampling | None = None,
    key: Array | None = None,
    stop_tokens: Sequence[int] = (),
    limit: int | Array | None = None,
    donate: bool = True,
) -> tuple[KVState, Array]:
    """Decode ``steps`` tokens a row in one ``lax.scan``.

    The state carries its step count, so n calls of one step equal one call of n steps bit for
    bit, and a run can be watched, saved and resumed at any step. Rows stop at a stop token; the
    loop idles once all have.

    Args:
      model: the decoder.
      params: its parameters.
      state: from ``prefill`` or an earlier ``decode``. Consumed: its buffers are deleted, or
        re-used in place, so that the full cache is freed at step 1. See ``donate``.
      first_token: [B] int32, the last token chosen and not yet in the cache: after prefill the
        one taken from its logits, later ``tokens[:, -1]``.
      steps: static, at least 1. One program per value.
      policy: the one given to ``prefill``. Its numbers are traced.
      sampling: None is greedy.
      key: PRNG key for sampling.
      stop_tokens: ids that finish a row.
      limit: traced, at most ``steps``: stop after so many, with the program of ``steps``. 0 only
        compiles (not for step 1).
      donate: False leaves ``state`` usable (to run several policies from one prefill), at the
        price of a second cache.

    Returns:
      state: after the steps.
      tokens: [B, steps] int32, the token chosen after each step; a row's stop token is its last,
        then ``NO_TOKEN``. Columns from ``limit`` on are ``NO_TOKEN`` too.

    Raises:
      ValueError: ``steps`` below 1, a wrong ``first_token``, a cache without room for the steps
        (nothing is evicted), or positions beyond the model's.

    Source: arXiv 2609.03515 section 3.2, 3.3 (Lazy, Score-Free).
    """
    first_token = jnp.asarray(first_token, jnp.int32)
    limit = steps if limit is None else limit
    _check_decode(model, state, first_token, policy, steps, limit)
    knobs = policy.knobs(model.num_layers)
    choice = _Choice(sampling, key, jnp.asarray(tuple(stop_tokens), jnp.int32))
    limit = jnp.asarray(limit, jnp.int32)
    bodies = _bodies(policy)
    if state.kept_slots is None:
        run = _decode_in_place if donate else _decode_copy
        return run(
            model, params, state, first_token, knobs, choice, limit, steps=steps, bodies=bodies
        )
    small, tokens = _decode_first(model, params, state, first_token, knobs, choice)
    if donate:
        _delete_cache(state)
    if steps == 1:
        return small, tokens
    small, later = _decode_in_place(
        model,
        params,
        small,
        jnp.maximum(tokens[:, 0], 0),
        knobs,
        choice,
        limit - 1,
        steps=steps - 1,
        bodies=bodies,
    )
    return small, jnp.concatenate([tokens, later], axis=1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Choice:
    """How the next token is chosen, and which ones end a row."""

    sampling: Sampling | None
    key: Array | None
    stop_tokens: Array  # [n] int32

    def __call__(self, state: KVState, logits: Array) -> tuple[KVState, Array]:
        """Choose from the logits of the step just taken: state, and [B] tokens or NO_TOKEN."""
        chosen = sample(logits, self.sampling, self.key, state.step)
        emitted = jnp.where(state.finished, NO_TOKEN, chosen)
        stopped = jnp.any(chosen[:, None] == self.stop_tokens[None], axis=1)
        return dataclasses.replace(state, finished=state.finished | stopped), emitted


def _decode_loop(model, params, state, token, knobs, choice, limit, *, steps, bodies):
    def take_step(carry, *, rescore):
        state, token, _ = carry
        state, logits = _step(model, params, state, token, knobs, rescore=rescore)
        state, emitted = choice(state, logits)
        # A finished row's token is never looked at, but must be an id.
        return state, jnp.maximum(emitted, 0), emitted

    def iteration(carry, index):
        state, token = carry
        running = (index < limit) & ~jnp.all(state.finished)
        idle = jnp.full_like(token, NO_TOKEN)
        state, token, emitted = _run_due_body(
            take_step,
            (state, token, idle),
            bodies,
            due=_refresh_due(state, knobs),
            running=running,
        )
        return (state, token), emitted

    (state, _), tokens = jax.lax.scan(iteration, (state, token), jnp.arange(steps))
    return state, tokens.T


def _decode_first_step(model, params, state, token, knobs, choice):
    state, logits = _first_step(model, params, state, token, knobs)
    state, emitted = choice(state, logits)
    return state, emitted[:, None]


# Module-level jits: one cache of programs for the life of the process. The loop's state is
# donated, here and nowhere lower, because a step would otherwise copy the whole cache once.
_STATIC = ("model", "steps", "bodies")
_decode_in_place = jax.jit(_decode_loop, static_argnames=_STATIC, donate_argnames="state")
_decode_copy = jax.jit(_decode_loop, static_argnames=_STATIC)
_decode_first = jax.jit(_decode_first_step, static_argnames="model")


def _bodies(policy: Policy) -> tuple[bool, ...]:
    """Which kinds of step the program must hold after step 1: True rescores, False does not."""
    return (True,) * policy.scores_some_steps + (False,) * policy.skips_some_steps


def _refresh_due(state: KVState, knobs: Knobs) -> Array:
    """Whether the next step rescores: (t - 1) % refresh == 0 (eq. 6)."""
    return state.step % knobs.refresh == 0


def _run_due_body(
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


def _step(model, params, state, token, knobs, *, rescore: bool) -> tuple[KVState, Array]:
    """A step of a state whose shape stays: at most one token a row is evicted."""
    state, active, logits = _insert_attend_aggregate(
        model, params, state, token, knobs, rescore=rescore
    )
    over_budget = active & (state.num_held > state.budget)
    candidates = _candidates(state, knobs) & over_budget[:, None]
    evicted = eviction.lowest(state.scores, state.positions, candidates)
    return _drop(state, evicted), logits


def _first_step(model, params, state, token, knobs) -> tuple[KVState, Array]:
    """Step 1: attend to the whole prompt, evict down to the budget, shrink the cache."""
    state, _, logits = _insert_attend_aggregate(model, params, state, token, knobs, rescore=True)
    kept = eviction.select_kept(
        state.scores, state.positions, state.valid, _candidates(state, knobs), state.budget
    )
    state = _drop(state, state.valid & ~kept)
    if state.kept_slots == state.num_slots:
        return dataclasses.replace(state, kept_slots=None), logits
    return _compact(state), logits


def _insert_attend_aggregate(
    model, params, state, token, knobs, *, rescore
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
        increment=jnp.zeros_like(scores) if rescore else None,
    )
    hidden, cache = model.hidden(params, token[:, None], state.next_position[:, None], cache)
    logits = model.logits(params, hidden[:, 0])
    if rescore:
        aged = aggregation.aggregate(scores, cache.increment, knobs.decay)
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
        return jnp.take_along_axis(leaf, source[:, None, :, None], axis=2)

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


def _delete_cache(state: KVState) -> None:
    """Free the full cache now: the caller's reference would keep it alive through the loop.

    Donation cannot do it, for no output has its shape.
    """
    for leaf in (*state.keys, *state.values):
        if not isinstance(leaf, Tracer):
            leaf.delete()


def _check_decode(model, state, first_token, policy, steps, limit) -> None:
    batch = state.valid.shape[0]
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    if first_token.shape != (batch,):
        raise ValueError(f"first_token must have shape ({batch},), got {first_token.shape}")
    if state.kept_slots is not None and not policy.evicts:
        raise ValueError(
            f"policy {policy.name!r} evicts nothing, but the state was prefilled for one that does"
        )
    if isinstance(state.next_position, Tracer) or isinstance(limit, Tracer):
        return
    limit = int(limit)
    fewest = 0 if state.kept_slots is None else 1
    if not fewest <= limit <= steps:
        raise ValueError(f"limit must be in {fewest} .. steps={steps}, got {limit}")
    seen = int(np.max(np.where(state.finished, 0, state.next_position)))
    room = model.max_positions if policy.evicts else min(model.max_positions, state.num_slots)
    if seen + limit > room:
        what = "positions of the model" if room == model.max_positions else "slots of the cache"
        raise ValueError(f"{seen} tokens and {limit} steps exceed the {room} {what}")
