"""Sizes and constants of a decoder from GGUF metadata, by way of Hugging Face's fields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from inertiakv_jax.config import ModelConfig
from inertiakv_jax.rope_scaling import RopeScaling, frequency_divisors
from inertiakv_jax.weights.gguf_file import GgufFile
from inertiakv_jax.weights.gguf_model import ROPE_FACTORS, architecture_of, read_numbers
from inertiakv_jax.weights.hf_config import config_from_hf

# Llama 3.1 and later write their scaled frequencies as a tensor, not these three constants.
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_CONTEXT = 1.0, 4.0, 8192

# Gemma's 27B models scale queries otherwise; llama.cpp, too, knows them by their layers.
LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
SOFTMAX_GATING = 1

Field = Callable[..., Any]
"""Reads one key of the file's architecture, with a default."""


def gguf_config(file: GgufFile) -> ModelConfig:
    """Sizes and constants from GGUF metadata.

    Whether there are biases and an lm_head shows in which tensors the file has.

    Raises:
        ValueError: a field is missing or asks for something that is not implemented; the message
            names the file and the field.
    """
    name, architecture = architecture_of(file)
    try:
        config = config_from_hf(_as_hf_config(file, name, architecture.model_type))
        return _with_rope_factors(file, config)
    except ValueError as error:
        message = str(error)
        prefix = "" if message.startswith(str(file.path)) else f"{file.path}: "
        raise ValueError(f"{prefix}{message}") from error


def _as_hf_config(file: GgufFile, name: str, model_type: str) -> dict[str, Any]:
    def field(key: str, default: Any = None) -> Any:
        return file.metadata.get(f"{name}.{key}", default)

    _refuse_what_is_not_implemented(field, name)
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    eos = [file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    heads = field("attention.head_count")
    config = {
        "model_type": model_type,
        "vocab_size": field("vocab_size", len(tokens) if isinstance(tokens, list) else None),
        "hidden_size": field("embedding_length"),
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "head_dim": field("attention.key_length"),
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": field("context_length"),
        "rope_theta": field("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(field),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [token for token in eos if token is not None],
    }
    if model_type in ("llama", "qwen2", "qwen3", "qwen3_moe"):
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if model_type == "llama":
        config["mlp_bias"] = "blk.0.ffn_down.bias" in file.tensors
    if name in LAYERS_OF_27B:
        config |= _gemma_fields(field, name)
    if model_type == "qwen3_moe":
        config |= {
            "num_experts": field("expert_count"),
            "num_experts_per_tok": field("expert_used_count"),
            "moe_intermediate_size": field("expert_feed_forward_length"),
            "norm_topk_prob": True,  # llama.cpp does it always
        }
    return config


def _gemma_fields(field: Field, name: str) -> dict[str, Any]:
    scale_dim, heads = field("attention.key_length"), field("attention.head_count")
    if field("block_count") == LAYERS_OF_27B[name] and isinstance(heads, int) and heads > 0:
        scale_dim = field("embedding_length", 0) // heads
    fields = {"query_pre_attn_scalar": scale_dim}
    fields["sliding_window"] = field("attention.sliding_window")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if field(key) is not None:
            fields[key] = field(key) or None  # 0 is none, no field is the default
    if name == "gemma3":
        fields["rope_local_base_freq"] = field("rope.freq_base_swa", 10000.0)
    return fields


def _rope_scaling(field: Field) -> dict[str, Any] | None:
    rope_type = field("rope.scaling.type")
    factor = field("rope.scaling.factor")
    if rope_type in (None, "none"):
        linear = field("rope.scale_linear", 1.0)  # the older spelling
        return None if linear == 1.0 else {"rope_type": "linear", "factor": linear}
    if rope_type == "linear" and factor in (None, 0.0, 1.0):
        return None
    original = field("rope.scaling.original_context_length")
    known = {} if original is None else {"original_max_position_embeddings": original}
    return {"rope_type": rope_type, "factor": factor, **known}


def _refuse_what_is_not_implemented(field: Field, name: str) -> None:
    key_length, heads = field("attention.key_length"), field("attention.head_count")
    hidden_size = field("embedding_length")
    if key_length is None and isinstance(heads, int) and isinstance(hidden_size, int) and heads:
        key_length = hidden_size // heads
    allowed = {
        "attention.causal": (None, True),
        "attention.value_length": (None, key_length),
        "rope.dimension_count": (None, key_length),
        "attention.clamp_kqv": (None, 0.0),
        "logit_scale": (None, 0.0, 1.0),
        "embedding_scale": (None, 0.0, 1.0),
        "residual_scale": (None, 0.0, 1.0),
        "attention.scale": (None, 0.0),
        "rope.scaling.attn_factor": (None, 0.0, 1.0),
        "rope.scaling.yarn_log_multiplier": (None, 0.0),
        "expert_shared_count": (None, 0),
        "expert_weights_scale": (None, 0.0, 1.0),
        "expert_weights_norm": (None, True),
        "expert_gating_func": (None, SOFTMAX_GATING),
        "attention.sliding_window_pattern": (None, {"gemma2": 2, "gemma3": 6}.get(name)),
    }
    if name not in LAYERS_OF_27B:
        allowed["attention.sliding_window"] = (None, 0)
    if name != "qwen3moe":
        allowed["expert_count"] = (None, 0)
    for key, values in allowed.items():
        if field(key) not in values:
            raise ValueError(f"{name}.{key} {field(key)!r} is not supported")


def _with_rope_factors(file: GgufFile, config: ModelConfig) -> ModelConfig:
    """Recognise the frequency divisors that Llama 3.1 and later store as a tensor."""
    tensor = file.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return config
    if tensor.shape != (config.head_dim // 2,):
        raise ValueError(
            f"tensor {ROPE_FACTORS!r} has shape {tensor.shape}, expected {(config.head_dim // 2,)}"
        )
    divisors = read_numbers(file.path, tensor)
    if np.array_equal(divisors, np.ones_like(divisors)):
        return config
    largest = float(divisors.max())
    if np.isfinite(largest) and largest > 1.0 and config.rope_scaling is None:
        scaling = RopeScaling("llama3", largest, LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_CONTEXT)
        expected = frequency_divisors(config.head_dim, config.rope_theta, scaling)
        if np.allclose(divisors, expected, rtol=1e-4, atol=0.0):
            return replace(config, rope_scaling=scaling)
    raise ValueError(
        f"tensor {ROPE_FACTORS!r} does not hold the llama3 scaling of a context of "
        f"{LLAMA3_CONTEXT} tokens (low_freq_factor {LLAMA3_LOW:g}, high_freq_factor "
        f"{LLAMA3_HIGH:g}); other frequency factors are not supported"
    )
