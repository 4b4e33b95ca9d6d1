"""What a model's layers talk to: caches that store, attend and score. The only door to kernels."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from inertiakv_jax import scoring
from inertiakv_jax.numerics import MASK_VALUE
from inertiakv_jax.pallas_kernels.decode_attention.api import (
    check_implementation,
    decode_attention,
)
from inertiakv_jax.sharding import CACHE, PARTIAL_SCORES, ROW, SLOTS, TOKEN_HEADS


@dataclasses.dataclass(frozen=True)
class Execution:
    """How decode attention is run. Static; the default serves every machine.

    Attributes:
      implementation: of the kernel: None takes the best for the device that is compiled for;
        "xla", "tpu" or "gpu" names one, which raises where it cannot run.
      mesh: with axes "data" (rows) and "model" (heads), over which state and parameters lie; None
        for one device. The kernel then runs on each device over its own rows and heads.
    """

    implementation: str | None = None
    mesh: Mesh | None = None

    def __post_init__(self):
        check_implementation(self.implementation)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeCache:
    """The cache of one decode step: one new token a row, attending to all that is held.

    Satisfies ``typing.AttentionCache``. Evicting and ageing of utilities happen once a step,
    outside; layers only add up their part of the increment, and devices only their heads' part
    of that: one sum over devices a step, none a layer.
    """

    keys: tuple[Array, ...]  # L x [B, K, S, D]
    values: tuple[Array, ...]  # L x [B, K, S, D]
    slot: Array  # [B] int32, where the new token goes; S writes nowhere (a finished row)
    valid: Array  # [B, S] bool, held slots, the new token's included
    layer_weights: Array  # [L] float32, weight of each layer's score in the increment
    increment: Array | None  # [devices of "model", B, S] float32, weighted scores so far; None: off
    execution: Execution = dataclasses.field(metadata={"static": True}, default=Execution())

    def attend(
        self, layer: int, query: Array, key: Array, value: Array
    ) -> tuple[Array, "DecodeCache"]:
        """Write one token, attend, add the layer's score. Shapes as in ``AttentionCache``, C=1."""
        scored = self.increment is not None
        attend = functools.partial(
            _write_and_attend,
            num_heads=query.shape[2],
            scored=scored,
            implementation=self.execution.implementation,
        )
        if self.execution.mesh is not None:
            attend = jax.shard_map(
                attend,
                mesh=self.execution.mesh,
                in_specs=(*[TOKEN_HEADS] * 3, CACHE, CACHE, ROW, SLOTS),
                out_specs=(TOKEN_HEADS, CACHE, CACHE, PARTIAL_SCORES if scored else None),
                check_vma=False,  # a Pallas kernel does not say how its outputs vary
            )
        output, keys, values, score = attend(
            query, key, value, self.keys[layer], self.values[layer], self.slot, self.valid
        )
        increment = self.increment
        if increment is not None and score is not None:
            increment = increment + self.layer_weights[layer] * score
        cache = dataclasses.replace(
            self,
            keys=_replace_at(self.keys, layer, keys),
            values=_replace_at(self.values, layer, values),
            increment=increment,
        )
        return output, cache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillCache:
    """The cache during prefill: C new tokens a row at slots offset .. offset+C-1, causal.

    Satisfies ``typing.AttentionCache``. Slot number equals position here; rows are padded on the
    right, so no token ever sees padding. C divides S and ``offset``.
    """

    keys: tuple[Array, ...]  # L x [B, K, S, D]
    values: tuple[Array, ...]  # L x [B, K, S, D]
    offset: Array  # [] int32, position of the chunk's first token

    def attend(
        self, layer: int, query: Array, key: Array, value: Array
    ) -> tuple[Array, "PrefillCache"]:
        """Write a chunk and attend to it and all before it. Shapes as in ``AttentionCache``."""
        zero = jnp.zeros_like(self.offset)  # a literal 0 is int64 under jax_enable_x64
        start = (zero, zero, self.offset, zero)
        keys = jax.lax.dynamic_update_slice(self.keys[layer], key.swapaxes(1, 2), start)
        values = jax.lax.dynamic_update_slice(self.values[layer], value.swapaxes(1, 2), start)
        output = causal_chunk_attention(query, keys, values, self.offset)
        cache = dataclasses.replace(
            self,
            keys=_replace_at(self.keys, layer, keys),
            values=_replace_at(self.values, layer, values),
        )
        return output, cache


def causal_chunk_attention(query: Array, keys: Array, values: Array, offset: Array) -> Array:
    """Causal attention of a chunk of queries to a cache, one block of keys at a time.

    The softmax is carried as running maximum, sum and output (online softmax, arXiv 1805.02867),
    so the largest temporary is [B, N, C, C], whatever the length of the text.

    Args:
      query: [B, C, N, D], the tokens at slots offset .. offset+C-1.
      keys: [B, K, S, D], C divides S; slots from offset+C on are not read.
      values: [B, K, S, D].
      offset: [] int32, a multiple of C.

    Returns:
      [B, C, N, D] in the dtype of ``query``.
    """
    batch, chunk, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    # [B, K, G * C, D]: all queries of a kv head as the rows of one matrix product.
    rows = query.reshape(batch, chunk, num_kv_heads, group, head_dim)
    rows = rows.transpose(0, 2, 3, 1, 4).reshape(batch, num_kv_heads, group * chunk, head_dim)
    rows = rows * jnp.asarray(head_dim**-0.5, rows.dtype)
    query_index = jnp.tile(jnp.arange(chunk), group)[:, None]
    causal = query_index >= jnp.arange(chunk)[None]  # [G * C, C], of the last block

    def attend_block(index, carry, *, mask=None):
        maximum, total, output = carry
        key = jax.lax.dynamic_slice_in_dim(keys, index * chunk, chunk, axis=2)
        value = jax.lax.dynamic_slice_in_dim(values, index * chunk, chunk, axis=2)
        logits = jnp.einsum("bkqd,bksd->bkqs", rows, key, preferred_element_type=jnp.float32)
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
    carry = jax.lax.fori_loop(0, last, attend_block, carry)
    _, total, output = attend_block(last, carry, mask=causal[None, None])
    output = (output / total).reshape(batch, num_kv_heads, group, chunk, head_dim)
    return output.transpose(0, 3, 1, 2, 4).reshape(query.shape).astype(query.dtype)


def _write_and_attend(
    query: Array,
    key: Array,
    value: Array,
    keys: Array,
    values: Array,
    slot: Array,
    valid: Array,
    *,
    num_heads: int,
    scored: bool,
    implementation: str | None,
) -> tuple[Array, Array, Array, Array | None]:
    """One layer on one device: attention output, caches, its heads' part [1, B, S] of the score.

    ``num_heads`` counts the query heads of all devices.
    """
    keys = _write_token(keys, key[:, 0], slot)
    values = _write_token(values, value[:, 0], slot)
    output, mass = decode_attention(
        query[:, 0], keys, values, valid, return_mass=scored, implementation=implementation
    )
    score = None if mass is None else scoring.attention(mass, num_heads)[None]
    return output[:, None], keys, values, score


def _write_token(cache: Array, token: Array, slot: Array) -> Array:
    """Put a [B, K, D] key or value into slot [B] of [B, K, S, D], in place; slot S is dropped.

    One scatter row per kv head, at least two, and a barrier behind: XLA:CPU (jax 0.10) turns the
    update of a single row into one it fuses with each reader, copying the cache three times a step.
    """
    batch, num_kv_heads, slots, head_dim = cache.shape
    rows, heads, places = jnp.arange(batch)[:, None], jnp.arange(num_kv_heads)[None], slot[:, None]
    if batch == num_kv_heads == 1:
        heads = jnp.zeros((1, 2), jnp.int32)
        places = jnp.concatenate([places, jnp.full_like(places, slots + 1)], axis=1)  # dropped
        token = jnp.broadcast_to(token, (1, 2, head_dim))
    written = cache.at[rows, heads, places].set(token, mode="drop", unique_indices=True)
    return jax.lax.optimization_barrier(written)


def _replace_at(leaves: tuple[Array, ...], index: int, leaf: Array) -> tuple[Array, ...]:
    return (*leaves[:index], leaf, *leaves[index + 1 :])
