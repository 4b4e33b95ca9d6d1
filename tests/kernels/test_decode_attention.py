"""Decode attention against ``jax.nn.dot_product_attention``, float64 NumPy and hand-made cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inertiakv_jax.pallas_kernels.decode_attention.api import decode_attention

# Absolute, of outputs of size 1 and masses of size G, against float64 from the same inputs.
# Observed on CPU: output 6.7e-7, 6.6e-3, 6.5e-4; mass 1.9e-7 whatever the dtype, for it is float32.
OUTPUT_TOLERANCE = {"float32": 2e-6, "bfloat16": 1.5e-2, "float16": 1.5e-3}
MASS_TOLERANCE = 1e-6
HALF = ("bfloat16", "float16")

# B, N, K, S, D: one of everything, S no multiple of anything, N = K, K = 1, real head counts.
SHAPES = [
    (1, 1, 1, 1, 2),
    (2, 4, 2, 5, 8),
    (3, 4, 4, 64, 16),
    (2, 8, 1, 17, 32),
    (1, 9, 3, 130, 64),
    (1, 14, 2, 257, 64),
]
# Half precision takes the same path, so it gets the awkward shapes alone.
CASES = [(shape, "float32") for shape in SHAPES]
CASES += [(shape, dtype) for shape in (SHAPES[0], SHAPES[1], SHAPES[4]) for dtype in HALF]
attend = jax.jit(
    decode_attention, static_argnames=("scale", "soft_cap", "return_mass", "implementation")
)


def random_inputs(shape, dtype, seed=0):
    batch, num_heads, num_kv_heads, slots, head_dim = shape
    rng = np.random.default_rng(seed)
    draw = lambda *size: jnp.asarray(rng.normal(size=size), dtype)  # noqa: E731
    return (
        draw(batch, num_heads, head_dim),
        draw(batch, num_kv_heads, slots, head_dim),
        draw(batch, num_kv_heads, slots, head_dim),
    )


def random_valid(shape, kind, seed=0):
    batch, _, num_kv_heads, slots, _ = shape
    rng = np.random.default_rng(seed)
    if kind == "all":
        return np.ones((batch, slots), bool)
    if kind == "one":
        return np.eye(slots, dtype=bool)[rng.integers(slots, size=batch)]
    if kind == "per_head":
        return rng.random((batch, num_kv_heads, slots)) < 0.5
    valid = rng.random((batch, slots)) < 0.5
    valid[0] = kind != "empty_row"  # the first row is full, or holds nothing
    return valid


def reference(query, keys, values, valid, scale=None, soft_cap=None):
    """The same in float64 loops over heads, from inputs as rounded as they are."""
    query, keys, values = (np.asarray(x, np.float64) for x in (query, keys, values))
    batch, num_heads, head_dim = query.shape
    num_kv_heads, slots = keys.shape[1:3]
    valid = np.broadcast_to(
        valid if valid.ndim == 3 else valid[:, None], (batch, num_kv_heads, slots)
    )
    output, mass = np.zeros(query.shape), np.zeros((batch, num_kv_heads, slots))
    for b in range(batch):
        for n in range(num_heads):
            k = n // (num_heads // num_kv_heads)
            held = np.flatnonzero(valid[b, k])
            if held.size == 0:
                continue
            logits = keys[b, k, held] @ query[b, n] * (scale or head_dim**-0.5)
            if soft_cap is not None:
                logits = soft_cap * np.tanh(logits / soft_cap)
            p = np.exp(logits - logits.max())
            p /= p.sum()
            output[b, n] = p @ values[b, k, held]
            mass[b, k, held] += p
    return output, mass


def check(inputs, valid, dtype, **options):
    output, mass = attend(*inputs, jnp.asarray(valid), **options)
    assert output.dtype == dtype
    assert mass.dtype == jnp.float32
    expected_output, expected_mass = reference(*inputs, valid, **options)
    tolerance = OUTPUT_TOLERANCE[dtype]
    np.testing.assert_allclose(np.asarray(output, np.float64), expected_output, atol=tolerance)
    np.testing.assert_allclose(mass, expected_mass, atol=MASS_TOLERANCE)
    return output, mass


def test_probabilities_of_a_group_add_up():
    """Keys are log-probabilities, so that query heads (1, 0) and (0, 1) attend as written."""
    heads = np.log([[0.8, 0.1, 0.1], [0.2, 0.7, 0.1], [0.1, 0.1, 0.8], [0.1, 0.2, 0.7]])
    keys = jnp.asarray(heads.reshape(1, 2, 2, 3).swapaxes(2, 3), jnp.float32)
    query = jnp.asarray([[[1, 0], [0, 1], [1, 0], [0, 1]]], jnp.float32)
    values = jnp.asarray(np.eye(3)[None, None, :, :2].repeat(2, axis=1), jnp.float32)
    output, mass = attend(query, keys, values, jnp.ones((1, 3), bool), scale=1.0)
    np.testing.assert_allclose(mass[0], [[1.0, 0.8, 0.2], [0.2, 0.3, 1.5]], atol=1e-6)
    expected = [[0.8, 0.1], [0.2, 0.7], [0.1, 0.1], [0.1, 0.2]]
    np.testing.assert_allclose(output[0], expected, atol=1e-6)


def test_default_scale_is_one_over_root_head_dim():
    query = jnp.asarray([[[2.0, 0.0, 0.0, 0.0]]])
    keys = jnp.asarray([[[[1.0, 0, 0, 0], [0.0, 0, 0, 0]]]])  # logits 2 / sqrt(4) = 1 and 0
    _, mass = attend(query, keys, keys, jnp.ones((1, 2), bool))
    np.testing.assert_allclose(mass[0, 0], [0.7310586, 0.2689414], atol=1e-6)


def test_ties_share_the_mass():
    query, keys = jnp.ones((1, 4, 8)), jnp.ones((1, 2, 5, 8))
    _, mass = attend(query, keys, keys, jnp.asarray([[True, True, False, True, True]]))
    assert mass.tolist() == [[[0.5, 0.5, 0.0, 0.5, 0.5]] * 2]


def test_large_logits_do_not_overflow():
    query = jnp.full((1, 1, 2), 300.0)
    keys = jnp.asarray([[[[300.0, 300.0], [-300.0, -300.0]]]])
    output, mass = attend(query, keys, keys, jnp.ones((1, 2), bool))
    assert mass.tolist() == [[[1.0, 0.0]]]
    assert output.tolist() == [[[300.0, 300.0]]]


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_against_float64(shape, dtype):
    inputs = random_inputs(shape, dtype)
    group = shape[1] // shape[2]
    for kind in ("all", "one", "half", "empty_row", "per_head"):
        valid = random_valid(shape, kind)
        output, mass = check(inputs, valid, dtype)
        held = valid.any(axis=-1)
        total = np.where(held if valid.ndim == 3 else held[:, None], group, 0)
        np.testing.assert_allclose(mass.sum(-1), np.broadcast_to(total, mass.shape[:2]), atol=1e-5)
        dead = ~(valid if valid.ndim == 3 else valid[:, None])
        assert not np.asarray(mass)[np.broadcast_to(dead, mass.shape)].any()
        if kind == "empty_row":
            assert not np.asarray(output[0], np.float32).any()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_jax(shape):
    query, keys, values = random_inputs(shape, "float32", seed=1)
    valid = jnp.asarray(random_valid(shape, "half", seed=1)).at[:, 0].set(True)
    expected = jax.jit(jax.nn.dot_product_attention)(
        query[:, None], keys.swapaxes(1, 2), values.swapaxes(1, 2), mask=valid[:, None, None]
    )
    output, _ = attend(query, keys, values, valid)
    np.testing.assert_allclose(output, expected[:, 0], atol=2 * OUTPUT_TOLERANCE["float32"])


def test_scale_argument():
    shape = (2, 4, 2, 5, 8)
    check(random_inputs(shape, "float32"), random_valid(shape, "half"), "float32", scale=1.5)


def test_soft_cap():
    shape = (2, 4, 2, 5, 8)
    inputs, valid = random_inputs(shape, "float32"), random_valid(shape, "half")
    check(inputs, valid, "float32", scale=3.0, soft_cap=2.0)
    query = jnp.asarray([[[1e4, 0.0]]])
    keys = jnp.asarray([[[[1.0, 0.0], [-1.0, 0.0]]]])  # logits that end at 0.5 and -0.5
    _, mass = attend(query, keys, keys, jnp.ones((1, 2), bool), soft_cap=0.5)
    np.testing.assert_allclose(mass[0, 0], [0.7310586, 0.2689414], atol=1e-6)


def test_without_the_mass():
    shape = (2, 4, 2, 5, 8)
    inputs, valid = random_inputs(shape, "float32"), random_valid(shape, "half")
    expected, _ = attend(*inputs, jnp.asarray(valid))
    output, mass = attend(*inputs, jnp.asarray(valid), return_mass=False)
    assert mass is None
    np.testing.assert_array_equal(output, expected)


@pytest.mark.parametrize("dtype", OUTPUT_TOLERANCE)
@pytest.mark.parametrize("kind", ["one", "half", "empty_row", "per_head"])
def test_dead_slots_may_hold_anything(kind, dtype):
    shape = (3, 4, 2, 17, 8)
    query, keys, values = random_inputs(shape, dtype)
    valid = random_valid(shape, kind)
    expected = attend(query, keys, values, jnp.asarray(valid))
    dead = jnp.asarray(~(valid if valid.ndim == 3 else valid[:, None]))[..., None]
    for in_keys, in_values in [(jnp.nan, jnp.nan), (jnp.inf, 1.0), (1.0, -jnp.inf), (0.0, jnp.nan)]:
        poisoned = attend(
            query,
            jnp.where(dead, jnp.asarray(in_keys, dtype), keys),
            jnp.where(dead, jnp.asarray(in_values, dtype), values),
            jnp.asarray(valid),
        )
        for got, clean in zip(poisoned, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(got), np.asarray(clean))


def test_what_one_row_holds_does_not_touch_another():
    query, keys, values = random_inputs((2, 4, 2, 9, 8), "float32")
    valid = jnp.ones((2, 9), bool)
    output, mass = attend(query, keys, values, valid)
    broken_output, broken_mass = attend(query, keys, values.at[1, :, 3].set(jnp.nan), valid)
    assert np.isnan(broken_output[1]).all()
    np.testing.assert_array_equal(broken_output[0], output[0])
    np.testing.assert_array_equal(broken_mass, mass)


def test_order_of_slots_does_not_matter():
    query, keys, values = random_inputs((2, 4, 2, 33, 8), "float32")
    valid = jnp.asarray(random_valid((2, 4, 2, 33, 8), "half"))
    order = np.random.default_rng(2).permutation(33)
    output, mass = attend(query, keys, values, valid)
    other_output, other_mass = attend(
        query, keys[:, :, order], values[:, :, order], valid[:, order]
    )
    np.testing.assert_allclose(other_output, output, atol=1e-6)
    np.testing.assert_allclose(other_mass, mass[:, :, order], atol=1e-6)


@given(data=st.data())
@settings(max_examples=12, deadline=None, derandomize=True)
def test_drawn_shapes(data):
    num_kv_heads = data.draw(st.integers(1, 3))
    shape = (
        data.draw(st.integers(1, 3)),
        num_kv_heads * data.draw(st.integers(1, 4)),
        num_kv_heads,
        data.draw(st.integers(1, 70)),
        2 * data.draw(st.integers(1, 20)),
    )
    dtype = data.draw(st.sampled_from(sorted(OUTPUT_TOLERANCE)))
    kind = data.draw(st.sampled_from(["all", "one", "half", "empty_row", "per_head"]))
    seed = data.draw(st.integers(0, 99))
    check(random_inputs(shape, dtype, seed), random_valid(shape, kind, seed), dtype)


def test_errors_name_the_shapes():
    query, keys, valid = jnp.ones((2, 4, 8)), jnp.ones((2, 2, 5, 8)), jnp.ones((2, 5), bool)
    with pytest.raises(ValueError, match=r"query must be \[B, N, D\], got shape \(2, 1, 4, 8\)"):
        attend(query[:, None], keys, keys, valid)
    with pytest.raises(ValueError, match=r"keys must be \[B=2, K, S, D=8\].*\(1, 2, 5, 8\)"):
        attend(query, keys[:1], keys[:1], valid)
    with pytest.raises(ValueError, match=r"keys must be \[B=2, K, S, D=8\].*\(2, 2, 5, 4\)"):
        attend(query, keys[..., :4], keys[..., :4], valid)
    with pytest.raises(ValueError, match=r"keys must be .*\(2, 2, 5\)"):
        attend(query, keys[..., 0], keys[..., 0], valid)
    with pytest.raises(ValueError, match=r"values must .*\(2, 2, 5, 8\), got \(2, 2, 4, 8\)"):
        attend(query, keys, keys[:, :, :4], valid)
    with pytest.raises(ValueError, match=r"num_heads=3 must be divisible by num_kv_heads=2"):
        attend(query[:, :3], keys, keys, valid)
    with pytest.raises(ValueError, match=r"\(2, 5\) or \(2, 2, 5\), got bool \(2, 4\)"):
        attend(query, keys, keys, valid[:, :4])
    with pytest.raises(ValueError, match=r"valid must be bool .* got float32 \(2, 5\)"):
        attend(query, keys, keys, valid.astype(jnp.float32))


@pytest.mark.parametrize("soft_cap", [0.0, -1.0, float("nan")])
def test_bad_soft_cap(soft_cap):
    keys = jnp.ones((2, 2, 5, 8))
    with pytest.raises(ValueError, match=f"soft_cap must be above 0, got {soft_cap}"):
        attend(jnp.ones((2, 4, 8)), keys, keys, jnp.ones((2, 5), bool), soft_cap=soft_cap)


def test_implementations_by_name():
    shape = (2, 4, 2, 5, 8)
    inputs, valid = random_inputs(shape, "float32"), random_valid(shape, "half")
    expected, _ = attend(*inputs, jnp.asarray(valid))
    output, _ = attend(*inputs, jnp.asarray(valid), implementation="xla")
    np.testing.assert_array_equal(output, expected)
    with pytest.raises(ValueError, match=r"implementation must be None or one of xla.*'cuda'"):
        attend(*inputs, jnp.asarray(valid), implementation="cuda")
