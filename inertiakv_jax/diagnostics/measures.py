"""Measures of kept sets and rankings, in NumPy.

Masks and numbers are said of every place in the text: [layers, heads, P], where ``layers`` is E or
1 (one ranking for all), ``heads`` is K or 1, and P counts the tokens of prompt and continuation.
Axes of 1 broadcast. A measure is the mean over heads, one number a layer.
"""

import numpy as np


def jaccard(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Size of the intersection over that of the union; 1 of two empty sets.

    Args:
      first: [..., P] bool, a set for each of the leading axes.
      second: likewise; the leading axes broadcast.

    Returns:
      [...] float64 in [0, 1].

    >>> jaccard(np.array([True, True, False]), np.array([True, False, True])).item()
    0.3333333333333333
    """
    union = (first | second).sum(axis=-1)
    return np.where(union == 0, 1.0, (first & second).sum(axis=-1) / np.maximum(union, 1))


def average_ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1 along the last axis; equals share the mean of theirs.

    >>> average_ranks(np.array([10.0, 30.0, 10.0, 20.0])).tolist()
    [1.5, 4.0, 1.5, 3.0]
    """
    order = np.argsort(values, axis=-1, kind="stable")
    ordered = np.take_along_axis(values, order, axis=-1)
    first_of_equals = np.ones(ordered.shape, np.bool_)
    first_of_equals[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    # Each row begins with True, so no group of equals reaches into the next row.
    group = np.cumsum(first_of_equals) - 1
    place = np.broadcast_to(np.arange(1.0, values.shape[-1] + 1), values.shape)
    mean = np.bincount(group, weights=place.ravel()) / np.bincount(group)
    ranks = np.empty(values.shape)
    np.put_along_axis(ranks, order, mean[group].reshape(values.shape), axis=-1)
    return ranks


def spearman(first: np.ndarray, second: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Spearman's rank correlation over the tokens held: Pearson's of the average ranks.

    Args:
      first: [..., P] finite numbers.
      second: likewise.
      held: [..., P] bool; the numbers of other tokens are not looked at.

    Returns:
      [...] float64 in [-1, 1]; NaN where all held tokens are equal in one of the two.

    >>> held = np.array([True, True, True, False])
    >>> spearman(np.array([1.0, 2.0, 3.0, 9.0]), np.array([5.0, 7.0, 6.0, 0.0]), held).item()
    0.5
    """
    shape = np.broadcast_shapes(first.shape, second.shape, held.shape)
    held = np.broadcast_to(held, shape)
    count = np.maximum(held.sum(axis=-1, keepdims=True), 1)

    def centred(values):
        # What is not held ranks behind, so the ranks of what is are the same without it.
        ranks = average_ranks(np.where(held, values, np.inf))
        return np.where(held, ranks - (ranks * held).sum(axis=-1, keepdims=True) / count, 0.0)

    x, y = centred(first), centred(second)
    scale = np.sqrt((x * x).sum(axis=-1) * (y * y).sum(axis=-1))
    return np.where(scale > 0.0, (x * y).sum(axis=-1) / np.where(scale > 0.0, scale, 1.0), np.nan)


def churn(now: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Share of a set [..., P] that was not in the one before: [...] float64 in [0, 1].

    >>> churn(np.array([True, False, True]), np.array([True, True, False])).item()
    0.5
    """
    return (now & ~before).sum(axis=-1) / np.maximum(now.sum(axis=-1), 1)


def changes_at_most_one(now: np.ndarray, before: np.ndarray) -> np.ndarray:
    """1 where at most one token of the set [..., P] is new, else 0: [...] float64."""
    return ((now & ~before).sum(axis=-1) <= 1).astype(np.float64)


def by_layer(measure: np.ndarray) -> np.ndarray:
    """Mean over heads of [layers, heads], NaN left out; NaN where there is nothing else."""
    known = ~np.isnan(measure)
    total = np.where(known, measure, 0.0).sum(axis=-1)
    count = known.sum(axis=-1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def mean(measure: np.ndarray) -> float:
    """Mean of all numbers but NaN; NaN where there is nothing else."""
    known = measure[~np.isnan(measure)]
    return float(known.mean()) if known.size else float("nan")
