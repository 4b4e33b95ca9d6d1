"""From a Hugging Face ``config.json`` to ``ModelConfig``, and what is refused on the way."""

from __future__ import annotations

import warnings
from typing import Any

from inertiakv_jax.config import ExpertsConfig, ModelConfig
from inertiakv_jax.weights import hf_rope
from inertiakv_jax.weights.hf_families import FAMILIES, Family
from inertiakv_jax.weights.hf_layers import local_layers
from inertiakv_jax.weights.json_fields import (
    Fields,
    boolean,
    integer,
    integers,
    number,
    optional_number,
    strings,
    token_ids,
)
from inertiakv_jax.weights.multimodal import TEXT_PARTS, is_multimodal, text_config

# Fields that change training, saving or the tokenizer, and nothing that is computed here.
_WITHOUT_EFFECT = """
_attn_implementation_autoset _name_or_path _sliding_window_pattern attention_dropout
cache_implementation chunk_size_feed_forward dtype hidden_act id2label initializer_range is_decoder
is_encoder_decoder is_llama_config label2id max_window_layers output_attentions
output_hidden_states output_router_logits pad_token_id pretraining_tp problem_type return_dict
rope_interleaved router_aux_loss_coef sliding_window_pattern task_specific_params torch_dtype
transformers_version unsloth_fixed unsloth_version use_cache use_mrope
"""
WITHOUT_EFFECT = frozenset(_WITHOUT_EFFECT.split())


def config_from_hf(config: Fields, generation_config: Fields | None = None) -> ModelConfig:
    """Parse the dict of a Hugging Face ``config.json``; of a multimodal one, its text part.

    A field that is neither read nor known to be without effect is named in a warning.

    Args:
        config: parsed config.json, as transformers 4 or 5 writes it.
        generation_config: parsed generation_config.json; its ``eos_token_id`` are added.

    Raises:
        ValueError: a field is missing, of the wrong type, or asks for something that is not
            implemented; the message names the field.
    """
    config = _Recorder(text_config(config) if is_multimodal(config) else config)
    name = config.get("model_type", "(none given)")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(
            f"architecture {name!r} (model_type) is not supported; supported: "
            f"{', '.join((*FAMILIES, *TEXT_PARTS))}"
        )
    family = FAMILIES[name]
    _refuse_what_is_not_implemented(config, name, family)
    hidden_size = integer(config, "hidden_size")
    num_heads = integer(config, "num_attention_heads", family.num_heads)
    num_layers = integer(config, "num_hidden_layers")
    positions = integer(config, "max_position_embeddings", family.max_position_embeddings)
    two_bases = name == "gemma3_text"
    parse_rope = hf_rope.parse_rope_of_two_bases if two_bases else hf_rope.parse_rope
    rope = parse_rope(config, positions)
    window, local = local_layers(config, family.layers, num_layers)
    eos = token_ids(config, "eos_token_id", family.eos_token_id)
    if generation_config is not None:
        eos += token_ids(generation_config, "eos_token_id")
    bos = token_ids(config, "bos_token_id", family.bos_token_id)
    parsed = ModelConfig(
        family=name,
        vocab_size=integer(config, "vocab_size", family.vocab_size),
        hidden_size=hidden_size,
        intermediate_size=integer(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=integer(config, "num_key_value_heads", family.num_kv_heads or num_heads),
        head_dim=_head_dim(config, family, hidden_size, num_heads),
        rms_norm_eps=number(config, "rms_norm_eps", 1e-6),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        local_rope_theta=rope.local_theta,
        max_position_embeddings=rope.max_positions,
        tie_word_embeddings=boolean(config, "tie_word_embeddings", family.tie_word_embeddings),
        attention_bias=_bias(config, "attention_bias", family.attention_bias),
        attention_out_bias=_bias(config, "attention_bias", family.attention_out_bias),
        mlp_bias=_bias(config, "mlp_bias", family.mlp_bias),
        sliding_window=window,
        local_layers=local,
        experts=_experts(config, num_layers) if name == "qwen3_moe" else None,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(dict.fromkeys(eos)),
        **family.traits,
        **(_gemma_constants(config, name) if name.startswith("gemma") else {}),
    )
    _warn_of_unread_fields(config, name)
    return parsed


class _Recorder(dict):
    """A dict that knows which of its keys were asked for."""

    def __init__(self, fields: Fields) -> None:
        super().__init__(fields)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


def _warn_of_unread_fields(config: _Recorder, name: str) -> None:
    unread = sorted(
        key
        for key, value in config.items()
        # Null and false switch nothing on.
        if key not in config.read | WITHOUT_EFFECT and value is not None and value is not False
    )
    if unread:
        warnings.warn(
            f"fields of config.json that have no effect here: {', '.join(unread)} (model_type "
            f"{name!r})",
            stacklevel=3,
        )


def _refuse_what_is_not_implemented(config: Fields, name: str, family: Family) -> None:
    """Raise ValueError naming the first field that would change the computation."""
    architectures = strings(config, "architectures")
    if architectures and not any(a.endswith("ForCausalLM") for a in architectures):
        raise ValueError(
            f"architectures {architectures} is not supported; supported: {family.architecture}"
        )
    if config.get("quantization_config"):
        raise ValueError(
            "quantization_config is not supported: load the unquantised weights, or a .gguf file"
        )
    gelu = family.traits.get("activation") == "gelu_tanh"
    key = "hidden_activation" if gelu else "hidden_act"
    supported = ("gelu_pytorch_tanh",) if gelu else ("silu", "swish")
    activation = config.get(key)
    if activation is not None and activation not in supported:
        raise ValueError(f"{key} {activation!r} is not supported; supported: {supported[0]}")
    refused = {"attention_bias": family.attention_bias, "mlp_bias": family.mlp_bias}
    for key, fixed in refused.items():
        if fixed is not None and boolean(config, key, fixed) != fixed:
            raise ValueError(
                f"{key} {config[key]} is not supported for model_type {name!r}; supported: {fixed}"
            )
    if boolean(config, "use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention true is not supported; supported: false")


def _head_dim(config: Fields, family: Family, hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is not None:
        return integer(config, "head_dim")
    if family.head_dim is not None:
        return family.head_dim
    if hidden_size % num_heads:
        raise ValueError(
            f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads} and "
            "head_dim is not given"
        )
    return hidden_size // num_heads


def _bias(config: Fields, key: str, fixed: bool | None) -> bool:
    return boolean(config, key) if fixed is None else fixed


def _experts(config: Fields, num_layers: int) -> ExpertsConfig:
    # transformers 5 writes num_local_experts.
    num_experts = integer(config, "num_experts", integer(config, "num_local_experts", 128))
    step = integer(config, "decoder_sparse_step", 1)
    only_mlp = set(integers(config, "mlp_only_layers"))
    return ExpertsConfig(
        num_experts=num_experts,
        num_per_token=integer(config, "num_experts_per_tok", 8),
        intermediate_size=integer(config, "moe_intermediate_size", 768),
        normalize_weights=boolean(config, "norm_topk_prob"),
        dense_layers=tuple(i for i in range(num_layers) if i in only_mlp or (i + 1) % step),
    )


def _gemma_constants(config: Fields, name: str) -> dict[str, Any]:
    caps = (50.0, 30.0) if name == "gemma2" else (None, None)
    attention_cap = optional_number(config, "attn_logit_softcapping", caps[0])
    if name == "gemma3_text" and attention_cap is not None:
        # transformers has the field and does not apply it.
        raise ValueError(
            f"attn_logit_softcapping {attention_cap} is not supported for model_type {name!r}; "
            "supported: null"
        )
    return {
        "query_scale_dim": number(config, "query_pre_attn_scalar", 256.0),
        "attention_soft_cap": attention_cap,
        "logits_soft_cap": optional_number(config, "final_logit_softcapping", caps[1]),
    }
