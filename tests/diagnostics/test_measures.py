"""Measures of sets and rankings: every expected number worked out by hand."""

import numpy as np
import pytest

from inertiakv_jax.diagnostics.measures import (
    average_ranks,
    by_layer,
    changes_at_most_one,
    churn,
    jaccard,
    mean,
    spearman,
)


def mask(*places, length=6):
    found = np.zeros(length, np.bool_)
    found[list(places)] = True
    return found


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (mask(0, 1, 2), mask(0, 1, 2), 1.0),
        (mask(0, 1, 2), mask(3, 4), 0.0),
        (mask(0, 1, 2, 3), mask(2, 3, 4, 5), 2 / 6),
        (mask(0), mask(0, 1, 2, 3), 0.25),
        (mask(), mask(), 1.0),
        (mask(), mask(5), 0.0),
    ],
)
def test_jaccard(first, second, expected):
    assert jaccard(first, second) == pytest.approx(expected, abs=1e-15)
    assert jaccard(second, first) == pytest.approx(expected, abs=1e-15)


def test_jaccard_of_one_ranking_and_one_per_layer_and_head():
    shared = mask(0, 1)[None, None]
    per_head = np.stack([mask(0, 1), mask(1, 2), mask(3, 4), mask(0, 1)]).reshape(2, 2, 6)
    found = jaccard(shared, per_head)
    np.testing.assert_allclose(found, [[1.0, 1 / 3], [0.0, 1.0]], atol=1e-15)
    np.testing.assert_allclose(by_layer(found), [2 / 3, 0.5], atol=1e-15)


@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        ([3.0, 1.0, 2.0], [3, 1, 2]),
        ([5.0, 5.0, 5.0], [2, 2, 2]),
        ([1.0, 2.0, 2.0, 0.0], [2, 3.5, 3.5, 1]),
        ([-1.0, 7.0, -1.0, 7.0, 0.0], [1.5, 4.5, 1.5, 4.5, 3]),
        ([4.0], [1]),
    ],
)
def test_average_ranks(values, ranks):
    assert average_ranks(np.array(values)).tolist() == ranks


def test_equals_of_one_row_do_not_reach_into_the_next():
    values = np.array([[[1.0, 2.0], [2.0, 2.0]], [[2.0, 1.0], [1.0, 1.0]]])
    assert average_ranks(values).tolist() == [[[1, 2], [1.5, 1.5]], [[2, 1], [1.5, 1.5]]]


# Without ties 1 - 6 sum(d^2) / (n (n^2 - 1)); with ties Pearson's of the average ranks, by hand:
# ranks (1, 2.5, 2.5, 4) and (1, 3, 2, 4): covariance 4.5, variances 4.5 and 5.
@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 40], 1.0),
        ([1, 2, 3, 4], [9, 8, 7, 6], -1.0),
        ([1, 2, 3, 4, 5], [2, 1, 4, 3, 5], 1 - 6 * 4 / (5 * 24)),
        ([86, 97, 99, 100, 101, 103, 106, 110, 112, 113],
         [2, 20, 28, 27, 50, 29, 7, 17, 6, 12], 1 - 6 * 194 / (10 * 99)),
        ([1, 2, 2, 3], [1, 3, 2, 4], 4.5 / (4.5 * 5) ** 0.5),
    ],
)  # fmt: skip
def test_spearman(first, second, expected):
    first, second = np.array(first, float), np.array(second, float)
    held = np.ones(len(first), np.bool_)
    assert spearman(first, second, held) == pytest.approx(expected, abs=1e-12)
    # Only the order counts, and only of what is held.
    assert spearman(np.exp(first / 50), second**3, held) == pytest.approx(expected, abs=1e-12)
    padded = [np.insert(x, 2, noise) for x, noise in ((first, 1e9), (second, -1e9))]
    assert spearman(*padded, np.insert(held, 2, False)) == pytest.approx(expected, abs=1e-12)


def test_spearman_of_equals_is_unknown():
    held = mask(0, 1, 2)
    same, ramp = np.zeros(6), np.arange(6.0)
    assert np.isnan(spearman(same, ramp, held))
    assert np.isnan(spearman(ramp, ramp, mask(3)))
    assert np.isnan(spearman(ramp, ramp, mask()))


def test_spearman_of_each_ranking():
    scores = np.stack([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])[:, None]  # [2, 1, 3]
    other = np.array([[[3.0, 2.0, 1.0], [1.0, 3.0, 2.0]]])  # [1, 2, 3]
    held = np.ones((1, 1, 3), np.bool_)
    np.testing.assert_allclose(spearman(scores, other, held), [[-1, 0.5], [-1, 0.5]], atol=1e-12)


def test_churn_and_small_changes():
    before = np.stack([mask(0, 1, 2, 3), mask(0, 1, 2, 3), mask(0, 1, 2, 3)])
    now = np.stack([mask(0, 1, 2, 3), mask(0, 1, 2, 4), mask(0, 1, 4, 5)])
    assert churn(now, before).tolist() == [0.0, 0.25, 0.5]
    assert changes_at_most_one(now, before).tolist() == [1.0, 1.0, 0.0]
    assert churn(mask(), mask(0)) == 0.0


def test_means_leave_out_what_is_unknown():
    unknown = float("nan")
    measure = np.array([[1.0, 2.0], [unknown, 5.0], [unknown, unknown]])
    np.testing.assert_array_equal(by_layer(measure), [1.5, 5.0, unknown])
    assert mean(measure) == pytest.approx(8 / 3)
    assert np.isnan(mean(measure[2]))
