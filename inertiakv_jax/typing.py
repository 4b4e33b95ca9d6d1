"""The shape alphabet, and what the library asks of a model.

Letters used in every comment, docstring and einsum:

| letter | meaning            | letter | meaning                             |
|--------|--------------------|--------|-------------------------------------|
| B      | batch rows         | S      | cache slots                         |
| L      | decoder layers     | D      | head_dim                            |
| E      | eligible layers    | T      | prompt tokens (a row's own: T_b)    |
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
        self: CacheT, layer: int, query: Array, key: Array, value: Array
    ) -> tuple[Array, CacheT]:
        """Store the new keys and values, attend to all that is held, and score it if asked.

        Args:
          layer: index of the decoder layer, 0 .. L-1.
          query: [B, C, N, D], rotated for its absolute positions, not scaled.
          key: [B, C, K, D], rotated likewise.
          value: [B, C, K, D].

        Returns:
          The attention output, [B, C, N, D] in the dtype of ``query``, and the new cache.
        """
        ...


@runtime_checkable
class Model(Protocol):
    """A decoder-only language model. Must be hashable: it is a static argument under jit."""

    @property
    def num_layers(self) -> int:
        """L, all of which keep a cache."""
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
