"""What the learned scorer learns from: queries, keys and attention of a frozen model, per layer.

E counts the layers without a sliding window, the only ones that are ever scored; T is the length of
a text, Q the number of its queries that are looked at.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from inertiakv_jax import scoring
from inertiakv_jax.numerics import MASK_VALUE
from inertiakv_jax.observation import block_logits, query_rows
from inertiakv_jax.prefill_attention import chunk_attention
from inertiakv_jax.scoring import Attended, LearnedParams
from inertiakv_jax.typing import Model, Params

FEATURES = 64
"""Of the bilinear form (arXiv 2609.03515 appendix E)."""

KL_WEIGHT = 0.1
"""Likewise."""

TEXT_MULTIPLE = 64
"""A text is read in blocks of 256 tokens, or of 64; its length must be a multiple."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Recorded:
    """What the scorer sees in each layer, and what it is to say."""

    queries: Array  # [E, B, Q, N, D] model dtype, rotated
    keys: Array  # [E, B, K, T, D] likewise
    log_attention: Array  # [E, B, Q, T] float32, log of the attention scorer's score
    seen: Array  # [B, Q, T] bool, the tokens up to each query, itself included


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecordingCache:
    """Causal attention to a text read in one piece, with notes on some of its queries.

    Satisfies ``typing.AttentionCache`` for C = T tokens from position 0 on.
    """

    positions: Array  # [B, Q] int32, the queries noted
    queries: tuple[Array, ...] = ()  # of each layer without a window so far: [B, Q, N, D]
    keys: tuple[Array, ...] = ()  # likewise, [B, K, T, D]
    log_attention: tuple[Array, ...] = ()  # likewise, [B, Q, T] float32
    windows: tuple[int | None, ...] = dataclasses.field(metadata={"static": True}, default=())

    def attend(
        self,
        layer: int,
        query: Array,
        key: Array,
        value: Array,
        *,
        soft_cap: float | None = None,
    ) -> tuple[Array, "RecordingCache"]:
        """Attend, and note what the wanted queries are and see. Shapes as in ``AttentionCache``."""
        window = self.windows[layer]
        keys, values = key.swapaxes(1, 2), value.swapaxes(1, 2)
        output = _causal_attention(query, keys, values, window, soft_cap)
        if window is not None:
            return output, self
        wanted = jnp.take_along_axis(query, self.positions[..., None, None], axis=1)
        target = log_mean_attention(wanted, keys, self.positions, soft_cap)
        cache = dataclasses.replace(
            self,
            queries=(*self.queries, wanted),
            keys=(*self.keys, keys),
            log_attention=(*self.log_attention, target),
        )
        return output, cache


def record(model: Model, params: Params, tokens: Array, positions: Array) -> Recorded:
    """Run the model once over a batch of texts and take notes. Pure, for use under ``jit``.

    Args:
      model: static; at least one of its layers has no sliding window.
      params: its parameters.
      tokens: [B, T] int32, no padding; T a multiple of ``TEXT_MULTIPLE``.
      positions: [B, Q] int32 in 0 .. T - 1, the queries to note.
    """
    batch, length = tokens.shape
    cache = RecordingCache(positions, windows=model.sliding_windows)
    places = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    _, cache = model.hidden(params, tokens, places, cache)
    return Recorded(
        queries=jnp.stack(cache.queries),
        keys=jnp.stack(cache.keys),
        log_attention=jnp.stack(cache.log_attention),
        seen=_seen(positions, length),
    )


def log_mean_attention(
    queries: Array, keys: Array, positions: Array, soft_cap: float | None = None
) -> Array:
    """Log of the attention scorer's scores, log mean_n p[n, i]; no probability underflows.

    Args:
      queries: [B, Q, N, D].
      keys: [B, K, T, D].
      positions: [B, Q] int32, of the queries, which see the keys up to their own.
      soft_cap: as in ``typing.AttentionCache``.

    Returns:
      [B, Q, T] float32; ``MASK_VALUE`` where a query does not see.

    Source: arXiv 2609.03515 eq. 1.
    """
    (batch, count, num_heads, _), (num_kv_heads, length) = queries.shape, keys.shape[1:3]
    logits = block_logits(query_rows(queries, num_kv_heads), keys, soft_cap)
    logits = logits.reshape(batch, num_heads, count, length)
    seen = _seen(positions, length)
    log_p = jax.nn.log_softmax(jnp.where(seen[:, None], logits, MASK_VALUE), axis=-1)
    mean = jax.nn.logsumexp(log_p, axis=1) - jnp.log(jnp.float32(num_heads))
    return jnp.where(seen, mean, MASK_VALUE)


def untrained(key: Array, model: Model) -> LearnedParams:
    """A head to begin with: the mean logit over heads, seen through a random projection.

    That logit, mean_n <q_n, k_k(n)> / sqrt(D), is a bilinear form of the concatenated heads with
    K * D features. W_k projects the keys onto 64 random directions, orthonormal; W_q does the same
    with each query head as if it lay at the place of its kv head; the scale makes up for what the
    projection loses on average. Ours: the paper does not say.

    Args:
      key: of ``jax.random``.
      model: gives N, K and D.
    """
    num_heads, num_kv_heads, head_dim = model.num_heads, model.num_kv_heads, model.head_dim
    width = num_kv_heads * head_dim
    rank = min(FEATURES, width)
    directions = jax.nn.initializers.orthogonal()(key, (width, FEATURES), jnp.float32)
    directions = directions.reshape(num_kv_heads, head_dim, FEATURES)
    scale = (width / rank * FEATURES**0.5 / (num_heads * head_dim**0.5)) ** 0.5
    key_weights = scale * directions
    return LearnedParams(jnp.repeat(key_weights, num_heads // num_kv_heads, axis=0), key_weights)


def learned_scores(weights: LearnedParams, recorded: Recorded) -> Array:
    """[E, B, Q, T] float32: ``scoring.learned`` itself, query by query; 0 for what is not seen."""

    def score(query, keys, seen):
        """[B, T] of one query a row, [B, N, D], over keys [B, K, T, D] of which it sees [B, T]."""
        positions = jnp.zeros_like(seen, jnp.int32)[:, None]
        row = jnp.zeros(len(query), jnp.int32)
        layer = Attended(query, keys, keys, seen[:, None], positions, row, None, learned=weights)
        return scoring.learned(layer).mean(axis=1)

    over_queries = jax.vmap(score, in_axes=(1, None, 1), out_axes=1)
    return jax.vmap(over_queries, in_axes=(0, 0, None))(
        recorded.queries, recorded.keys, recorded.seen
    )


def distillation_loss(scores: Array, recorded: Recorded) -> Array:
    """MSE + 0.1 KL between the head's scores and the attention scorer's, mean over all queries.

    MSE compares the *logarithms* of attention with the scores as they are, each less its mean over
    the tokens the query sees. This is ours, for the paper does not say what it compares.
    Probabilities themselves are about 1 / T, so that squares of their differences are next to
    nothing, and what is left is said by the few tokens that have most of the mass; logarithms ask
    for the order of all tokens. Means are taken off, for they rank nothing. Both terms then have
    the same optimum, and every layer's scores the same unit (nats), as adding them up over layers
    needs.

    KL is that of softmax(scores) from attention, at temperature 1.

    Args:
      scores: [E, B, Q, T] float32.
      recorded: what attention says.

    Returns:
      [] float32.

    Source: arXiv 2609.03515 appendix E; the normalisation is ours.
    """
    seen = jnp.broadcast_to(recorded.seen[None], scores.shape)
    target = recorded.log_attention
    error = jnp.square(_centred(scores, seen) - _centred(target, seen))
    mse = jnp.mean(error, axis=-1, where=seen)
    log_softmax = jax.nn.log_softmax(jnp.where(seen, scores, MASK_VALUE), axis=-1)
    kl = jnp.sum(jnp.exp(target) * (target - log_softmax), axis=-1, where=seen)
    return jnp.mean(mse + KL_WEIGHT * kl)


def _centred(x: Array, seen: Array) -> Array:
    return x - jnp.mean(x, axis=-1, where=seen, keepdims=True)


def _causal_attention(query, keys, values, window, soft_cap) -> Array:
    """[B, T, N, D], one block of queries after the other: memory linear in T."""
    length = query.shape[1]
    size = 256 if length % 256 == 0 else TEXT_MULTIPLE
    blocks = query.reshape(query.shape[0], length // size, size, *query.shape[2:]).swapaxes(0, 1)
    attend = partial(chunk_attention, window=window, soft_cap=soft_cap)
    offsets = jnp.arange(0, length, size, dtype=jnp.int32)
    outputs = jax.lax.map(lambda x: attend(x[0], keys, values, x[1])[0], (blocks, offsets))
    return outputs.swapaxes(0, 1).reshape(query.shape)


def _seen(positions: Array, length: int) -> Array:
    """[B, Q, T] bool, tokens up to each of [B, Q] positions."""
    return jnp.arange(length, dtype=jnp.int32)[None, None] <= positions[..., None]
