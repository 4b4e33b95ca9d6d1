"""Sizes and constants of a decoder, parsed from a Hugging Face ``config.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from inertiakv_jax.rope_scaling import (
    RopeScaling,
    as_float,
    frequency_divisors,
    parse_hf_rope,
    plain_frequencies,
)


@dataclass(frozen=True)
class Family:
    """What Hugging Face leaves unsaid about a model type: class defaults and fixed biases.

    ``None`` for a bias means that config.json decides.
    """

    num_kv_heads: int | None  # default of num_key_value_heads; None: as many as query heads
    max_position_embeddings: int
    attention_bias: bool | None
    attention_out_bias: bool | None
    mlp_bias: bool | None
    sliding_window: int | None  # default when config.json does not say
    bos_token_id: int | None
    eos_token_id: int | None


# Defaults of LlamaConfig, MistralConfig and Qwen2Config in transformers.
FAMILIES: Mapping[str, Family] = {
    "llama": Family(None, 2048, None, None, None, None, 1, 2),
    "mistral": Family(8, 131072, False, False, False, 4096, 1, 2),
    "qwen2": Family(32, 32768, True, False, False, None, None, None),
}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of one decoder-only model.

    Attributes:
        family: "llama", "mistral" or "qwen2" (``model_type`` of config.json).
        vocab_size: V, rows of the embedding.
        hidden_size: H, width of the residual stream.
        intermediate_size: width of the MLP.
        num_layers: L, decoder layers.
        num_heads: N, query heads.
        num_kv_heads: K, key-value heads; divides N.
        head_dim: D, width of one head; even.
        rms_norm_eps: added to the mean square in every RMSNorm.
        rope_theta: base of the rotary frequencies.
        rope_scaling: None for plain rotary embeddings.
        max_position_embeddings: longest sequence, in tokens, the model was made for.
        tie_word_embeddings: logits use the embedding; there is no lm_head.
        attention_bias: q, k and v projections have biases.
        attention_out_bias: the output projection of attention has a bias.
        mlp_bias: the three MLP projections have biases.
        bos_token_id: token that begins a text, or None.
        eos_token_ids: tokens that end a text, in order of declaration; may be empty.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for sizes that no decoder can have."""
        if self.family not in FAMILIES:
            raise ValueError(f"family {self.family!r} is not one of {', '.join(FAMILIES)}")
        for field in fields(self):
            # `from __future__ import annotations` makes field types strings.
            if field.type == "int" and getattr(self, field.name) < 1:
                raise ValueError(
                    f"{field.name} must be at least 1, got {getattr(self, field.name)}"
                )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and "
                f"{self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0.0):
                raise ValueError(f"{name} must be a positive number, got {value!r}")
        tokens = (*self.eos_token_ids, *(() if self.bos_token_id is None else [self.bos_token_id]))
        if any(not 0 <= token < 2**31 for token in tokens):
            raise ValueError(f"bos/eos token ids must lie in 0 .. 2**31 - 1, got {tokens}")

    @property
    def num_query_groups(self) -> int:
        """G = N // K, query heads that share one key-value head."""
        return self.num_heads // self.num_kv_heads

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of keys and values that one token takes over all layers.

        Args:
            dtype_bytes: bytes of one number of the cache: 4 for float32, 2 for bfloat16.
        """
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes

    def rope_inverse_frequencies(self) -> np.ndarray:
        """Radians per position of each rotated pair, [D / 2] float32, scaling applied.

        Computed in float64 and rounded once.
        """
        frequencies = plain_frequencies(self.head_dim, self.rope_theta)
        if self.rope_scaling is not None:
            frequencies = frequencies / frequency_divisors(frequencies, self.rope_scaling)
        return frequencies.astype(np.float32)

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """Parse the dict of a Hugging Face ``config.json``.

        Args:
            config: parsed config.json, in the form of transformers 4 (``rope_theta``,
                ``rope_scaling``) or 5 (``rope_parameters``).
            generation_config: parsed generation_config.json; its ``eos_token_id`` are added.

        Raises:
            ValueError: a field is missing, of the wrong type, or asks for something that is not
                implemented; the message names the field.
        """
        name = config.get("model_type", "(none given)")
        if not isinstance(name, str) or name not in FAMILIES:
            raise ValueError(
                f"architecture {name!r} (model_type) is not supported; supported: "
                f"{', '.join(FAMILIES)}"
            )
        family = FAMILIES[name]
        _refuse_what_is_not_implemented(config, name, family)
        hidden_size = _integer(config, "hidden_size")
        num_heads = _integer(config, "num_attention_heads")
        theta, scaling = parse_hf_rope(config)
        eos = _token_ids(config, "eos_token_id", family.eos_token_id)
        if generation_config is not None:
            eos += _token_ids(generation_config, "eos_token_id", None)
        bos = _token_ids(config, "bos_token_id", family.bos_token_id)
        return cls(
            family=name,
            vocab_size=_integer(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_integer(config, "intermediate_size"),
            num_layers=_integer(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=_integer(config, "num_key_value_heads", family.num_kv_heads or num_heads),
            head_dim=_head_dim(config, hidden_size, num_heads),
            rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=_integer(
                config, "max_position_embeddings", family.max_position_embeddings
            ),
            tie_word_embeddings=_boolean(config, "tie_word_embeddings"),
            attention_bias=_bias(config, "attention_bias", family.attention_bias),
            attention_out_bias=_bias(config, "attention_bias", family.attention_out_bias),
            mlp_bias=_bias(config, "mlp_bias", family.mlp_bias),
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=tuple(dict.fromkeys(eos)),
        )


def _refuse_what_is_not_implemented(config: Mapping[str, Any], name: str, family: Family) -> None:
    """Raise ValueError naming the first field that would change the computation."""
    architectures = _names(config, "architectures")
    if architectures and not any(str(a).endswith("ForCausalLM") for a in architectures):
        raise ValueError(
            f"architectures {architectures} is not supported; supported: "
            "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM"
        )
    if config.get("quantization_config"):
        raise ValueError(
            "quantization_config is not supported: load the unquantised weights, or a .gguf file"
        )
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"hidden_act {activation!r} is not supported; supported: silu")
    layer_types = set(_names(config, "layer_types") or ["full_attention"])
    if layer_types != {"full_attention"}:
        raise ValueError(
            f"layer_types {sorted(layer_types)} is not supported; supported: "
            "full_attention in every layer"
        )
    if config.get("use_sliding_window"):
        raise ValueError("use_sliding_window true is not supported; supported: false")
    window = config.get("sliding_window", family.sliding_window)
    context = _integer(config, "max_position_embeddings", family.max_position_embeddings)
    # Qwen2 configs carry a window that use_sliding_window false switches off. A window no shorter
    # than the context never hides a token.
    if (
        name == "mistral"
        and window is not None
        and not (isinstance(window, int) and window >= context)
    ):
        raise ValueError(
            f"sliding_window {window} is not supported; supported: null (config.json without the "
            f"field means {family.sliding_window})"
        )


def _head_dim(config: Mapping[str, Any], hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is not None:
        return _integer(config, "head_dim")
    if hidden_size % num_heads:
        raise ValueError(
            f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads} and "
            "head_dim is not given"
        )
    return hidden_size // num_heads


def _integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key} must be an integer of at least 1, got {value!r}")
    return value


def _names(config: Mapping[str, Any], key: str) -> list[str]:
    value = config.get(key)
    value = [] if value is None else value
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{key} must be a list of strings, got {value!r:.80}")
    return list(value)


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{key} must be a number, got {value!r}")
    return as_float(value, key)


def _boolean(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, got {value!r}")
    return value


def _bias(config: Mapping[str, Any], key: str, fixed: bool | None) -> bool:
    return _boolean(config, key) if fixed is None else fixed


def _token_ids(config: Mapping[str, Any], key: str, default: int | None) -> tuple[int, ...]:
    value = config.get(key, default)
    ids = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ValueError(f"{key} must be an integer, a list of integers or null, got {value!r}")
    return tuple(ids)
