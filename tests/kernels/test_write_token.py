"""Writing one token into the cache, plain and as TPU kernel, against a loop over rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from inertiakv_jax.pallas_kernels.write_token import ref, tpu
from inertiakv_jax.pallas_kernels.write_token.api import write_token

IMPLEMENTATIONS = {
    "xla": ref.write_token,
    "tpu": functools.partial(tpu.write_token, interpret=True),
}
# B, K, S, D; S below, at and beyond a tile of 128 lanes.
SHAPES = [(1, 1, 1, 64), (3, 2, 130, 96), (2, 3, 128, 64), (4, 2, 320, 80)]
CASES = [(shape, dtype) for shape in SHAPES for dtype in ("float32", "bfloat16")]


def random_case(shape, dtype, per_head, seed=0):
    """A cache with a NaN in every row, a token, and slots: the first, the last, none, any."""
    batch, num_kv_heads, slots, head_dim = shape
    rng = np.random.default_rng(seed)
    cache = rng.normal(size=shape)
    cache[:, :, slots // 2, 0] = np.nan
    token = rng.normal(size=(batch, num_kv_heads, head_dim))
    lead = (batch, num_kv_heads) if per_head else (batch,)
    slot = rng.integers(slots, size=lead)
    ends = [0, slots - 1, slots][-slot.size :]
    slot.flat[: len(ends)] = ends
    return jnp.asarray(cache, dtype), jnp.asarray(token, dtype), jnp.asarray(slot, jnp.int32)


def by_hand(cache, token, slot):
    """Row by row, head by head."""
    cache, token, slot = np.array(cache, np.float32), np.asarray(token, np.float32), np.array(slot)
    slot = np.broadcast_to(slot if slot.ndim == 2 else slot[:, None], cache.shape[:2])
    for b, k in np.ndindex(slot.shape):
        if slot[b, k] < cache.shape[2]:
            cache[b, k, slot[b, k]] = token[b, k]
    return cache


@pytest.mark.parametrize("per_head", [False, True], ids=["shared", "per_head"])
@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_only_the_slot_changes(name, shape, dtype, per_head):
    cache, token, slot = random_case(shape, dtype, per_head)
    got = jax.jit(IMPLEMENTATIONS[name])(cache, token, slot)
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.asarray(got, np.float32), by_hand(cache, token, slot))


def test_simulated_memory():
    """Whole tiles: the simulator rounds an array that is aliased up to them."""
    simulated = pltpu.InterpretParams(uninitialized_memory="nan")
    for per_head in (False, True):
        cache, token, slot = random_case((2, 2, 256, 64), "float32", per_head)
        got = jax.jit(functools.partial(tpu.write_token, interpret=simulated))(cache, token, slot)
        np.testing.assert_array_equal(got, by_hand(cache, token, slot))


def test_row_that_has_finished_is_left_alone():
    cache, token = jnp.zeros((1, 1, 130, 64)), jnp.ones((1, 1, 64))
    for write in IMPLEMENTATIONS.values():
        assert not write(cache, token, jnp.asarray([130])).any()


def test_kernel_is_the_default_on_tpus_where_it_serves():
    def kernels(head_dim, dtype="bfloat16"):
        cache = jax.ShapeDtypeStruct((2, 2, 256, head_dim), dtype)
        token = jax.ShapeDtypeStruct((2, 2, head_dim), dtype)
        slot = jax.ShapeDtypeStruct((2,), jnp.int32)
        traced = jax.jit(write_token).trace(cache, token, slot)
        return traced.lower(lowering_platforms=("tpu",)).as_text().count("tpu_custom_call")

    assert kernels(64) == kernels(96) == kernels(64, "float32") == 1
    assert kernels(128) == kernels(256) == kernels(64, "float16") == 0


def test_bad_input_is_refused_while_tracing():
    cache, token, slot = random_case((2, 3, 5, 64), "float32", False)
    with pytest.raises(ValueError, match=r"cache must be \[B, K, S, D\], got shape \(3, 5, 64\)"):
        write_token(cache[0], token, slot)
    with pytest.raises(ValueError, match=r"token must be float32 \(2, 3, 64\), got bfloat16"):
        write_token(cache, token.astype(jnp.bfloat16), slot)
    with pytest.raises(ValueError, match=r"slot must be int32 \(2,\) or \(2, 3\), got .* \(3,\)"):
        write_token(cache, token, jnp.zeros(3, jnp.int32))
    wide = jnp.zeros((2, 3, 5, 256))
    with pytest.raises(ValueError, match=r"no head_dim that is a multiple of 128, .* got 256"):
        write_token(wide, wide[:, :, 0], slot, implementation="tpu")
    with pytest.raises(ValueError, match=r"needs a TPU, this program is for .* 'cpu'"):
        write_token(cache, token, slot, implementation="tpu")
