"""Bootstrap intervals against closed forms."""

import numpy as np
import pytest

from inertiakv_jax.eval.bootstrap import Interval, interval, paired_interval

HALF = [1.0] * 50 + [0.0] * 50  # standard error of the mean: sqrt(0.25 / 100) = 0.05


def test_interval_of_a_coin_is_the_normal_one():
    found = interval({"coin": HALF})
    assert found.value == 0.5
    # 0.5 +- 1.96 * 0.05, within the width of one example
    assert found.low == pytest.approx(0.402, abs=0.011)
    assert found.high == pytest.approx(0.598, abs=0.011)


def test_tasks_weigh_the_same_whatever_their_size():
    found = interval({"small": [1.0], "large": [0.0] * 9})
    assert found == Interval(0.5, 0.5, 0.5)


def test_two_tasks_narrow_the_interval_by_the_root_of_two():
    one, two = interval({"a": HALF}), interval({"a": HALF, "b": HALF})
    assert (two.high - two.low) / (one.high - one.low) == pytest.approx(2**-0.5, abs=0.03)


def test_pairing_removes_what_both_share():
    rng = np.random.default_rng(3)
    hard = rng.uniform(size=200)
    difference = paired_interval({"t": (hard + 0.01).tolist()}, {"t": hard.tolist()})
    assert difference.low == pytest.approx(0.01, abs=1e-12)
    assert difference.high == pytest.approx(0.01, abs=1e-12)


def test_difference_has_the_sign_of_the_first():
    assert paired_interval({"t": [1.0, 1.0]}, {"t": [0.0, 0.0]}) == Interval(1.0, 1.0, 1.0)


def test_same_seed_same_interval_and_order_of_tasks_does_not_matter():
    scores = {"a": HALF, "b": [0.2, 0.9, 0.4]}
    assert interval(scores, seed=5) == interval(dict(reversed(scores.items())), seed=5)
    assert interval(scores, seed=5) != interval(scores, seed=6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: interval({}), "at least one example"),
        (lambda: interval({"a": []}), "at least one example"),
        (lambda: interval({"a": [1.0]}, level=1.0), "level must be in"),
        (lambda: paired_interval({"a": [1.0]}, {"a": [1.0, 0.0]}), "same examples"),
        (lambda: paired_interval({"a": [1.0]}, {"b": [1.0]}), "same examples"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
