"""What a config.json says about rotary embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from inertiakv_jax.rope_scaling import ROPE_TYPES, RopeScaling, yarn_attention_factor
from inertiakv_jax.weights.json_fields import (
    Fields,
    boolean,
    mapping,
    number,
    optional_number,
    whole_number,
)

GLOBAL, LOCAL = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Rope:
    """Rotary fields of ``ModelConfig``, and the context length that scaling extends to."""

    theta: float
    scaling: RopeScaling | None
    local_theta: float | None
    max_positions: int


def parse_rope(config: Fields, max_positions: int) -> Rope:
    """Rotary bases and scaling of one base for all layers.

    Args:
        config: in the form of transformers 4 (``rope_theta``, ``rope_scaling``) or 5
            (``rope_parameters``); where both are given ``rope_scaling`` wins, as there.
        max_positions: context length that the config states.

    Raises:
        ValueError: a rope_type that is not implemented, or a missing or meaningless number.
    """
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = mapping(config, field)
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(f"{field} with one entry per layer type is not supported in this family")
    theta, scaling = _base_and_scaling(rope, f"{field}.", config, 10_000.0, max_positions)
    # A config with YaRN still states the length before it; llama3 and linear state the one after.
    if scaling is not None and scaling.rope_type == "yarn":
        extended = scaling.factor * scaling.original_max_position_embeddings
        max_positions = max(max_positions, int(extended))
    return Rope(theta, scaling, None, max_positions)


def parse_rope_of_two_bases(config: Fields, max_positions: int) -> Rope:
    """Rotary bases of Gemma 3: layers with a sliding window have their own, and no scaling."""
    kinds = mapping(config, "rope_parameters")
    unknown = set(kinds) - {GLOBAL, LOCAL}
    if unknown:
        raise ValueError(
            f"rope_parameters must have entries {GLOBAL!r} and {LOCAL!r}, got {sorted(kinds)}"
        )
    scaling_field = mapping(config, "rope_scaling")
    # A rope_scaling beside it changes the global layers, as in transformers.
    whole = {**mapping(kinds, GLOBAL, within="rope_parameters."), **scaling_field}
    within = "rope_scaling." if scaling_field else f"rope_parameters.{GLOBAL}."
    theta, scaling = _base_and_scaling(whole, within, config, 1_000_000.0, max_positions)
    local = mapping(kinds, LOCAL, within="rope_parameters.")
    within = f"rope_parameters.{LOCAL}."
    local_default = number(config, "rope_local_base_freq", 10_000.0)
    local_theta, local_scaling = _base_and_scaling(local, within, {}, local_default, max_positions)
    if local_scaling is not None:
        raise ValueError(f"{within}rope_type {local_scaling.rope_type!r} is not supported")
    return Rope(theta, scaling, local_theta, max_positions)


def _base_and_scaling(
    rope: Fields, within: str, config: Fields, default_theta: float, max_positions: int
) -> tuple[float, RopeScaling | None]:
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor {partial!r} is not supported; supported: 1.0")
    theta = number(config, "rope_theta", default_theta)
    if rope.get("rope_theta") is not None:
        theta = number(rope, "rope_theta", within=within)
    rope_type = rope.get("rope_type", rope.get("type")) or "default"
    if rope_type == "default":
        return theta, None
    if rope_type not in ROPE_TYPES:
        raise ValueError(
            f"{within}rope_type {rope_type!r} is not supported; supported: "
            f"{', '.join(('default', *ROPE_TYPES))}"
        )
    factor = number(rope, "factor", within=within)
    if rope_type == "linear":
        return theta, RopeScaling("linear", factor)
    length = {"original_max_position_embeddings": max_positions, **rope}
    original = whole_number(length, "original_max_position_embeddings", within=within)
    if rope_type == "yarn":
        return theta, _yarn(rope, within, factor, original)
    return theta, RopeScaling(
        "llama3",
        factor,
        low_freq_factor=number(rope, "low_freq_factor", within=within),
        high_freq_factor=number(rope, "high_freq_factor", within=within),
        original_max_position_embeddings=original,
    )


def _yarn(rope: Fields, within: str, factor: float, original: int) -> RopeScaling:
    attention_factor = optional_number(rope, "attention_factor")
    if attention_factor is None:
        scales = (optional_number(rope, key) for key in ("mscale", "mscale_all_dim"))
        attention_factor = yarn_attention_factor(factor, *scales)
    return RopeScaling(
        "yarn",
        factor,
        original_max_position_embeddings=original,
        # Null and 0 both mean the default, as in transformers.
        beta_fast=number(rope, "beta_fast", 32.0, within=within) or 32.0,
        beta_slow=number(rope, "beta_slow", 1.0, within=within) or 1.0,
        truncate=boolean(rope, "truncate", True, within=within),
        attention_factor=attention_factor,
    )
