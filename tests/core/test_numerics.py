import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from inertiakv_jax.numerics import MASK_VALUE, masked_softmax

softmax = jax.jit(masked_softmax)


def test_softmax_of_what_the_mask_leaves():
    logits = jnp.asarray([[0.0, np.log(3.0), 5.0], [7.0, 7.0, 7.0]], jnp.float32)
    mask = jnp.asarray([[True, True, False], [True, True, True]])
    got = softmax(logits, mask)
    np.testing.assert_allclose(got, [[0.25, 0.75, 0.0], [1 / 3, 1 / 3, 1 / 3]], atol=1e-7)
    assert got[0, 2] == 0.0


def test_empty_mask_gives_zeros():
    assert softmax(jnp.asarray([[1.0, jnp.nan]]), jnp.zeros((1, 2), bool)).tolist() == [[0.0, 0.0]]


def test_masked_logits_may_be_anything():
    for junk in (jnp.nan, jnp.inf, -jnp.inf, 3e38):
        got = softmax(jnp.asarray([[2.0, junk, 2.0]]), jnp.asarray([[True, False, True]]))
        assert got.tolist() == [[0.5, 0.0, 0.5]]


def test_extreme_logits():
    mask = jnp.ones((1, 2), bool)
    assert softmax(jnp.asarray([[1e29, -1e29]]), mask).tolist() == [[1.0, 0.0]]
    assert softmax(jnp.asarray([[-1e29, -1e29]]), mask).tolist() == [[0.5, 0.5]]


def test_mask_value_is_finite_and_vanishes():
    assert np.isfinite(np.float32(MASK_VALUE))
    assert np.exp(np.float32(MASK_VALUE) - np.float32(-1e29)) == 0.0


def test_mask_is_broadcast():
    mask = jnp.asarray([[[True, False, True]]])
    got = softmax(jnp.zeros((2, 2, 3)), mask)
    assert got.tolist() == [[[0.5, 0.0, 0.5]] * 2] * 2


@given(
    st.lists(st.floats(-80, 80, width=32), min_size=7, max_size=7),
    st.lists(st.booleans(), min_size=7, max_size=7),
)
@settings(max_examples=50, deadline=None, derandomize=True)
def test_against_float64(logits, mask):
    got = np.asarray(softmax(jnp.asarray([logits]), jnp.asarray([mask])))[0]
    held = np.flatnonzero(mask)
    expected = np.zeros(7)
    if held.size:
        weights = np.exp(np.asarray(logits)[held] - np.max(np.asarray(logits)[held]))
        expected[held] = weights / weights.sum()
    np.testing.assert_allclose(got, expected, atol=1e-6)  # observed 4.9e-8
