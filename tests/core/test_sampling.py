import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inertiakv_jax.sampling import Sampling, filter_logits, sample

filtered = jax.jit(filter_logits)
drawn = jax.jit(sample)
PROBABILITIES = [0.05, 0.4, 0.1, 0.25, 0.2]  # by rank: 1, 3, 4, 2, 0
STEP = jnp.int32(0)


def logits_of(probabilities):
    return jnp.log(jnp.asarray([probabilities], jnp.float32))


def kept(probabilities, **options):
    got = np.asarray(filtered(logits_of(probabilities), Sampling(**options)))[0]
    assert not np.isnan(got).any()
    return set(np.flatnonzero(np.isfinite(got)).tolist())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 0}, {0, 1, 2, 3, 4}),
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 3, 4}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 1.0}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.41}, {1, 3}),
        ({"top_p": 0.84}, {1, 3, 4}),
        ({"top_p": 0.86}, {1, 3, 4, 2}),
        ({"top_p": 1e-9}, {1}),
        ({"min_p": 0.0}, {0, 1, 2, 3, 4}),
        ({"min_p": 0.13}, {1, 3, 4, 2}),
        ({"min_p": 0.24}, {1, 3, 4, 2}),
        ({"min_p": 0.26}, {1, 3, 4}),
        ({"min_p": 1.0}, {1}),
        # 1 and 3 alone are 8 and 5 of 13, so 0.6 is reached by the first; of all five it is not
        ({"top_k": 2, "top_p": 0.6}, {1}),
        ({"top_p": 0.6}, {1, 3}),
        ({"top_k": 3, "min_p": 0.6}, {1, 3}),
        ({"top_k": 4, "top_p": 0.95, "min_p": 0.3}, {1, 3, 4}),
        # at temperature 0.5 probabilities are squared: 16, 6.25, 4, 1, 0.25 of 27.5
        ({"temperature": 0.5, "top_p": 0.6}, {1, 3}),
        ({"temperature": 0.5, "top_p": 0.55}, {1}),
        ({"temperature": 0.5, "min_p": 0.3}, {1, 3}),
    ],
)
def test_filters(options, expected):
    assert kept(PROBABILITIES, **options) == expected


def test_equals_stay_together():
    """Which of equals would go depends on a sort; all stay."""
    assert kept([0.25, 0.25, 0.25, 0.25], top_k=2) == {0, 1, 2, 3}
    assert kept([0.4, 0.2, 0.2, 0.2], top_k=2) == {0, 1, 2, 3}
    assert kept([0.4, 0.2, 0.2, 0.2], top_p=0.5) == {0, 1, 2, 3}
    assert kept([0.3, 0.3, 0.2, 0.2], top_k=2) == {0, 1}


def test_no_filter_drops_the_unlikely():
    """Float32 sums of probabilities reach 1 before the last of these."""
    got = filtered(jnp.asarray([[0.0, -30.0, -31.0, -90.0]]), Sampling())
    assert got.tolist() == [[0.0, -30.0, -31.0, -90.0]]


def test_what_stays_is_divided_by_the_temperature():
    got = np.asarray(filtered(logits_of(PROBABILITIES), Sampling(temperature=0.5, top_k=2)))[0]
    np.testing.assert_allclose(got[[1, 3]], [2 * math.log(0.4), 2 * math.log(0.25)], rtol=1e-6)


def test_rows_are_filtered_apart():
    logits = jnp.concatenate([logits_of(PROBABILITIES), logits_of(PROBABILITIES[::-1])])
    got = np.isfinite(filtered(logits, Sampling(top_k=1)))
    assert got.tolist() == [[False, True, False, False, False], [False, False, False, True, False]]


def test_greedy_takes_the_first_of_equals():
    token = drawn(jnp.asarray([[0.0, 3.0, 3.0], [5.0, 1.0, 5.0]]), None, None, STEP)
    assert token.tolist() == [1, 0]
    assert token.dtype == jnp.int32


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e-4},
        {"temperature": 1e-38},
        {"temperature": 1e-300},
        {"top_k": 1},
        {"top_p": 1e-6},
        {"min_p": 1.0},
    ],
)
def test_limits_of_every_option_are_greedy(options):
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(8, 50)), jnp.float32)
    token = drawn(logits, Sampling(**options), jax.random.key(0), STEP)
    assert token.tolist() == jnp.argmax(logits, axis=-1).tolist()


def test_frequencies():
    """20,000 rows of one distribution; three standard deviations are 0.0104 at most."""
    logits = jnp.broadcast_to(logits_of(PROBABILITIES), (20_000, 5))
    tokens = np.asarray(drawn(logits, Sampling(), jax.random.key(1), STEP))
    frequencies = np.bincount(tokens, minlength=5) / 20_000
    np.testing.assert_allclose(frequencies, PROBABILITIES, atol=0.0104)
    tokens = np.asarray(drawn(logits, Sampling(temperature=0.5, top_k=2), jax.random.key(1), STEP))
    frequencies = np.bincount(tokens, minlength=5) / 20_000
    np.testing.assert_allclose(frequencies, [0, 64 / 89, 0, 25 / 89, 0], atol=0.0104)


def test_draw_depends_on_key_step_and_row_alone():
    logits = jnp.zeros((4, 1000))

    def draw(seed, step, rows=4):
        key = jax.random.key(seed)
        return drawn(logits[:rows], Sampling(), key, jnp.int32(step)).tolist()

    first = draw(0, 0)
    assert draw(0, 0) == first
    assert draw(0, 0, rows=2) == first[:2]
    assert len(set(first)) == 4
    assert draw(0, 1) != first
    assert draw(1, 0) != first


def test_sampling_needs_a_key():
    with pytest.raises(ValueError, match=r"sampling needs a PRNG key.*key=jax.random.key\(seed\)"):
        sample(jnp.zeros((1, 3)), Sampling(), None, STEP)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature must be above 0 and finite, got 0.0"),
        ({"temperature": -1}, "temperature must be above 0 and finite, got -1"),
        ({"temperature": math.inf}, "temperature must be above 0 and finite, got inf"),
        ({"temperature": math.nan}, "temperature must be above 0 and finite, got nan"),
        ({"top_k": -1}, "top_k must be an integer >= 0, got -1"),
        ({"top_k": 2.5}, "top_k must be an integer >= 0, got 2.5"),
        ({"top_k": math.inf}, "top_k must be an integer >= 0, got inf"),
        ({"top_k": 2**31}, "top_k must be below 2**31, got 2147483648"),
        ({"top_k": np.int64(-3)}, "top_k must be an integer >= 0, got np.int64(-3)"),
        ({"temperature": np.float32(-1)}, "temperature must be above 0 and finite, got np.float"),
        ({"top_p": 0.0}, "top_p must be in (0, 1], got 0.0"),
        ({"top_p": 1.1}, "top_p must be in (0, 1], got 1.1"),
        ({"top_p": math.nan}, "top_p must be in (0, 1], got nan"),
        ({"min_p": -0.1}, "min_p must be in [0, 1], got -0.1"),
        ({"min_p": 1.1}, "min_p must be in [0, 1], got 1.1"),
        ({"temperature": "0.7"}, "temperature must be a number, got '0.7'"),
        ({"top_k": None}, "top_k must be a number, got None"),
        ({"top_p": [0.9]}, "top_p must be a number, got [0.9]"),
        ({"min_p": True}, "min_p must be a number, got True"),
    ],
)
def test_bad_values(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Sampling(**options)


@pytest.mark.torch
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"top_k": 10},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.5, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
        {"temperature": 0.3, "top_k": 5, "top_p": 0.5},
        {"temperature": 0.8, "top_p": 0.9, "min_p": 0.2},
    ],
    ids=str,
)
def test_against_transformers(options):
    torch = pytest.importorskip("torch", reason="needs torch (extra 'peers')")
    from transformers.generation import logits_process

    logits = np.random.default_rng(3).normal(scale=2.0, size=(16, 200)).astype(np.float32)
    expected = torch.from_numpy(logits)
    for name, processor in {
        "temperature": "TemperatureLogitsWarper",
        "top_k": "TopKLogitsWarper",
        "top_p": "TopPLogitsWarper",
        "min_p": "MinPLogitsWarper",
    }.items():
        if name in options:
            expected = getattr(logits_process, processor)(options[name])(None, expected)
    got = filtered(jnp.asarray(logits), Sampling(**options))
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-6)
    assert np.isfinite(got).sum(axis=-1).min() >= 1
