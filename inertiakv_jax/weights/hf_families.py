"""The model families: what Hugging Face's configuration classes leave unsaid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from inertiakv_jax.weights.hf_layers import NO_WINDOWS, Layers


@dataclass(frozen=True)
class Family:
    """What Hugging Face leaves unsaid about a model type: class defaults and fixed traits.

    Attributes:
        architecture: the class that holds the weights.
        max_position_embeddings: default, as are ``num_kv_heads`` (None: as many as query heads),
            ``head_dim`` (None: hidden_size / heads), ``vocab_size`` and ``num_heads`` (None:
            required), ``tie_word_embeddings``, ``bos_token_id`` and ``eos_token_id``.
        attention_bias: whether q, k, v have biases; None: config.json decides. The same for the
            output projection and the MLP.
        layers: which layers have a sliding window.
        traits: fields of ``ModelConfig`` that are the same in all models of the family.
    """

    architecture: str
    max_position_embeddings: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    vocab_size: int | None = None
    num_heads: int | None = None
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    attention_bias: bool | None = False
    attention_out_bias: bool | None = False
    mlp_bias: bool | None = False
    layers: Layers = NO_WINDOWS
    traits: Mapping[str, Any] = field(default_factory=dict)


_GEMMA = {
    "post_norms": True,
    "unit_offset_norms": True,
    "activation": "gelu_tanh",
    "scale_embeddings": True,
}
_GEMMA_DEFAULTS: dict[str, Any] = {
    "num_kv_heads": 4,
    "head_dim": 256,
    "num_heads": 8,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "attention_bias": None,
    "attention_out_bias": None,
}

# Defaults of the configuration classes in transformers.
FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        2048,
        bos_token_id=1,
        eos_token_id=2,
        attention_bias=None,
        attention_out_bias=None,
        mlp_bias=None,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        131072,
        num_kv_heads=8,
        bos_token_id=1,
        eos_token_id=2,
        layers=Layers("all", window=4096),
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        32768,
        num_kv_heads=32,
        attention_bias=True,
        layers=Layers("upper", window=4096, switch="use_sliding_window", listed=True),
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        32768,
        num_kv_heads=32,
        head_dim=128,
        attention_bias=None,
        attention_out_bias=None,
        layers=Layers("upper", window=4096, switch="use_sliding_window", listed=True),
        traits={"qk_norm": True},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        32768,
        num_kv_heads=4,
        attention_bias=None,
        attention_out_bias=None,
        layers=Layers("all", window=4096, switch="use_sliding_window"),
        traits={"qk_norm": True},
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        8192,
        vocab_size=256_000,
        layers=Layers("pattern", window=4096, pattern=2, listed=True),
        traits=_GEMMA,
        **_GEMMA_DEFAULTS,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        131072,
        vocab_size=262_208,
        layers=Layers("pattern", window=4096, pattern=6, listed=True),
        traits={**_GEMMA, "qk_norm": True},
        **_GEMMA_DEFAULTS,
    ),
}
