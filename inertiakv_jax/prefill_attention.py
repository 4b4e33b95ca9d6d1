"""The cache while a prompt is read: chunks of queries over blocks of keys."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from inertiakv_jax.numerics import MASK_VALUE
from inertiakv_jax.observation import (
    Observed,
    ObservedMoments,
    Observing,
    block,
    block_logits,
    observe_mass,
    observe_moments,
    query_rows,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillCache:
    """The cache during prefill: C new tokens a row at positions offset .. offset+C-1, causal.

    Satisfies ``typing.AttentionCache``. Rows are padded on the right, so no token ever sees
    padding. C divides every S and ``offset``. The token at position p lies in slot p % S: in a
    layer without a sliding window S exceeds every position, in one with a window it is a ring that
    holds the window and the chunk.
    """

    keys: tuple[Array, ...]  # L x [B, K, S, D]
    values: tuple[Array, ...]  # L x [B, K, S, D]
    offset: Array  # [] int32, position of the chunk's first token
    lengths: Array  # [B] int32, tokens of each row
    observed: tuple[Observed, ...] = ()  # of each layer without a window, if anything is observed
    rotary: tuple[Array, Array] | None = None  # [B, C, 1, D / 2] float32, to undo the rotation
    windows: tuple[int | None, ...] = dataclasses.field(metadata={"static": True}, default=())
    observing: Observing | None = dataclasses.field(metadata={"static": True}, default=None)

    def attend(
        self,
        layer: int,
        query: Array,
        key: Array,
        value: Array,
        *,
        soft_cap: float | None = None,
    ) -> tuple[Array, "PrefillCache"]:
        """Write a chunk and attend to it and all before it. Shapes as in ``AttentionCache``."""
        window = self.windows[layer]
        keys = self._write(self.keys[layer], key, ring=window is not None)
        values = self._write(self.values[layer], value, ring=window is not None)
        output, normalizer = chunk_attention(
            query, keys, values, self.offset, window=window, soft_cap=soft_cap
        )
        observed = self.observed
        if self.observing is not None and window is None:
            index = sum(window is None for window in self.windows[:layer])
            seen = self._observe(observed[index], query, keys, normalizer, soft_cap)
            observed = _replace_at(observed, index, seen)
        cache = dataclasses.replace(
            self,
            keys=_replace_at(self.keys, layer, keys),
            values=_replace_at(self.values, layer, values),
            observed=observed,
        )
        return output, cache

    def _write(self, cache: Array, chunk: Array, *, ring: bool) -> Array:
        chunk = chunk.swapaxes(1, 2)
        place = self.offset % cache.shape[2] if ring else self.offset
        zero = jnp.zeros_like(place)  # a literal 0 is int64 under jax_enable_x64
        start = (zero, zero, place, zero)
        if ring:
            # A row that has ended must not lose its window to the padding behind it.
            old = jax.lax.dynamic_slice(cache, start, chunk.shape)
            going_on = (self.offset < self.lengths)[:, None, None, None]
            chunk = jnp.where(going_on, chunk, old)
        return jax.lax.dynamic_update_slice(cache, chunk, start)

    def _observe(self, seen, query, keys, normalizer, soft_cap) -> Observed:
        assert self.observing is not None
        positions = self.offset + jnp.arange(query.shape[1], dtype=jnp.int32)[None]
        wanted = self.observing.queries(positions, self.lengths[:, None])
        if isinstance(seen, ObservedMoments):
            assert self.rotary is not None
            return observe_moments(seen, query, self.rotary, wanted)
        return observe_mass(seen, query, keys, normalizer, wanted, self.offset, soft_cap)


def chunk_attention(
    query: Array,
    keys: Array,
    values: Array,
    offset: Array,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[Array, tuple[Array, Array]]:
    """Causal attention of a chunk of queries to a cache, one block of keys at a time.

    The softmax is carried as running maximum, sum and output (online softmax, arXiv 1805.02867),
    so the largest temporary is [B, N, C, C], whatever the length of the text.

    Args:
      query: [B, C, N, D], the tokens at positions offset .. offset+C-1.
      keys: [B, K, S, D], C divides S; position p lies in slot p % S. Positions from offset+C on
        are not read.
      values: [B, K, S, D].
      offset: [] int32, a multiple of C.
      window: static; a query attends to this many positions, its own the last. None: to all.
      soft_cap: static; logits x become soft_cap * tanh(x / soft_cap).

    Returns:
      [B, C, N, D] in the dtype of ``query``, and the softmax's maximum and sum of each query,
      [B, K, G * C, 1] float32.
    """
    batch, chunk, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    rows = query_rows(query, num_kv_heads)
    query_index = jnp.tile(jnp.arange(chunk), group)[:, None]
    apart = query_index - jnp.arange(chunk)[None]  # [G * C, C], places from key to query
    causal = apart >= 0

    def attend_block(index, carry, *, mask=None):
        maximum, total, output = carry
        value = block(values, index, chunk)
        logits = block_logits(rows, block(keys, index, chunk), soft_cap)
        if window is not None:
            distance = apart + (offset - index * chunk)
            mask = ((distance >= 0) & (distance < window))[None, None]
        if mask is not None:
            logits = jnp.where(mask, logits, MASK_VALUE)
        new_maximum = jnp.maximum(maximum, jnp.max(logits, axis=-1, keepdims=True))
        weights = jnp.exp(logits - new_maximum)
        rescale = jnp.exp(maximum - new_maximum)
        added = jnp.einsum(
            "bkqs,bksd->bkqd",
            weights.astype(value.dtype),
            value,
            preferred_element_type=jnp.float32,
        )
        total = total * rescale + jnp.sum(weights, axis=-1, keepdims=True)
        return new_maximum, total, output * rescale + added

    shape = (batch, num_kv_heads, group * chunk, 1)
    carry = (
        jnp.full(shape, MASK_VALUE, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape[:3], head_dim), jnp.float32),
    )
    last = offset // chunk
    first = 0 if window is None else jnp.maximum(offset - (window - 1), 0) // chunk
    carry = jax.lax.fori_loop(first, last, attend_block, carry)
    maximum, total, output = attend_block(last, carry, mask=causal[None, None])
    output = (output / total).reshape(batch, num_kv_heads, group, chunk, head_dim)
    output = output.transpose(0, 3, 1, 2, 4).reshape(query.shape).astype(query.dtype)
    return output, (maximum, total)


def _replace_at(leaves: tuple, index: int, leaf) -> tuple:
    return (*leaves[:index], leaf, *leaves[index + 1 :])
