"""One policy in a trace: its own cache, and what it would keep if nothing were ever evicted."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from inertiakv_jax.diagnostics.cache_run import (
    ATTENTION,
    CacheRun,
    Recorder,
    Step,
    insert_and_age,
    top,
    weighted_sum,
)
from inertiakv_jax.diagnostics.measures import (
    by_layer,
    changes_at_most_one,
    churn,
    jaccard,
    spearman,
)
from inertiakv_jax.diagnostics.records import Boundary, TracedRun
from inertiakv_jax.language_model import LanguageModel
from inertiakv_jax.policy import Policy
from inertiakv_jax.prefilling import ReadPrompts
from inertiakv_jax.state import PER_HEAD

NEAR = 3
"""Tokens on either side of the boundary whose utilities a trace has."""


class TracedPolicy:
    """A policy's own cache, and its ranking of all tokens by the full cache's scores."""

    def __init__(
        self,
        lm: LanguageModel,
        read: ReadPrompts,
        policy: Policy,
        steps: int,
        recorder: Recorder,
    ):
        """Start from a prompt; the arguments are those of ``CacheRun``."""
        self._policy, self._prompt_tokens = policy, int(read.lengths[0])
        self._cache = CacheRun(lm, read, policy, steps, recorder)
        knobs = policy.knobs(lm.model)
        self._weights, self._decay = knobs.layer_weights, knobs.decay
        self._prompt_slots = self._cache.slots
        held, start = self._cache.held, self._cache.utilities
        self._evicted_at = np.full(held.shape, steps + 1, np.int32)
        of_prompt = np.s_[..., : self._prompt_tokens]
        self._evicted_at[of_prompt][~held[of_prompt]] = 0
        # Utilities by attention in the own cache; by the scorer and by attention in the full one.
        self._by_attention = self._full = self._full_by_attention = jnp.asarray(start)
        self._tops: dict[str, np.ndarray] = {}  # of the step before
        self._measures: dict[str, list[np.ndarray]] = {}
        self._utilities, self._threshold, self._chosen, self._logits = [], [], [], []

    def step(self, token: int, full: Step) -> None:
        """Take a step and measure it; ``full`` is what the full cache saw at it."""
        step = self._cache.step(token)
        self._evicted_at[step.held & ~step.kept] = len(self._chosen) + 1
        self._chosen.append(self._cache.chosen)
        self._logits.append(self._cache.chosen_logit)
        if self._policy.evicts:
            self._measure_held(step)
            self._measure_full(step, full)
            self._note_boundary(step)

    def _age(self, utilities, held: np.ndarray, scores: np.ndarray, rescored: bool):
        new = self._prompt_tokens + len(self._chosen) - 1
        held = held & (np.arange(held.shape[-1]) != new)
        increment = None
        if rescored:
            increment = weighted_sum(scores, self._weights, retention=self._policy.retention)
        return insert_and_age(utilities, held, new, increment, self._decay)

    def _measure_held(self, step: Step) -> None:
        attention, own = step.recorded[ATTENTION], step.recorded[self._policy.scorer]
        self._by_attention = self._age(self._by_attention, step.held, attention, step.rescored)
        by_attention = np.asarray(self._by_attention)
        self._note("spearman_held", spearman(own, attention, step.held))
        self._note("spearman_held_aggregated", spearman(step.utilities, by_attention, step.held))

    def _measure_full(self, step: Step, full: Step) -> None:
        attention, own = full.recorded[ATTENTION], full.recorded[self._policy.scorer]
        if self._policy.retention != PER_HEAD:
            attention, own = (x.mean(axis=1, keepdims=True) for x in (attention, own))
        seen = full.held[:1, :1]
        self._full = self._age(self._full, seen, own, step.rescored)
        self._full_by_attention = self._age(self._full_by_attention, seen, attention, step.rescored)
        utilities, by_attention = np.asarray(self._full), np.asarray(self._full_by_attention)
        self._note("spearman_seen", spearman(own, attention, seen))
        self._note("spearman_seen_aggregated", spearman(utilities, by_attention, seen))
        raw, aggregated = (np.asarray(top(x, seen[0, 0], step.budget)) for x in (own, utilities))
        self._note("raw_aggregated_jaccard", jaccard(raw, aggregated))
        first = not self._tops  # nothing was ranked before, and nothing evicted
        for name, now in (("raw", raw), ("aggregated", aggregated)):
            before = now if first else self._tops[name]
            self._note(f"{name}_churn", churn(now, before), unknown=first)
            self._note(f"{name}_small_change", changes_at_most_one(now, before), unknown=first)
        self._note("raw_evicted", churn(raw, step.held), unknown=first)
        self._tops = {"raw": raw, "aggregated": aggregated}

    def _note(self, name: str, measure: np.ndarray, *, unknown: bool = False) -> None:
        values = by_layer(np.full_like(measure, np.nan) if unknown else measure)
        self._measures.setdefault(name, []).append(values)

    def _note_boundary(self, step: Step) -> None:
        utilities, held, kept = (x[-1, -1] for x in (step.utilities, step.held, step.kept))
        self._utilities.append(np.where(held, utilities, np.nan))
        self._threshold.append(utilities[kept].min())

    def traced(self) -> TracedRun:
        """The run as the trace has it."""
        return TracedRun(
            name=self._policy.name,
            policy=dataclasses.asdict(self._policy),
            retention=self._policy.retention,
            evicts=self._policy.evicts,
            prompt_slots=self._prompt_slots,
            slots=self._cache.slots,
            evicted_at=self._evicted_at,
            chosen=np.asarray(self._chosen, np.int32),
            chosen_logit=np.asarray(self._logits, np.float32),
            measures={name: np.stack(values) for name, values in self._measures.items()},
            boundary=self._boundary() if self._policy.evicts else None,
        )

    def _boundary(self) -> Boundary:
        """The last tokens to go, and the lowest of those that stay."""
        utilities = np.stack(self._utilities)
        evicted_at, steps = self._evicted_at[-1, -1], len(utilities)
        gone = np.flatnonzero((evicted_at > 1) & (evicted_at <= steps))
        gone = gone[np.argsort(evicted_at[gone], kind="stable")][-NEAR:]
        stay = np.flatnonzero(self._cache.held[-1, -1])
        stay = stay[np.argsort(utilities[-1, stay], kind="stable")][:NEAR]
        positions = np.concatenate([gone, stay])
        return Boundary(positions, utilities[:, positions].T, np.asarray(self._threshold))
