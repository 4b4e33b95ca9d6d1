"""A model that says what it is told to, with a byte-level tokenizer: token 3 + b is byte b."""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from weights.tiny_files import write_tokenizer_json

from inertiakv_jax.config import ModelConfig
from inertiakv_jax.language_model import LanguageModel
from inertiakv_jax.weights.tokenizer import hf_tokenizer

VOCABULARY = 300
EOS = 2
TOKEN_BYTES = 2 * 2 * 1 * 2 * 4  # keys and values, layers, kv heads, head_dim, float32
CONFIG = ModelConfig(
    family="llama",
    vocab_size=VOCABULARY,
    hidden_size=2,
    intermediate_size=2,
    num_layers=2,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    max_position_embeddings=256,
    eos_token_ids=(EOS,),
)


@dataclasses.dataclass(frozen=True)
class ScriptedModel:
    """After position i comes ``script[i + 1]``, whatever the tokens; satisfies ``typing.Model``."""

    num_layers: int = CONFIG.num_layers
    num_heads: int = CONFIG.num_heads
    num_kv_heads: int = CONFIG.num_kv_heads
    head_dim: int = CONFIG.head_dim
    vocab_size: int = CONFIG.vocab_size
    max_positions: int = CONFIG.max_position_embeddings
    sliding_windows: tuple = (None, None)
    dtype: Any = "float32"

    def hidden(self, params, tokens, positions, cache):
        nothing = jnp.zeros((*tokens.shape, 1, self.head_dim))
        for layer in range(self.num_layers):
            _, cache = cache.attend(layer, nothing, nothing, nothing)
        return params["script"][positions + 1][..., None], cache

    def logits(self, params, hidden):
        chosen = jax.nn.one_hot(hidden[..., 0].astype(jnp.int32), VOCABULARY)
        return chosen * params["sharpness"] + 0 * hidden  # a NaN in the script is a NaN here


def tokenizer():
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer_json(Path(folder))
        return hf_tokenizer(Path(folder), "llama")


def ids_of(text):
    """One token a byte; the tokenizer's merges are left out."""
    return [3 + byte for byte in text.encode()]


def language_model(script, *, sharpness=20.0):
    """A model whose text from position 0 on is ``script``: token ids, or text of a token a byte."""
    ids = ids_of(script) if isinstance(script, str) else list(script)
    padded = np.full(CONFIG.max_position_embeddings + 1, 3 + ord("."), np.float32)
    padded[: len(ids)] = ids
    return LanguageModel(
        model=ScriptedModel(),
        params={"script": jnp.asarray(padded), "sharpness": jnp.float32(sharpness)},
        tokenizer=tokenizer(),
        config=CONFIG,
        eos_token_ids=CONFIG.eos_token_ids,
        name="scripted",
    )
