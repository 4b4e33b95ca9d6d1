"""Intervals of a benchmark average, and of the difference of two policies on the same examples."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

RESAMPLES = 10_000


@dataclasses.dataclass(frozen=True)
class Interval:
    """An average and its percentile interval, in the unit of the scores.

    Attributes:
      value: of the scores as they are.
      low: 2.5th percentile over the resamples (for ``level`` 0.95).
      high: 97.5th percentile.
    """

    value: float
    low: float
    high: float


Scores = Mapping[str, Sequence[float]]
"""Task -> the score of each of its examples."""


def interval(scores: Scores, *, level: float = 0.95, seed: int = 0) -> Interval:
    """Bootstrap interval of the macro average: the mean over tasks of their mean scores.

    Examples are drawn with replacement inside each task, so that every task keeps its weight.

    Args:
      scores: at least one task, each with at least one example.
      level: probability mass of the interval, in (0, 1).
      seed: of the resampling.

    Raises:
      ValueError: no task, a task without examples, or ``level`` out of range.
    """
    return _interval(_columns(scores), level, seed)


def paired_interval(
    scores: Scores, against: Scores, *, level: float = 0.95, seed: int = 0
) -> Interval:
    """Bootstrap interval of how far ``scores`` lie above ``against`` in the macro average.

    Paired: each resample takes the same examples of both, so what an example is worth to either
    cancels out. 0 outside the interval is a difference at that level.

    Args:
      scores: as of ``interval``.
      against: the same tasks and examples, in the same order.
      level: probability mass of the interval, in (0, 1).
      seed: of the resampling.

    Returns:
      An ``Interval`` of the difference.

    Raises:
      ValueError: the two differ in tasks or numbers of examples, or as ``interval``.

    >>> paired_interval({"a": [1.0, 0.5]}, {"a": [0.5, 0.0]})
    Interval(value=0.5, low=0.5, high=0.5)
    """
    sizes = {task: len(rows) for task, rows in scores.items()}
    other = {task: len(rows) for task, rows in against.items()}
    if sizes != other:
        raise ValueError(f"expected scores of the same examples, got {sizes} against {other}")
    mine, theirs = _columns(scores), _columns(against)
    return _interval([a - b for a, b in zip(mine, theirs, strict=True)], level, seed)


def _columns(scores: Scores) -> list[np.ndarray]:
    if not scores or not all(len(rows) for rows in scores.values()):
        raise ValueError(f"expected at least one example of each task, got {dict(scores)}")
    return [np.asarray(scores[task], np.float64) for task in sorted(scores)]


def _interval(columns: list[np.ndarray], level: float, seed: int) -> Interval:
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must be in (0, 1), got {level!r}")
    rng = np.random.default_rng(seed)
    total = np.zeros(RESAMPLES)
    for column in columns:
        # How often each example is drawn; one row is one resample.
        times = rng.multinomial(len(column), np.full(len(column), 1 / len(column)), size=RESAMPLES)
        total += times @ column / len(column)
    tail = 50 * (1 - level)
    low, high = np.percentile(total / len(columns), [tail, 100 - tail])
    value = float(np.mean([column.mean() for column in columns]))
    return Interval(value, float(low), float(high))
