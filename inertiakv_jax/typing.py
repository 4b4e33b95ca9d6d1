"""The shape alphabet, and what the library asks of a model.

Letters used in every comment, docstring and einsum:

| letter | meaning            | letter | meaning                             |
|--------|--------------------|--------|-------------------------------------|
| B      | batch rows         | S      | cache slots                         |
| L      | decoder layers     | D      | head_dim                            |
| E      | layers without a   | T      | prompt tokens (a row's own: T_b)    |
|        | sliding window     | W      | sliding window                      |
| N      | query heads        | C      | tokens of one forward (1 in decode) |
| K      | key-value heads    | H      | hidden size                         |
| G      | N // K             | V      | vocabulary                          |
"""

from typing import Any, Protocol, TypeVar, runtime_checkable

from jax import Array

Params = Any
"""A pytree of arrays; only the model looks inside."""

CacheT = TypeVar("CacheT", bound="AttentionCache")


@runtime_checkable
class AttentionCache(Protocol):
    """What a model sees of the KV cache: one method, called once per layer, in layer order."""

    def attend(
        self: CacheT,
        layer: int,
        query: Array,
        key: Array,
        value: Array,
        *,
        soft_cap: float | None = None,
    ) -> tuple[Array, CacheT]:
        """Store the new keys and values, attend to all that is held, and score it if asked.

        Args:
          layer: index of the decoder layer, 0 .. L-1.
          query: [B, C, N, D], rotated for its absolute positions, not scaled.
          key: [B, C, K, D], rotated likewise.
          value: [B, C, K, D].
          soft_cap: static, logits x become soft_cap * tanh(x / soft_cap) (Gemma 2); None: x.

        Returns:
          The attention output, [B, C, N, D] in the dtype of ``query``, and the new cache.
        """
        ...


@runtime_checkable
class Model(Protocol):
    """A decoder-only language model. Must be hashable: it is a static argument under jit."""

    @property
    def num_layers(self) -> int:
        """L."""
        ...

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """One entry a layer. None: it attends to everything, and its tokens can be evicted.

        W: it attends to its last W tokens, the query's own included, keeps just these, and is
        never scored.
        """
        ...

    @property
    def num_heads(self) -> int:
        """N."""
        ...

    @property
    def num_kv_heads(self) -> int:
        """K, divides N."""
        ...

    @property
    def head_dim(self) -> int:
        """D."""
        ...

    @property
    def vocab_size(self) -> int:
        """V: ids are 0 .. V - 1."""
        ...

    @property
    def max_positions(self) -> int:
        """Longest text, in tokens."""
        ...

    @property
    def dtype(self) -> Any:
        """Dtype of activations, keys and values."""
        ...

    def hidden(
        self, params: Params, tokens: Array, positions: Array, cache: CacheT
    ) -> tuple[Array, CacheT]:
        """Run the decoder layers: [B, C] int32 tokens at [B, C] int32 positions to [B, C, H]."""
        ...

    def logits(self, params: Params, hidden: Array) -> Array:
        """Final norm and head: [..., H] to [..., V] float32."""
        ...


def check_model(model: Any) -> None:
    """Raise ValueError unless ``model`` has what ``Model`` asks for."""
    lacking = [name for name in vars(Model) if name[0] != "_" and not hasattr(model, name)]
    if lacking or isinstance(model, type):
        hint = "; of what load returns that is its .model" if hasattr(model, "model") else ""
        raise ValueError(
            f"model must be an object with all of inertiakv_jax.typing.Model, got {model!r:.80}, "
            f"which lacks {', '.join(lacking) or 'being an instance'}{hint}"
        )


@runtime_checkable
class RotaryModel(Model, Protocol):
    """A model that tells how it rotates, for methods that undo it (Expected Attention)."""

    def rotary(self, positions: Array) -> tuple[Array, Array]:
        """Cosine and sine at [B, C] positions: [B, C, 1, D / 2] float32, of pairs (i, i + D/2)."""
        ...
