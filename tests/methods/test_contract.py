"""What holds of every named method: types, budgets, rows apart, nothing but numbers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core.tiny_model import CONFIG, padded, prompts
from oracle import llama
from oracle.tiny import random_params

from inertiakv_jax import decode, policies, prefill, step
from inertiakv_jax import state as kv_state
from inertiakv_jax.learned_scorer import save_learned
from inertiakv_jax.models.decoder import DecoderModel
from inertiakv_jax.scoring import LearnedParams

SMALL = dataclasses.replace(CONFIG, num_layers=2)
LENGTHS = (40, 53, 30)  # budgets at ratio 0.8: 8, 10, 6
BUDGETS = [8, 10, 6]
STEPS = 5
METHODS = sorted({*policies.METHODS, "lazy2"} - {"full"})
COMPOSED = ["snapkv+lazy2", "adakv-ea+keydiff", "kvzip+tova"]
DTYPES = ["float32", "bfloat16"]


@functools.cache
def params(dtype):
    tree = llama.cast(random_params(SMALL, seed=5), np.float32)
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)


@functools.cache
def named(name, folder):
    options = {}
    if name == "learned":
        rng = np.random.default_rng(8)
        shapes = [(heads, SMALL.head_dim, 16) for heads in (SMALL.num_heads, SMALL.num_kv_heads)]
        options["scorer_weights"] = str(folder / "scorer.safetensors")
        save_learned(
            options["scorer_weights"],
            LearnedParams(*(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)),
        )
    return policies.by_name(name, 0.8, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("scorer")


def run(policy, rows, numbers, dtype):
    """States after prefill and after each of five steps, and the tokens [B, steps]."""
    model = DecoderModel(SMALL, dtype)
    tokens, lengths = padded(rows, width=max(*LENGTHS, *map(len, rows)))
    state, logits = prefill(
        model, params(dtype), tokens, lengths, policy, max_new_tokens=STEPS, rows=numbers
    )
    states, chosen = [state], [jnp.argmax(logits, axis=-1).astype(jnp.int32)]
    for _ in range(STEPS):
        state, token = decode(
            model, params(dtype), state, chosen[-1], steps=1, policy=policy, donate=False
        )
        states.append(state)
        chosen.append(token[:, 0])
    return states, np.stack(chosen, axis=1)


def by_row(state, x):
    """An array of the state with the rows first."""
    return np.moveaxis(np.asarray(x), 0 if state.valid.ndim == 2 else 1, 0)


def types(state):
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", METHODS + COMPOSED)
def test_a_ragged_batch(name, dtype, folder):
    policy = named(name, folder)
    rows = prompts(LENGTHS)
    states, tokens = run(policy, rows, (0, 1, 2), dtype)
    for state in states[1:]:
        held = by_row(state, state.num_held)
        step_number = int(state.step)
        for row, budget in enumerate(BUDGETS):
            if policy.evicts:
                assert (held[row] == budget).all(), step_number
            else:  # thinned out once, then growing
                assert held[row].sum() == (budget + step_number) * held[row].size
        assert all(np.isfinite(leaf).all() for leaf in (state.scores, state.finite))
        assert bool(state.finite.all())
        assert not np.any(np.asarray(state.scores)[~np.asarray(state.valid)])
        newest = by_row(state, state.positions).reshape(len(LENGTHS), -1).max(axis=1)
        assert (newest < np.asarray(state.next_position)).all()
    assert all(types(state) == types(states[1]) for state in states[2:])
    assert states[1].keys[0].dtype == dtype
    assert states[1].scores.dtype == jnp.float32

    # Row 1 alone, as every row of a batch of the same size: the same program, other neighbours.
    alone, alone_tokens = run(policy, [rows[1]] * 3, (1, 1, 1), dtype)
    np.testing.assert_array_equal(alone_tokens[0], tokens[1])
    # Capacity may differ, where the longest head sets it: compare positions, not slots.
    got = by_row(alone[-1], alone[-1].positions)[0]
    expected = by_row(states[-1], states[-1].positions)[1]
    assert kept(got) == kept(expected)


def kept(positions):
    """The set of positions of each ranking."""
    flat = positions.reshape(-1, positions.shape[-1])
    return [sorted(places[places >= 0].tolist()) for places in flat]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", METHODS)
def test_step_keeps_the_type(name, dtype, folder):
    """Nothing is compiled: what a scan asks of its body, after step 1."""
    policy, model = named(name, folder), DecoderModel(SMALL, dtype)
    state = kv_state.init(model, 2, 8, budget=jnp.asarray([3, 5]), retention=policy.retention)
    shapes = jax.eval_shape(
        lambda weights, state, token: step(model, weights, state, token, policy)[0],
        params(dtype),
        state,
        jnp.zeros((2,), jnp.int32),
    )
    assert jax.tree.structure(shapes) == jax.tree.structure(state)
    assert types(shapes) == types(state)


def test_a_budget_that_grows_with_the_text():
    """A fifth of all tokens seen: of 40, 53 and 30 and of those that follow."""
    policy = policies.inertiakv(0.8, ratio_of="seen")
    states, _ = run(policy, prompts(LENGTHS), None, "float32")
    held = [state.num_held.tolist() for state in states[1:]]
    assert held == [[8, 10, 6], [8, 11, 6], [8, 11, 6], [8, 11, 6], [9, 11, 7]]
    with pytest.raises(ValueError, match="grows with the text, so prefill needs max_new_tokens="):
        prefill(DecoderModel(SMALL), params("float32"), *padded(prompts(LENGTHS)), policy)
    small, token = dataclasses.replace(states[0], kept_slots=16), jnp.zeros((3,), jnp.int32)
    with pytest.raises(ValueError, match=r"after 201 steps the budget needs 51 slots, .* has 16"):
        decode(DecoderModel(SMALL), params("float32"), small, token, steps=201, policy=policy)


def test_decoding_may_keep_more_than_was_left_of_the_prompt():
    """A tenth of 150 tokens is left, and may grow to nine tenths: slots for those."""
    policy = policies.compose(policies.snapkv(0.9, window=8), policies.inertiakv(0.1))
    states, _ = run(policy, prompts((150,)), None, "float32")
    assert states[0].kept_slots == states[1].num_slots == 192  # 135 and the next, rounded up
    assert [state.num_held.max() for state in states] == [15, 16, 17, 18, 19, 20]


def test_a_state_of_other_rankings_is_refused():
    states, _ = run(policies.inertiakv(0.8), prompts(LENGTHS), None, "float32")
    message = r"'tova' has per_layer rankings \(2, 3\), but the state was prefilled for .*\(3,\)"
    for state in states[:2]:
        with pytest.raises(ValueError, match=message):
            decode(
                DecoderModel(SMALL),
                params("float32"),
                state,
                jnp.zeros((3,), jnp.int32),
                steps=1,
                policy=policies.tova(0.8),
            )


def test_one_layer_with_one_head_is_ranked_alike_by_all_retentions():
    """With nothing to share a ranking with, the three are one and the same."""
    config = dataclasses.replace(SMALL, num_layers=1, num_kv_heads=1)
    model = DecoderModel(config)
    weights = jax.tree.map(jnp.asarray, llama.cast(random_params(config, seed=6), np.float32))
    tokens, lengths = padded(prompts(LENGTHS))
    ends = []
    for retention in kv_state.RETENTIONS:
        policy = policies.inertiakv(0.8, retention=retention, decay=0.5)
        state, logits = prefill(model, weights, tokens, lengths, policy)
        first = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        state, chosen = decode(model, weights, state, first, steps=STEPS, policy=policy)
        ends.append([np.asarray(x).reshape(3, -1) for x in (state.positions, state.scores, chosen)])
    for positions, scores, chosen in ends[1:]:
        np.testing.assert_array_equal(positions, ends[0][0])
        np.testing.assert_allclose(scores, ends[0][1], rtol=1e-5)
        np.testing.assert_array_equal(chosen, ends[0][2])
