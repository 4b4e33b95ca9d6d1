"""What a policy does to the prompt between prefill and the first decode step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from inertiakv_jax import eviction, prompt_scoring
from inertiakv_jax import state as kv_state
from inertiakv_jax.observation import Observed, ObservedMass, ObservedMoments, Observing
from inertiakv_jax.policy import Knobs, Policy
from inertiakv_jax.prefill_method import EXPECTED_ATTENTION, KVZIP, SNAPKV, PrefillMethod
from inertiakv_jax.reconstruction import reconstruction_scores
from inertiakv_jax.scoring import SCORERS, Attended
from inertiakv_jax.shrinking import drop, shrink
from inertiakv_jax.state import PER_HEAD, PER_LAYER, SHARED, KVState, spread
from inertiakv_jax.typing import Model, Params, RotaryModel


def observing_of(policy: Policy) -> Observing | None:
    """What prefill must note of the prompt's queries for a policy."""
    method = policy.prefill
    if method is not None and method.scorer == SNAPKV:
        return Observing(last=method.window)
    if method is not None and method.scorer == EXPECTED_ATTENTION:
        return Observing(skip=prompt_scoring.SINKS, moments=True)
    return Observing(last=policy.prompt_queries) if policy.prompt_queries else None


def rank(state: KVState, observed: tuple[Observed, ...], policy: Policy, model: Model) -> KVState:
    """Give a state fresh from prefill the rankings of the policy, and its ``prompt_queries``."""
    masses = tuple(seen.mass for seen in observed if isinstance(seen, ObservedMass))
    masses = masses if policy.prompt_queries else ()
    if policy.retention == SHARED and not masses:
        return state
    # All but keys and values, which would be copied.
    small = dataclasses.replace(state, keys=(), values=())
    small = _rank(small, masses, policy.knobs(model), model=model, retention=policy.retention)
    return dataclasses.replace(small, keys=state.keys, values=state.values)


@functools.partial(jax.jit, static_argnames=("model", "retention"))
def _rank(
    state: KVState, masses: tuple[Array, ...], knobs: Knobs, *, model: Model, retention: str
) -> KVState:
    batch, slots = state.valid.shape
    lead = kv_state.ranking_shape(model, batch, retention)

    scores = jnp.zeros((*lead, slots), jnp.float32)
    if masses:
        group = model.num_heads // model.num_kv_heads
        of_head = jnp.stack(masses) / group * knobs.layer_weights[:, None, None, None]
        scores = _reduce(of_head, retention)
        scores = scores * len(masses) if retention == SHARED else scores  # weights were applied
    return dataclasses.replace(
        state,
        scores=scores,
        valid=spread(state.valid, (*lead, slots)),
        positions=spread(state.positions, (*lead, slots)),
        budget=spread(state.budget, lead),
    )


def _reduce(of_head: Array, retention: str) -> Array:
    """[E, B, K, S] to the mean that a ranking is made by: [E, B, K, S], [E, B, S] or [B, S]."""
    axes = {PER_HEAD: (), PER_LAYER: (2,), SHARED: (0, 2)}[retention]
    return of_head.mean(axis=axes) if axes else of_head


def thin_out_prompt(
    model: Model,
    params: Params,
    state: KVState,
    tokens: np.ndarray,
    observed: tuple[Observed, ...],
    method: PrefillMethod,
    lengths: np.ndarray,
    *,
    new_tokens: int,
    least_slots: int,
    donate: bool,
) -> KVState:
    """Keep of each prompt what ``method`` scores highest, in a cache of the size that it needs.

    Args:
      model: the decoder.
      params: its parameters.
      state: ranked, fresh from prefill.
      tokens: [B, S] int32, the prompts.
      observed: what prefill noted for the method.
      method: the prefill-time method.
      lengths: [B] int32, tokens of each prompt.
      new_tokens: room for so many more.
      least_slots: slots that step 1 needs; the cache has them now.
      donate: delete the keys and values of ``state``, which nothing else would free in time.
    """
    if method.scorer == KVZIP:
        of_head = reconstruction_scores(model, params, state, tokens, method)
    else:
        of_head = _prompt_scores(state, observed, method=method, model=model)
    kept = _kept(of_head, state, jnp.asarray(method.budgets(lengths, model)), method=method)
    most = int(kept.sum(axis=-1).max())  # what the longest head keeps sets the capacity: a sync
    slots = kv_state.slots_for(most + max(new_tokens, 1), multiple=64)
    slots = min(max(slots, least_slots), state.num_slots)
    thin = _thin_out(state, kept, slots=slots, windows=model.sliding_windows)
    if donate and slots < state.num_slots:
        for leaf, window in zip(
            (*state.keys, *state.values), model.sliding_windows * 2, strict=True
        ):
            if window is None:
                leaf.delete()
    return thin


@functools.partial(jax.jit, static_argnames=("method", "model"))
def _prompt_scores(
    state: KVState, observed: tuple[Observed, ...], *, method: PrefillMethod, model: Model
) -> Array:
    """Scores [E, B, K, S] float32 of the prompt's tokens."""
    eligible = [i for i, window in enumerate(model.sliding_windows) if window is None]
    valid = jnp.arange(state.num_slots, dtype=jnp.int32)[None] < state.next_position[:, None]
    if method.scorer == SNAPKV:
        mass = jnp.stack([seen.mass for seen in observed if isinstance(seen, ObservedMass)])
        return prompt_scoring.snapkv(mass, state.next_position, method.window, method.pool)
    if method.scorer == EXPECTED_ATTENTION:
        assert isinstance(model, RotaryModel)
        average = prompt_scoring.average_rotation(model, state.next_position)
        scores = [
            prompt_scoring.expected_attention(
                seen, state.keys[layer], state.values[layer], valid, average
            )
            for seen, layer in zip(observed, eligible, strict=True)
            if isinstance(seen, ObservedMoments)
        ]
        return jnp.stack(scores)
    score = SCORERS[method.scorer].score
    positions = jnp.where(valid, jnp.arange(state.num_slots, dtype=jnp.int32)[None], -1)
    return jnp.stack(
        [
            score(
                Attended(
                    query=jnp.zeros((len(valid), model.num_heads, model.head_dim), jnp.float32),
                    keys=state.keys[layer],
                    values=state.values[layer],
                    valid=valid[:, None],
                    positions=positions[:, None],
                    row=state.row,
                    mass=None,
                )
            )
            for layer in eligible
        ]
    )


@functools.partial(jax.jit, static_argnames="method")
def _kept(of_head: Array, state: KVState, budgets: Array, *, method: PrefillMethod) -> Array:
    """Mask [..., S] of the tokens that stay in each ranking of ``method.retention``."""
    lengths, slots = state.next_position, of_head.shape[-1]
    position = jnp.arange(slots, dtype=jnp.int32)[None]
    valid = position < lengths[:, None]
    first = position < method.protect_first
    latest = position >= (lengths - (method.window if method.scorer == SNAPKV else 0))[:, None]
    # By rank, not by a mask: where the budget is below what is protected, the latest of it stay.
    protected = jnp.broadcast_to((first | latest)[None, :, None], of_head.shape)
    scores = _reduce(of_head, method.retention)
    protected = _reduce(protected.astype(jnp.float32), method.retention) > 0.0
    scores = jnp.where(protected, jnp.inf, scores)
    if method.head_budgets == "equal":
        valid = spread(valid, scores.shape)
        positions = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
        budgets = spread(budgets, scores.shape[:-1])
        return eviction.select_kept(scores, positions, valid, valid, budgets)
    return prompt_scoring.keep_across_heads(scores, valid, budgets, method)


@functools.partial(jax.jit, static_argnames=("slots", "windows"))
def _thin_out(state: KVState, kept: Array, *, slots: int, windows) -> KVState:
    """``state``, whose utilities are not begun yet, with what is ``kept``."""
    return shrink(drop(state, kept), slots, windows)
