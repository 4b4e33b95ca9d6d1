"""GGUF checkpoints as Hugging Face ones: tensor names, config and row order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from inertiakv_jax.config import ModelConfig
from inertiakv_jax.rope_scaling import RopeScaling, frequency_divisors
from inertiakv_jax.weights.gguf_file import GgufFile, GgufTensor
from inertiakv_jax.weights.hf_config import config_from_hf
from inertiakv_jax.weights.tensor_source import Block, read_bytes, row_blocks


@dataclass(frozen=True)
class Architecture:
    """What differs between the architectures that a GGUF file can name.

    Attributes:
        model_type: the Hugging Face name of the same architecture.
        permuted: parts of GGUF tensor names whose rows the converter reordered head by head, so
            that rotary pairs lie side by side.
    """

    model_type: str
    permuted: tuple[str, ...] = ()


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", permuted=(".attn_q.", ".attn_k.")),
    "qwen2": Architecture("qwen2"),
}

# GGUF tensor names without "weight" or "bias", and what Hugging Face calls them.
NAMES: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"

# Llama 3.1 and later write their scaled frequencies as a tensor, not these three constants.
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_CONTEXT = 1.0, 4.0, 8192


@dataclass(frozen=True)
class GgufSource:
    """A ``TensorSource`` over one GGUF file; values come dequantised, as float32.

    Attributes:
        tensors: by Hugging Face name.
        heads: number of heads of each tensor whose rows the converter reordered.
        path: the file.
    """

    path: Path
    tensors: Mapping[str, GgufTensor]
    heads: Mapping[str, int]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor by Hugging Face name."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self.path

    def blocks(self, name: str) -> Iterator[Block]:
        """Yield ``(rows, values)``, values float32."""
        tensor = self.tensors[name]
        if tensor.quantization is GGMLQuantizationType.F64:
            raise ValueError(f"{self.path}: tensor {name!r}: F64 is not supported")
        # A vector has no rows to take one by one: its blocks are cut along its only dimension.
        if len(tensor.shape) == 1:
            yield slice(0, tensor.shape[0]), self._restored(name, read_numbers(self.path, tensor))
            return
        order = None
        if name in self.heads:
            order = unpermuted_rows(tensor.shape[0], self.heads[name])
        for start, stop in row_blocks(tensor.shape):
            rows = slice(start, stop) if order is None else order[start:stop]
            yield rows, read_numbers(self.path, tensor, start, stop)

    def _restored(self, name: str, vector: np.ndarray) -> np.ndarray:
        if name not in self.heads:
            return vector
        restored = np.empty_like(vector)
        restored[unpermuted_rows(len(vector), self.heads[name])] = vector
        return restored


def read_numbers(
    path: Path, tensor: GgufTensor, start: int = 0, stop: int | None = None
) -> np.ndarray:
    """Read rows ``start:stop`` of a tensor (a vector: all of it) as float32.

    Raises:
        ValueError: the gguf package cannot dequantise the tensor's type.
    """
    shape = tensor.shape if len(tensor.shape) > 1 else (1, *tensor.shape)
    stop = shape[0] if stop is None else stop
    block, block_bytes = GGML_QUANT_SIZES[tensor.quantization]
    row_bytes = int(np.prod(shape[1:], dtype=np.int64)) // block * block_bytes
    raw = read_bytes(path, tensor.offset + start * row_bytes, (stop - start) * row_bytes)
    try:
        # One long row: the package would otherwise work through sixteen short ones at a time.
        numbers = dequantize(raw.reshape(1, -1), tensor.quantization)
    except NotImplementedError as error:
        raise ValueError(
            f"{path}: tensor {tensor.name!r} has quantisation {tensor.quantization.name}, which "
            "is not supported"
        ) from error
    return numbers.reshape(tensor.shape if len(tensor.shape) == 1 else (stop - start, *shape[1:]))


def unpermuted_rows(num_rows: int, num_heads: int) -> np.ndarray:
    """Where each row of a reordered q or k tensor belongs, [num_rows] int64.

    The converter turns a head's halves ``[a0 a1 ... b0 b1 ...]`` into pairs ``[a0 b0 a1 b1 ...]``.
    """
    head_dim = num_rows // num_heads
    row = np.arange(head_dim)
    within = row % 2 * (head_dim // 2) + row // 2
    return (np.arange(num_heads)[:, None] * head_dim + within[None, :]).reshape(-1)


def hf_name(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor, or None for one without a counterpart."""
    stem, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        return None
    if stem in NAMES:
        return f"{NAMES[stem]}.{kind}"
    match stem.split("."):
        case ["blk", layer, part] if layer.isdecimal() and part in LAYER_NAMES:
            return f"model.layers.{int(layer)}.{LAYER_NAMES[part]}.{kind}"
    return None


def architecture_of(file: GgufFile) -> tuple[str, Architecture]:
    """Name and row of the file's architecture; ValueError listing the supported ones."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(
            f"{file.path}: architecture {name!r} is not supported; supported: "
            f"{', '.join(ARCHITECTURES)}"
        )
    splits = file.metadata.get("split.count", 0)
    if splits not in (0, 1):
        raise ValueError(
            f"{file.path}: one of {splits} files of a split model (split.count) is not supported; "
            "merge them with llama-gguf-split"
        )
    return name, ARCHITECTURES[name]


def gguf_source(file: GgufFile, config: ModelConfig) -> GgufSource:
    """The tensors of a GGUF file under Hugging Face names.

    Raises:
        ValueError: a tensor without a counterpart there, by name.
    """
    _, architecture = architecture_of(file)
    tensors, heads, unknown = {}, {}, []
    for name, tensor in file.tensors.items():
        if name == ROPE_FACTORS:  # read by gguf_config
            continue
        target = hf_name(name)
        if target is None:
            unknown.append(name)
            continue
        tensors[target] = tensor
        if any(part in name for part in architecture.permuted):
            heads[target] = config.num_heads if ".attn_q." in name else config.num_kv_heads
    if unknown:
        raise ValueError(
            f"{file.path}: {len(unknown)} tensors have no place in the model: "
            f"{', '.join(unknown[:8])}"
        )
    return GgufSource(file.path, tensors, heads)


def gguf_config(file: GgufFile) -> ModelConfig:
    """Sizes and constants from GGUF metadata.

    Whether there are biases and an lm_head shows in which tensors the file has.

    Raises:
        ValueError: a field is missing or asks for something that is not implemented; the message
            names the file and the field.
    """
    name, architecture = architecture_of(file)
    try:
        config = config_from_hf(_as_hf_config(file, name, architecture))
        return _with_rope_factors(file, config)
    except ValueError as error:
        message = str(error)
        prefix = "" if message.startswith(str(file.path)) else f"{file.path}: "
        raise ValueError(f"{prefix}{message}") from error


def _as_hf_config(file: GgufFile, name: str, architecture: Architecture) -> dict[str, Any]:
    def field(key: str, default: Any = None) -> Any:
        return file.metadata.get(f"{name}.{key}", default)

    heads, hidden_size = field("attention.head_count"), field("embedding_length")
    head_dim = field("attention.key_length")
    _refuse_what_is_not_implemented(file, name)
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    eos = [file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    return {
        "model_type": architecture.model_type,
        "vocab_size": field("vocab_size", len(tokens) if isinstance(tokens, list) else None),
        "hidden_size": hidden_size,
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": field("context_length"),
        "rope_theta": field("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(field),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [token for token in eos if token is not None],
    }


def _rope_scaling(field: Any) -> dict[str, Any] | None:
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


def _refuse_what_is_not_implemented(file: GgufFile, name: str) -> None:
    def field(key: str, default: Any = None) -> Any:
        return file.metadata.get(f"{name}.{key}", default)

    key_length, heads = field("attention.key_length"), field("attention.head_count")
    hidden_size = field("embedding_length")
    if key_length is None and isinstance(heads, int) and isinstance(hidden_size, int) and heads:
        key_length = hidden_size // heads
    allowed = {
        "expert_count": (None, 0),
        "attention.causal": (None, True),
        "attention.sliding_window": (None, 0),
        "attention.value_length": (None, key_length),
        "rope.dimension_count": (None, key_length),
        "attention.clamp_kqv": (None, 0.0),
        "logit_scale": (None, 0.0, 1.0),
        "embedding_scale": (None, 0.0, 1.0),
        "residual_scale": (None, 0.0, 1.0),
        "attention.scale": (None, 0.0),
        "rope.scaling.attn_factor": (None, 0.0, 1.0),
        "rope.scaling.yarn_log_multiplier": (None, 0.0),
    }
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
