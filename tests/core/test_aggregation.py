import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inertiakv_jax import aggregation, eviction
from inertiakv_jax.aggregation import RULES, recurrence


def sequential(alpha, layers):
    return recurrence(alpha, None, "sequential", layers, shared=True)


@pytest.mark.parametrize(
    ("alpha", "layers", "expected"),
    [
        (0.8, 1, [0.2]),
        (0.8, 3, [0.128, 0.16, 0.2]),
        (0.5, 4, [0.0625, 0.125, 0.25, 0.5]),
        (0.0, 3, [0.0, 0.0, 1.0]),  # the last layer alone
    ],
)
def test_layer_weights(alpha, layers, expected):
    decay, weights = sequential(alpha, layers)
    assert weights.dtype == np.float32
    np.testing.assert_allclose(weights, expected, rtol=1e-7)
    assert decay == alpha**layers


@pytest.mark.parametrize(
    ("rule", "alpha", "decay", "shared", "expected"),
    [
        ("layer-sequential", 0.5, None, True, (0.125, [0.125, 0.25, 0.5])),
        ("layer-sequential", 0.5, 0.4, True, (0.4, [0.6 / 7, 1.2 / 7, 2.4 / 7])),
        ("layer-sequential", 0.5, None, False, (0.5, [0.5, 0.5, 0.5])),
        ("over-steps", 0.8, None, True, (0.8, [0.2 / 3] * 3)),
        ("over-steps", 0.8, 0.25, True, (0.25, [0.25] * 3)),
        ("single-step", 0.8, None, True, (0.0, [1 / 3] * 3)),
        ("single-step", 0.8, None, False, (0.0, [1.0] * 3)),
        ("last-layer", 0.8, None, True, (0.0, [0.0, 0.0, 1.0])),
        ("cumulative", 0.8, None, True, (1.0, [1 / 3] * 3)),
        ("cumulative", 0.8, None, False, (1.0, [1.0] * 3)),
    ],
)
def test_rules(rule, alpha, decay, shared, expected):
    knobs = {"decay": decay, **RULES[rule]} if decay is None else {**RULES[rule], "decay": decay}
    got = recurrence(alpha, knobs.get("decay"), knobs["layer_weights"], num_layers=3, shared=shared)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-12)
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-7)


def test_numbers_are_used_as_they_are():
    decay, weights = recurrence(0.8, 0.5, (3.0, 0.0), 2, shared=True)
    assert (decay, weights.tolist()) == (0.5, [3.0, 0.0])
    with pytest.raises(ValueError, match="layer_weights has 2 numbers, but the model has 3 layers"):
        recurrence(0.8, 0.5, (3.0, 0.0), 3, shared=True)


@given(
    alpha=st.floats(0, 0.99),
    layers=st.integers(1, 40),
    steps=st.integers(1, 4),
    seed=st.integers(0, 999),
)
@settings(max_examples=50, deadline=None, derandomize=True)
def test_weights_unroll_the_moving_average_over_layers(alpha, layers, steps, seed):
    """m <- alpha * m + (1 - alpha) * s[l], layer by layer, is one recurrence a step (eq. 4)."""
    scores = np.random.default_rng(seed).dirichlet(np.ones(5), size=(steps, layers))
    expected, got = np.zeros(5), np.zeros(5)
    weights = sequential(alpha, layers)[1].astype(np.float64)
    for step in range(steps):
        for layer in range(layers):
            expected = alpha * expected + (1 - alpha) * scores[step, layer]
        got = alpha**layers * got + weights @ scores[step]
    np.testing.assert_allclose(got, expected, rtol=2e-6)  # observed 4.1e-8; weights are float32
    np.testing.assert_allclose(weights.sum(), 1 - alpha**layers, rtol=1e-6)


def test_aggregate():
    m = jnp.asarray([[0.5, 0.0, 1.0]])
    got = aggregation.aggregate(m, jnp.asarray([[0.1, 0.2, 0.0]]), jnp.float32(0.5))
    np.testing.assert_allclose(got, [[0.35, 0.2, 0.5]], rtol=1e-6)


def test_small_differences_add_up():
    """In bfloat16 both would stay at 0.25 for ever: its spacing there is 0.002."""
    m = jnp.asarray([[0.25, 0.25]])
    increment = jnp.float32(0.01) * jnp.asarray([[0.252, 0.25]])
    for _ in range(100):
        m = aggregation.aggregate(m, increment, jnp.float32(0.99))
    assert m.dtype == jnp.float32
    np.testing.assert_allclose(m, [[0.251268, 0.25]], atol=1e-6)


def test_mean_utility():
    scores = jnp.asarray([[1.0, 2.0, jnp.nan, 6.0], [5.0, 7.0, 9.0, 1.0]])
    valid = jnp.asarray([[True, True, False, True], [False] * 4])
    assert aggregation.mean_utility(scores, valid).tolist() == [3.0, 0.0]


def test_mean_of_equals_is_exact():
    """A sum of 3 .. 64 equals, divided again, is off by a rounding for 45 of these."""
    utilities = np.random.default_rng(0).random(62).astype(np.float32)
    valid = np.arange(64)[None] < np.arange(3, 65)[:, None]
    scores = np.broadcast_to(utilities[:, None], (62, 64))
    got = aggregation.mean_utility(jnp.asarray(scores), jnp.asarray(valid))
    assert got.tolist() == utilities.tolist()


def test_new_token_is_not_frozen_out():
    """Its prior is the mean of the others; had it begun at 0, it would go in its own step."""
    valid = jnp.asarray([[True] * 4 + [False]])
    m = jnp.asarray([[0.25] * 4 + [0.0]])
    prior = aggregation.mean_utility(m, valid)
    assert prior.tolist() == [0.25]
    m = m.at[0, 4].set(prior[0])
    increment = jnp.float32(0.1) * jnp.asarray([[0.175] * 4 + [0.3]])
    m = aggregation.aggregate(m, increment, jnp.float32(0.9))
    np.testing.assert_allclose(m, [[0.2425] * 4 + [0.255]], rtol=1e-6)
    kept = eviction.select_kept(
        m, jnp.arange(5)[None], jnp.ones((1, 5), bool), jnp.ones((1, 5), bool), jnp.asarray([4])
    )
    assert kept.tolist() == [[False, True, True, True, True]]
