"""How rotary frequencies of long-context models differ from the plain ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

ROPE_TYPES = ("linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies of a long-context model differ from the plain ones.

    Attributes:
        rope_type: "linear" (every frequency divided by ``factor``), "llama3" or "yarn" (low
            frequencies divided by ``factor``, high ones kept, a ramp between; arXiv 2309.00071).
        factor: divisor, at least 1.
        low_freq_factor: llama3 only: wavelengths above ``original_max_position_embeddings /
            low_freq_factor`` are divided in full.
        high_freq_factor: llama3 only: wavelengths below ``original_max_position_embeddings /
            high_freq_factor`` are kept.
        original_max_position_embeddings: llama3 and yarn: context length before it was extended.
        beta_fast: yarn only: pairs that turn more often in the original context are kept.
        beta_slow: yarn only: pairs that turn less often in it are divided in full.
        truncate: yarn only: both ends of the ramp are rounded outwards to whole pairs.
        attention_factor: yarn only: queries and keys are multiplied by it.
    """

    rope_type: str
    factor: float
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        """Raise ValueError for values under which the formula has no meaning."""
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(
                f"rope_type {self.rope_type!r} is not supported; supported: "
                f"{', '.join(('default', *ROPE_TYPES))}"
            )
        if not (math.isfinite(self.factor) and self.factor >= 1.0):
            raise ValueError(f"rope factor must be a number of at least 1, got {self.factor!r}")
        original = self.original_max_position_embeddings
        if self.rope_type == "llama3" and not (
            0.0 < self.low_freq_factor < self.high_freq_factor < math.inf and original > 0
        ):
            raise ValueError(
                "rope_type 'llama3' needs 0 < low_freq_factor < high_freq_factor and a positive "
                f"original_max_position_embeddings, got {self.low_freq_factor!r}, "
                f"{self.high_freq_factor!r} and {original!r}"
            )
        if self.rope_type == "yarn" and not (
            0.0 < self.beta_slow < self.beta_fast < math.inf and original > 0
        ):
            raise ValueError(
                "rope_type 'yarn' needs 0 < beta_slow < beta_fast and a positive "
                f"original_max_position_embeddings, got {self.beta_slow!r}, {self.beta_fast!r} and "
                f"{original!r}"
            )
        if not 0.0 < self.attention_factor < math.inf:
            raise ValueError(
                f"rope attention_factor must be a positive number, got {self.attention_factor!r}"
            )


def plain_frequencies(head_dim: int, rope_theta: float) -> np.ndarray:
    """Radians per position of each rotated pair without scaling, [D / 2] float64."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    return float(rope_theta) ** -exponents


def inverse_frequencies(
    head_dim: int, rope_theta: float, scaling: RopeScaling | None
) -> np.ndarray:
    """Radians per position of each rotated pair, [D / 2] float32.

    Computed in float64 and rounded once.
    """
    frequencies = plain_frequencies(head_dim, rope_theta)
    if scaling is not None:
        frequencies = frequencies / frequency_divisors(head_dim, rope_theta, scaling)
    return frequencies.astype(np.float32)


def frequency_divisors(head_dim: int, rope_theta: float, scaling: RopeScaling) -> np.ndarray:
    """Number that each plain frequency is divided by, [D / 2] float64.

    The formulas are those of transformers' ``modeling_rope_utils``.
    """
    if scaling.rope_type == "linear":
        return np.full(head_dim // 2, scaling.factor)
    ramp = _llama3_ramp if scaling.rope_type == "llama3" else _yarn_ramp
    kept = np.clip(ramp(head_dim, rope_theta, scaling), 0.0, 1.0)
    return 1.0 / (kept + (1.0 - kept) / scaling.factor)


def _llama3_ramp(head_dim: int, rope_theta: float, scaling: RopeScaling) -> np.ndarray:
    """Linear in how often a pair turns within the original context."""
    frequencies = plain_frequencies(head_dim, rope_theta)
    turns = scaling.original_max_position_embeddings * frequencies / (2.0 * math.pi)
    return (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)


def _yarn_ramp(head_dim: int, rope_theta: float, scaling: RopeScaling) -> np.ndarray:
    """Linear in the index of a pair, between those that turn beta_fast and beta_slow times."""

    def pair_that_turns(times: float) -> float:
        wavelength = scaling.original_max_position_embeddings / (2.0 * math.pi * times)
        return head_dim * math.log(wavelength) / (2.0 * math.log(rope_theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # as transformers does
    return 1.0 - (np.arange(head_dim // 2, dtype=np.float64) - first) / (last - first)


def yarn_attention_factor(
    factor: float, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
    """YaRN's multiplier of queries and keys where a config does not state it.

    Args:
        factor: of the scaling.
        mscale: weight of the logarithm in the numerator; used only together with the next.
        mscale_all_dim: weight of the logarithm in the denominator.
    """

    def grown(weight: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return grown(mscale) / grown(mscale_all_dim)
    return grown(1.0)
