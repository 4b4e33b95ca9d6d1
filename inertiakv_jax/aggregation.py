"""From per-layer scores of a step to one utility per token: a linear recurrence.

The paper runs one exponential moving average through the layers of each step (eq. 4 and
appendix E). Unrolled over the E eligible layers of step t it is

    m_t = decay * m_{t-1} + sum_l layer_weights[l] * s_t[l]

with ``decay = alpha**E`` and ``layer_weights[l] = (1 - alpha) * alpha**(E - l)``, l = 1 .. E. The
two knobs are independent here (ours); linearity means that layers, heads and devices may add up
their parts in any order, and one reduction a step is enough.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array


def sequential_layer_weights(alpha: float, num_layers: int) -> np.ndarray:
    """Weights of the layer-sequential moving average.

    Args:
      alpha: in [0, 1); 0 leaves the last layer alone.
      num_layers: E, at least 1.

    Returns:
      [E] float32, first layer first; sums to 1 - alpha**E.

    Source: arXiv 2609.03515 eq. 4, unrolled (ours).

    >>> sequential_layer_weights(0.5, 3).tolist()
    [0.125, 0.25, 0.5]
    >>> sequential_layer_weights(0.0, 3).tolist()
    [0.0, 0.0, 1.0]
    """
    exponents = np.arange(num_layers - 1, -1, -1, dtype=np.float64)
    return ((1.0 - alpha) * np.power(alpha, exponents)).astype(np.float32)


def mean_utility(scores: Array, valid: Array) -> Array:
    """Mean utility of the tokens each row holds, the prior of its next token.

    Args:
      scores: [..., S] float32.
      valid: [..., S] bool.

    Returns:
      [...] float32; 0 for a row that holds nothing.

    Source: arXiv 2609.03515 appendix E for steps without a refresh; at every step, ours.
    """
    held = jnp.sum(valid, axis=-1).astype(jnp.float32)
    total = jnp.sum(jnp.where(valid, scores, 0.0), axis=-1)
    # Rounded, the mean of equals may fall below them all, and the new token would always go first.
    lowest = jnp.min(jnp.where(valid, scores, jnp.inf), axis=-1)
    highest = jnp.max(jnp.where(valid, scores, -jnp.inf), axis=-1)
    mean = jnp.clip(total / jnp.maximum(held, 1.0), lowest, highest)
    return jnp.where(held > 0.0, mean, 0.0)


def aggregate(scores: Array, increment: Array, decay: Array) -> Array:
    """One step of the recurrence: ``decay * scores + increment``, all float32 [..., S]."""
    return decay * scores + increment
