"""Scorers on a layer small enough to work out by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from inertiakv_jax import scoring
from inertiakv_jax.scoring import SCORERS, Attended, LearnedParams

NAN = float("nan")
# One row, two query heads on each of two kv heads, four slots of which the last is free.
KEYS = [[[3, 4], [0, 2], [1, 0], [NAN, NAN]], [[0, 1], [0, 5], [0, -1], [NAN, NAN]]]
VALUES = [[[1, 0], [0, 3], [2, 0], [NAN, NAN]], [[2, 0], [0, 2], [0, 2], [NAN, NAN]]]
MASS = [[1.0, 0.6, 0.4, 0.0], [0.2, 0.2, 1.6, 0.0]]  # sums over slots to the two query heads


def layer(*, per_head_slots=False, **changes):
    valid = jnp.asarray([[[True, True, True, False]]])
    positions = jnp.asarray([[[4, 0, 7, -1]]], jnp.int32)
    if per_head_slots:
        valid, positions = (jnp.broadcast_to(x, (1, 2, 4)) for x in (valid, positions))
    fields = {
        "query": jnp.asarray([[[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 2.0]]]),
        "keys": jnp.asarray([KEYS], jnp.float32),
        "values": jnp.asarray([VALUES], jnp.float32),
        "valid": valid,
        "positions": positions,
        "row": jnp.asarray([3], jnp.int32),
        "mass": jnp.asarray([MASS]),
        "seed": jnp.uint32(5),
        "learned": LearnedParams(
            query=jnp.arange(4, dtype=jnp.float32)[:, None, None] * jnp.ones((4, 2, 4)),
            key=jnp.asarray([[[1.0] * 4, [0.0] * 4], [[0.0] * 4, [-1.0] * 4]]),
        ),
    }
    return Attended(**(fields | changes))


def scores(name, **changes):
    got = SCORERS[name].score(layer(**changes))
    assert got.shape == (1, 2, 4)
    assert got.dtype == jnp.float32
    assert np.asarray(got)[..., 3].tolist() == [[0.0, 0.0]]  # the free slot
    return np.asarray(got)[0, :, :3]


HALF_ATTENTION = [[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]
MEAN = [0.3, 0.2, 0.5]  # of the two kv heads
ENTROPY = -sum(p * np.log(p) for p in MEAN) / np.log(3)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("attention", HALF_ATTENTION),
        # Norms 1, 3, 2 and 2, 2, 2 over their means 2 and 2.
        ("vnorm", [[0.25, 0.45, 0.2], [0.1, 0.1, 0.8]]),
        ("entropy", ENTROPY * np.array(HALF_ATTENTION)),
        ("knorm", [[-5, -2, -1], [-1, -5, -1]]),
        (
            "keydiff",
            [
                # Cosines with (1.6, 1.8); with (0, 1), whatever its length.
                [-(0.96 + 1.44) / 2.40832, -1.8 / 2.40832, -1.6 / 2.40832],
                [-1, -1, 1],
            ],
        ),
        ("recency", [[4, 0, 7], [4, 0, 7]]),
        # Query features: heads 0..3 times their sums 1, 1, 2, 2 of components: 0 + 1 + 4 + 6 = 11,
        # over sqrt(4). Keys: first component of head 0, minus the second of head 1. Twice, for K.
        ("learned", np.array([[3, 0, 1], [-1, -5, 1]]) * 4 * 11 / 2 * 2),
    ],
)
@pytest.mark.parametrize("per_head_slots", [False, True])
def test_scores(name, expected, per_head_slots):
    got = scores(name, per_head_slots=per_head_slots)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_scorers_are_the_ones_of_the_paper():
    assert set(SCORERS) == {
        *("attention", "vnorm", "entropy", "keydiff", "knorm", "recency", "random", "learned")
    }
    assert {name for name, scorer in SCORERS.items() if scorer.needs_mass} == {
        *("attention", "vnorm", "entropy")
    }


@pytest.mark.parametrize("name", [n for n, scorer in SCORERS.items() if not scorer.needs_mass])
def test_scorers_that_need_no_mass(name):
    without = scores(name, mass=None)
    np.testing.assert_array_equal(without, scores(name))


def test_attention_of_one_token_has_entropy_one():
    alone = layer(
        valid=jnp.asarray([[[True, False, False, False]]]),
        mass=jnp.asarray([[[2.0, 0, 0, 0], [2.0, 0, 0, 0]]]),
    )
    assert scoring.entropy(alone).tolist() == [[[1.0, 0, 0, 0], [1.0, 0, 0, 0]]]


def test_random_belongs_to_seed_row_and_position():
    first = scores("random")
    assert first[0].tolist() == first[1].tolist()  # all heads alike
    assert len(set(first[0].tolist())) == 3
    swapped = layer(positions=jnp.asarray([[[7, 4, 0, -1]]], jnp.int32))
    assert np.asarray(scoring.random(swapped))[0, 0, :3].tolist() == first[0, [2, 0, 1]].tolist()
    assert (scores("random", seed=jnp.uint32(6)) != first).all()
    assert (scores("random", row=jnp.asarray([4], jnp.int32)) != first).all()


def test_random_is_uniform():
    """100,000 draws: the mean within 5 standard deviations, all tenths filled alike."""
    count = 100_000
    many = layer(
        keys=jnp.zeros((1, 1, count, 2)),
        valid=jnp.ones((1, 1, count), bool),
        positions=jnp.arange(count, dtype=jnp.int32)[None, None],
    )
    drawn = np.asarray(scoring.random(many)).ravel()
    assert 0 <= drawn.min() < drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 5 * (1 / 12 / count) ** 0.5
    tenths = np.histogram(drawn, bins=10, range=(0, 1))[0]
    assert np.abs(tenths - count / 10).max() < 5 * (count * 0.09) ** 0.5
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 5 / count**0.5


@pytest.mark.parametrize("name", SCORERS)
def test_bfloat16_is_scored_in_float32(name):
    half = {key: jnp.asarray([x], jnp.bfloat16) for key, x in (("keys", KEYS), ("values", VALUES))}
    np.testing.assert_array_equal(scores(name, **half), scores(name))  # small integers are exact


def test_learned_needs_its_weights():
    with pytest.raises(ValueError, match="needs its weights"):
        scoring.learned(layer(learned=None))
