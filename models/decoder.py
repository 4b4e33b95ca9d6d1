"""A decoder-only transformer in Flax; the model families differ by configuration only."""

import dataclasses
from functools import partial

import flax.linen as nn
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from inertiakv_jax.config import ModelConfig
from inertiakv_jax.models.experts import ExpertsMLP
from inertiakv_jax.models.layers import (
    ACTIVATIONS,
    RMSNorm,
    Rotation,
    linear,
    matmul_transposed,
    rotary_embedding,
    rotate,
    scaled,
    soft_cap,
)
from inertiakv_jax.typing import CacheT, Params


@dataclasses.dataclass(frozen=True)
class DecoderModel:
    """The decoder as the library's ``typing.Model``: pure functions of explicit parameters.

    Attributes:
      config: sizes and constants.
      dtype: of parameters, activations, keys and values: "float32" or "bfloat16".
      quantization: "int8": the projections of every layer have int8 weights with one scale per
        output; None: they are of ``dtype`` like the rest.
      mesh: devices over which experts are split; None for one, or where there are none.

    Example:
      >>> import jax
      >>> config = ModelConfig("llama", vocab_size=32, hidden_size=16, intermediate_size=24,
      ...                      num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
      >>> model = DecoderModel(config)
      >>> sorted(model.init(jax.random.key(0)))
      ['embed', 'final_norm', 'layers_0', 'lm_head']
    """

    config: ModelConfig
    dtype: str = "float32"
    quantization: str | None = None
    mesh: Mesh | None = None

    def __post_init__(self):
        if self.quantization not in (None, "int8"):
            raise ValueError(
                f"quantization {self.quantization!r} is not supported; supported: None, 'int8'"
            )

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
    def vocab_size(self) -> int:
        """V."""
        return self.config.vocab_size

    @property
    def max_positions(self) -> int:
        """Longest text, in tokens."""
        return self.config.max_position_embeddings

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """One window in tokens per layer, the query's own included; None attends to all."""
        return self.config.sliding_windows

    @property
    def module(self) -> "Decoder":
        """The Flax module."""
        return Decoder(self.config, jnp.dtype(self.dtype), self.quantization == "int8", self.mesh)

    def hidden(
        self, params: Params, tokens: Array, positions: Array, cache: CacheT
    ) -> tuple[Array, CacheT]:
        """Run the layers: [B, C] int32 tokens at [B, C] positions to [B, C, H] and the cache."""
        return self.module.apply({"params": params}, tokens, positions, cache)  # pyright: ignore

    def logits(self, params: Params, hidden: Array) -> Array:
        """Final norm and head: [..., H] to [..., V] float32."""
        return self.module.apply({"params": params}, hidden, method="logits")  # pyright: ignore

    def rotary(self, positions: Array) -> Rotation:
        """The rotation of layers without a window: cosine and sine, [B, C, 1, D / 2] float32."""
        return rotary_embedding(self.config, positions)

    def init(self, key: Array) -> Params:
        """Random parameters, for tests and sizes; also under ``jax.eval_shape``."""
        return self.module.init(key, method="init_all")["params"]


class Decoder(nn.Module):
    """Embedding, ``num_layers`` blocks, final norm and head (tied or its own)."""

    config: ModelConfig
    dtype: jnp.dtype
    int8: bool = False
    mesh: Mesh | None = None

    def setup(self):
        """Declare the parts; their names are the parameter paths."""
        config, dtype = self.config, self.dtype
        self.embed = nn.Embed(config.vocab_size, config.hidden_size, dtype=dtype, param_dtype=dtype)
        self.layers = [
            Block(config, dtype, self.int8, self.mesh, i) for i in range(config.num_layers)
        ]
        self.final_norm = _norm(config, dtype)
        if not config.tie_word_embeddings:
            self.lm_head = linear(config.vocab_size, dtype, bias=False)

    def __call__(self, tokens: Array, positions: Array, cache: CacheT) -> tuple[Array, CacheT]:
        """Map [B, C] tokens at [B, C] positions to [B, C, H], before the final norm."""
        config = self.config
        rotation = rotary_embedding(config, positions)
        local_rotation = rotary_embedding(config, positions, local=True)
        hidden = self.embed(tokens)
        if config.scale_embeddings:
            # Rounded to the model's dtype first, as these models were trained.
            hidden = hidden * jnp.asarray(config.hidden_size**0.5, self.dtype)
        for index, layer in enumerate(self.layers):
            local = index in config.local_layers
            hidden, cache = layer(hidden, local_rotation if local else rotation, cache)
        return hidden, cache

    def logits(self, hidden: Array) -> Array:
        """Map [..., H] to [..., V] float32."""
        hidden = self.final_norm(hidden)
        if self.config.tie_word_embeddings:
            logits = matmul_transposed(hidden, self.embed.embedding)
        else:
            logits = self.lm_head(hidden).astype(jnp.float32)
        return soft_cap(logits, self.config.logits_soft_cap)

    def init_all(self) -> Array:
        """Touch every parameter, for ``init``."""
        tokens = jnp.zeros((1, 1), jnp.int32)
        hidden, _ = self(tokens, tokens, _NoCache())
        return self.logits(hidden)


class Block(nn.Module):
    """One decoder layer: attention and MLP, each on a normed residual."""

    config: ModelConfig
    dtype: jnp.dtype
    int8: bool
    mesh: Mesh | None
    layer: int

    @nn.compact
    def __call__(self, hidden: Array, rotation: Rotation, cache: CacheT) -> tuple[Array, CacheT]:
        """Map [B, C, H] to [B, C, H], and the cache to the next."""
        config, dtype = self.config, self.dtype
        norm = partial(_norm, config, dtype)
        attention = Attention(config, dtype, self.int8, self.layer, name="attention")
        if config.experts is not None and config.has_experts(self.layer):
            mlp = ExpertsMLP(config, config.experts, dtype, self.int8, self.mesh, name="mlp")
        else:
            mlp = GatedMLP(config, dtype, self.int8, name="mlp")
        attended, cache = attention(norm(name="input_norm")(hidden), rotation, cache)
        if config.post_norms:
            hidden = hidden + norm(name="post_attention_norm")(attended)
            mapped = mlp(norm(name="pre_feedforward_norm")(hidden))
            return hidden + norm(name="post_feedforward_norm")(mapped), cache
        hidden = hidden + attended
        # Hugging Face's name; without norms on the outputs it is the norm before the MLP.
        return hidden + mlp(norm(name="post_attention_norm")(hidden)), cache


class Attention(nn.Module):
    """Project, rotate, hand over to the cache, project back."""

    config: ModelConfig
    dtype: jnp.dtype
    int8: bool
    layer: int

    @nn.compact
    def __call__(self, hidden: Array, rotation: Rotation, cache: CacheT) -> tuple[Array, CacheT]:
        """Map [B, C, H] to [B, C, H], and the cache to the next."""
        config = self.config
        query = self._heads(hidden, config.num_heads, "q_proj")
        key = self._heads(hidden, config.num_kv_heads, "k_proj")
        value = self._heads(hidden, config.num_kv_heads, "v_proj")
        if config.qk_norm:
            query = _norm(config, self.dtype, name="q_norm")(query)
            key = _norm(config, self.dtype, name="k_norm")(key)
        # The cache divides by sqrt(D); what a model wants otherwise goes into its queries.
        query_scale = (config.head_dim / (config.query_scale_dim or config.head_dim)) ** 0.5
        output, cache = cache.attend(
            self.layer,
            rotate(query, scaled(rotation, query_scale)),
            rotate(key, rotation),
            value,
            soft_cap=config.attention_soft_cap,
        )
        output = output.reshape(*hidden.shape[:-1], config.num_heads * config.head_dim)
        back = self._linear(config.hidden_size, bias=config.attention_out_bias, name="o_proj")
        return back(output), cache

    def _heads(self, hidden: Array, heads: int, name: str) -> Array:
        """Project [B, C, H] to [B, C, heads, D]."""
        width = heads * self.config.head_dim
        projected = self._linear(width, bias=self.config.attention_bias, name=name)(hidden)
        return projected.reshape(*hidden.shape[:-1], heads, self.config.head_dim)

    def _linear(self, features: int, *, bias: bool, name: str) -> nn.Module:
        return linear(features, self.dtype, bias=bias, int8=self.int8, name=name)


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x))."""

    config: ModelConfig
    dtype: jnp.dtype
    int8: bool

    @nn.compact
    def __call__(self, hidden: Array) -> Array:
        """Map [..., H] to [..., H]."""
        config = self.config
        project = partial(linear, dtype=self.dtype, bias=config.mlp_bias, int8=self.int8)
        gate = project(config.intermediate_size, name="gate_proj")(hidden)
        up = project(config.intermediate_size, name="up_proj")(hidden)
        activated = ACTIVATIONS[config.activation](gate)
        return project(config.hidden_size, name="down_proj")(activated * up)


def _norm(config: ModelConfig, dtype: jnp.dtype, *, name: str | None = None) -> RMSNorm:
    return RMSNorm(config.rms_norm_eps, dtype, config.unit_offset_norms, name=name)


class _NoCache:
    """Attention output for shapes alone, when parameters are initialised."""

    def attend(self, layer, query, key, value, soft_cap=None):
        del layer, key, value, soft_cap
        return query, self
