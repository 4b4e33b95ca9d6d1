"""How many tokens stay: exact arithmetic of ratios, tokens and bytes."""

import math
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from inertiakv_jax.checks import check_field, in_unit_interval, is_positive_count
from inertiakv_jax.state import NO_EVICTION, num_eligible
from inertiakv_jax.typing import Model

_LARGEST_DENOMINATOR = 10**4


def check_budget(budget: Any) -> None:
    """Raise ValueError unless exactly one of ``ratio``, ``tokens``, ``kv_bytes`` is set, well."""
    given = [f for f in ("ratio", "tokens", "kv_bytes") if getattr(budget, f) is not None]
    if len(given) != 1:
        raise ValueError(
            "expected exactly one of ratio, tokens, kv_bytes, got "
            + (" and ".join(f"{f}={getattr(budget, f)!r}" for f in given) or "none")
        )
    if budget.ratio is not None:
        check_field(budget, "ratio", in_unit_interval, "a number in [0, 1)")
        return
    check_field(budget, given[0], is_positive_count, "an integer >= 1")


def token_budgets(budget: Any, lengths: Sequence[int] | np.ndarray, model: Model) -> np.ndarray:
    """Tokens of each row [B] int32, by whichever of ``ratio``, ``tokens``, ``kv_bytes`` is set.

    Raises:
      ValueError: ``kv_bytes`` is below one token.
    """
    lengths = [int(length) for length in lengths]
    if budget.ratio is not None:
        budgets = [tokens_kept(length, budget.ratio) for length in lengths]
    elif budget.tokens is not None:
        budgets = [budget.tokens] * len(lengths)
    else:
        token_bytes = kv_bytes_per_token(model)
        if budget.kv_bytes < token_bytes:
            raise ValueError(f"kv_bytes={budget.kv_bytes} is below one token's {token_bytes}")
        budgets = [budget.kv_bytes // token_bytes] * len(lengths)
    return np.asarray([min(tokens, NO_EVICTION) for tokens in budgets], np.int32)


def tokens_kept(length: int, ratio: float) -> int:
    """Budget of a prompt: ``length - ceil(ratio * length)``, at least 1, without rounding error.

    >>> [tokens_kept(length, 0.9) for length in (10, 100, 1000, 3)]
    [1, 10, 100, 1]
    >>> tokens_kept(4095, 0.8)
    819
    """
    return max(1, length - math.ceil(_decimal(ratio) * length))


def fraction_of_seen(ratio: float) -> Fraction:
    """``ratio`` as a fraction for ``tokens_kept_of_seen``.

    Raises:
      ValueError: more than four decimals, for which int32 arithmetic would not be exact.
    """
    fraction = Fraction(_decimal(ratio))
    if fraction.denominator > _LARGEST_DENOMINATOR:
        raise ValueError(f"a ratio of all tokens seen takes at most four decimals, got {ratio!r}")
    return fraction


def tokens_kept_of_seen(seen: Array, ratio_of_seen: Array) -> Array:
    """``tokens_kept`` of [...] int32 tokens inside a program, for ``Knobs.ratio_of_seen``."""
    numerator, denominator = ratio_of_seen[0], ratio_of_seen[1]
    whole, rest = seen // denominator, seen % denominator
    # rest * numerator is below 10**8: exact, where seen * numerator could overflow.
    removed = whole * numerator + (rest * numerator + denominator - 1) // denominator
    return jnp.maximum(seen - removed, 1)


def _decimal(ratio: float) -> Decimal:
    """The number the caller wrote: in float64, (1 - 0.9) * 100 is below 10."""
    return Decimal(repr(float(ratio)))


def kv_bytes_per_token(model: Model) -> int:
    """Bytes of one token's keys and values over the layers without a sliding window."""
    itemsize = jnp.dtype(model.dtype).itemsize
    return 2 * num_eligible(model) * model.num_kv_heads * model.head_dim * itemsize


def window_kv_bytes(model: Model, tokens: int) -> int:
    """Bytes that the layers with a sliding window hold of a row of ``tokens`` tokens."""
    held = sum(min(window, tokens) for window in model.sliding_windows if window is not None)
    return 2 * held * model.num_kv_heads * model.head_dim * jnp.dtype(model.dtype).itemsize
