"""Which tensor of a Hugging Face checkpoint becomes which parameter of the decoder."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from inertiakv_jax.config import ModelConfig


@dataclass(frozen=True)
class Row:
    """One row of the table; ``{layer}`` stands for every layer number.

    Attributes:
        name: tensor name in the checkpoint.
        path: parameter path, parts separated by "/".
        shape: shape in the checkpoint, each letter a size: V, H, I (MLP width), Q = N * D and
            K = num_kv_heads * D. Linear weights are stored [out, in] there.
        transpose: the parameter is the transposed tensor ([in, out]).
        present: whether a model of this config has the tensor.
    """

    name: str
    path: str
    shape: str
    transpose: bool = False
    present: Callable[[ModelConfig], bool] = lambda config: True


@dataclass(frozen=True)
class Tensor:
    """One tensor that a checkpoint must have: a row of the table with its numbers filled in."""

    name: str
    path: tuple[str, ...]
    shape: tuple[int, ...]
    transpose: bool


def _attention_bias(config: ModelConfig) -> bool:
    return config.attention_bias


def _attention_out_bias(config: ModelConfig) -> bool:
    return config.attention_out_bias


def _mlp_bias(config: ModelConfig) -> bool:
    return config.mlp_bias


def _untied(config: ModelConfig) -> bool:
    return not config.tie_word_embeddings


_LAYER = "model.layers.{layer}."
TABLE = (
    Row("model.embed_tokens.weight", "embed/embedding", "VH"),
    Row(_LAYER + "input_layernorm.weight", "layers_{layer}/input_norm/scale", "H"),
    Row(_LAYER + "self_attn.q_proj.weight", "layers_{layer}/attention/q_proj/kernel", "QH", True),
    Row(_LAYER + "self_attn.k_proj.weight", "layers_{layer}/attention/k_proj/kernel", "KH", True),
    Row(_LAYER + "self_attn.v_proj.weight", "layers_{layer}/attention/v_proj/kernel", "KH", True),
    Row(_LAYER + "self_attn.o_proj.weight", "layers_{layer}/attention/o_proj/kernel", "HQ", True),
    Row(
        _LAYER + "self_attn.q_proj.bias",
        "layers_{layer}/attention/q_proj/bias",
        "Q",
        present=_attention_bias,
    ),
    Row(
        _LAYER + "self_attn.k_proj.bias",
        "layers_{layer}/attention/k_proj/bias",
        "K",
        present=_attention_bias,
    ),
    Row(
        _LAYER + "self_attn.v_proj.bias",
        "layers_{layer}/attention/v_proj/bias",
        "K",
        present=_attention_bias,
    ),
    Row(
        _LAYER + "self_attn.o_proj.bias",
        "layers_{layer}/attention/o_proj/bias",
        "H",
        present=_attention_out_bias,
    ),
    Row(
        _LAYER + "post_attention_layernorm.weight",
        "layers_{layer}/post_attention_norm/scale",
        "H",
    ),
    Row(_LAYER + "mlp.gate_proj.weight", "layers_{layer}/mlp/gate_proj/kernel", "IH", True),
    Row(_LAYER + "mlp.up_proj.weight", "layers_{layer}/mlp/up_proj/kernel", "IH", True),
    Row(_LAYER + "mlp.down_proj.weight", "layers_{layer}/mlp/down_proj/kernel", "HI", True),
    Row(_LAYER + "mlp.gate_proj.bias", "layers_{layer}/mlp/gate_proj/bias", "I", present=_mlp_bias),
    Row(_LAYER + "mlp.up_proj.bias", "layers_{layer}/mlp/up_proj/bias", "I", present=_mlp_bias),
    Row(_LAYER + "mlp.down_proj.bias", "layers_{layer}/mlp/down_proj/bias", "H", present=_mlp_bias),
    Row("model.norm.weight", "final_norm/scale", "H"),
    Row("lm_head.weight", "lm_head/kernel", "VH", True, present=_untied),
)

# Buffers that some checkpoints carry although the model computes them: nothing to load.
HARMLESS_EXTRAS = re.compile(
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.(inv_freq|cos_cached|sin_cached)"
    r"|model\.rotary_emb\.inv_freq"
)


def expected_tensors(config: ModelConfig) -> Iterator[Tensor]:
    """Every tensor that a checkpoint of ``config`` must have, layer by layer."""
    sizes = {
        "V": config.vocab_size,
        "H": config.hidden_size,
        "I": config.intermediate_size,
        "Q": config.num_heads * config.head_dim,
        "K": config.num_kv_heads * config.head_dim,
    }
    for row in TABLE:
        if not row.present(config):
            continue
        for layer in range(config.num_layers if "{layer}" in row.name else 1):
            yield Tensor(
                name=row.name.format(layer=layer),
                path=tuple(row.path.format(layer=layer).split("/")),
                shape=tuple(sizes[letter] for letter in row.shape),
                transpose=row.transpose,
            )


def is_harmless_extra(name: str, config: ModelConfig) -> bool:
    """Whether a tensor that no parameter needs may be left unread.

    A tied checkpoint may repeat its embedding as ``lm_head.weight``; config.json decides, as in
    transformers.
    """
    if HARMLESS_EXTRAS.fullmatch(name):
        return True
    return name == "lm_head.weight" and config.tie_word_embeddings
