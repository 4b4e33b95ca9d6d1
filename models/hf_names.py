"""Which tensor of a Hugging Face checkpoint becomes which parameter of the decoder."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from inertiakv_jax.config import ModelConfig

Present = Callable[[ModelConfig, int], bool]


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        name: tensor name in the checkpoint; ``{layer}`` stands for every layer number and
            ``{expert}`` for every expert's.
        path: parameter path, parts separated by "/". The tensors of all experts fill one parameter,
            which has an axis more in front.
        shape: shape in the checkpoint, each letter a size: V, H, I (MLP width), Q = N * D,
            K = num_kv_heads * D, D, X (experts) and M (width of one expert). Linear weights are
            stored [out, in] there.
        transpose: the parameter is the transposed tensor ([in, out]).
        present: whether a layer of a model of this config has the tensor.
    """

    name: str
    path: str
    shape: str
    transpose: bool = False
    present: Present = lambda config, layer: True


@dataclass(frozen=True)
class Tensor:
    """One tensor that a checkpoint must have: a row of the table with its numbers filled in.

    ``expert`` is its index along the first axis of the parameter, None for a parameter of its own.
    """

    name: str
    path: tuple[str, ...]
    shape: tuple[int, ...]
    transpose: bool
    expert: int | None = None

    @property
    def is_projection(self) -> bool:
        """Whether it is the matrix of a projection: what int8 quantisation is for.

        The embedding, the head and the router are not: they are few, and decide tokens and experts.
        """
        return self.path[-1] == "kernel" and self.path[-2].endswith("_proj")


def _has_experts(config: ModelConfig, layer: int) -> bool:
    return config.has_experts(layer)


def _has_mlp(config: ModelConfig, layer: int) -> bool:
    return not config.has_experts(layer)


def _has_mlp_bias(config: ModelConfig, layer: int) -> bool:
    return config.mlp_bias and not config.has_experts(layer)


def _attention_bias(config: ModelConfig, layer: int) -> bool:
    return config.attention_bias


def _attention_out_bias(config: ModelConfig, layer: int) -> bool:
    return config.attention_out_bias


def _qk_norm(config: ModelConfig, layer: int) -> bool:
    return config.qk_norm


def _post_norms(config: ModelConfig, layer: int) -> bool:
    return config.post_norms


def _untied(config: ModelConfig, layer: int) -> bool:
    return not config.tie_word_embeddings


def _in_layer(
    theirs: str,
    ours: str,
    shape: str,
    transpose: bool = False,
    present: Present = lambda config, layer: True,
) -> Row:
    return Row(
        "model.layers.{layer}." + theirs, "layers_{layer}/" + ours, shape, transpose, present
    )


_EXPERT = "mlp.experts.{expert}."
TABLE = (
    Row("model.embed_tokens.weight", "embed/embedding", "VH"),
    _in_layer("input_layernorm.weight", "input_norm/scale", "H"),
    _in_layer("self_attn.q_proj.weight", "attention/q_proj/kernel", "QH", True),
    _in_layer("self_attn.k_proj.weight", "attention/k_proj/kernel", "KH", True),
    _in_layer("self_attn.v_proj.weight", "attention/v_proj/kernel", "KH", True),
    _in_layer("self_attn.o_proj.weight", "attention/o_proj/kernel", "HQ", True),
    _in_layer("self_attn.q_proj.bias", "attention/q_proj/bias", "Q", present=_attention_bias),
    _in_layer("self_attn.k_proj.bias", "attention/k_proj/bias", "K", present=_attention_bias),
    _in_layer("self_attn.v_proj.bias", "attention/v_proj/bias", "K", present=_attention_bias),
    _in_layer("self_attn.o_proj.bias", "attention/o_proj/bias", "H", present=_attention_out_bias),
    _in_layer("self_attn.q_norm.weight", "attention/q_norm/scale", "D", present=_qk_norm),
    _in_layer("self_attn.k_norm.weight", "attention/k_norm/scale", "D", present=_qk_norm),
    _in_layer("post_attention_layernorm.weight", "post_attention_norm/scale", "H"),
    _in_layer(
        "pre_feedforward_layernorm.weight", "pre_feedforward_norm/scale", "H", present=_post_norms
    ),
    _in_layer(
        "post_feedforward_layernorm.weight", "post_feedforward_norm/scale", "H", present=_post_norms
    ),
    _in_layer("mlp.gate_proj.weight", "mlp/gate_proj/kernel", "IH", True, _has_mlp),
    _in_layer("mlp.up_proj.weight", "mlp/up_proj/kernel", "IH", True, _has_mlp),
    _in_layer("mlp.down_proj.weight", "mlp/down_proj/kernel", "HI", True, _has_mlp),
    _in_layer("mlp.gate_proj.bias", "mlp/gate_proj/bias", "I", present=_has_mlp_bias),
    _in_layer("mlp.up_proj.bias", "mlp/up_proj/bias", "I", present=_has_mlp_bias),
    _in_layer("mlp.down_proj.bias", "mlp/down_proj/bias", "H", present=_has_mlp_bias),
    _in_layer("mlp.gate.weight", "mlp/router/kernel", "XH", True, _has_experts),
    _in_layer(_EXPERT + "gate_proj.weight", "mlp/gate_proj/kernel", "MH", True, _has_experts),
    _in_layer(_EXPERT + "up_proj.weight", "mlp/up_proj/kernel", "MH", True, _has_experts),
    _in_layer(_EXPERT + "down_proj.weight", "mlp/down_proj/kernel", "HM", True, _has_experts),
    Row("model.norm.weight", "final_norm/scale", "H"),
    Row("lm_head.weight", "lm_head/kernel", "VH", True, _untied),
)

# Buffers that some checkpoints carry although the model computes them: nothing to load.
HARMLESS_EXTRAS = re.compile(
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.(inv_freq|cos_cached|sin_cached)"
    r"|model\.rotary_emb\.inv_freq"
)


def expected_tensors(config: ModelConfig) -> Iterator[Tensor]:
    """Every tensor that a checkpoint of ``config`` must have, row by row, layer by layer."""
    sizes = {
        "V": config.vocab_size,
        "H": config.hidden_size,
        "I": config.intermediate_size,
        "Q": config.num_heads * config.head_dim,
        "K": config.num_kv_heads * config.head_dim,
        "D": config.head_dim,
    }
    if config.experts is not None:
        sizes |= {"X": config.experts.num_experts, "M": config.experts.intermediate_size}
    for row in TABLE:
        for layer in range(config.num_layers if "{layer}" in row.name else 1):
            if not row.present(config, layer):
                continue
            for expert in range(sizes["X"]) if "{expert}" in row.name else (None,):
                yield Tensor(
                    name=row.name.format(layer=layer, expert=expert),
                    path=tuple(row.path.format(layer=layer).split("/")),
                    shape=tuple(sizes[letter] for letter in row.shape),
                    transpose=row.transpose,
                    expert=expert,
                )


def is_harmless_extra(name: str, config: ModelConfig) -> bool:
    """Whether a tensor that no parameter needs may be left unread.

    A tied checkpoint may repeat its embedding as ``lm_head.weight``; config.json decides, as in
    transformers.
    """
    if HARMLESS_EXTRAS.fullmatch(name):
        return True
    return name == "lm_head.weight" and config.tie_word_embeddings
