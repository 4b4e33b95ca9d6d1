"""The decode loop: steps in one ``lax.scan``, over a state that carries its own schedule."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.sharding import Mesh

from inertiakv_jax.attention import Execution
from inertiakv_jax.decode_input import check_steps, checked_ids, checked_token
from inertiakv_jax.decode_step import (
    attend_to_prompt,
    evict_to_budget,
    later_step,
    refresh_due,
    run_due_body,
    step_kinds,
)
from inertiakv_jax.policy import Policy
from inertiakv_jax.sampling import Sampling, check_sampling, sample
from inertiakv_jax.sharding import check_batch, layout, on_mesh, place
from inertiakv_jax.state import KVState
from inertiakv_jax.typing import Model, Params

NO_TOKEN = -1
"""What the returned tokens show for a row that has already finished."""


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
    implementation: str | None = None,
    mesh: Mesh | None = None,
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
        one taken from its logits, later ``tokens[:, -1]`` (``tokens[:, limit - 1]`` with a
        limit).
      steps: static, at least 1. One program per value.
      policy: the one given to ``prefill``. Its numbers are traced.
      sampling: None is greedy.
      key: PRNG key for sampling.
      stop_tokens: ids that finish a row.
      limit: traced, at most ``steps``: stop after so many, with the program of ``steps``. 0 only
        compiles (not for step 1).
      donate: False leaves ``state`` usable (to run several policies from one prefill), at the
        price of a second cache.
      implementation: static, of the attention kernel: "xla", "tpu" or "gpu", which raises where it
        cannot run; None takes the best for the device.
      mesh: static, as of ``load``: devices over which the state's rows and heads are laid. Axis
        "data" must divide B. None for one device.

    Returns:
      state: after the steps.
      tokens: [B, steps] int32, the token chosen after each step; a row's stop token is its last,
        then ``NO_TOKEN``. Columns from ``limit`` on are ``NO_TOKEN`` too.

    Raises:
      ValueError: an argument of another kind, ``steps`` below 1, a wrong ``first_token``, a
        consumed ``state`` or one of another policy's, a cache without room for the steps (nothing
        is evicted), or positions beyond the model's.

    Source: arXiv 2609.03515 section 3.2, 3.3 (Lazy, Score-Free).
    """
    token = checked_token(model, state, policy, "first_token", first_token)
    limit = steps if limit is None else limit
    check_steps(model, state, token, policy, steps, limit)
    check_batch(mesh, state.next_position.shape[0])
    check_sampling(sampling)
    ends = checked_ids("stop_tokens", stop_tokens)
    execution = Execution(implementation, layout(mesh, model))
    state = place(state, execution.mesh)
    knobs = policy.knobs(model)
    choice = _Choice(sampling, key, jnp.asarray(ends, jnp.int32))
    first_token = jnp.asarray(token, jnp.int32)
    limit = jnp.asarray(limit, jnp.int32)
    static = {"ranking": policy.ranking, "execution": execution}
    bodies = step_kinds(policy)
    if state.kept_slots is None:
        run = _decode_in_place if donate else _decode_copy
        return run(
            model,
            params,
            state,
            first_token,
            knobs,
            choice,
            limit,
            steps=steps,
            bodies=bodies,
            **static,
        )
    first = _first_in_place if donate else _first_copy
    full, tokens = first(model, params, state, first_token, knobs, choice, **static)
    small = _evict(full, knobs, windows=model.sliding_windows, mesh=execution.mesh)
    _delete_moved(full, small)
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
        **static,
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


def _decode_loop(
    model, params, state, token, knobs, choice, limit, *, steps, bodies, ranking, execution
):
    def take_step(carry, *, rescore):
        state, token, _ = carry
        state, logits = later_step(
            model, params, state, token, knobs, ranking, rescore=rescore, execution=execution
        )
        state, emitted = choice(state, logits)
        # A finished row's token is never looked at, but must be an id.
        return state, jnp.maximum(emitted, 0), emitted

    def iteration(carry, index):
        state, token = carry
        running = (index < limit) & ~jnp.all(state.finished)
        idle = jnp.full_like(token, NO_TOKEN)
        state, token, emitted = run_due_body(
            take_step,
            (state, token, idle),
            bodies,
            due=refresh_due(state, knobs),
            running=running,
        )
        return (state, token), emitted

    state = on_mesh(state, execution.mesh)
    (state, _), tokens = jax.lax.scan(iteration, (state, token), jnp.arange(steps, dtype=jnp.int32))
    return state, tokens.T


def _first_step(model, params, state, token, knobs, choice, *, ranking, execution):
    state, logits = attend_to_prompt(
        model, params, state, token, knobs, ranking, execution=execution
    )
    state, emitted = choice(state, logits)
    return state, emitted[:, None]


def _evict_to_budget(state, knobs, *, windows, mesh):
    return on_mesh(evict_to_budget(state, knobs, windows), mesh)


# Module-level jits: one cache of programs for the life of the process. The state is donated, here
# and nowhere lower, because a step would otherwise copy the whole cache once. Step 1 is two
# programs: in one, whose result has another shape, nothing could be donated, and inserting the
# token would copy the full cache.
_STATIC = ("model", "steps", "bodies", "ranking", "execution")
_decode_in_place = jax.jit(_decode_loop, static_argnames=_STATIC, donate_argnames="state")
_decode_copy = jax.jit(_decode_loop, static_argnames=_STATIC)
_FIRST_STATIC = ("model", "ranking", "execution")
_first_in_place = jax.jit(_first_step, static_argnames=_FIRST_STATIC, donate_argnames="state")
_first_copy = jax.jit(_first_step, static_argnames=_FIRST_STATIC)
_evict = jax.jit(_evict_to_budget, static_argnames=("windows", "mesh"))


def _delete_moved(full: KVState, small: KVState) -> None:
    """Free what was gathered from the full cache: its last reference goes too late."""
    before, after = ((*state.keys, *state.values) for state in (full, small))
    for leaf, moved in zip(before, after, strict=True):
        if leaf.shape != moved.shape and not isinstance(leaf, Tracer):
            leaf.delete()
