"""KVzip: score a prompt's tokens by how much repeating the prompt attends to them.

The prompt is read a second time, part by part, as the continuation "repeat this: <part>" of itself.
A token's score is the most attention that any query of its part gives it, in any query head of its
group, among the first four tokens, the part, and the repetition so far. Source: arXiv 2505.23416.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from inertiakv_jax.distributed import fetch
from inertiakv_jax.numerics import MASK_VALUE
from inertiakv_jax.observation import block, block_logits, query_rows
from inertiakv_jax.prefill_method import PrefillMethod
from inertiakv_jax.state import KVState
from inertiakv_jax.typing import Model, Params

PART = 2048
"""Tokens of the prompt that are repeated at a time."""
OVERLAP = 8
"""Tokens of the part before that the request quotes."""
SINKS = 4
CHUNK = 256


def reconstruction_scores(
    model: Model, params: Params, state: KVState, tokens: np.ndarray, method: PrefillMethod
) -> Array:
    """Scores [E, B, K, S] float32 of the prompts.

    Args:
      model: the decoder, without sliding windows.
      params: its parameters.
      state: fresh from prefill.
      tokens: [B, S] int32, the prompts, padded to the slots of the cache.
      method: ``repeat_first`` and ``repeat_next``, what asks for the repetition.
    """
    lengths, slots = fetch(state.next_position), state.num_slots
    chunk = CHUNK if slots % CHUNK == 0 else 64
    part = min(PART, slots)
    # One program for all parts: room for the longest request.
    request = max(len(method.repeat_first), len(method.repeat_next) + OVERLAP)
    request += len(method.repeat_suffix)
    width = -(-(request + part) // chunk) * chunk
    scores = []
    for start in range(0, slots, part):
        size = min(part, slots - start)
        if start >= lengths.max():
            scores.append(jnp.full((*_head_shape(model, len(lengths)), size), 0.0, jnp.float32))
            continue
        repeated, counts = _repetition(tokens, lengths, start, size, method, width)
        scores.append(
            _score_part(
                model,
                params,
                state.keys,
                state.values,
                state.next_position,
                repeated,
                counts,
                jnp.int32(start),
                chunk=chunk,
                size=size,
            )
        )
    return jnp.concatenate(scores, axis=-1)


def _head_shape(model: Model, batch: int) -> tuple[int, int, int]:
    return model.num_layers, batch, model.num_kv_heads


def _repetition(
    tokens: np.ndarray, lengths: np.ndarray, start: int, size: int, method, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """What each row reads to repeat its part: [B, width] ids, and how many of them count [B]."""
    repeated = np.zeros((len(tokens), width), np.int32)
    counts = np.zeros(len(tokens), np.int32)
    for row, (ids, length) in enumerate(zip(tokens, lengths, strict=True)):
        part = ids[start : min(start + size, length)]
        if not len(part):
            continue
        if start:
            request = [*method.repeat_next, *ids[start - OVERLAP : start]]
        else:
            request = method.repeat_first
        text = [*request, *method.repeat_suffix, *part]
        repeated[row, : len(text)] = text
        counts[row] = len(text)
    return repeated, counts


@functools.partial(jax.jit, static_argnames=("model", "chunk", "size"))
def _score_part(
    model, params, keys, values, lengths, repeated, counts, start, *, chunk: int, size: int
) -> Array:
    batch, width = repeated.shape
    shape = (batch, model.num_kv_heads, width, model.head_dim)
    empty = tuple(jnp.zeros(shape, model.dtype) for _ in keys)
    score = tuple(jnp.zeros((*shape[:2], size), jnp.float32) for _ in keys)

    def read_chunk(index, carry):
        own_keys, own_values, score = carry
        offset = index * chunk
        places = offset + jnp.arange(chunk, dtype=jnp.int32)[None]
        ids = jax.lax.dynamic_slice_in_dim(repeated, offset, chunk, axis=1)
        cache = ReconstructionCache(
            keys, values, own_keys, own_values, score, lengths, counts, offset, start
        )
        _, cache = model.hidden(params, ids, lengths[:, None] + places, cache)
        return cache.own_keys, cache.own_values, cache.score

    chunks = (jnp.max(counts) + chunk - 1) // chunk
    *_, score = jax.lax.fori_loop(0, chunks, read_chunk, (empty, empty, score))
    return jnp.stack(score)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReconstructionCache:
    """The prompt's cache, read only, and that of its repetition. Satisfies ``AttentionCache``."""

    keys: tuple[Array, ...]  # L x [B, K, S, D], of the prompt
    values: tuple[Array, ...]  # L x [B, K, S, D]
    own_keys: tuple[Array, ...]  # L x [B, K, width, D], of the repetition so far
    own_values: tuple[Array, ...]  # L x [B, K, width, D]
    score: tuple[Array, ...]  # L x [B, K, size] float32, of the part, the highest so far
    lengths: Array  # [B] int32, of the prompts
    counts: Array  # [B] int32, tokens of the repetitions
    offset: Array  # [] int32, first token of the chunk within the repetition
    start: Array  # [] int32, first token of the part

    def attend(
        self,
        layer: int,
        query: Array,
        key: Array,
        value: Array,
        *,
        soft_cap: float | None = None,
    ) -> tuple[Array, "ReconstructionCache"]:
        """Attend to the prompt and the repetition so far; note the most attention to the part."""
        zero = jnp.zeros_like(self.offset)
        at = (zero, zero, self.offset, zero)
        own_keys = jax.lax.dynamic_update_slice(self.own_keys[layer], key.swapaxes(1, 2), at)
        own_values = jax.lax.dynamic_update_slice(self.own_values[layer], value.swapaxes(1, 2), at)
        batch, chunk, num_heads, head_dim = query.shape
        group = num_heads // key.shape[2]
        rows = query_rows(query, key.shape[2])
        within = jnp.arange(chunk, dtype=jnp.int32)
        apart = jnp.tile(within, group)[:, None] - within[None]
        score, size = self.score[layer], self.score[layer].shape[2]

        def prompt_block(index, carry):
            place = (index * chunk + within)[None]
            there = (place < self.lengths[:, None])[:, None, None]
            in_part = (place >= self.start) & (place < self.start + size)
            ranked = in_part | (place < jnp.minimum(self.start, SINKS))
            ranked = there & ranked[:, None, None]
            cache = (self.keys[layer], self.values[layer])
            return _softmax_block(carry, rows, cache, index, chunk, there, ranked, soft_cap)

        def own_block(index, carry):
            causal = (apart + (self.offset - index * chunk) >= 0)[None, None]
            cache = (own_keys, own_values)
            return _softmax_block(carry, rows, cache, index, chunk, causal, causal, soft_cap)

        shape = (*rows.shape[:3], 1)
        start = jnp.full(shape, MASK_VALUE, jnp.float32), jnp.zeros(shape, jnp.float32)
        carry = (start, start, jnp.zeros(rows.shape, jnp.float32))
        prompt_blocks = (jnp.max(self.lengths) + chunk - 1) // chunk
        carry = jax.lax.fori_loop(0, prompt_blocks, prompt_block, carry)
        carry = jax.lax.fori_loop(0, self.offset // chunk + 1, own_block, carry)
        (_, total), (maximum, ranked_total), output = carry

        real = ((self.offset + within)[None] < self.counts[:, None]).astype(jnp.float32)
        weight = jnp.tile(real, (1, group))[:, None, :, None] / ranked_total

        def score_block(index, score):
            place = (self.start + index * chunk + within)[None]
            there = (place < self.lengths[:, None])[:, None, None]
            logits = block_logits(
                rows, block(self.keys[layer], self.start // chunk + index, chunk), soft_cap
            )
            probability = jnp.where(there, jnp.exp(logits - maximum) * weight, 0.0)
            at = (jnp.zeros_like(index), jnp.zeros_like(index), index * chunk)
            old = jax.lax.dynamic_slice(score, at, (*score.shape[:2], chunk))
            new = jnp.maximum(old, jnp.max(probability, axis=2))
            return jax.lax.dynamic_update_slice(score, new, at)

        score = jax.lax.fori_loop(0, size // chunk, score_block, score)
        output = (output / total).reshape(batch, key.shape[2], group, chunk, head_dim)
        output = output.transpose(0, 3, 1, 2, 4).reshape(query.shape).astype(query.dtype)
        cache = dataclasses.replace(
            self,
            own_keys=_replace_at(self.own_keys, layer, own_keys),
            own_values=_replace_at(self.own_values, layer, own_values),
            score=_replace_at(self.score, layer, score),
        )
        return output, cache


def _softmax_block(carry, rows, cache, index, chunk, there, ranked, soft_cap):
    """One block of two online softmaxes: of all that is there, with output, and of ``ranked``."""
    (maximum, total), (ranked_maximum, ranked_total), output = carry
    logits = block_logits(rows, block(cache[0], index, chunk), soft_cap)
    value = block(cache[1], index, chunk)
    ranked_maximum, ranked_total, _, _ = _accumulate(ranked_maximum, ranked_total, logits, ranked)
    maximum, total, rescale, weights = _accumulate(maximum, total, logits, there)
    added = jnp.einsum(
        "bkqs,bksd->bkqd", weights.astype(value.dtype), value, preferred_element_type=jnp.float32
    )
    return (maximum, total), (ranked_maximum, ranked_total), output * rescale + added


def _accumulate(maximum, total, logits, mask):
    logits = jnp.where(mask, logits, MASK_VALUE)
    new_maximum = jnp.maximum(maximum, jnp.max(logits, axis=-1, keepdims=True))
    weights = jnp.where(mask, jnp.exp(logits - new_maximum), 0.0)
    rescale = jnp.exp(maximum - new_maximum)
    return (
        new_maximum,
        total * rescale + jnp.sum(weights, axis=-1, keepdims=True),
        rescale,
        weights,
    )


def _replace_at(leaves: tuple[Array, ...], index: int, leaf: Array) -> tuple[Array, ...]:
    return (*leaves[:index], leaf, *leaves[index + 1 :])
