"""How rotary frequencies of long-context models are scaled, and how config files say so."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

ROPE_TYPES = ("linear", "llama3")


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies of a long-context model differ from the plain ones.

    Attributes:
        rope_type: "linear" (every frequency divided by ``factor``) or "llama3" (low frequencies
            divided by ``factor``, high ones kept, a smooth ramp between).
        factor: divisor, at least 1.
        low_freq_factor: llama3 only: wavelengths above ``original_max_position_embeddings /
            low_freq_factor`` are divided in full.
        high_freq_factor: llama3 only: wavelengths below ``original_max_position_embeddings /
            high_freq_factor`` are kept.
        original_max_position_embeddings: llama3 only: context length before it was extended.
    """

    rope_type: str
    factor: float
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    original_max_position_embeddings: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for values under which the formula has no meaning."""
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(
                f"rope_type {self.rope_type!r} is not supported; supported: "
                f"{', '.join(('default', *ROPE_TYPES))}"
            )
        if not (math.isfinite(self.factor) and self.factor >= 1.0):
            raise ValueError(f"rope factor must be a number of at least 1, got {self.factor!r}")
        if self.rope_type == "llama3" and not (
            0.0 < self.low_freq_factor < self.high_freq_factor < math.inf
            and self.original_max_position_embeddings > 0
        ):
            raise ValueError(
                "rope_type 'llama3' needs 0 < low_freq_factor < high_freq_factor and a positive "
                f"original_max_position_embeddings, got {self.low_freq_factor!r}, "
                f"{self.high_freq_factor!r} and {self.original_max_position_embeddings!r}"
            )


def plain_frequencies(head_dim: int, rope_theta: float) -> np.ndarray:
    """Radians per position of each rotated pair without scaling, [D / 2] float64."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    return float(rope_theta) ** -exponents


def frequency_divisors(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Number that each plain frequency is divided by, [D / 2] float64.

    Args:
        frequencies: [D / 2] plain frequencies in radians per position.
        scaling: the rule; the formulas are those of transformers' ``modeling_rope_utils``.
    """
    if scaling.rope_type == "linear":
        return np.full_like(frequencies, scaling.factor)
    # A ramp over how often a pair turns within the original context.
    turns = scaling.original_max_position_embeddings * frequencies / (2.0 * math.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = np.clip(ramp, 0.0, 1.0)
    return 1.0 / (kept + (1.0 - kept) / scaling.factor)


def parse_hf_rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Rotary base and scaling of a Hugging Face config.json.

    Args:
        config: in the form of transformers 4 (``rope_theta``, ``rope_scaling``) or 5
            (``rope_parameters``); where both are given ``rope_scaling`` wins, as there.

    Returns:
        ``(rope_theta, scaling)``, scaling None for plain rotary embeddings.

    Raises:
        ValueError: a rope_type that is not implemented, or a missing or meaningless number.
    """
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(field) or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"{field} must be an object, got {rope!r}")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(f"{field} with one entry per layer type is not supported")
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor {partial!r} is not supported; supported: 1.0")
    theta = rope.get("rope_theta", config.get("rope_theta"))
    theta = 10000.0 if theta is None else rope_number({"rope_theta": theta}, "rope_theta", field)
    rope_type = rope.get("rope_type", rope.get("type")) or "default"
    if rope_type == "default":
        return theta, None
    if rope_type not in ROPE_TYPES:
        raise ValueError(
            f"{field}.rope_type {rope_type!r} is not supported; supported: "
            f"{', '.join(('default', *ROPE_TYPES))}"
        )
    factor = rope_number(rope, "factor", field)
    if rope_type == "linear":
        return theta, RopeScaling("linear", factor)
    original = {"original_max_position_embeddings": config.get("max_position_embeddings")} | {
        **rope
    }
    return theta, RopeScaling(
        "llama3",
        factor,
        low_freq_factor=rope_number(rope, "low_freq_factor", field),
        high_freq_factor=rope_number(rope, "high_freq_factor", field),
        original_max_position_embeddings=_whole(
            rope_number(original, "original_max_position_embeddings", field),
            f"{field}.original_max_position_embeddings",
        ),
    )


def _whole(value: float, name: str) -> int:
    if not value.is_integer():
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    return int(value)


def rope_number(rope: Mapping[str, Any], key: str, field: str) -> float:
    """``rope[key]`` as a float; ValueError naming ``field`` and ``key`` for anything else."""
    value = rope.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{field}.{key} must be a number, got {value!r}")
    return as_float(value, f"{field}.{key}")


def as_float(value: int | float, name: str) -> float:
    """``value`` as a float; ValueError naming it for an integer that no float can hold."""
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(f"{name} must be a number below 1e308, got a larger one") from error
