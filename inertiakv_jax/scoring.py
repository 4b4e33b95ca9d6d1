"""Scorers: one number per held token and layer; larger means keep."""

from jax import Array


def attention(mass: Array, num_heads: int) -> Array:
    """Mean over all query heads of the softmax probability on each token.

    Args:
      mass: [B, K, S] float32, the probability summed over each kv head's G query heads.
      num_heads: N, query heads of the layer. Where ``mass`` holds some of its kv heads only, the
        result is their part of the mean.

    Returns:
      [B, S] float32, sums to 1 over the valid slots of a row.

    Source: arXiv 2609.03515 eq. 1; under grouped-query attention the mean runs over all N heads.
    """
    return mass.sum(axis=1) / num_heads
