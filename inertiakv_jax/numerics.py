"""Numeric constants and float32 helpers shared by every layer of the library."""

import jax.numpy as jnp
from jax import Array

# Finite, so that a row whose every logit is masked still has finite differences; far below any
# real logit, so that exp(MASK_VALUE - max) is exactly 0 in float32.
MASK_VALUE = -1e30


def masked_softmax(logits: Array, mask: Array) -> Array:
    """Softmax over the last axis restricted to ``mask``, in float32.

    Args:
      logits: [..., S] float32; entries outside the mask may hold anything, NaN included.
      mask: bool, broadcastable to ``logits``.

    Returns:
      [..., S] float32; exactly 0 outside the mask. Sums to 1, or to 0 where the mask is empty.
    """
    logits = jnp.where(mask, logits, MASK_VALUE)
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    weights = jnp.where(mask, weights, 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total > 0.0, total, 1.0)
