"""What holds of every decode step: its type, what it may read, and what it leaves alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core.tiny_model import (
    CONFIG,
    EVICTING,
    LENGTHS,
    MODEL,
    POLICIES,
    assert_identical,
    decoded,
    held_positions,
    params,
    prefilled,
    stepped,
    utilities,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from inertiakv_jax import policies, step
from inertiakv_jax import state as kv_state
from inertiakv_jax.config import ModelConfig
from inertiakv_jax.models.decoder import DecoderModel

LOGITS_TOLERANCE = 2e-5  # absolute, of logits up to 7; observed 6.0e-6
UTILITY_TOLERANCE = 1e-5  # relative; observed 1.6e-6
EACH_POLICY = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def after_step_one(policy, rows=None):
    """A state that has taken its first step, with the next token."""
    state, token = prefilled(policy, rows)
    state, logits = stepped(state, token, policy)
    return state, jnp.argmax(logits, axis=-1).astype(jnp.int32)


def types(tree):
    """Structure, and shape, dtype and weak type of every leaf."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype, jax.typeof(leaf).weak_type) for leaf in leaves]


def types_of_step(state, policy, token, model=MODEL):
    """As ``types``, of what a step would return; nothing is compiled."""
    weights = jax.eval_shape(model.init, jax.random.key(0))
    shapes = jax.eval_shape(
        lambda *arguments: step(model, *arguments, policy)[0], weights, state, token
    )
    leaves, structure = jax.tree.flatten(shapes)
    return structure, [(leaf.shape, leaf.dtype, leaf.weak_type) for leaf in leaves]


@EACH_POLICY
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_step_returns_the_type_that_init_gave(policy, dtype):
    model = DecoderModel(CONFIG, dtype)
    state = kv_state.init(model, 2, 8, budget=jnp.asarray([3, 5]))
    assert state.keys[0].dtype == dtype
    token = jnp.zeros((2,), jnp.int32)
    assert types_of_step(state, policy, token, model) == types(state)


@EACH_POLICY
def test_step_fits_scan_and_cond(policy):
    """Both refuse a carry whose type changes."""
    state = kv_state.init(MODEL, 2, 8, budget=jnp.asarray([3, 5]))

    def scanned(params, state, tokens):
        return jax.lax.scan(lambda s, t: step(MODEL, params, s, t, policy), state, tokens)

    final, logits = jax.eval_shape(scanned, params(), state, jnp.zeros((4, 2), jnp.int32))
    assert jax.tree.structure(final) == jax.tree.structure(state)
    assert logits.shape == (4, 2, CONFIG.vocab_size)

    def maybe(params, state, token, take):
        return jax.lax.cond(
            take, lambda s: step(MODEL, params, s, token, policy)[0], lambda s: s, state
        )

    final = jax.eval_shape(maybe, params(), state, jnp.zeros((2,), jnp.int32), jnp.bool_(True))
    assert jax.tree.structure(final) == jax.tree.structure(state)


@pytest.mark.parametrize("policy", EVICTING.values(), ids=EVICTING)
def test_step_one_shrinks_the_state_once(policy):
    state, token = prefilled(policy)
    assert (state.num_slots, state.kept_slots) == (192, 64)
    state, token = after_step_one(policy)
    assert (state.num_slots, state.kept_slots) == (64, None)
    assert [leaf.shape for leaf in state.keys + state.values] == [(3, 2, 64, 8)] * 6
    assert types_of_step(state, policy, token) == types(state)


@EACH_POLICY
def test_counters(policy):
    state, token = prefilled(policy)
    assert state.next_position.tolist() == list(LENGTHS)
    assert state.num_held.tolist() == list(LENGTHS)
    for t in range(1, 4):
        state, logits = stepped(state, token, policy)
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        assert int(state.step) == t
        assert state.next_position.tolist() == [n + t for n in LENGTHS]
        held = [6, 13, 17] if policy.evicts else [n + t for n in LENGTHS]
        assert state.num_held.tolist() == held
        assert [len(row) for row in held_positions(state)] == held
        assert state.finite.all()
        assert not state.finished.any()


@EACH_POLICY
def test_free_slots_show_nothing(policy):
    state, _ = after_step_one(policy)
    free = ~np.asarray(state.valid)
    assert (np.asarray(state.positions)[free] == -1).all()
    assert not np.asarray(state.scores)[free].any()
    assert free.any(axis=1).all()


def shuffled(state, seed):
    """The same state with each row's slots in another order."""
    rng = np.random.default_rng(seed)
    batch, slots = state.valid.shape
    order = jnp.asarray(np.stack([rng.permutation(slots) for _ in range(batch)]))

    def move(leaf):
        return jnp.take_along_axis(leaf, order, axis=1)

    def move_cache(leaf):
        return jnp.take_along_axis(leaf, order[:, None, :, None], axis=2)

    return dataclasses.replace(
        state,
        keys=tuple(map(move_cache, state.keys)),
        values=tuple(map(move_cache, state.values)),
        scores=move(state.scores),
        valid=move(state.valid),
        positions=move(state.positions),
    )


@EACH_POLICY
@pytest.mark.parametrize("seed", [0, 1])
def test_order_of_slots_does_not_matter(policy, seed):
    state, token = after_step_one(policy)
    other = shuffled(state, seed)
    for _ in range(4):
        state, logits = stepped(state, token, policy)
        other, other_logits = stepped(other, token, policy)
        other = shuffled(other, seed)
        assert held_positions(other) == held_positions(state)
        np.testing.assert_allclose(other_logits, logits, atol=LOGITS_TOLERANCE)
        for got, expected in zip(utilities(other), utilities(state), strict=True):
            assert got == pytest.approx(expected, rel=UTILITY_TOLERANCE, abs=0)
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)


@pytest.mark.parametrize("policy", EVICTING.values(), ids=EVICTING)
def test_order_of_slots_does_not_matter_at_step_one(policy):
    state, token = prefilled(policy)
    shrunk, logits = stepped(state, token, policy)
    other, other_logits = stepped(shuffled(state, 3), token, policy)
    np.testing.assert_array_equal(other.positions, shrunk.positions)  # compaction sorts
    np.testing.assert_allclose(other_logits, logits, atol=LOGITS_TOLERANCE)


def poisoned(state, key, value):
    """The state with every dead slot of every key and value overwritten."""
    dead = ~state.valid[:, None, :, None]
    return dataclasses.replace(
        state,
        keys=tuple(jnp.where(dead, jnp.float32(key), leaf) for leaf in state.keys),
        values=tuple(jnp.where(dead, jnp.float32(value), leaf) for leaf in state.values),
    )


@EACH_POLICY
@pytest.mark.parametrize("junk", [(np.nan, np.nan), (np.inf, -np.inf), (3e38, 3e38)], ids=str)
def test_dead_slots_may_hold_anything(policy, junk):
    state, token = after_step_one(policy)
    other = state
    for _ in range(3):
        state, logits = stepped(state, token, policy)
        other, other_logits = stepped(poisoned(other, *junk), token, policy)
        assert_identical(poisoned(other, 0.0, 0.0), poisoned(state, 0.0, 0.0))
        assert other_logits.tobytes() == logits.tobytes()
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)


@pytest.mark.parametrize("policy", EVICTING.values(), ids=EVICTING)
def test_dead_slots_of_the_prompt_may_hold_anything(policy):
    state, token = prefilled(policy)
    shrunk, logits = stepped(state, token, policy)
    other, other_logits = stepped(poisoned(state, np.nan, np.nan), token, policy)
    assert_identical(poisoned(other, 0.0, 0.0), poisoned(shrunk, 0.0, 0.0))
    assert other_logits.tobytes() == logits.tobytes()


@EACH_POLICY
def test_finished_rows_are_frozen(policy):
    """Every leaf of row 1, to the bit, dead slots included."""

    def row(state, index):
        cache = [leaf[index] for leaf in state.keys + state.values]
        names = ("scores", "valid", "positions", "next_position", "budget", "finished", "finite")
        return [*cache, *(getattr(state, name)[index] for name in names)]

    state, token = after_step_one(policy)
    running, _ = decoded(state, token, policy, steps=5, donate=False)
    state = dataclasses.replace(state, finished=jnp.asarray([False, True, False]))
    before = row(state, 1)
    junk = token.at[1].set(-1)
    state, tokens = decoded(state, junk, policy, steps=5, donate=False)
    assert_identical(row(state, 1), before)
    assert tokens[1].tolist() == [-1] * 5
    for index in (0, 2):
        assert_identical(row(state, index), row(running, index))


@pytest.mark.parametrize("name", ["inertiakv", "score-free"])
def test_nan_logits_are_remembered(name):
    """A row that saw NaN is marked; the others, and rows already finished, are not."""
    policy = POLICIES[name]
    state, token = after_step_one(policy)
    value = state.values[1].at[1].set(jnp.nan)
    broken = dataclasses.replace(state, values=(state.values[0], value, state.values[2]))
    broken, _ = stepped(broken, token, policy)
    assert broken.finite.tolist() == [True, False, True]
    frozen = dataclasses.replace(
        state,
        values=(state.values[0], value, state.values[2]),
        finished=jnp.asarray([False, True, False]),
    )
    frozen, _ = stepped(frozen, token, policy)
    assert frozen.finite.tolist() == [True, True, True]


@pytest.mark.parametrize("name", ["inertiakv", "lazy4"])
def test_an_empty_cache_fills_to_its_budget(name):
    """Decoding from nothing: the first token attends to itself alone."""
    policy = POLICIES[name]
    state = kv_state.init(MODEL, 3, 64, budget=jnp.asarray([1, 3, 2**31 - 1]))
    for t in range(1, 6):
        state, _ = decoded(state, jnp.asarray([3, 5, 7]), policy, steps=1)
        assert state.num_held.tolist() == [1, min(t, 3), t]
        assert state.finite.all()


@given(
    lengths=st.tuples(st.integers(1, 60), st.integers(1, 190), st.integers(128, 190)),
    ratio=st.sampled_from([0.7, 0.75, 0.9, 0.97, 0.99]),
    alpha=st.floats(0.0, 0.99),
    refresh=st.integers(2, 5),
    seed=st.integers(0, 99),
    data=st.data(),
)
@settings(max_examples=12, deadline=None, derandomize=True)
def test_drawn_runs(lengths, ratio, alpha, refresh, seed, data):
    budgets = [policies.tokens_kept(length, ratio) for length in lengths]
    first = data.draw(st.integers(0, min(budgets)))
    recent = data.draw(st.integers(0, min(budgets) - first))
    policy = policies.lazy(refresh, ratio, alpha=alpha, protect_first=first, protect_recent=recent)
    rng = np.random.default_rng(seed)
    state, token = prefilled(policy, [rng.integers(0, 97, size=n) for n in lengths])
    before = [set(range(n)) for n in lengths]
    for t in range(1, 5):
        state, tokens = decoded(state, token, policy, steps=1)
        token = jnp.asarray(tokens[:, 0])
        held = held_positions(state)
        for row, length in enumerate(lengths):
            newest = length + t - 1
            assert len(held[row]) == budgets[row]
            assert held[row] <= before[row] | {newest}
            reserved = {*range(min(first, length)), *range(newest - recent + 1, newest + 1)}
            assert reserved <= held[row]
        assert state.next_position.tolist() == [n + t for n in lengths]
        assert state.finite.all()
        before = held


def test_positions_after_eviction():
    """A query is rotated by its place in the text, not by the number of tokens held.

    One layer, one head of two numbers, every query (1, 0) and every key (0, 1) before rotation.
    Of four tokens positions 1 and 2 are gone; the token at 4 has logits sin 4, sin 1, sin 0 over
    the root of 2.
    """
    config = ModelConfig(
        family="llama",
        vocab_size=4,
        hidden_size=2,
        intermediate_size=2,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        attention_bias=True,
    )
    model = DecoderModel(config)
    weights = jax.tree.map(jnp.zeros_like, model.init(jax.random.key(0)))
    weights["layers_0"]["attention"]["q_proj"]["bias"] = jnp.asarray([1.0, 0.0])
    weights["layers_0"]["attention"]["k_proj"]["bias"] = jnp.asarray([0.0, 1.0])
    policy = policies.inertiakv(tokens=7, alpha=0.0)  # utilities are the last step's attention
    token = jnp.asarray([1])
    run = jax.jit(step, static_argnames=("model", "policy"))

    state = kv_state.init(model, 1, 8, budget=jnp.asarray([7]))
    for _ in range(4):
        state, _ = run(model, weights, state, token, policy)
    kept = jnp.asarray([[True, False, False, True, False, False, False, False]])
    state = dataclasses.replace(
        state,
        valid=kept,
        positions=jnp.where(kept, state.positions, -1),
        scores=jnp.where(kept, state.scores, 0.0),
    )
    state, _ = run(model, weights, state, token, policy)
    assert utilities(state) == [pytest.approx({0: 0.172301, 3: 0.533463, 4: 0.294236}, abs=2e-6)]
    state, _ = run(model, weights, state, token, policy)
    assert held_positions(state) == [{0, 3, 4, 5}]
