"""Scores of a prompt's tokens for prefill-time methods, per layer and kv head."""

import jax
import jax.numpy as jnp
from jax import Array

from inertiakv_jax import eviction
from inertiakv_jax.observation import ObservedMoments
from inertiakv_jax.prefill_method import PrefillMethod
from inertiakv_jax.typing import RotaryModel

SINKS = 4
"""First tokens whose queries are outliers (arXiv 2510.00636)."""
FUTURE_POSITIONS = 512
"""Positions of future queries that Expected Attention averages over."""


def snapkv(mass: Array, lengths: Array, window: int, pool: int) -> Array:
    """Attention of the last ``window`` queries, averaged over ``pool`` neighbours.

    Args:
      mass: [E, B, K, S] float32, summed over the window's queries and each group.
      lengths: [B] int32.
      window: queries observed; their own tokens get no say in their neighbours' mean.
      pool: odd, tokens averaged; beyond the ends counts as 0.

    Returns:
      [E, B, K, S] float32.

    Source: SnapKV, arXiv 2404.14469.
    """
    slots = mass.shape[-1]
    before = jnp.arange(slots, dtype=jnp.int32)[None] < (lengths - window)[:, None]
    mass = jnp.where(before[None, :, None], mass, 0.0)
    padded = jnp.pad(mass, ((0, 0), (0, 0), (0, 0), (pool // 2, pool // 2)))
    total = sum(padded[..., shift : shift + slots] for shift in range(pool))
    return jnp.asarray(total) / pool


def average_rotation(model: RotaryModel, lengths: Array) -> tuple[Array, Array]:
    """Mean cosine and sine over the positions that follow each prompt, [B, D / 2] float32 each."""
    future = lengths[:, None] + jnp.arange(FUTURE_POSITIONS, dtype=jnp.int32)[None]
    cosine, sine = model.rotary(future)
    return cosine[:, :, 0].mean(axis=1), sine[:, :, 0].mean(axis=1)


def expected_attention(
    seen: ObservedMoments, keys: Array, values: Array, valid: Array, average: tuple[Array, Array]
) -> Array:
    """Attention that the next queries are expected to give, times the value's norm.

    Queries are taken as Gaussian with the moments of the prompt's; E[exp(q k)] is then
    exp(mean k + k cov k / 2).

    Args:
      seen: moments of the prompt's unrotated queries.
      keys: [B, K, S, D].
      values: [B, K, S, D].
      valid: [B, S] bool.
      average: of ``average_rotation``.

    Returns:
      [B, K, S] float32.

    Source: Expected Attention, arXiv 2510.00636.
    """
    batch, num_kv_heads, slots, head_dim = keys.shape
    count = jnp.maximum(seen.count, 1.0)[:, None, None, None]
    mean = _rotate(seen.mean, average)
    covariance = _rotate(seen.scatter / count, average)
    covariance = _rotate(covariance.swapaxes(-1, -2), average)
    key = keys.astype(jnp.float32)
    mean = mean.reshape(batch, num_kv_heads, -1, head_dim)
    covariance = covariance.reshape(*mean.shape, head_dim)
    linear = jnp.einsum("bkgd,bksd->bkgs", mean, key) * head_dim**-0.5
    square = jnp.einsum("bksi,bkgij,bksj->bkgs", key, covariance, key) / (2 * head_dim)
    beyond_sinks = valid & (jnp.arange(slots)[None] >= SINKS)
    logits = jnp.where(beyond_sinks[:, None, None], linear + square, -jnp.inf)
    probability = jnp.where(beyond_sinks[:, None, None], jax.nn.softmax(logits, axis=-1), 0.0)
    return probability.mean(axis=2) * jnp.linalg.norm(values.astype(jnp.float32), axis=-1)


def _rotate(x: Array, average: tuple[Array, Array]) -> Array:
    """Rotate the last axis of [B, ..., D] by the averaged rotation."""
    half = x.shape[-1] // 2
    cosine, sine = (a.reshape(-1, *(1,) * (x.ndim - 2), half) for a in average)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine], axis=-1
    )


def keep_across_heads(scores: Array, valid: Array, budgets: Array, method: PrefillMethod) -> Array:
    """Share out the budgets of a layer's heads, or of all heads, by score.

    Args:
      scores: [E, B, K, S] float32.
      valid: [B, S] bool.
      budgets: [B] int32, tokens a head keeps on average.
      method: ``head_budgets`` "layer", where a head keeps ``safeguard`` of its own budget by its
        own ranking, or "model".

    Returns:
      [E, B, K, S] bool. Of equal scores the lower position goes first, then the lower head.

    Source: Ada-KV, arXiv 2407.11550; KVzip, arXiv 2505.23416.
    """
    layers, batch, num_kv_heads, slots = scores.shape
    position = jnp.arange(slots, dtype=jnp.int32)
    valid = jnp.broadcast_to(valid[None, :, None], scores.shape)
    if method.head_budgets == "layer" and method.safeguard > 0:
        safe = (budgets.astype(jnp.float32) * method.safeguard).astype(jnp.int32)
        safe = jnp.maximum(safe, 1)
        own = eviction.select_kept(
            scores,
            jax.lax.broadcasted_iota(jnp.int32, scores.shape, 3),
            valid,
            valid,
            jnp.broadcast_to(safe[None, :, None], scores.shape[:-1]),
        )
        scores = jnp.where(own, jnp.inf, scores)
    # Heads that share a budget become one ranking, over tokens of all of them.
    axes = (0, 1, 2, 3) if method.head_budgets == "layer" else (1, 0, 2, 3)
    heads = num_kv_heads if method.head_budgets == "layer" else layers * num_kv_heads
    lead = (layers, batch) if method.head_budgets == "layer" else (batch,)

    def together(x):
        return x.transpose(axes).reshape(*lead, heads * slots)

    place = position[None] * heads + jnp.arange(heads, dtype=jnp.int32)[:, None]
    place = jnp.broadcast_to(place.reshape((1,) * len(lead) + (-1,)), (*lead, heads * slots))
    total = budgets * heads
    total = jnp.broadcast_to(total[None], lead) if len(lead) == 2 else total
    together_valid = together(valid)
    kept = eviction.select_kept(together(scores), place, together_valid, together_valid, total)
    if method.head_budgets == "layer":
        return kept.reshape(scores.shape)
    return kept.reshape(batch, layers, num_kv_heads, slots).swapaxes(0, 1)
