"""What a policy is: a scorer, an aggregation, a schedule, a retention and a budget."""

import dataclasses
import math
import numbers
import os
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from inertiakv_jax.aggregation import LAYER_WEIGHTS, recurrence
from inertiakv_jax.attention import Ranking
from inertiakv_jax.budget import check_budget, fraction_of_seen, token_budgets
from inertiakv_jax.checks import (
    check_choice,
    check_field,
    in_unit_interval,
    is_a,
    is_count,
    is_int32_count,
)
from inertiakv_jax.learned_scorer import load_learned
from inertiakv_jax.prefill_method import PrefillMethod
from inertiakv_jax.scoring import SCORERS, LearnedParams
from inertiakv_jax.state import NO_EVICTION, RETENTIONS, SHARED, num_eligible
from inertiakv_jax.typing import Model

EVERY_STEP = 1
STEP_ONE_ONLY = 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Knobs:
    """The numbers of a policy that a compiled step takes as arguments: changing one is free."""

    decay: Array  # [] float32
    layer_weights: Array  # [E] float32
    refresh: Array  # [] int32, rescore every so many steps
    protect_first: Array  # [] int32
    protect_recent: Array  # [] int32
    recent_fraction: Array  # [] float32
    seed: Array  # [] uint32, of random scores
    ratio_of_seen: Array  # [2] int32, numerator and denominator; 0 / 1: the budget stays
    learned: LearnedParams | None


@dataclasses.dataclass(frozen=True)
class Policy:
    """How a KV cache is thinned out while decoding. Hashable, so static under jit.

    Five axes, each free of the others: what a token's score is (``scorer``), how scores become
    utilities (``alpha``, ``decay``, ``layer_weights``), when they are renewed (``refresh``), who
    shares a ranking (``retention``), and how much stays (the budget, protected positions). The
    methods of the paper's tables are points of this space: see ``policies``.

    Give the budget one way: ``ratio``, ``tokens`` or ``kv_bytes``.

    Attributes:
      name: as on the command line and in results.
      ratio: fraction of the prompt removed, in [0, 1); a row of T tokens keeps
        T - ceil(ratio * T), at least 1. 0 evicts nothing, ever.
      tokens: tokens a row keeps, at least 1; shorter rows grow to it first.
      kv_bytes: bytes of keys and values a row keeps, all layers together.
      ratio_of: what ``ratio`` is a fraction of: "prompt", or "seen", all tokens so far, so that
        the budget grows with the text (then at most four decimals).
      scorer: one of ``scoring.SCORERS``.
      retention: "shared", one ranking for all layers; "per_layer"; "per_head", one for each kv
        head of each layer.
      alpha: moving-average coefficient in [0, 1), applied layer by layer as in the paper, or once
        a step where layers do not share a ranking; higher forgets slower.
      decay: in [0, 1], what a step leaves of the utilities before it adds its scores; None: what
        ``alpha`` means. 0 looks at one step alone, 1 forgets nothing.
      layer_weights: weight of each layer in a shared ranking: "sequential" (the paper's, by
        ``alpha``), "uniform", "last", or one number for each layer without a sliding window.
      refresh: rescore every ``refresh`` steps; 1 is every step, 0 is step 1 only.
      protect_first: this many first positions are never evicted.
      protect_recent: nor this many latest ones.
      recent_fraction: in [0, 1), this share of the budget is for the latest tokens, too (H2O).
      seed: of the random scorer.
      scorer_weights: file of the learned scorer, written by ``inertiakv train-scorer``.
      prompt_queries: the last so many queries of the prompt are scored, too, before step 1
        (H2O: all of them); 0 as in the paper. Needs decay 1 and the scorer "attention".
      prefill: a method that thins out the prompt before decoding; None keeps all of it.

    Raises:
      ValueError: a value out of its range, or more than one budget.

    Source: arXiv 2609.03515 sections 3.1 - 3.3, 5.1; ``tokens``, ``kv_bytes``, ``ratio_of``,
    ``decay`` apart from ``layer_weights``, and the exact rounding of the budget are ours.
    """

    name: str
    ratio: float | None = None
    tokens: int | None = None
    kv_bytes: int | None = None
    ratio_of: str = "prompt"
    scorer: str = "attention"
    retention: str = SHARED
    alpha: float = 0.8
    decay: float | None = None
    layer_weights: str | tuple[float, ...] = "sequential"
    refresh: int = EVERY_STEP
    protect_first: int = 0
    protect_recent: int = 0
    recent_fraction: float = 0.0
    seed: int = 0
    scorer_weights: str | None = None
    prompt_queries: int = 0
    prefill: PrefillMethod | None = None

    def __post_init__(self):
        check_budget(self)
        check_choice(self, "ratio_of", ("prompt", "seen"))
        if self.ratio_of == "seen":
            if self.ratio is None:
                raise ValueError("ratio_of='seen' needs a ratio")
            fraction_of_seen(self.ratio)
        if self.prompt_queries and self.decay != 1:
            raise ValueError(
                f"prompt_queries={self.prompt_queries} adds up what the prompt attended to, so "
                f"decay must be 1, got {self.decay!r}"
            )
        check_choice(self, "scorer", tuple(SCORERS))
        check_choice(self, "retention", RETENTIONS)
        check_field(self, "alpha", in_unit_interval, "a number in [0, 1)")
        check_field(self, "recent_fraction", in_unit_interval, "a number in [0, 1)")
        if self.decay is not None:
            check_field(self, "decay", _is_decay, "a number in [0, 1]")
        self._check_layer_weights()
        for name in ("refresh", "protect_first", "protect_recent"):
            check_field(self, name, is_count, "an integer >= 0")
        check_field(self, "prompt_queries", is_int32_count, "an integer in 0 .. 2**31 - 1")
        check_field(self, "seed", lambda x: is_count(x) and x < 2**32, "an integer below 2**32")
        if self.scorer_weights is not None:
            check_field(
                self, "scorer_weights", lambda x: isinstance(x, str | os.PathLike), "a path"
            )
        if (self.scorer == "learned") != (self.scorer_weights is not None):
            raise ValueError(
                "scorer_weights, a file of `inertiakv train-scorer`, belongs to the scorer "
                f"'learned', and it to them; got {self.scorer=} and {self.scorer_weights=}"
            )

    def _check_layer_weights(self) -> None:
        if isinstance(self.layer_weights, list):  # as from YAML; a list has no hash
            object.__setattr__(self, "layer_weights", tuple(self.layer_weights))
        numbers_given = isinstance(self.layer_weights, tuple) and all(
            isinstance(x, numbers.Real) and math.isfinite(x) and x >= 0 for x in self.layer_weights
        )
        if not numbers_given and self.layer_weights not in LAYER_WEIGHTS:
            raise ValueError(
                f"layer_weights must be one of {', '.join(LAYER_WEIGHTS)}, or numbers >= 0, got "
                f"{self.layer_weights!r}"
            )

    @property
    def evicts(self) -> bool:
        """False for the full cache."""
        return bool(self.ratio != 0)  # a NumPy ratio compares to a NumPy bool

    @property
    def scores_some_steps(self) -> bool:
        """Whether steps after the first may rescore."""
        return self.evicts and self.refresh != STEP_ONE_ONLY

    @property
    def skips_some_steps(self) -> bool:
        """Whether steps after the first may leave the utilities as they are."""
        return not self.evicts or self.refresh != EVERY_STEP

    @property
    def ranking(self) -> Ranking:
        """The static part: what is ranked by what."""
        return Ranking(self.scorer, self.retention)

    def budgets(self, lengths: Sequence[int] | np.ndarray, model: Model) -> np.ndarray:
        """Tokens each row may hold after a decode step (R), while the text has ``lengths`` tokens.

        Args:
          lengths: [B] ints, prompt tokens of each row, padding not counted.
          model: gives the bytes of one token.

        Returns:
          [B] int32, ``NO_EVICTION`` where nothing is ever evicted.

        Raises:
          ValueError: the budget leaves no room for an evictable token next to the protected
            ones, or ``kv_bytes`` is below one token.
        """
        if not self.evicts:
            return np.full(len(lengths), NO_EVICTION, np.int32)
        budgets = token_budgets(self, lengths, model)
        protected = min(self.protect_first + self.protect_recent, NO_EVICTION)
        if protected > budgets.min():
            raise ValueError(
                f"protect_first={self.protect_first} and protect_recent={self.protect_recent} "
                f"must fit the smallest budget of the batch, {budgets.min()} tokens "
                f"(prompt lengths {[int(length) for length in lengths]})"
            )
        return budgets

    def knobs(self, model: Model) -> Knobs:
        """The policy's numbers as arrays, for a model.

        Raises:
          ValueError: ``layer_weights`` or ``scorer_weights`` of another model.
        """
        decay, layer_weights = recurrence(
            self.alpha,
            self.decay,
            self.layer_weights,
            num_eligible(model),
            shared=self.retention == SHARED,
        )
        learned = None if self.scorer_weights is None else load_learned(self.scorer_weights, model)
        growth = fraction_of_seen(self.ratio or 0) if self.ratio_of == "seen" else Fraction(0)
        return Knobs(
            decay=jnp.float32(decay),
            layer_weights=jnp.asarray(layer_weights),
            refresh=_as_int32(max(self.refresh, 1)),
            protect_first=_as_int32(self.protect_first),
            protect_recent=_as_int32(self.protect_recent),
            recent_fraction=jnp.float32(self.recent_fraction),
            seed=jnp.uint32(self.seed),
            ratio_of_seen=jnp.asarray(growth.as_integer_ratio(), jnp.int32),
            learned=learned,
        )


def _as_int32(value: int) -> Array:
    """A count that a step compares with others; beyond int32 is as good as its largest."""
    return jnp.int32(min(value, NO_EVICTION))


def check_policy(policy: Any) -> None:
    """Raise ValueError for a name where a ``Policy`` is needed, or anything else that is none."""
    if not isinstance(policy, Policy):
        hint = f"; write policies.by_name({policy!r})" if isinstance(policy, str) else ""
        raise ValueError(f"policy must be a Policy, got {policy!r}{hint}")


def _is_decay(value: Any) -> bool:
    return in_unit_interval(value) or (is_a(value, numbers.Real) and value == 1)
