"""A language model as a folder that transformers loads: config, tokenizer and safetensors."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from inertiakv_jax.config import ModelConfig
from inertiakv_jax.files import check_folder, make_folder
from inertiakv_jax.language_model import LanguageModel
from inertiakv_jax.models.hf_names import Tensor, expected_tensors
from inertiakv_jax.rope_scaling import RopeScaling
from inertiakv_jax.typing import Params
from inertiakv_jax.weights.hf_families import FAMILIES
from inertiakv_jax.weights.hf_rope import GLOBAL, LOCAL
from inertiakv_jax.weights.safetensors_files import INDEX_NAME

SHARD_BYTES = 1 << 31
"""Bytes of tensors per file; one file's worth is held on the host while it is written."""


def save_safetensors(
    lm: LanguageModel, folder: str | os.PathLike[str], *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write a folder that transformers and ``load`` read.

    Args:
        lm: with parameters of ``lm.model.dtype``.
        folder: made here; must not exist, or be empty. It appears when it is complete.
        shard_bytes: most bytes of tensors per file; a larger tensor has a file of its own.

    Raises:
        ValueError: the folder has files, or the parameters are int8.
    """
    if getattr(lm.model, "quantization", None) is not None:
        raise ValueError(
            "int8 parameters cannot be saved as safetensors for transformers; load the model "
            "without quantize, or save it as an orbax checkpoint"
        )
    with new_folder(Path(folder)) as made:
        write_description(lm, made)
        _write_weights(lm, made, shard_bytes)


def check_new_folder(target: Path) -> None:
    """Raise ValueError unless nothing is at ``target``, or an empty folder, and one can be made."""
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"{target} exists and is not an empty folder; nothing is overwritten")
    check_folder(target.parent)


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder beside ``target`` that takes its place once it is complete.

    Raises:
        ValueError: there is something at ``target`` already, or it cannot be made.
    """
    check_new_folder(target)
    make_folder(target.parent)
    made = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield made
        made.chmod(0o777 & ~_umask())  # mkdtemp lets in its maker only
        os.replace(made, target)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_description(lm: LanguageModel, folder: Path) -> None:
    """Write config.json, generation_config.json and the tokenizer's files."""
    config = config_to_hf(lm.config) | {"torch_dtype": str(lm.model.dtype)}
    ends = list(lm.eos_token_ids)
    for name, content in (
        ("config.json", config),
        ("generation_config.json", {"eos_token_id": ends} if ends else {}),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    lm.tokenizer.save_pretrained(folder)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The config.json that says what ``config`` says, in the form of transformers 4.

    transformers 5 reads it, too. ``config_from_hf`` makes ``config`` of it again.
    """
    family = FAMILIES[config.family]
    gelu = config.activation == "gelu_tanh"
    fields: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_activation" if gelu else "hidden_act": "gelu_pytorch_tanh" if gelu else "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_scaling_to_hf(config.rope_scaling),
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
    }
    for key, fixed, value in (
        ("attention_bias", family.attention_bias, config.attention_bias),
        ("mlp_bias", family.mlp_bias, config.mlp_bias),
    ):
        if fixed is None:
            fields[key] = value
    return fields | _layers_to_hf(config) | _experts_to_hf(config) | _gemma_to_hf(config)


def _rope_scaling_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    keys = {
        "linear": (),
        "llama3": ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "yarn": (
            *("beta_fast", "beta_slow", "truncate", "attention_factor"),
            "original_max_position_embeddings",
        ),
    }
    names = ("rope_type", "factor", *keys[scaling.rope_type])
    return {name: getattr(scaling, name) for name in names}


def _layers_to_hf(config: ModelConfig) -> dict[str, Any]:
    layers = FAMILIES[config.family].layers
    if layers.rule == "none":
        return {}
    fields: dict[str, Any] = {"sliding_window": config.sliding_window}
    if layers.switch:
        fields[layers.switch] = bool(config.local_layers)
    if layers.listed:
        local = set(config.local_layers)
        fields["layer_types"] = [LOCAL if i in local else GLOBAL for i in range(config.num_layers)]
    return fields


def _experts_to_hf(config: ModelConfig) -> dict[str, Any]:
    experts = config.experts
    if experts is None:
        return {}
    return {
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_per_token,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.normalize_weights,
        "mlp_only_layers": list(experts.dense_layers),
    }


def _gemma_to_hf(config: ModelConfig) -> dict[str, Any]:
    scale = config.query_scale_dim
    if scale is None:
        return {}
    fields = {
        # transformers takes no 256.0 for the 256 that is published.
        "query_pre_attn_scalar": int(scale) if float(scale).is_integer() else scale,
        "attn_logit_softcapping": config.attention_soft_cap,
        "final_logit_softcapping": config.logits_soft_cap,
    }
    local = config.local_rope_theta
    return fields if local is None else fields | {"rope_local_base_freq": local}


def _write_weights(lm: LanguageModel, folder: Path, shard_bytes: int) -> None:
    from safetensors.numpy import save_file

    width = np.dtype(lm.model.dtype).itemsize
    shards: list[list[Tensor]] = [[]]
    room = shard_bytes
    for tensor in expected_tensors(lm.config):
        size = int(np.prod(tensor.shape)) * width
        if shards[-1] and size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= size
    count, weight_map = len(shards), {}
    for index, shard in enumerate(shards, start=1):
        name = "model.safetensors" if count == 1 else f"model-{index:05}-of-{count:05}.safetensors"
        arrays = {tensor.name: _array(lm.params, tensor) for tensor in shard}
        save_file(arrays, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(arrays, name)
    if count > 1:
        total = sum(leaf.nbytes for leaf in jax.tree.leaves(lm.params))
        index_content = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_NAME).write_text(json.dumps(index_content, indent=2) + "\n")


def _array(params: Params, tensor: Tensor) -> np.ndarray:
    """A parameter as the checkpoint has it, on the host."""
    leaf = params
    for part in tensor.path:
        leaf = leaf[part]
    array = np.asarray(leaf if tensor.expert is None else leaf[tensor.expert])
    return np.ascontiguousarray(array.T if tensor.transpose else array)
