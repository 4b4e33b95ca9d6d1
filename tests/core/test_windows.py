"""Layers with a sliding window: prefill, decoding, and eviction beside them.

The model has one layer with a window between two without. The oracle is the same model whose window
is applied as a mask over everything: a full forward for each token.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core.tiny_model import CONFIG, padded, prompts
from oracle import llama
from oracle.tiny import random_params

from inertiakv_jax import decode, policies, prefill
from inertiakv_jax import state as kv_state
from inertiakv_jax.models.decoder import DecoderModel

WINDOW, STEPS = 24, 40
LENGTHS = (30, 134, 9)  # beyond the window, many chunks beyond it, and within it
WINDOWED = DecoderModel(dataclasses.replace(CONFIG, sliding_window=WINDOW, local_layers=(1,)))
TOLERANCE = 2e-4  # of logits up to 7; observed 1e-5


@functools.cache
def params():
    return jax.tree.map(jnp.asarray, llama.cast(random_params(CONFIG, seed=5), np.float32))


@dataclasses.dataclass(frozen=True)
class MaskedCache:
    """All tokens at once, each layer with its own mask: what a cache must be equal to."""

    windows: tuple

    def attend(self, layer, query, key, value, *, soft_cap=None):
        assert soft_cap is None
        window = self.windows[layer]
        local = None if window is None else (window - 1, 0)
        output = jax.nn.dot_product_attention(
            query, key, value, is_causal=True, local_window_size=local
        )
        return output, self


def full_logits(row):
    """[T, V] float32: logits after each token of one text, nothing cached."""
    tokens = jnp.asarray(row, jnp.int32)[None]
    positions = jnp.arange(len(row), dtype=jnp.int32)[None]
    cache = MaskedCache(WINDOWED.sliding_windows)
    hidden, _ = WINDOWED.hidden(params(), tokens, positions, cache)
    return np.asarray(WINDOWED.logits(params(), hidden)[0])


def test_windows_of_the_model():
    assert WINDOWED.sliding_windows == (None, WINDOW, None)
    state = kv_state.init(WINDOWED, 2, 64, budget=jnp.asarray([3, 5]), retention="per_layer")
    assert [leaf.shape[2] for leaf in state.keys] == [64, WINDOW, 64]
    assert state.scores.shape == (2, 2, 64)


def test_full_cache_equals_a_forward_over_everything():
    tokens, lengths = padded(prompts(LENGTHS))
    state, logits = prefill(
        WINDOWED, params(), tokens, lengths, policies.full(), max_new_tokens=STEPS
    )
    first = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    state, chosen = decode(WINDOWED, params(), state, first, steps=STEPS, policy=policies.full())
    for row, prompt in enumerate(prompts(LENGTHS)):
        text = np.concatenate([prompt, [int(first[row])], np.asarray(chosen)[row]])
        expected = full_logits(text)
        np.testing.assert_allclose(logits[row], expected[len(prompt) - 1], atol=TOLERANCE)
        greedy = expected[len(prompt) : -1].argmax(axis=-1)
        np.testing.assert_array_equal(chosen[row], greedy)
    assert state.keys[1].shape[2] == WINDOW


@pytest.mark.parametrize("name", ["inertiakv", "tova", "keydiff", "snapkv", "adakv-ea", "h2o"])
def test_eviction_leaves_windows_alone(name):
    """A budget of all tokens, and the window's layer evicts nothing: the same as the full cache."""
    tokens, lengths = padded(prompts(LENGTHS))
    policy = policies.by_name(name, tokens=200)
    ends = []
    for chosen in (policy, policies.full()):
        state, logits = prefill(WINDOWED, params(), tokens, lengths, chosen, max_new_tokens=STEPS)
        first = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        state, generated = decode(WINDOWED, params(), state, first, steps=STEPS, policy=chosen)
        ends.append(
            (np.asarray(generated), np.asarray(state.keys[1]), np.asarray(state.next_position))
        )
    np.testing.assert_array_equal(ends[0][0], ends[1][0])
    np.testing.assert_allclose(ends[0][1], ends[1][1], atol=1e-5)


def test_eviction_beside_a_window():
    """Tokens go from the layers without a window; the ring keeps the latest, whatever went."""
    tokens, lengths = padded(prompts(LENGTHS))
    policy = policies.inertiakv(0.8)
    state, logits = prefill(WINDOWED, params(), tokens, lengths, policy)
    first = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    state, _ = decode(WINDOWED, params(), state, first, steps=STEPS, policy=policy)
    assert state.num_held.tolist() == [6, 26, 1]
    assert [leaf.shape[2] for leaf in state.keys] == [64, WINDOW, 64]
    knobs = policy.knobs(WINDOWED)
    assert knobs.layer_weights.shape == (2,)
    np.testing.assert_allclose(float(knobs.decay), 0.64, rtol=1e-6)


def test_kvzip_refuses_windows():
    with pytest.raises(ValueError, match="kvzip reads the prompt a second time"):
        prefill(
            WINDOWED,
            params(),
            np.ones((1, 5), int),
            np.array([5]),
            policies.kvzip(0.5),
            max_new_tokens=1,
        )
