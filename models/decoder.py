"""A decoder-only transformer in Flax: the Llama family, Mistral and Qwen2 by configuration."""

import dataclasses
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from inertiakv_jax.config import ModelConfig
from inertiakv_jax.typing import CacheT, Params


@dataclasses.dataclass(frozen=True)
class DecoderModel:
    """The decoder as the library's ``typing.Model``: pure functions of explicit parameters.

    Attributes:
      config: sizes and constants.
      dtype: of parameters, activations, keys and values: "float32" or "bfloat16".

    Example:
      >>> config = ModelConfig("llama", vocab_size=32, hidden_size=16, intermediate_size=24,
      ...                      num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
      >>> model = DecoderModel(config)
      >>> sorted(model.init(jax.random.key(0)))
      ['embed', 'final_norm', 'layers_0', 'lm_head']
    """

    config: ModelConfig
    dtype: str = "float32"

    @property
    def num_layers(self) -> int:
        """L."""
        return self.config.num_layers

    @property
    def num_heads(self) -> int:
        """N."""
        return self.config.num_heads

    @property
    def num_kv_heads(self) -> int:
        """K."""
        return self.config.num_kv_heads

    @property
    def head_dim(self) -> int:
        """D."""
        return self.config.head_dim

    @property
    def max_positions(self) -> int:
        """Longest text, in tokens."""
        return self.config.max_position_embeddings

    @property
    def module(self) -> "Decoder":
        """The Flax module."""
        return Decoder(self.config, jnp.dtype(self.dtype))

    def hidden(
        self, params: Params, tokens: Array, positions: Array, cache: CacheT
    ) -> tuple[Array, CacheT]:
        """Run the layers: [B, C] int32 tokens at [B, C] positions to [B, C, H] and the cache."""
        return self.module.apply({"params": params}, tokens, positions, cache)  # pyright: ignore

    def logits(self, params: Params, hidden: Array) -> Array:
        """Final norm and head: [..., H] to [..., V] float32."""
        return self.module.apply({"params": params}, hidden, method="logits")  # pyright: ignore

    def init(self, key: Array) -> Params:
        """Random parameters, for tests and sizes; also under ``jax.eval_shape``."""
        return self.module.init(key, method="init_all")["params"]


class Decoder(nn.Module):
    """Embedding, ``num_layers`` blocks, final norm and head (tied or its own)."""

    config: ModelConfig
    dtype: jnp.dtype

    def setup(self):
        """Declare the parts; their names are the parameter paths."""
        config, dtype = self.config, self.dtype
        self.embed = nn.Embed(config.vocab_size, config.hidden_size, dtype=dtype, param_dtype=dtype)
        self.layers = [Block(config, dtype, layer) for layer in range(config.num_layers)]
        self.final_norm = RMSNorm(config.rms_norm_eps, dtype)
        if not config.tie_word_embeddings:
            self.lm_head = _dense(config.vocab_size, dtype, bias=False)

    def __call__(self, tokens: Array, positions: Array, cache: CacheT) -> tuple[Array, CacheT]:
        """Map [B, C] tokens at [B, C] positions to [B, C, H], before the final norm."""
        rotation = rotary_embedding(self.config, positions)
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden, cache = layer(hidden, rotation, cache)
        return hidden, cache

    def logits(self, hidden: Array) -> Array:
        """Map [..., H] to [..., V] float32."""
        hidden = self.final_norm(hidden)
        if self.config.tie_word_embeddings:
            return _matmul_transposed(hidden, self.embed.embedding)
        return self.lm_head(hidden).astype(jnp.float32)

    def init_all(self) -> Array:
        """Touch every parameter, for ``init``."""
        tokens = jnp.zeros((1, 1), jnp.int32)
        hidden, _ = self(tokens, tokens, _NoCache())
        return self.logits(hidden)


class Block(nn.Module):
    """One decoder layer: attention and gated MLP, each on a normed residual."""

    config: ModelConfig
    dtype: jnp.dtype
    layer: int

    @nn.compact
    def __call__(
        self, hidden: Array, rotation: tuple[Array, Array], cache: CacheT
    ) -> tuple[Array, CacheT]:
        """Map [B, C, H] to [B, C, H], and the cache to the next."""
        config, dtype = self.config, self.dtype
        normed = RMSNorm(config.rms_norm_eps, dtype, name="input_norm")(hidden)
        attended, cache = Attention(config, dtype, self.layer, name="attention")(
            normed, rotation, cache
        )
        hidden = hidden + attended
        normed = RMSNorm(config.rms_norm_eps, dtype, name="post_attention_norm")(hidden)
        return hidden + GatedMLP(config, dtype, name="mlp")(normed), cache


class Attention(nn.Module):
    """Project, rotate, hand over to the cache, project back."""

    config: ModelConfig
    dtype: jnp.dtype
    layer: int

    @nn.compact
    def __call__(
        self, hidden: Array, rotation: tuple[Array, Array], cache: CacheT
    ) -> tuple[Array, CacheT]:
        """Map [B, C, H] to [B, C, H], and the cache to the next."""
        config = self.config
        project = partial(_dense, dtype=self.dtype, bias=config.attention_bias)
        query = project(config.num_heads * config.head_dim, name="q_proj")(hidden)
        key = project(config.num_kv_heads * config.head_dim, name="k_proj")(hidden)
        value = project(config.num_kv_heads * config.head_dim, name="v_proj")(hidden)
        batch, length, _ = hidden.shape
        query = query.reshape(batch, length, config.num_heads, config.head_dim)
        key = key.reshape(batch, length, config.num_kv_heads, config.head_dim)
        value = value.reshape(batch, length, config.num_kv_heads, config.head_dim)
        output, cache = cache.attend(
            self.layer, rotate(query, rotation), rotate(key, rotation), value
        )
        output = output.reshape(batch, length, config.num_heads * config.head_dim)
        back = _dense(config.hidden_size, self.dtype, bias=config.attention_out_bias, name="o_proj")
        return back(output), cache


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    config: ModelConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, hidden: Array) -> Array:
        """Map [..., H] to [..., H]."""
        config = self.config
        project = partial(_dense, dtype=self.dtype, bias=config.mlp_bias)
        gate = project(config.intermediate_size, name="gate_proj")(hidden)
        up = project(config.intermediate_size, name="up_proj")(hidden)
        return project(config.hidden_size, name="down_proj")(nn.silu(gate) * up)


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 and cast back before the scale, as HF does."""

    epsilon: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, hidden: Array) -> Array:
        """Map [..., H] to [..., H] in the module's dtype."""
        scale = self.param("scale", nn.initializers.ones, hidden.shape[-1:], self.dtype)
        wide = hidden.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(mean_square + self.epsilon)
        return normed.astype(self.dtype) * scale.reshape((1,) * (hidden.ndim - 1) + scale.shape)


def rotary_embedding(config: ModelConfig, positions: Array) -> tuple[Array, Array]:
    """Cosine and sine of every rotation angle, [B, C, 1, D / 2] float32 each."""
    frequencies = jnp.asarray(config.rope_inverse_frequencies())
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies[None, None, None]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Array, rotation: tuple[Array, Array]) -> Array:
    """Rotate [B, C, heads, D]: pair (i, i + D/2) by its angle, in float32, back to x's dtype."""
    cosine, sine = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = [first * cosine - second * sine, second * cosine + first * sine]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def _dense(features: int, dtype: DTypeLike, *, bias: bool, name: str | None = None) -> nn.Dense:
    return nn.Dense(features, use_bias=bias, dtype=dtype, param_dtype=dtype, name=name)


def _matmul_transposed(hidden: Array, embedding: Array) -> Array:
    """[..., H] times [V, H] transposed, float32; the embedding is read as it lies."""
    contract = (((hidden.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(hidden, embedding, contract, preferred_element_type=jnp.float32)


class _NoCache:
    """Attention output for shapes alone, when parameters are initialised."""

    def attend(self, layer, query, key, value):
        del layer, key, value
        return query, self
