"""The decoding loop: chunks, limits, ends, donation, and what equals what."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core.compilations import compiled_programs
from core.tiny_model import (
    CONFIG,
    EVICTING,
    LENGTHS,
    MODEL,
    POLICIES,
    STEPS,
    assert_identical,
    decoded,
    held_positions,
    padded,
    params,
    prefilled,
    prompts,
    stepped,
    utilities,
)

from inertiakv_jax import Sampling, decode, policies, prefill, step
from inertiakv_jax.models.decoder import DecoderModel

EACH_POLICY = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def in_chunks(policy, limits, *, steps=None, state_and_token=None, **options):
    """Decodes ``limits`` steps call by call; each call is a program of ``steps`` if given."""
    state, token = state_and_token or prefilled(policy)
    columns = []
    for limit in limits:
        state, tokens = decoded(
            state, token, policy, steps=steps or limit, limit=limit if steps else None, **options
        )
        columns.append(tokens[:, :limit])
        token = jnp.asarray(tokens[:, limit - 1])
    return state, np.concatenate(columns, axis=1)


@EACH_POLICY
def test_calls_of_one_step_equal_one_call(policy):
    state, tokens = in_chunks(policy, [STEPS])
    other, other_tokens = in_chunks(policy, [1] * STEPS)
    assert_identical(other, state)
    assert other_tokens.tolist() == tokens.tolist()
    assert int(state.step) == STEPS
    assert tokens.min() >= 0


@EACH_POLICY
def test_chunks_and_limits_equal_one_call(policy):
    state, tokens = in_chunks(policy, [1, 5])
    for limits in ([1, 2, 3], [1, 4, 1]):
        other = in_chunks(policy, limits[:1])
        token = jnp.asarray(other[1][:, -1])
        other, later = in_chunks(policy, limits[1:], steps=5, state_and_token=(other[0], token))
        assert_identical(other, state)
        assert later.tolist() == tokens[:, 1:].tolist()


def test_limit_counts_step_one():
    policy = POLICIES["lazy4"]
    state, tokens = in_chunks(policy, [1, 1, 1])
    other, token = prefilled(policy)
    other, other_tokens = decoded(other, token, policy, steps=STEPS, limit=3)
    assert_identical(other, state)
    assert other_tokens[:, :3].tolist() == tokens.tolist()
    assert (other_tokens[:, 3:] == -1).all()


def test_limit_zero_changes_nothing():
    policy = POLICIES["lazy4"]
    state, tokens = in_chunks(policy, [1])
    other, none = decoded(state, tokens[:, -1], policy, steps=5, limit=0, donate=False)
    assert_identical(other, state)
    assert (none == -1).all()


def test_lazy_one_is_full_refresh():
    state, tokens = in_chunks(policies.inertiakv(0.9), [STEPS])
    other, other_tokens = in_chunks(policies.lazy(1, 0.9), [STEPS])
    assert_identical(other, state)
    assert other_tokens.tolist() == tokens.tolist()


def test_lazy_without_a_second_refresh_is_score_free():
    state, tokens = in_chunks(policies.score_free(0.9), [STEPS])
    other, other_tokens = in_chunks(policies.lazy(1000, 0.9), [STEPS])
    assert held_positions(other) == held_positions(state)
    assert other_tokens.tolist() == tokens.tolist()
    np.testing.assert_allclose(other.scores, state.scores, rtol=1e-6)


@pytest.mark.parametrize("refresh", [1, 4, 0])
def test_ratio_zero_is_the_full_cache(refresh):
    state, tokens = in_chunks(policies.full(), [STEPS])
    other, other_tokens = in_chunks(policies.inertiakv(0.0, refresh=refresh), [STEPS])
    assert_identical(other, state)
    assert other_tokens.tolist() == tokens.tolist()
    assert held_positions(state) == [set(range(n + STEPS)) for n in LENGTHS]


def test_a_budget_that_is_not_reached_changes_no_token():
    state, tokens = in_chunks(policies.full(), [STEPS])
    other, other_tokens = in_chunks(policies.inertiakv(tokens=190), [STEPS])
    assert other_tokens.tolist() == tokens.tolist()
    assert held_positions(other) == held_positions(state)


@EACH_POLICY
@pytest.mark.parametrize("row", range(len(LENGTHS)))
def test_a_row_of_a_batch_is_what_it_is_alone(policy, row):
    state, tokens = in_chunks(policy, [STEPS])
    alone = prefilled(policy, [prompts()[row]])
    alone, alone_tokens = in_chunks(policy, [STEPS], state_and_token=alone)
    assert alone_tokens.tolist() == tokens[row : row + 1].tolist()
    assert held_positions(alone) == held_positions(state)[row : row + 1]
    [got], expected = utilities(alone), utilities(state)[row]
    assert got == pytest.approx(expected, rel=1e-5, abs=1e-9)  # observed 2e-6


def test_budget_is_kept_at_every_step():
    """50 steps after 10 tokens of which half stay; the others begin with 134 and 170."""
    policy = policies.inertiakv(0.7)
    state, token = prefilled(policy, prompts((10, 134, 170)))
    for _ in range(50):
        state, tokens = decoded(state, token, policy, steps=1)
        token = tokens[:, 0]
        assert state.num_held.tolist() == [3, 40, 51]
        assert [len(row) for row in held_positions(state)] == [3, 40, 51]
        assert state.num_slots == 64
    assert state.next_position.tolist() == [60, 184, 220]


def test_budget_of_one_token():
    policy = policies.inertiakv(0.99)
    state, token = prefilled(policy, prompts((1, 100, 170)))
    for _ in range(3):
        state, tokens = decoded(state, token, policy, steps=1)
        token = tokens[:, 0]
        assert state.num_held.tolist() == [1, 1, 1]
        assert state.finite.all()


def test_token_budget_above_a_prompt_grows_first():
    policy = policies.inertiakv(tokens=62)
    state, token = prefilled(policy)
    for held in (61, 62, 62, 62):
        state, tokens = decoded(state, token, policy, steps=1)
        token = tokens[:, 0]
        assert state.num_held.tolist() == [held, 62, 62]
    assert held_positions(state)[0] < set(range(64))


def test_token_budget_beyond_every_position():
    """The cache gets room for all positions of the model, 256, not for the budget."""
    state, _ = prefilled(policies.inertiakv(tokens=10**9))
    assert (state.num_slots, state.kept_slots) == (512, 320)
    assert state.budget.tolist() == [10**9] * 3


@pytest.mark.parametrize("refresh", [1, 4, 0])
def test_protected_positions_stay(refresh):
    policy = policies.inertiakv(0.9, refresh=refresh, protect_first=2, protect_recent=3)
    state, token = prefilled(policy)
    for t in range(1, 20):
        state, tokens = decoded(state, token, policy, steps=1)
        token = tokens[:, 0]
        for row, length in zip(held_positions(state), LENGTHS, strict=True):
            newest = length + t - 1
            assert {0, 1, newest, newest - 1, newest - 2} <= row
        assert state.num_held.tolist() == [6, 13, 17]


def test_attention_that_is_uniform_does_not_freeze_new_tokens_out():
    """Every utility is the same up to rounding; of equals the lower position goes."""
    policy = POLICIES["inertiakv"]
    weights = jax.tree.map(jnp.asarray, params())
    for layer in range(CONFIG.num_layers):
        attention = weights[f"layers_{layer}"]["attention"]
        attention["q_proj"] = {"kernel": jnp.zeros_like(attention["q_proj"]["kernel"])}
    state, token = prefilled(policy)
    for t in range(1, 51):
        state, tokens = decode(MODEL, weights, state, token, steps=1, policy=policy)
        token = tokens[:, 0]
        for row, length in zip(held_positions(state), LENGTHS, strict=True):
            assert max(row) == length + t - 1, f"{t=}"


# Ends


def test_stop_tokens_end_a_row():
    policy = POLICIES["lazy4"]
    _, tokens = in_chunks(policy, [STEPS])
    stop = int(tokens[1, 2])
    assert stop not in tokens[[0, 2]]
    assert stop not in tokens[1, :2]
    other, other_tokens = in_chunks(policy, [STEPS], stop_tokens=[stop, 96])
    assert other_tokens[1].tolist() == [*tokens[1, :3].tolist(), -1, -1, -1]
    assert other_tokens[[0, 2]].tolist() == tokens[[0, 2]].tolist()
    assert other.finished.tolist() == [False, True, False]
    assert other.next_position.tolist() == [n + s for n, s in zip(LENGTHS, (6, 3, 6), strict=True)]
    chunked, chunked_tokens = in_chunks(policy, [1] * STEPS, stop_tokens=[stop, 96])
    assert_identical(chunked, other)
    assert chunked_tokens.tolist() == other_tokens.tolist()


def test_the_loop_idles_once_all_rows_have_ended():
    policy = POLICIES["lazy4"]
    state, tokens = in_chunks(policy, [1])
    state = dataclasses.replace(state, finished=jnp.ones((3,), bool))
    other, none = decoded(state, tokens[:, 0], policy, steps=5, donate=False)
    assert_identical(other, state)
    assert int(other.step) == 1
    assert (none == -1).all()


# Sampling


def test_sampled_tokens_do_not_depend_on_chunks():
    policy = POLICIES["lazy4"]
    options = {"sampling": Sampling(temperature=1.5, top_k=50), "key": jax.random.key(3)}
    state, tokens = in_chunks(policy, [STEPS], **options)
    other, other_tokens = in_chunks(policy, [1] * STEPS, **options)
    assert_identical(other, state)
    assert other_tokens.tolist() == tokens.tolist()
    greedy = in_chunks(policy, [STEPS])[1]
    assert tokens.tolist() != greedy.tolist()
    options["key"] = jax.random.key(4)
    assert in_chunks(policy, [STEPS], **options)[1].tolist() != tokens.tolist()
    options["sampling"] = Sampling(temperature=1e-5, top_k=0)
    assert in_chunks(policy, [STEPS], **options)[1].tolist() == greedy.tolist()


def test_sampling_needs_a_key():
    state, token = prefilled(POLICIES["lazy4"])
    with pytest.raises(ValueError, match="sampling needs a PRNG key"):
        decoded(state, token, POLICIES["lazy4"], sampling=Sampling())


# Calls that share nothing


def test_nothing_leaks_from_one_run_into_another():
    policy, long, short = POLICIES["lazy4"], prompts(), prompts((8, 30, 140), seed=1)
    first = in_chunks(policy, [STEPS], state_and_token=prefilled(policy, short))
    between = in_chunks(policy, [STEPS], state_and_token=prefilled(policy, long))
    again = in_chunks(policy, [STEPS], state_and_token=prefilled(policy, short))
    assert_identical(again, first)
    assert again[1].tolist() != between[1].tolist()


# Donation


@EACH_POLICY
def test_a_state_is_consumed(policy):
    state, token = prefilled(policy)
    later, tokens = decoded(state, token, policy, steps=1)
    assert all(leaf.is_deleted() for leaf in state.keys + state.values)
    with pytest.raises(ValueError, match="the state was consumed by an earlier decode"):
        decoded(state, token, policy, steps=1)
    last, _ = decoded(later, tokens[:, 0], policy, steps=1)
    assert all(leaf.is_deleted() for leaf in later.keys + later.values)
    with pytest.raises(ValueError, match="the state was consumed by an earlier decode"):
        decoded(later, tokens[:, 0], policy, steps=1)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(last))


@pytest.mark.parametrize("name", ["full", "lazy4"])
def test_a_state_can_be_kept(name):
    policy = POLICIES[name]
    expected, tokens = in_chunks(policy, [1, 5])
    state, token = prefilled(policy)
    for _ in range(2):
        later, first = decoded(state, token, policy, steps=1, donate=False)
        for _ in range(2):
            last, rest = decoded(later, first[:, 0], policy, steps=5, donate=False)
            assert_identical(last, expected)
            assert np.concatenate([first, rest], axis=1).tolist() == tokens.tolist()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((state, later)))


def test_one_prefill_serves_several_policies():
    state, token = prefilled(POLICIES["inertiakv"])
    for policy in EVICTING.values():
        later, tokens = decoded(state, token, policy, donate=False)
        expected, expected_tokens = in_chunks(policy, [STEPS])
        assert_identical(later, expected)
        assert tokens.tolist() == expected_tokens.tolist()


def test_step_is_what_decode_does():
    policy = POLICIES["lazy4"]
    state, token = prefilled(policy)
    expected, tokens = in_chunks(policy, [STEPS])
    for t in range(STEPS):
        state, logits = stepped(state, token, policy)
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        assert token.tolist() == tokens[:, t].tolist()
    assert held_positions(state) == held_positions(expected)
    np.testing.assert_allclose(state.scores, expected.scores, rtol=1e-5)


# Errors


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("lazy4", {"steps": 0}, "steps must be at least 1, got 0"),
        ("lazy4", {"steps": 1.5}, "steps must be an integer, got 1.5"),
        ("lazy4", {"steps": 5, "limit": 6}, "limit must be in 1 .. steps=5, got 6"),
        ("lazy4", {"steps": 5, "limit": 0}, "limit must be in 1 .. steps=5, got 0"),
        ("full", {"steps": 5, "limit": -1}, "limit must be in 0 .. steps=5, got -1"),
        ("full", {"steps": 23}, "170 tokens and 23 steps exceed the 192 slots of the cache"),
        ("lazy4", {"steps": 87}, "170 tokens and 87 steps exceed the 256 positions of the model"),
    ],
)
def test_bad_arguments(name, options, message):
    policy = POLICIES[name]
    state, token = prefilled(policy)
    with compiled_programs() as names, pytest.raises(ValueError, match=re.escape(message)):
        decoded(state, token, policy, **options)
    assert names == []
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_first_token_of_another_batch():
    policy = POLICIES["lazy4"]
    state, token = prefilled(policy)
    for wrong in (token[:2], token[:, None]):
        with pytest.raises(ValueError, match=r"first_token must have shape \(3,\), got"):
            decoded(state, wrong, policy)


def test_first_token_that_is_none():
    """The last column of a limited decode holds no token."""
    policy = POLICIES["lazy4"]
    state, tokens = decoded(*prefilled(policy), policy, limit=2)
    with pytest.raises(ValueError, match=r"got \[-1 -1 -1\]; .*tokens\[:, limit - 1\]"):
        decoded(state, tokens[:, -1], policy)
    decoded(state, tokens[:, 1], policy)


def test_first_token_that_is_no_id():
    policy = POLICIES["lazy4"]
    state, token = prefilled(policy)
    with pytest.raises(ValueError, match=r"every unfinished row, 0 \.\. 96, got \[97 97 97\]"):
        decoded(state, 0 * token + 97, policy)


@pytest.mark.parametrize("wrong", [[1.0, 2.5, 3.0], [True, False, True], [2**33, 1, 2], [None] * 3])
def test_ids_that_are_no_integers(wrong):
    """A conversion would round 2.5 to 2 and make 0 of 2**33."""
    policy = POLICIES["lazy4"]
    state, token = prefilled(policy)
    with pytest.raises(ValueError, match=r"first_token must be integers below 2\*\*31, got"):
        decoded(state, wrong, policy)
    with pytest.raises(ValueError, match=r"stop_tokens must be integers below 2\*\*31, got"):
        decoded(state, token, policy, stop_tokens=wrong)
    with pytest.raises(ValueError, match="first_token must be integers"):
        decoded(state, jnp.asarray([0.5, 1.5, 2.5]), policy)


@pytest.mark.parametrize("first_steps", [0, 1])
def test_a_state_restored_as_numpy_arrays(first_steps):
    policy = POLICIES["lazy4"]
    state, token = prefilled(policy)
    if first_steps:
        state, tokens = decoded(state, token, policy, first_steps)
        token = tokens[:, -1]
    restored = jax.tree.map(np.array, state)
    expected, tokens = decoded(state, token, policy)
    got, same_tokens = decoded(restored, token, policy)
    assert_identical(got, expected)
    np.testing.assert_array_equal(same_tokens, tokens)


def test_policy_of_another_prefill():
    state, token = prefilled(POLICIES["lazy4"])
    for take in (decoded, stepped):
        with pytest.raises(ValueError, match="'full' evicts nothing, but the state was prefilled"):
            take(state, token, POLICIES["full"])
        with pytest.raises(ValueError, match=r"'tova' has per_layer rankings \(3, 3\), but the"):
            take(state, token, policies.tova(0.9))


def test_step_refuses_tokens_that_are_not_one_a_row():
    policy = POLICIES["lazy4"]
    state, token = prefilled(policy)
    for wrong in (token[:2], token[:, None], token[0]):
        with pytest.raises(ValueError, match=r"token must have shape \(3,\), got"):
            stepped(state, wrong, policy)
    with pytest.raises(ValueError, match=r"token must be integers below 2\*\*31, got"):
        stepped(state, token.astype(jnp.float32), policy)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": "data=1"}, "mesh must be a Mesh or None, got 'data=1'; write make_mesh('data=1'"),
        ({"model": "llama"}, "all of inertiakv_jax.typing.Model, got 'llama', which lacks num_la"),
        ({"model": CONFIG}, "which lacks max_positions, dtype, hidden, logits"),
        ({"model": DecoderModel}, "which lacks being an instance"),
    ],
)
def test_arguments_of_another_kind(options, message):
    policy = POLICIES["lazy4"]
    state, token = prefilled(policy)
    model, mesh = options.get("model", MODEL), options.get("mesh")
    calls = (
        lambda: prefill(model, params(), *padded(prompts()), policy, mesh=mesh),
        lambda: decode(model, params(), state, token, steps=1, policy=policy, mesh=mesh),
        lambda: step(model, params(), state, token, policy, mesh=mesh),
    )
    with compiled_programs() as names:
        for call in calls:
            with pytest.raises(ValueError, match=re.escape(message)):
                call()
    assert names == []


def test_sampling_that_is_none():
    state, token = prefilled(POLICIES["lazy4"])
    with pytest.raises(ValueError, match=r"sampling must be a Sampling or None .*, got 0\.7"):
        decoded(state, token, POLICIES["lazy4"], sampling=0.7)


def test_a_full_cache_never_overflows_unseen():
    """Prefilled for the full cache, decoded with a policy that would evict if it had a budget."""
    state, token = prefilled(POLICIES["full"])
    with pytest.raises(ValueError, match="170 tokens and 23 steps exceed the 192 slots"):
        decoded(state, token, POLICIES["lazy4"], steps=23)


def test_bfloat16():
    """Utilities are float32, everything else of the model's dtype, and every number finite."""
    model = DecoderModel(CONFIG, "bfloat16")
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params())
    state, token = prefilled(POLICIES["inertiakv"], model=model, weights=half)
    state, _ = decode(model, half, state, token, steps=STEPS, policy=POLICIES["inertiakv"])
    assert {leaf.dtype for leaf in state.keys + state.values} == {jnp.dtype("bfloat16")}
    assert state.scores.dtype == jnp.float32
    assert state.finite.all()
    assert state.num_held.tolist() == [6, 13, 17]
    for row in utilities(state):
        assert len(set(row.values())) == len(row), "utilities tie"


def test_double_precision_enabled():
    """A program may ask jax for 64 bits; the state and the tokens stay what they are."""
    policy, options = POLICIES["lazy4"], {"sampling": Sampling(top_k=5), "key": jax.random.key(2)}
    expected, tokens = decoded(*prefilled(policy), policy, **options)
    with jax.enable_x64(True):
        state, same_tokens = decoded(*prefilled(policy), policy, **options)
    np.testing.assert_array_equal(same_tokens, tokens)
    assert held_positions(state) == held_positions(expected)
    for leaf, other in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert leaf.dtype == other.dtype
