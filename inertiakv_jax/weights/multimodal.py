"""The language model inside a multimodal checkpoint: Gemma 3 of 4B and more.

Their text part is a plain Gemma 3 under longer names; the vision tower is left unread.
"""

from __future__ import annotations

import dataclasses
import re

from inertiakv_jax.weights.json_fields import Fields, mapping
from inertiakv_jax.weights.safetensors_files import SafetensorsSource

TEXT_PARTS = {"gemma3": "gemma3_text"}
"""``model_type`` of a multimodal config.json, and of its ``text_config``."""

# Fields that the whole config has and that hold for its text, too.
_SHARED = ("bos_token_id", "eos_token_id", "tie_word_embeddings", "quantization_config")

# Under the names of transformers 4 (and the hub) and 5.
_TEXT = re.compile(r"(?:language_model\.model\.|model\.language_model\.)(.*)")
_HEAD = re.compile(r"(?:language_model\.)?(lm_head\..*)")
_VISION = re.compile(r"(?:model\.)?(?:vision_tower|multi_modal_projector)\..*")


def is_multimodal(config: Fields) -> bool:
    """Whether a config.json is of a model with more than text."""
    return config.get("model_type") in tuple(TEXT_PARTS)  # which may be anything, lists included


def text_config(config: Fields) -> Fields:
    """The config.json of the language model alone."""
    shared = {key: config[key] for key in _SHARED if config.get(key) is not None}
    model_type = TEXT_PARTS[config["model_type"]]
    return {**mapping(config, "text_config"), **shared, "model_type": model_type}


def text_tensors(source: SafetensorsSource) -> SafetensorsSource:
    """The tensors of the language model alone, under the names it has alone.

    A tensor of neither part keeps its name, for the error that it is.
    """
    entries = {}
    for name, entry in source.entries.items():
        if text := _TEXT.fullmatch(name):
            entries["model." + text[1]] = entry
        elif head := _HEAD.fullmatch(name):
            entries[head[1]] = entry
        elif not _VISION.fullmatch(name):
            entries[name] = entry
    return dataclasses.replace(source, entries=entries)
