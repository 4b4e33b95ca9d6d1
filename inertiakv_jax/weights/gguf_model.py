"""GGUF checkpoints as Hugging Face ones: tensor names, row order and what was added to norms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from inertiakv_jax.config import ModelConfig
from inertiakv_jax.weights.gguf_file import GgufFile, GgufTensor, quantized_bytes
from inertiakv_jax.weights.tensor_source import Block, read_bytes, row_blocks

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
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}
POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class Architecture:
    """What differs between the architectures that a GGUF file can name.

    Attributes:
        model_type: the Hugging Face name of the same architecture.
        names: parts of a layer beyond ``LAYER_NAMES``, or other names for them.
        permuted: parts of GGUF tensor names whose rows the converter reordered head by head, so
            that rotary pairs lie side by side.
        one_plus_norms: norm weights are stored as 1 + w.
    """

    model_type: str
    names: Mapping[str, str] = field(default_factory=dict)
    permuted: tuple[str, ...] = ()
    one_plus_norms: bool = False


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", permuted=(".attn_q.", ".attn_k.")),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", QK_NORMS),
    "qwen3moe": Architecture("qwen3_moe", QK_NORMS | EXPERTS),
    "gemma2": Architecture("gemma2", POST_NORMS, one_plus_norms=True),
    "gemma3": Architecture("gemma3_text", QK_NORMS | POST_NORMS, one_plus_norms=True),
}


@dataclass(frozen=True)
class GgufSource:
    """A ``TensorSource`` over one GGUF file; values come dequantised, as float32.

    Attributes:
        path: the file.
        tensors: by Hugging Face name.
        heads: number of heads of each tensor whose rows the converter reordered.
        one_plus_norms: norm weights are stored as 1 + w.
    """

    path: Path
    tensors: Mapping[str, GgufTensor]
    heads: Mapping[str, int]
    one_plus_norms: bool = False

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
            yield slice(0, tensor.shape[0]), self._vector(name, tensor)
            return
        order = None
        if name in self.heads:
            order = unpermuted_rows(tensor.shape[0], self.heads[name])
        for start, stop in row_blocks(tensor.shape):
            rows = slice(start, stop) if order is None else order[start:stop]
            yield rows, read_numbers(self.path, tensor, start, stop)

    def _vector(self, name: str, tensor: GgufTensor) -> np.ndarray:
        vector = read_numbers(self.path, tensor)
        if self.one_plus_norms and name.endswith("norm.weight"):
            return vector - 1.0
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


def hf_name(name: str, architecture: Architecture) -> str | None:
    """The Hugging Face name of a GGUF tensor, or None for one without a counterpart."""
    stem, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        return None
    if stem in NAMES:
        return f"{NAMES[stem]}.{kind}"
    parts = {**LAYER_NAMES, **architecture.names}
    match stem.split("."):
        case ["blk", layer, part] if layer.isdecimal() and part in parts:
            return f"model.layers.{int(layer)}.{parts[part]}.{kind}"
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
        target = hf_name(name, architecture)
        if target is None:
            unknown.append(name)
        elif "{expert}" in target and len(tensor.shape) == 3:
            tensors |= {
                target.format(expert=index): part for index, part in enumerate(experts_of(tensor))
            }
        else:
            tensors[target] = tensor
            if any(part in name for part in architecture.permuted):
                heads[target] = config.num_heads if ".attn_q." in name else config.num_kv_heads
    if unknown:
        raise ValueError(
            f"{file.path}: {len(unknown)} tensors have no place in the model: "
            f"{', '.join(unknown[:8])}"
        )
    return GgufSource(file.path, tensors, heads, architecture.one_plus_norms)


def experts_of(tensor: GgufTensor) -> Iterator[GgufTensor]:
    """The matrices of a stacked tensor, one per expert, as tensors of their own."""
    num_experts, *shape = tensor.shape
    for index in range(num_experts):
        offset = tensor.offset + index * quantized_bytes(tuple(shape), tensor.quantization)
        yield replace(tensor, shape=tuple(shape), offset=offset)
