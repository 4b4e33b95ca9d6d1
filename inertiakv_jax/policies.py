"""Eviction policies: what is scored, when, how scores age, and how many tokens stay."""

import dataclasses
import math
import numbers
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from inertiakv_jax.aggregation import sequential_layer_weights
from inertiakv_jax.state import NO_EVICTION
from inertiakv_jax.typing import Model

EVERY_STEP = 1
STEP_ONE_ONLY = 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Knobs:
    """The numbers of a policy that a compiled step takes as arguments: changing one is free."""

    decay: Array  # [] float32
    layer_weights: Array  # [L] float32
    refresh: Array  # [] int32, rescore every so many steps
    protect_first: Array  # [] int32
    protect_recent: Array  # [] int32


@dataclasses.dataclass(frozen=True)
class Policy:
    """How a KV cache is thinned out while decoding. Hashable, so static under jit.

    Give the budget one way: ``ratio``, ``tokens`` or ``kv_bytes``. Use the makers below
    (``inertiakv``, ``lazy``, ``score_free``, ``full``) or ``by_name``.

    Attributes:
      name: as on the command line and in results.
      ratio: fraction of the prompt removed, in [0, 1); a row of T tokens keeps
        T - ceil(ratio * T), at least 1. 0 evicts nothing, ever.
      tokens: tokens a row keeps, at least 1; shorter rows grow to it first.
      kv_bytes: bytes of keys and values a row keeps, all layers together.
      alpha: moving-average coefficient in [0, 1), applied layer by layer as in the paper;
        higher forgets slower.
      refresh: rescore every ``refresh`` steps; 1 is every step, 0 is step 1 only.
      protect_first: this many first positions are never evicted.
      protect_recent: nor this many latest ones.

    Raises:
      ValueError: a value out of its range, or more than one budget.

    Source: arXiv 2609.03515 sections 3.1 - 3.3; ``tokens``, ``kv_bytes`` and the exact rounding
    of the budget are ours.
    """

    name: str
    ratio: float | None = None
    tokens: int | None = None
    kv_bytes: int | None = None
    alpha: float = 0.8
    refresh: int = EVERY_STEP
    protect_first: int = 0
    protect_recent: int = 0

    def __post_init__(self):
        given = [f for f in ("ratio", "tokens", "kv_bytes") if getattr(self, f) is not None]
        if len(given) != 1:
            raise ValueError(
                "expected exactly one of ratio, tokens, kv_bytes, got "
                + (" and ".join(f"{f}={getattr(self, f)!r}" for f in given) or "none")
            )
        if self.ratio is not None:
            _check(self, "ratio", _in_unit_interval, "a number in [0, 1)")
        for name in ("tokens", "kv_bytes"):
            if getattr(self, name) is not None:
                _check(
                    self, name, lambda value: _is_integer(value) and value >= 1, "an integer >= 1"
                )
        _check(self, "alpha", _in_unit_interval, "a number in [0, 1)")
        for name in ("refresh", "protect_first", "protect_recent"):
            _check(self, name, lambda value: _is_integer(value) and value >= 0, "an integer >= 0")

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

    def budgets(self, lengths: Sequence[int] | np.ndarray, model: Model) -> np.ndarray:
        """Tokens each row may hold after a decode step (R).

        Args:
          lengths: [B] ints, prompt tokens of each row, padding not counted.
          model: gives the bytes of one token.

        Returns:
          [B] int32, ``NO_EVICTION`` where nothing is ever evicted.

        Raises:
          ValueError: the budget leaves no room for an evictable token next to the protected
            ones, or ``kv_bytes`` is below one token.
        """
        lengths = [int(length) for length in lengths]
        if not self.evicts:
            return np.full(len(lengths), NO_EVICTION, np.int32)
        if self.ratio is not None:
            budgets = [tokens_kept(length, self.ratio) for length in lengths]
        elif self.tokens is not None:
            budgets = [self.tokens] * len(lengths)
        else:
            assert self.kv_bytes is not None
            token_bytes = kv_bytes_per_token(model)
            if self.kv_bytes < token_bytes:
                raise ValueError(f"kv_bytes={self.kv_bytes} is below one token's {token_bytes}")
            budgets = [self.kv_bytes // token_bytes] * len(lengths)
        protected = self.protect_first + self.protect_recent
        if protected > min(budgets):
            raise ValueError(
                f"protect_first={self.protect_first} and protect_recent={self.protect_recent} "
                f"must fit the smallest budget of the batch, {min(budgets)} tokens "
                f"(prompt lengths {lengths})"
            )
        return np.asarray([min(budget, NO_EVICTION) for budget in budgets], np.int32)

    def knobs(self, num_layers: int) -> Knobs:
        """The policy's numbers as arrays, for a model of ``num_layers`` eligible layers."""
        return Knobs(
            decay=jnp.float32(self.alpha**num_layers),
            layer_weights=jnp.asarray(sequential_layer_weights(self.alpha, num_layers)),
            refresh=_as_int32(max(self.refresh, 1)),
            protect_first=_as_int32(self.protect_first),
            protect_recent=_as_int32(self.protect_recent),
        )


def tokens_kept(length: int, ratio: float) -> int:
    """Budget of a prompt: ``length - ceil(ratio * length)``, at least 1, without rounding error.

    >>> [tokens_kept(length, 0.9) for length in (10, 100, 1000, 3)]
    [1, 10, 100, 1]
    >>> tokens_kept(4095, 0.8)
    819
    """
    # Decimal of the shortest repr is the number the caller wrote; float64 gives 9 for 0.9 of 100.
    return max(1, length - math.ceil(Decimal(repr(float(ratio))) * length))


def kv_bytes_per_token(model: Model) -> int:
    """Bytes of one token's keys and values over all layers."""
    itemsize = jnp.dtype(model.dtype).itemsize
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * itemsize


def full() -> Policy:
    """Keep the full cache: nothing is scored, nothing is evicted."""
    return Policy("full", ratio=0.0)


def _full(ratio: float | None = None, **options: Any) -> Policy:
    _make("full", ratio, options)  # refuses what is out of range, though nothing of it is used
    return full()


def inertiakv(ratio: float | None = None, **options: Any) -> Policy:
    """InertiaKV: utilities are a moving average of attention, rescored every step.

    Args:
      ratio: fraction of the prompt removed; or give ``tokens`` or ``kv_bytes``. 0.9 if none is.
      **options: fields of ``Policy``.

    Source: arXiv 2609.03515 section 3.2.
    """
    refresh = options.get("refresh", EVERY_STEP)
    names = {EVERY_STEP: "inertiakv", STEP_ONE_ONLY: "score-free"}
    return _make(names.get(refresh, f"lazy{refresh}"), ratio, options)


def lazy(refresh: int, ratio: float | None = None, **options: Any) -> Policy:
    """InertiaKV-Lazy: rescore every ``refresh`` steps, evict at every one (eq. 6)."""
    if not _is_integer(refresh) or refresh < 1:
        raise ValueError(f"refresh must be an integer >= 1, got {refresh!r}")
    return _make(f"lazy{refresh}", ratio, options | {"refresh": refresh})


def score_free(ratio: float | None = None, **options: Any) -> Policy:
    """Score-Free: score at step 1 only, evict at every step."""
    refresh = options.setdefault("refresh", STEP_ONE_ONLY)
    if refresh != STEP_ONE_ONLY:
        raise ValueError(f"score-free never rescores: refresh must be 0, got {refresh!r}")
    return _make("score-free", ratio, options)


_MAKERS: dict[str, Callable[..., Policy]] = {
    "full": _full,
    "inertiakv": inertiakv,
    "score-free": score_free,
}

NAMES = (*_MAKERS, "lazyR")
"""What ``by_name`` takes; R is the refresh interval, as in lazy4."""


def by_name(name: str, ratio: float | None = None, **options: Any) -> Policy:
    """Make a policy from its name, as given on the command line.

    Args:
      name: one of ``NAMES``.
      ratio: fraction of the prompt removed; ignored by ``full``.
      **options: fields of ``Policy``; likewise.

    Raises:
      ValueError: an unknown name (the known ones are listed), or an option out of range.

    >>> by_name("lazy4", ratio=0.9).refresh
    4
    """
    if not isinstance(name, str):
        raise ValueError(f"policy must be a name, got {name!r}; one of: {', '.join(NAMES)}")
    if match := re.fullmatch(r"lazy([1-9][0-9]*)", name):
        return lazy(int(match[1]), ratio, **options)
    if name not in _MAKERS:
        raise ValueError(f"unknown policy {name!r}; expected one of: {', '.join(NAMES)}")
    return _MAKERS[name](ratio, **options)


def _make(name: str, ratio: float | None, options: dict[str, Any]) -> Policy:
    if ratio is None and not {"tokens", "kv_bytes"} & {
        k for k, v in options.items() if v is not None
    }:
        ratio = 0.9
    return Policy(name, ratio=ratio, **options)


def _as_int32(value: int) -> Array:
    """A count that a step compares with others; beyond int32 is as good as its largest."""
    return jnp.int32(min(value, NO_EVICTION))


def check_policy(policy: Any) -> None:
    """Raise ValueError for a name where a ``Policy`` is needed, or anything else that is none."""
    if not isinstance(policy, Policy):
        hint = f"; write policies.by_name({policy!r})" if isinstance(policy, str) else ""
        raise ValueError(f"policy must be a Policy, got {policy!r}{hint}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _in_unit_interval(value: Any) -> bool:
    return isinstance(value, numbers.Real) and 0.0 <= float(value) < 1.0


def _check(policy: Policy, name: str, good: Callable[[Any], bool], expected: str) -> None:
    value = getattr(policy, name)
    if not good(value):
        raise ValueError(f"{name} must be {expected}, got {value!r}")
