"""How well a scorer ranks tokens as attention does."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from inertiakv_jax.aggregation import recurrence

ALPHA = 0.8
"""Of the layer weights of the one ranking that ``Agreement`` tells of: the paper's."""


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How well a head ranks the tokens of held-out texts; means over texts, queries and layers.

    Attributes:
      loss: what training minimises.
      spearman: rank correlation with attention, layer by layer.
      jaccard: of the two top tenths, layer by layer: their intersection over their union.
      shared_spearman: of the one ranking of all layers, as InertiaKV has it: both scores summed
        with the paper's layer weights (alpha 0.8).
      shared_jaccard: likewise.
    """

    loss: float
    spearman: float
    jaccard: float
    shared_spearman: float
    shared_jaccard: float


def agreement(
    loss: float, scores: np.ndarray, log_attention: np.ndarray, seen: np.ndarray
) -> Agreement:
    """Agreement on one text.

    Args:
      loss: what training minimises.
      scores: [E, Q, T] float32, the head's.
      log_attention: likewise, logarithm of attention's.
      seen: [Q, T] bool, the first so many tokens of each query, at least 10.
    """
    _, weights = recurrence(ALPHA, None, "sequential", len(scores), shared=True)
    summed, attended = (np.einsum("e,eqt->qt", weights, x) for x in (scores, np.exp(log_attention)))
    return Agreement(
        loss,
        *rank_agreement(scores, log_attention, seen),
        *rank_agreement(summed, attended, seen),
    )


def mean_agreement(texts: Sequence[Agreement]) -> Agreement:
    """The mean over texts."""
    return Agreement(*np.mean([dataclasses.astuple(text) for text in texts], axis=0).tolist())


def rank_agreement(scores: np.ndarray, target: np.ndarray, seen: np.ndarray) -> tuple[float, float]:
    """How far two rankings of the tokens that a query sees agree.

    Args:
      scores: [..., Q, T] float32.
      target: likewise.
      seen: [Q, T] bool, the first so many tokens of each query, at least 10.

    Returns:
      Spearman's rank correlation, and Jaccard's index of the two top tenths; means over the rest.
    """
    correlations = []
    for query, count in enumerate(seen.sum(axis=-1)):
        x, y = (_centred_ranks(a[..., query, :count]) for a in (scores, target))
        scale = np.sqrt((x * x).sum(axis=-1) * (y * y).sum(axis=-1))
        # Where all tokens have the same score nothing is ranked: correlation 0.
        correlations.append((x * y).sum(axis=-1) / np.where(scale > 0.0, scale, 1.0))
    first, second = (top_tenth(a, np.broadcast_to(seen, a.shape)) for a in (scores, target))
    jaccard = (first & second).sum(axis=-1) / (first | second).sum(axis=-1)
    return float(np.mean(correlations)), float(np.mean(jaccard))


def _centred_ranks(values: np.ndarray) -> np.ndarray:
    """Ranks along the last axis, equals sharing the mean of theirs, less their mean."""
    from scipy import stats  # of the extra 'train'

    ranks = stats.rankdata(values, axis=-1)
    return ranks - ranks.mean(axis=-1, keepdims=True)


def top_tenth(values: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """[..., T] bool, what a policy with ratio 0.9 keeps; of equals, the lower position goes."""
    order = np.argsort(np.where(seen, values, -np.inf), axis=-1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.broadcast_to(np.arange(order.shape[-1]), order.shape), -1)
    return rank >= order.shape[-1] - seen.sum(axis=-1, keepdims=True) // 10
