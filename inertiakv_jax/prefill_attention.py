"""The cache while a prompt is read: chunks of queries over blocks of keys."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from inertiakv_jax.numerics import MASK_VALUE
from inertiakv_jax.observation import (
    Observed,
    ObservedMass,
    ObservedMoments,
    Observing,
    block,
    block_logits,
    observe_mass,
    observe_moments,
    query_rows,
)
from inertiakv_jax.sharding import (
    CACHE,
    CONTEXT,
    FULL_CACHE,
    FULL_HEAD_SLOTS,
    GROUP,
    ROW,
    SCALAR,
    SLOTS,
    TOKEN_HEADS,
    TOKEN_QUERIES,
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
    mesh: Mesh | None = dataclasses.field(metadata={"static": True}, default=None)
    """A layout (``sharding.layout``); None for one device."""

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
        index = sum(window is None for window in self.windows[:layer])
        observed = self.observed[index] if self.observing is not None and window is None else None
        mass = observed.mass if isinstance(observed, ObservedMass) else None
        grouped = query.reshape(*query.shape[:2], key.shape[2], -1, query.shape[3])
        attend = self._on_mesh(
            functools.partial(_write_and_attend, window=window, soft_cap=soft_cap),
            window,
            observes=mass is not None,
        )
        output, keys, values, mass = attend(
            (grouped, key, value),
            (self.keys[layer], self.values[layer]),
            (self.offset, self.lengths),
            None if mass is None else (mass, self._wanted(query)),
        )
        if isinstance(observed, ObservedMoments):
            assert self.rotary is not None
            observed = observe_moments(observed, query, self.rotary, self._wanted(query))
        elif mass is not None:
            observed = ObservedMass(mass)
        cache = dataclasses.replace(
            self,
            keys=_replace_at(self.keys, layer, keys),
            values=_replace_at(self.values, layer, values),
            observed=self.observed
            if observed is None
            else _replace_at(self.observed, index, observed),
        )
        return output.reshape(query.shape), cache

    def _wanted(self, query: Array) -> Array:
        """[B, C] bool, the queries that are observed."""
        assert self.observing is not None
        positions = self.offset + jnp.arange(query.shape[1], dtype=jnp.int32)[None]
        return self.observing.queries(positions, self.lengths[:, None])

    def _on_mesh(self, attend, window: int | None, *, observes: bool):
        """``attend`` on every device, over its own rows and heads, and its slots of ``CONTEXT``."""
        if self.mesh is None:
            return attend
        divided = window is None and self.mesh.shape[CONTEXT] > 1
        axes = {"group_axis": GROUP, "context_axis": CONTEXT if divided else None}
        cache = FULL_CACHE if window is None else CACHE
        return jax.shard_map(
            functools.partial(attend, **axes),
            mesh=self.mesh,
            in_specs=(
                (TOKEN_QUERIES, TOKEN_HEADS, TOKEN_HEADS),
                cache,
                (SCALAR, ROW),
                (FULL_HEAD_SLOTS, SLOTS) if observes else None,
            ),
            out_specs=(TOKEN_QUERIES, cache, cache, FULL_HEAD_SLOTS if observes else None),
            check_vma=False,  # what is merged is the same everywhere; loops do not say so
        )


def _write_and_attend(
    token: tuple[Array, Array, Array],
    cache: tuple[Array, Array],
    where: tuple[Array, Array],
    observe: tuple[Array, Array] | None,
    *,
    window: int | None,
    soft_cap: float | None,
    group_axis: str | None = None,
    context_axis: str | None = None,
) -> tuple[Array, Array, Array, Array | None]:
    """One layer on one device: attention output [B, C, K, G, D], keys, values, observed mass.

    ``where`` is the chunk's offset and the rows' lengths; ``observe`` the mass so far and which
    queries add to it.
    """
    (grouped, key, value), (offset, lengths) = token, where
    query = grouped.reshape(*grouped.shape[:2], -1, grouped.shape[-1])
    slots = cache[0].shape[2]
    place, written = offset, None
    if window is not None:
        # A row that has ended must not lose its window to the padding behind it.
        place, written = offset % slots, offset < lengths
    elif context_axis is not None:
        # From here on counted from the first slot on this device, which may not have the place.
        offset = offset - jax.lax.axis_index(context_axis) * slots
        place = jnp.clip(offset, 0, slots - key.shape[1])
        written = jnp.broadcast_to(place == offset, lengths.shape)
    keys = _write_chunk(cache[0], key, place, written)
    values = _write_chunk(cache[1], value, place, written)
    output, normalizer = chunk_attention(
        query, keys, values, offset, window=window, soft_cap=soft_cap, context_axis=context_axis
    )
    mass = None
    if observe is not None:
        mass, wanted = observe
        added = observe_mass(query, keys, normalizer, wanted, offset, soft_cap)
        mass = mass + (added if group_axis is None else jax.lax.psum(added, group_axis))
    return output.reshape(grouped.shape), keys, values, mass


def _write_chunk(cache: Array, chunk: Array, place: Array, written: Array | None) -> Array:
    """Put a [B, C, K, D] chunk into slots ``place`` .. of [B, K, S, D], for rows ``written`` [B].

    None writes all rows, without reading what is there.
    """
    chunk = chunk.swapaxes(1, 2)
    zero = jnp.zeros_like(place)  # a literal 0 is int64 under jax_enable_x64
    start = (zero, zero, place, zero)
    if written is not None:
        old = jax.lax.dynamic_slice(cache, start, chunk.shape)
        chunk = jnp.where(written[:, None, None, None], chunk, old)
    return jax.lax.dynamic_update_slice(cache, chunk, start)


def chunk_attention(
    query: Array,
    keys: Array,
    values: Array,
    offset: Array,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    context_axis: str | None = None,
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
      context_axis: static, mesh axis over which the text's slots are split, inside
        ``jax.shard_map``: offset counts from the first one here, and may lie beyond them.

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
        if mask is None and (window is not None or context_axis is not None):
            distance = apart + (offset - index * chunk)
            mask = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            mask = mask[None, None]
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
    if context_axis is not None:
        blocks = jnp.clip(last + 1, 0, keys.shape[2] // chunk)
        carry = jax.lax.fori_loop(0, blocks, attend_block, carry)
        maximum, total, output = _merge(carry, context_axis)
    else:
        first = 0 if window is None else jnp.maximum(offset - (window - 1), 0) // chunk
        carry = jax.lax.fori_loop(first, last, attend_block, carry)
        mask = causal if window is None else causal & (apart < window)
        maximum, total, output = attend_block(last, carry, mask=mask[None, None])
    output = (output / total).reshape(batch, num_kv_heads, group, chunk, head_dim)
    output = output.transpose(0, 3, 1, 2, 4).reshape(query.shape).astype(query.dtype)
    return output, (maximum, total)


def _merge(part: tuple[Array, Array, Array], axis: str) -> tuple[Array, Array, Array]:
    """Running maximum, sum and output of one softmax whose keys are on several devices."""
    maximum = jax.lax.pmax(part[0], axis)
    share = jnp.exp(part[0] - maximum)
    return maximum, jax.lax.psum(part[1] * share, axis), jax.lax.psum(part[2] * share, axis)


def _replace_at(leaves: tuple, index: int, leaf) -> tuple:
    return (*leaves[:index], leaf, *leaves[index + 1 :])
