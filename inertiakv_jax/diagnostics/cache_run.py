"""One cache taken step by step through a forced continuation, with all that its layers scored.

A step attends in one program and ranks and evicts in another: policies that differ in their scorer
share the first, which is large, and a replay attends as its trace did.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from inertiakv_jax import aggregation, eviction
from inertiakv_jax.attention import Execution, Ranking
from inertiakv_jax.decode_step import evict_to_budget, insert_and_attend, refresh_due, step_kinds
from inertiakv_jax.language_model import LanguageModel
from inertiakv_jax.policy import Knobs, Policy
from inertiakv_jax.prefilling import ReadPrompts, read_prompts, start
from inertiakv_jax.sharding import DATA, layout, mesh_sizes, on_mesh
from inertiakv_jax.shrinking import drop, shrink
from inertiakv_jax.state import PER_HEAD, SHARED, KVState
from inertiakv_jax.typing import Model, Params

ATTENTION = "attention"
"""The scorer that others are compared with; every run records it."""


@dataclasses.dataclass(frozen=True)
class Recorder:
    """What every run of a trace records.

    Attributes:
      scorers: names of ``scoring.SCORERS``, ``ATTENTION`` among them.
      knobs: seed of the random scorer and weights of the learned one.
    """

    scorers: tuple[str, ...]
    knobs: Knobs


@dataclasses.dataclass(frozen=True)
class Step:
    """What one step saw and did, by place in the text: [E or 1, K or 1, P].

    Attributes:
      held: bool, tokens attended to, the new one included.
      kept: bool, those of them still held after the step.
      utilities: float32, aggregated, before the step evicts; 0 where not held.
      recorded: by scorer [E, K or 1, P] float32, unweighted scores of each layer.
      rescored: whether the step aggregated its scores.
      budget: tokens that a ranking may keep.
    """

    held: np.ndarray
    kept: np.ndarray
    utilities: np.ndarray
    recorded: dict[str, np.ndarray]
    rescored: bool
    budget: int


def read(
    lm: LanguageModel, prompt: Sequence[int], policy: Policy, steps: int, least_slots: int = 0
) -> ReadPrompts:
    """Read a prompt for policies that note the same of it as this one.

    Raises:
      ValueError: a mesh that divides rows.
    """
    rows = 1 if lm.mesh is None else mesh_sizes(lm.mesh)[DATA]
    if rows > 1:
        raise ValueError(f"a trace is of one text, so mesh axis {DATA!r} must be 1, got {rows}")
    return read_prompts(
        lm.model,
        lm.params,
        np.asarray([prompt], np.int32),
        np.asarray([len(prompt)], np.int32),
        [policy],
        max_new_tokens=steps,
        least_slots=least_slots,
        mesh=lm.mesh,
    )


class CacheRun:
    """A prompt's cache and the steps taken with it.

    Attributes:
      chosen: most likely token after the prompt, then after the last step.
      chosen_logit: its logit.
    """

    def __init__(
        self,
        lm: LanguageModel,
        read: ReadPrompts,
        policy: Policy,
        steps: int,
        recorder: Recorder,
    ):
        """Start from a prompt that was read for the policy; ``steps`` more tokens will follow."""
        self._lm, self._policy, self._scorers = lm, policy, recorder.scorers
        self._length = int(read.lengths[0]) + steps
        self._knobs = dataclasses.replace(
            policy.knobs(lm.model), seed=recorder.knobs.seed, learned=recorder.knobs.learned
        )
        state = start(lm.model, lm.params, read, policy, max_new_tokens=steps, donate=False)
        self._state = jax.tree.map(jnp.copy, state)  # steps donate it, and others start from it
        self.chosen = int(jnp.argmax(read.logits[0]))
        self.chosen_logit = float(jnp.max(read.logits[0]))

    @property
    def slots(self) -> int:
        """Of the cache as it is."""
        return self._state.num_slots

    @property
    def held(self) -> np.ndarray:
        """[E or 1, K or 1, P] bool."""
        return self._by_position(_of_rankings(self._state.valid), self._state)

    @property
    def utilities(self) -> np.ndarray:
        """[E or 1, K or 1, P] float32; 0 where not held."""
        return self._by_position(_of_rankings(self._state.scores), self._state)

    def step(self, token: int) -> Step:
        """Insert a token, attend, score, evict by the policy.

        Raises:
          FloatingPointError: the logits hold NaN or infinity.
        """
        rescored = self._rescores()
        state, recorded = self._attend(token)
        if rescored:
            own = recorded[self._scorers.index(self._policy.scorer)]
            state = _age(state, own, self._knobs, retention=self._policy.retention)
        scores = [self._by_position(np.asarray(x), state) for x in recorded]
        held, utilities = (
            self._by_position(_of_rankings(x), state) for x in (state.valid, state.scores)
        )
        if self._policy.evicts:
            state = _evict(state, self._knobs, windows=self._lm.model.sliding_windows)
        self._state = state
        return Step(
            held=held,
            kept=self.held,
            utilities=utilities,
            recorded=dict(zip(self._scorers, scores, strict=True)),
            rescored=rescored,
            budget=int(jnp.max(state.budget)),
        )

    def thin_out_as_told(self, evicted_at: np.ndarray, slots: int) -> None:
        """Before step 1, drop what a trace's run does not hold then.

        Args:
          evicted_at: as of ``TracedRun``.
          slots: of the cache after it, at most as many as before.
        """
        self._state = self._evict_as_told(self._state, evicted_at, slots)

    def step_as_told(self, token: int, evicted_at: np.ndarray) -> None:
        """Insert a token, attend, and evict as a trace says. Raises as ``step``."""
        state, _ = self._attend(token)
        slots = state.num_slots if state.kept_slots is None else state.kept_slots
        state = self._evict_as_told(state, evicted_at, slots)
        self._state = dataclasses.replace(state, kept_slots=None)

    def _attend(self, token: int) -> tuple[KVState, Array]:
        """The state before eviction, and scores [scorers, E, K or 1, S]."""
        state, recorded, chosen, logit = _attend(
            self._lm.model,
            self._lm.params,
            self._state,
            jnp.asarray([token], jnp.int32),
            self._knobs,
            retention=self._policy.retention,
            record=self._scorers,
            mesh=layout(self._lm.mesh, self._lm.model),
        )
        if not bool(state.finite[0]):
            raise FloatingPointError(
                f"the logits of policy {self._policy.name!r} hold NaN or infinity after "
                f"{int(state.next_position[0])} tokens; are the weights sound, and does the dtype "
                "reach?"
            )
        self.chosen, self.chosen_logit = int(chosen), float(logit)
        return state, recorded

    def _rescores(self) -> bool:
        if self._policy.evicts and self._state.kept_slots is not None:
            return True  # step 1
        kinds = step_kinds(self._policy)
        return kinds[0] if len(kinds) == 1 else bool(refresh_due(self._state, self._knobs))

    def _evict_as_told(self, state: KVState, evicted_at: np.ndarray, slots: int) -> KVState:
        return _evict_as_told(
            state,
            jnp.asarray(evicted_at.reshape(*state.valid.shape[:-1], -1)),
            slots=slots,
            windows=self._lm.model.sliding_windows,
        )

    def _by_position(self, x: np.ndarray, state: KVState) -> np.ndarray:
        """From slots [..., S] to places in the text [..., P], 0 where nothing is held."""
        positions = _of_rankings(state.positions)
        shape = np.broadcast_shapes(x.shape, positions.shape)
        place = np.broadcast_to(np.where(positions < 0, self._length, positions), shape)
        found = np.zeros((*shape[:-1], self._length + 1), x.dtype)
        np.put_along_axis(found, place, np.broadcast_to(x, shape), axis=-1)
        return found[..., : self._length]


# Jitted at module level: one cache of programs for the life of the process.
@functools.partial(
    jax.jit, static_argnames=("model", "retention", "record", "mesh"), donate_argnames="state"
)
def _attend(
    model: Model,
    params: Params,
    state: KVState,
    token: Array,
    knobs: Knobs,
    *,
    retention: str,
    record: tuple[str, ...],
    mesh: Mesh | None,
) -> tuple[KVState, Array, Array, Array]:
    """A step up to its scores [scorers, E, K or 1, S], with the best next token and its logit."""
    execution = Execution(mesh=mesh)
    state, cache, _, logits = insert_and_attend(
        model,
        params,
        state,
        token,
        knobs,
        Ranking(retention=retention),
        rescore=False,
        execution=execution if state.kept_slots is None else execution.of_full_cache(),
        record=record,
    )
    # [1, K, S] of each of a layer's heads, or [devices, 1, S], each device's part of their mean.
    layers = jnp.stack([x[0] if retention == PER_HEAD else x.sum(axis=0) for x in cache.recorded])
    recorded = layers.reshape(-1, len(record), *layers.shape[1:]).swapaxes(0, 1)
    return on_mesh(state, mesh), recorded, jnp.argmax(logits[0]), jnp.max(logits[0])


@functools.partial(jax.jit, static_argnames="retention")
def _age(state: KVState, scores: Array, knobs: Knobs, *, retention: str) -> KVState:
    """Aggregate a step's scores [E, K or 1, S]."""
    increment = weighted_sum(scores, knobs.layer_weights, retention=retention)
    increment = increment.reshape(state.scores.shape)
    return dataclasses.replace(
        state, scores=aggregation.aggregate(state.scores, increment, knobs.decay)
    )


_evict = jax.jit(evict_to_budget, static_argnames="windows")


@functools.partial(jax.jit, static_argnames=("slots", "windows"))
def _evict_as_told(state: KVState, evicted_at: Array, *, slots: int, windows) -> KVState:
    """Drop what ``evicted_at`` [..., P] says is gone by now, and shrink as ``evict_to_budget``."""
    when = jnp.take_along_axis(evicted_at, jnp.maximum(state.positions, 0), axis=-1)
    return shrink(drop(state, state.valid & (when > state.step)), slots, windows)


@functools.partial(jax.jit, static_argnames="retention")
def weighted_sum(scores: Array, layer_weights: Array, *, retention: str) -> Array:
    """What a step adds to the utilities: [E, K or 1, ...] scores to [E or 1, K or 1, ...]."""
    if retention != PER_HEAD:
        scores = scores.mean(axis=1, keepdims=True)
    weighted = layer_weights[:, None, None] * scores
    return weighted.sum(axis=0, keepdims=True) if retention == SHARED else weighted


@jax.jit
def insert_and_age(
    utilities: Array, held: Array, new: int, increment: Array | None, decay: Array
) -> Array:
    """Utilities [..., P] of one step on: the new place has the mean of those held before."""
    prior = aggregation.mean_utility(utilities, held)[..., None]
    here = jnp.arange(utilities.shape[-1], dtype=jnp.int32) == new
    utilities = jnp.where(here, prior, utilities)
    return utilities if increment is None else aggregation.aggregate(utilities, increment, decay)


@jax.jit
def top(scores: Array, seen: Array, budget: int) -> Array:
    """Mask [..., P] of the ``budget`` highest of the tokens seen [P], as eviction ranks them."""
    positions = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    seen = jnp.broadcast_to(seen, scores.shape)
    budgets = jnp.full(scores.shape[:-1], budget, jnp.int32)
    return eviction.select_kept(scores, positions, seen, seen, budgets)


def _of_rankings(x: Array) -> np.ndarray:
    """Of a batch of one: [B, S], [E, B, S] or [E, B, K, S] to [E or 1, K or 1, S]."""
    found = np.asarray(x)
    if found.ndim == 4:
        return found[:, 0]
    return found if found.ndim == 3 else found[None]
