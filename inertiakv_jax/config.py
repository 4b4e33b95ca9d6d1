"""Sizes and constants of a decoder: everything that tells one model family from another."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, fields

import numpy as np

from inertiakv_jax.rope_scaling import RopeScaling, inverse_frequencies

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text")
"""Supported families, by ``model_type`` of config.json."""

ACTIVATIONS = ("silu", "gelu_tanh")
MAX_LAYERS = 10_000  # a corrupt file must not make us count to a billion


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in place of the MLP.

    Attributes:
        num_experts: X, experts of a layer.
        num_per_token: experts that each token is sent to, the ones its router likes best.
        intermediate_size: width of one expert.
        normalize_weights: the weights of a token's experts are scaled to sum to 1.
        dense_layers: layers that keep a plain MLP of ``ModelConfig.intermediate_size``.
    """

    num_experts: int
    num_per_token: int
    intermediate_size: int
    normalize_weights: bool = True
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for sizes that no mixture can have."""
        _check_sizes(self)
        if self.num_per_token > self.num_experts:
            raise ValueError(
                f"num_per_token must be at most num_experts, got {self.num_per_token} and "
                f"{self.num_experts}"
            )


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of one decoder-only model.

    Attributes:
        family: one of ``FAMILIES``.
        vocab_size: V, rows of the embedding.
        hidden_size: H, width of the residual stream.
        intermediate_size: width of the MLP.
        num_layers: L, decoder layers.
        num_heads: N, query heads.
        num_kv_heads: K, key-value heads; divides N.
        head_dim: D, width of one head; even.
        rms_norm_eps: added to the mean square in every RMSNorm.
        rope_theta: base of the rotary frequencies.
        rope_scaling: None for plain rotary embeddings.
        local_rope_theta: base in ``local_layers``, without scaling; None: as everywhere.
        max_position_embeddings: longest sequence, in tokens, the model was made for.
        tie_word_embeddings: logits use the embedding; there is no lm_head.
        attention_bias: q, k and v projections have biases.
        attention_out_bias: the output projection of attention has a bias.
        mlp_bias: the three MLP projections have biases.
        qk_norm: each head's query and key is normed before it is rotated.
        post_norms: the outputs of attention and MLP are normed before they are added, too.
        unit_offset_norms: norm weights are stored as their difference from 1.
        activation: of the MLP, "silu" or "gelu_tanh".
        scale_embeddings: embeddings are multiplied by sqrt(H).
        query_scale_dim: attention logits are divided by its square root; None: by D's.
        attention_soft_cap: attention logits x become cap * tanh(x / cap); None: they stay.
        logits_soft_cap: the same for the model's logits.
        sliding_window: tokens that ``local_layers`` attend to, the query's own included.
        local_layers: layers, ascending, that attend to the window only.
        experts: None for plain MLPs.
        bos_token_id: token that begins a text, or None.
        eos_token_ids: tokens that end a text, in order of declaration; may be empty.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    unit_offset_norms: bool = False
    activation: str = "silu"
    scale_embeddings: bool = False
    query_scale_dim: float | None = None
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    sliding_window: int | None = None
    local_layers: tuple[int, ...] = ()
    experts: ExpertsConfig | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for sizes that no decoder can have."""
        if self.family not in FAMILIES:
            raise ValueError(f"family {self.family!r} is not one of {', '.join(FAMILIES)}")
        _check_sizes(self)
        if self.num_layers > MAX_LAYERS:
            raise ValueError(f"num_layers must be at most {MAX_LAYERS}, got {self.num_layers}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and "
                f"{self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation {self.activation!r} is not one of {', '.join(ACTIVATIONS)}"
            )
        self._check_constants()
        self._check_layers()
        tokens = (*self.eos_token_ids, *(() if self.bos_token_id is None else [self.bos_token_id]))
        if any(not 0 <= token < 2**31 for token in tokens):
            raise ValueError(f"bos/eos token ids must lie in 0 .. 2**31 - 1, got {tokens}")

    def _check_constants(self) -> None:
        for name, lowest in (
            *(("rms_norm_eps", 0.0), ("rope_theta", 1.0), ("local_rope_theta", 1.0)),
            *(("query_scale_dim", 0.0), ("attention_soft_cap", 0.0), ("logits_soft_cap", 0.0)),
        ):
            value = getattr(self, name)
            if value is not None and not lowest < value < math.inf:
                raise ValueError(f"{name} must be a number above {lowest:g}, got {value!r}")

    def _check_layers(self) -> None:
        for name, layers in (
            ("local_layers", self.local_layers),
            ("dense_layers", self.experts.dense_layers if self.experts else ()),
        ):
            ascending = all(a < b for a, b in itertools.pairwise(layers))
            if not ascending or (layers and not 0 <= layers[0] <= layers[-1] < self.num_layers):
                raise ValueError(
                    f"{name} must be ascending indices of {self.num_layers} layers, got {layers}"
                )
        if self.local_layers and (self.sliding_window is None or self.sliding_window < 1):
            raise ValueError(
                f"local_layers need a sliding_window of at least 1, got {self.sliding_window}"
            )

    @property
    def num_query_groups(self) -> int:
        """G = N // K, query heads that share one key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """One window in tokens per layer, None for a layer that attends to all.

        A window as long as the longest text hides nothing and counts as none.
        """
        window = self.sliding_window
        if window is None or window >= self.max_position_embeddings:
            return (None,) * self.num_layers
        return tuple(window if i in self.local_layers else None for i in range(self.num_layers))

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has a mixture of experts instead of an MLP."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of keys and values by which one more token lets the full cache grow.

        Layers with a sliding window do not count: theirs stops growing at the window.

        Args:
            dtype_bytes: bytes of one number of the cache: 4 for float32, 2 for bfloat16.
        """
        return self.sliding_windows.count(None) * self._kv_bytes_of_a_layer(dtype_bytes)

    def window_kv_bytes(self, dtype_bytes: int) -> int:
        """Bytes of keys and values that the layers with a sliding window hold, all full."""
        windows = sum(window for window in self.sliding_windows if window is not None)
        return windows * self._kv_bytes_of_a_layer(dtype_bytes)

    def _kv_bytes_of_a_layer(self, dtype_bytes: int) -> int:
        return 2 * self.num_kv_heads * self.head_dim * dtype_bytes

    def rope_inverse_frequencies(self) -> np.ndarray:
        """Radians per position of each rotated pair, [D / 2] float32, scaling applied."""
        return inverse_frequencies(self.head_dim, self.rope_theta, self.rope_scaling)

    def local_rope_inverse_frequencies(self) -> np.ndarray:
        """The same in ``local_layers``."""
        if self.local_rope_theta is None:
            return self.rope_inverse_frequencies()
        return inverse_frequencies(self.head_dim, self.local_rope_theta, None)


def _check_sizes(config: ExpertsConfig | ModelConfig) -> None:
    """Raise ValueError for an integer field below 1."""
    for field in fields(config):
        # `from __future__ import annotations` makes field types strings.
        if field.type == "int" and getattr(config, field.name) < 1:
            raise ValueError(f"{field.name} must be at least 1, got {getattr(config, field.name)}")
