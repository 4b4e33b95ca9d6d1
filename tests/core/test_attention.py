"""Attention of a chunk of the prompt, against ``jax.nn.dot_product_attention``."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inertiakv_jax.prefill_attention import PrefillCache, chunk_attention

# Absolute, of outputs of size 1; both sides are off. Observed: 4.8e-7, 9.3e-3.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}


@jax.jit
def attend(query, keys, values, offset):
    return chunk_attention(query, keys, values, offset)[0]


# B, N, K, D, chunk, number of chunks: one of everything, N = K, K = 1, real head counts.
SHAPES = [
    (1, 1, 1, 2, 1, 3),
    (2, 4, 2, 8, 4, 1),
    (2, 4, 2, 8, 4, 5),
    (1, 4, 4, 16, 8, 3),
    (2, 6, 1, 8, 16, 2),
    (1, 9, 3, 64, 64, 3),
]


def inputs(shape, dtype, seed=0):
    batch, num_heads, num_kv_heads, head_dim, chunk, chunks = shape
    rng = np.random.default_rng(seed)
    sizes = [(batch, chunk * chunks, heads, head_dim) for heads in (num_heads, *[num_kv_heads] * 2)]
    return [jnp.asarray(rng.normal(size=size), dtype) for size in sizes]


@functools.partial(jax.jit, static_argnames="chunk")
def in_chunks(query, key, value, chunk):
    """All queries, a chunk at a time; what lies behind a chunk is NaN."""
    later = jnp.arange(query.shape[1])[None, None, :, None]
    outputs = []
    for offset in range(0, query.shape[1], chunk):
        keys, values = (
            jnp.where(later >= offset + chunk, jnp.asarray(jnp.nan, x.dtype), x.swapaxes(1, 2))
            for x in (key, value)
        )
        part = query[:, offset : offset + chunk]
        outputs.append(chunk_attention(part, keys, values, jnp.int32(offset))[0])
    return jnp.concatenate(outputs, axis=1)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_jax(shape, dtype):
    query, key, value = inputs(shape, dtype)
    got = in_chunks(query, key, value, chunk=shape[4])
    wide = [x.astype(jnp.float32) for x in (query, key, value)]
    expected = jax.jit(functools.partial(jax.nn.dot_product_attention, is_causal=True))(*wide)
    assert got.dtype == dtype
    assert got.shape == query.shape
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, atol=TOLERANCE[dtype])


def test_by_hand():
    """Keys are log-probabilities; query heads (1, 0), (0, 1) see tokens 0, then 0 and 1."""
    scale = np.sqrt(2.0)  # undoes the scale of a head of two numbers
    query = jnp.asarray([[[[1.0, 0.0], [0.0, 1.0]]] * 2]) * jnp.float32(scale)
    keys = jnp.log(jnp.asarray([[[[0.25, 0.9], [0.75, 0.1]]]]))
    values = jnp.asarray([[[[4.0, 0.0], [0.0, 8.0]]]])
    got = attend(query, keys, values, jnp.int32(0))
    expected = [[[4.0, 0.0], [4.0, 0.0]], [[1.0, 6.0], [3.6, 0.8]]]
    np.testing.assert_allclose(got[0], expected, atol=1e-5)


def test_large_logits_do_not_overflow():
    query = jnp.full((1, 4, 1, 2), 200.0)
    keys = jnp.asarray([200.0, -200.0] * 4)[None, None, :, None] * jnp.ones((1, 1, 1, 2))
    values = jnp.arange(8.0)[None, None, :, None] * jnp.ones((1, 1, 1, 2))
    got = attend(query, keys, values, jnp.int32(4))
    # equal weight on the even tokens seen so far
    assert got[0, :, 0, 0].tolist() == [2.0, 2.0, 3.0, 3.0]


def test_cache_writes_a_chunk_and_attends_to_all_before_it():
    query, key, value = inputs((2, 4, 2, 8, 4, 3), "float32")
    expected = in_chunks(query, key, value, chunk=4)
    empty = tuple(jnp.full((2, 2, 12, 8), jnp.nan) for _ in range(2))
    lengths, windows = jnp.asarray([12, 12]), (None, None)
    cache = PrefillCache(empty, empty, jnp.int32(0), lengths, windows=windows)
    run = jax.jit(PrefillCache.attend, static_argnums=1)
    for offset in (0, 4, 8):
        cache = dataclasses.replace(cache, offset=jnp.int32(offset))
        part = slice(offset, offset + 4)
        output, cache = run(cache, 1, query[:, part], key[:, part], value[:, part])
        np.testing.assert_allclose(output, expected[:, part], atol=1e-6)
        np.testing.assert_array_equal(
            cache.keys[1][:, :, : offset + 4], key[:, : offset + 4].swapaxes(1, 2)
        )
        assert jnp.isnan(cache.keys[1][:, :, offset + 4 :]).all()
    np.testing.assert_array_equal(cache.values[1], value.swapaxes(1, 2))
    assert jnp.isnan(cache.keys[0]).all()


@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 11, 40])
@pytest.mark.parametrize("soft_cap", [None, 0.5])
def test_window_in_a_ring(window, soft_cap):
    """24 tokens through a ring that holds the window and a chunk; the second row ends after 10."""
    chunk, lengths = 4, np.array([24, 10])
    query, key, value = inputs((2, 4, 2, 8, chunk, 6), "float32", seed=window)
    expected = windowed(query, key, value, window, soft_cap)
    ring = min(24, -(-window // chunk) * chunk + chunk)
    empty = (jnp.full((2, 2, ring, 8), jnp.nan),)
    cache = PrefillCache(empty, empty, jnp.int32(0), jnp.asarray(lengths), windows=(window,))
    run = jax.jit(functools.partial(PrefillCache.attend, soft_cap=soft_cap), static_argnums=1)
    for offset in range(0, 24, chunk):
        cache = dataclasses.replace(cache, offset=jnp.int32(offset))
        part = slice(offset, offset + chunk)
        output, cache = run(cache, 0, query[:, part], key[:, part], value[:, part])
        for row, length in enumerate(lengths):
            real = slice(0, max(length - offset, 0))
            np.testing.assert_allclose(output[row, real], expected[row, part][real], atol=2e-6)
    for row, length in enumerate(lengths):  # what decoding will need is still there
        for position in range(max(length - window, 0), length):
            kept = cache.keys[0][row, :, position % ring]
            np.testing.assert_array_equal(kept, key[row, position])


def windowed(query, key, value, window, soft_cap):
    """Attention to the last ``window`` tokens in float64 NumPy."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    key, value = (np.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    logits = np.einsum("bqnd,bsnd->bnqs", query, key) / np.sqrt(query.shape[-1])
    if soft_cap is not None:
        logits = soft_cap * np.tanh(logits / soft_cap)
    apart = np.arange(query.shape[1])[:, None] - np.arange(query.shape[1])[None]
    logits = np.where((apart >= 0) & (apart < window), logits, -np.inf)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("bnqs,bsnd->bqnd", weights, value)
