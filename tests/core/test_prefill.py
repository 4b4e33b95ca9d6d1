"""Prefill: chunks, capacities, bad prompts, and decoding against a prefill of the longer text."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core.compilations import compiled_programs
from core.tiny_model import CONFIG, LENGTHS, MODEL, padded, params, prefilled, prompts
from oracle import llama

from inertiakv_jax import policies, prefill, step
from inertiakv_jax.models.decoder import DecoderModel
from inertiakv_jax.prefilling import read_chunks

TOLERANCE = 4e-5  # absolute, of logits up to 6; observed 8.5e-6
CACHE_TOLERANCE = 3e-5  # absolute, of keys and values up to 7; observed 6.7e-6
LONG = DecoderModel(dataclasses.replace(CONFIG, num_layers=2, max_position_embeddings=1024))
FULL, EVICTING = policies.full(), policies.inertiakv(0.9)
take_step = jax.jit(step, static_argnames=("model", "policy"))


def text(length):
    return np.random.default_rng(11).integers(0, CONFIG.vocab_size, size=length)


def long_params():
    return {name: leaf for name, leaf in params().items() if name != "layers_2"}


def read(tokens, policy=FULL, *, room=8):
    """State and logits after a prefill of one row; slots for ``room`` more tokens."""
    return prefill(
        LONG, long_params(), tokens[None], np.array([len(tokens)]), policy, max_new_tokens=room
    )


# The borders of chunks of 64 and 256, and of the capacities 128, 512, 768.
@pytest.mark.parametrize("length", [1, 63, 64, 65, 255, 256, 257, 300, 513])
def test_decoding_equals_a_prefill_of_the_longer_text(length):
    steps = 4
    tokens = text(length + steps)
    state, logits = read(tokens[:length])
    for t in range(steps):
        state, logits = take_step(
            LONG, long_params(), state, jnp.asarray(tokens[None, length + t]), FULL
        )
        longer, expected = read(tokens[: length + t + 1], room=7 - t)
        np.testing.assert_allclose(logits, expected, atol=TOLERANCE)
        assert longer.num_slots == state.num_slots
    np.testing.assert_array_equal(longer.positions, state.positions)
    np.testing.assert_array_equal(longer.next_position, state.next_position)


@pytest.mark.parametrize("length", [63, 64, 255, 256, 300])
def test_policy_does_not_touch_the_prompt(length):
    """The slots that a policy asks for, and so the size of chunks, change no result."""
    tokens = text(length)
    full, logits = read(tokens)
    state, other = read(tokens, EVICTING)
    np.testing.assert_allclose(other, logits, atol=TOLERANCE)
    for got, expected in zip(state.keys + state.values, full.keys + full.values, strict=True):
        np.testing.assert_allclose(
            got[:, :, :length], expected[:, :, :length], atol=CACHE_TOLERANCE
        )
    assert state.num_slots > length


@pytest.mark.parametrize("length", [1, 64, 257, 500])
def test_size_of_chunks_does_not_matter(length):
    tokens, lengths = padded([text(length)], width=512)
    read = functools.partial(read_chunks, LONG, long_params(), tokens, lengths, observing=None)
    state, logits, _ = read(chunk=256)
    for chunk in (64, 128):
        other, other_logits, _ = read(chunk=chunk)
        np.testing.assert_allclose(other_logits, logits, atol=TOLERANCE)
        for got, expected in zip(other.keys + other.values, state.keys + state.values, strict=True):
            np.testing.assert_allclose(
                got[:, :, :length], expected[:, :, :length], atol=CACHE_TOLERANCE
            )


def test_against_float64():
    """300 tokens through the NumPy model."""
    tokens = text(300)
    state, logits = read(tokens)
    tree = llama.cast(jax.tree.map(np.asarray, long_params()), np.float64)
    caches, expected = llama.prefill(tree, LONG.config, tokens)
    np.testing.assert_allclose(logits[0], expected, atol=TOLERANCE)
    for layer, cache in enumerate(caches):
        for got, listed in ((state.keys, cache.keys), (state.values, cache.values)):
            expected = np.stack(listed).swapaxes(0, 1)
            np.testing.assert_allclose(got[layer][0, :, :300], expected, atol=CACHE_TOLERANCE)


def test_state_of_a_ragged_batch():
    state, token = prefilled(EVICTING)
    for row, length in enumerate(LENGTHS):
        held = np.arange(192) < length
        assert state.valid[row].tolist() == held.tolist()
        assert state.positions[row].tolist() == np.where(held, np.arange(192), -1).tolist()
    assert state.next_position.tolist() == list(LENGTHS)
    assert state.budget.tolist() == [6, 13, 17]
    assert not state.scores.any()
    assert not state.finished.any()
    assert state.finite.all()
    assert (int(state.step), state.kept_slots, state.num_slots) == (0, 64, 192)
    assert token.shape == (3,)


def test_padding_does_not_matter():
    tokens, lengths = padded(prompts())
    state, logits = prefill(MODEL, params(), tokens, lengths, EVICTING)
    tokens[0, lengths[0] :] = -100  # no ids
    tokens[1, lengths[1] :] = 10**6
    tokens = np.pad(tokens, ((0, 0), (0, 50)), constant_values=5)
    other, other_logits = prefill(MODEL, params(), jnp.asarray(tokens), lengths, EVICTING)
    np.testing.assert_array_equal(other_logits, logits)
    assert other.num_slots == state.num_slots
    for got, expected in zip(other.keys, state.keys, strict=True):
        np.testing.assert_array_equal(got[0, :, :60], expected[0, :, :60])


def test_a_row_of_a_batch_is_what_it_is_alone():
    tokens, lengths = padded(prompts())
    _, logits = prefill(MODEL, params(), tokens, lengths, EVICTING)
    for row, prompt in enumerate(prompts()):
        _, alone = prefill(MODEL, params(), *padded([prompt]), EVICTING)
        np.testing.assert_allclose(alone[0], logits[row], atol=TOLERANCE)


@pytest.mark.parametrize(
    ("policy", "length", "new", "slots", "kept"),
    [
        (FULL, 100, 20, 128, None),
        (FULL, 100, 200, 512, None),
        (FULL, 500, 12, 512, None),
        (EVICTING, 63, None, 64, 64),
        (EVICTING, 64, None, 128, 64),
        (EVICTING, 255, None, 256, 64),
        (EVICTING, 256, None, 512, 64),
        (EVICTING, 1000, None, 1024, 128),
        (policies.inertiakv(tokens=63), 500, 400, 512, 64),
        (policies.inertiakv(tokens=64), 500, None, 512, 128),
        (policies.inertiakv(tokens=300), 100, None, 512, 320),
    ],
)
def test_capacities(policy, length, new, slots, kept):
    """By shapes alone; the slots of the full cache, and those that step 1 leaves."""
    run = functools.partial(
        prefill, LONG, tokens=text(length)[None], lengths=np.array([length]), policy=policy
    )
    state, logits = jax.eval_shape(lambda weights: run(weights, max_new_tokens=new), long_params())
    assert (state.num_slots, state.kept_slots) == (slots, kept)
    assert logits.shape == (1, CONFIG.vocab_size)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": np.zeros((0, 5), int), "lengths": np.zeros(0, int)}, "the batch is empty"),
        ({"tokens": np.zeros(5, int)}, "tokens must be int [B, T], got int64 (5,)"),
        ({"tokens": np.zeros((2, 5))}, "tokens must be int [B, T], got float64 (2, 5)"),
        ({"lengths": np.array([3])}, "lengths must be int [2], got int64 (1,)"),
        ({"lengths": np.array([3.0, 2.0])}, "lengths must be int [2], got float64 (2,)"),
        ({"lengths": np.array([3, 6])}, "length 6 exceeds the 5 tokens given"),
        ({"lengths": np.array([3, 0])}, "row 1 has an empty prompt"),
        ({"lengths": np.array([-1, 3])}, "row 0 has an empty prompt"),
        ({"tokens": np.full((2, 5), -1)}, "tokens must be ids in 0 .. 96, got -1 .. -1"),
        ({"tokens": np.full((2, 5), 97)}, "tokens must be ids in 0 .. 96, got 97 .. 97"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be an integer, got 2.5"),
        ({"max_new_tokens": True}, "max_new_tokens must be an integer, got True"),
        (
            {"max_new_tokens": 252},
            "a prompt of 5 tokens and 252 new ones exceed the model's 256 positions",
        ),
        ({"policy": "lazy4"}, "got 'lazy4'; write policies.by_name('lazy4')"),
        ({"policy": None}, "policy must be a Policy, got None"),
        (
            {"policy": FULL},
            "policy 'full' evicts nothing while decoding, so prefill needs max_new_tokens=",
        ),
        (
            {"policy": policies.inertiakv(0.5, protect_first=2)},
            "protect_first=2 and protect_recent=0 must fit the smallest budget of the batch, 1",
        ),
        ({"policy": policies.inertiakv(kv_bytes=10)}, "kv_bytes=10 is below one token's 384"),
    ],
)
def test_bad_prompts(changes, message):
    arguments = {
        "tokens": np.zeros((2, 5), int),
        "lengths": np.array([5, 3]),
        "policy": EVICTING,
    } | changes
    weights = params()
    with compiled_programs() as names, pytest.raises(ValueError, match=re.escape(message)):
        prefill(MODEL, weights, **arguments)
    assert names == []


def test_prompt_beyond_the_positions():
    with pytest.raises(ValueError, match=r"a prompt of 257 tokens and 0 new ones exceed .* 256"):
        prefill(MODEL, params(), text(257)[None], np.array([257]), EVICTING)


def test_inside_jit():
    tokens, lengths = padded([text(5)])
    with pytest.raises(ValueError, match="prefill needs concrete tokens and lengths"):
        jax.jit(lambda tokens: prefill(MODEL, params(), tokens, lengths, EVICTING))(tokens)


def test_nan_weights_show():
    weights = dict(params())
    weights["embed"] = {"embedding": weights["embed"]["embedding"].at[3].set(jnp.nan)}
    tokens, lengths = padded(prompts())
    tokens[tokens == 3] = 4
    tokens[2, 50] = 3
    state, logits = prefill(MODEL, weights, tokens, lengths, EVICTING)
    assert state.finite.tolist() == [True, True, False]
    assert jnp.isfinite(logits[:2]).all()
