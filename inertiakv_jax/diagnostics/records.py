"""What a trace holds: runs of policies over one forced continuation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

WITHOUT_EMA = " without EMA"
"""What the name of a policy's counterpart without moving average ends in."""


@dataclass(frozen=True)
class Boundary:
    """Tokens about the edge of the budget, in the last ranking of a run.

    Attributes:
      positions: [n] int, places in the text.
      utilities: [n, steps] float, aggregated, before the step evicts; NaN where not held.
      threshold: [steps] float, the lowest utility that stays after each step.
    """

    positions: np.ndarray
    utilities: np.ndarray
    threshold: np.ndarray


@dataclass(frozen=True)
class TracedRun:
    """One policy over the continuation.

    Attributes:
      name: of the policy, the run's own in the trace.
      policy: the policy's fields, for the record; ``replay`` does not look at them.
      retention: one of ``state.RETENTIONS``.
      evicts: whether step 1 shrinks the cache.
      prompt_slots: slots of the cache that step 1 attends to.
      slots: slots after it.
      evicted_at: [E or 1, K or 1, P] int32, for each place in the text the step that evicted it:
        0 if the prompt was thinned out before, steps + 1 if it was still held at the end.
      chosen: [steps] int32, the most likely token after each step.
      chosen_logit: [steps] float32, its logit.
      measures: by name [steps, E or 1] float, NaN where there is none; see ``docs/diagnostics.md``.
      boundary: None if nothing is evicted while decoding.
    """

    name: str
    policy: Mapping[str, Any]
    retention: str
    evicts: bool
    prompt_slots: int
    slots: int
    evicted_at: np.ndarray
    chosen: np.ndarray
    chosen_logit: np.ndarray
    measures: Mapping[str, np.ndarray]
    boundary: Boundary | None

    def kept(self, step: int) -> np.ndarray:
        """[E or 1, K or 1, P] bool, the tokens held after a step; of step 0, before step 1."""
        steps = len(self.chosen)
        seen = np.arange(self.evicted_at.shape[-1]) < self.evicted_at.shape[-1] - steps + step
        return (self.evicted_at > step) & seen


@dataclass(frozen=True)
class Trace:
    """Several policies over one forced continuation.

    Attributes:
      config: model, dtype, versions and the like, for the record.
      prompt: T token ids.
      continuation: token ids, that of step t at place T + t - 1.
      full_chosen: [steps] int32, the most likely token after each step with the full cache.
      runs: one a policy.
      kept_jaccard: of each pair of names [steps, E or 1] float, Jaccard of what is held after
        each step.
    """

    config: Mapping[str, Any]
    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    full_chosen: np.ndarray
    runs: tuple[TracedRun, ...]
    kept_jaccard: Mapping[tuple[str, str], np.ndarray]
