"""From per-layer scores of a step to one utility per token: a linear recurrence.

The paper runs one exponential moving average through the layers of each step (eq. 4 and
appendix E). Unrolled over the E eligible layers of step t it is

    m_t = decay * m_{t-1} + sum_l layer_weights[l] * s_t[l]

with ``decay = alpha**E`` and ``layer_weights[l] = (1 - alpha) * alpha**(E - l)``, l = 1 .. E. The
two knobs are independent here (ours); linearity means that layers, heads and devices may add up
their parts in any order, and one reduction a step is enough. A factor common to all weights changes
no ranking, so the named shapes are scaled to sum to 1 - decay, or to 1 where nothing is forgotten.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

LAYER_WEIGHTS = ("sequential", "uniform", "last")
"""Named shapes of the layer weights, over the layers of a shared ranking."""

RULES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "layer-sequential": {"layer_weights": "sequential"},  # the paper's; give alpha
        "over-steps": {"layer_weights": "uniform"},  # a moving average over steps; give decay
        "single-step": {"decay": 0.0, "layer_weights": "uniform"},
        "last-layer": {"decay": 0.0, "layer_weights": "last"},  # the paper's alpha = 0
        "cumulative": {"decay": 1.0, "layer_weights": "uniform"},  # eq. 3, as in H2O
    }
)
"""The paper's rules as points of the two knobs: fields of ``Policy``."""


def recurrence(
    alpha: float,
    decay: float | None,
    layer_weights: str | Sequence[float],
    num_layers: int,
    *,
    shared: bool,
) -> tuple[float, np.ndarray]:
    """Decay and layer weights of a policy for a model.

    Args:
      alpha: in [0, 1), coefficient of the moving average.
      decay: in [0, 1], what a step leaves of the utilities. None: what ``alpha`` means, that is
        alpha**E where the average runs through E layers each step, alpha where it runs once.
      layer_weights: one of ``LAYER_WEIGHTS``, or E numbers, used as they are.
      num_layers: E, at least 1.
      shared: one ranking for all layers. False: one for each, of which a weight would change
        nothing, so that all are equal.

    Returns:
      decay, and [E] float32 weights, first layer first.

    Raises:
      ValueError: a number of weights other than E.

    Source: arXiv 2609.03515 eq. 3, eq. 4; as two knobs, ours.

    >>> decay, weights = recurrence(0.5, None, "sequential", 3, shared=True)
    >>> decay, weights.tolist()
    (0.125, [0.125, 0.25, 0.5])
    >>> decay, weights = recurrence(0.5, 1.0, "uniform", 4, shared=True)
    >>> decay, weights.tolist()
    (1.0, [0.25, 0.25, 0.25, 0.25])
    """
    if decay is None:
        decay = alpha**num_layers if shared and layer_weights == "sequential" else alpha
    total = 1.0 if decay == 1.0 else 1.0 - decay
    if not shared:
        return decay, np.full(num_layers, total, np.float32)
    if isinstance(layer_weights, str):
        exponents = np.arange(num_layers - 1, -1, -1, dtype=np.float64)
        shape = {
            "sequential": np.power(alpha, exponents),
            "uniform": np.ones(num_layers),
            "last": exponents == 0.0,
        }[layer_weights]
        return decay, (total * shape / shape.sum()).astype(np.float32)
    if len(layer_weights) != num_layers:
        raise ValueError(
            f"layer_weights has {len(layer_weights)} numbers, but the model has {num_layers} "
            "layers that keep the whole text"
        )
    return decay, np.asarray(layer_weights, np.float32)


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
