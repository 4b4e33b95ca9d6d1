"""The library against the NumPy model of the method: the same tokens kept at every step.

The oracle computes in float64, the library in float32. Kept positions are compared as sets, without
any slack. Two tokens whose utilities differ by less than float32 arithmetic resolves could be
swapped by either; the seed is therefore chosen so that the relative gap between the oracle's
utilities on the two sides of every cut (`Record.margin`) is above `CLEAR`, and tests assert that.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import llama, method
from oracle.tiny import random_params

from inertiakv_jax import policies
from inertiakv_jax.config import ModelConfig
from inertiakv_jax.decode_step import step
from inertiakv_jax.decoding import decode
from inertiakv_jax.models.decoder import DecoderModel
from inertiakv_jax.prefilling import prefill
from inertiakv_jax.rope_scaling import RopeScaling

STEPS = 40
CLEAR = 1e-5
UTILITY_TOLERANCE = 5e-5  # relative; observed 1.2e-5 with the tiny model
LOGITS_TOLERANCE = 2e-4  # absolute, of logits up to 10; observed 3.2e-5
CONFIG = ModelConfig(
    family="llama",
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=256,
)
# Budgets at ratio 0.5, 0.9, 0.97: (30, 67, 85), (6, 13, 17), (1, 4, 5). Without refreshes the gaps
# between utilities shrink by a factor a step that falls with the budget (1/2 at a budget of 2), so
# 40 steps need a budget of at least 4 to stay in float32's reach; 1 is exact, a tie at every step.
LENGTHS = (60, 134, 170)
SEED = 44


@functools.cache
def tiny(config=CONFIG):
    """The library's model, and parameters for it and for the oracle, equal in every bit."""
    tree = random_params(config, SEED, bias=config.attention_bias, tied=config.tie_word_embeddings)
    tree = llama.cast(tree, np.float32)
    return DecoderModel(config), jax.tree.map(jnp.asarray, tree), tree


@functools.cache
def ragged_batch(lengths=LENGTHS):
    """Prompts of these lengths, and a text to force on each."""
    rng = np.random.default_rng(100 + SEED)
    prompts = tuple(rng.integers(0, CONFIG.vocab_size, size=n) for n in lengths)
    return prompts, rng.integers(0, CONFIG.vocab_size, size=(len(lengths), STEPS))


def padded(prompts):
    """[B, T] tokens; what stands in the padding is a token like any other."""
    tokens = np.full((len(prompts), max(map(len, prompts))), 13)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens, np.array([len(prompt) for prompt in prompts])


def run_oracle(params, config, prompts, policy, forced, dtype: type = np.float64):
    return [
        method.run(
            params,
            config,
            prompt,
            steps=STEPS,
            ratio=policy.ratio,
            budget=policy.tokens,
            alpha=policy.alpha,
            refresh=policy.refresh,
            protect_first=policy.protect_first,
            protect_recent=policy.protect_recent,
            forced_tokens=None if forced is None else forced[row],
            dtype=dtype,
        )
        for row, prompt in enumerate(prompts)
    ]


def held_positions(state):
    """The set of positions that each row holds; no position is held twice."""
    rows = []
    for valid, positions in zip(np.asarray(state.valid), np.asarray(state.positions), strict=True):
        held = positions[valid].tolist()
        assert len(held) == len(set(held))
        rows.append(set(held))
    return rows


def check_step(state, t, rows, lengths):
    """The state after step t (0: prefill) against each row's records."""
    assert np.asarray(state.next_position).tolist() == [n + t for n in lengths]
    assert held_positions(state) == [records[t].kept for records in rows], f"{t=}"
    assert state.scores.dtype == jnp.float32
    valid, positions, scores = map(np.asarray, (state.valid, state.positions, state.scores))
    for row, records in enumerate(rows):
        held, utilities = positions[row][valid[row]].tolist(), scores[row][valid[row]]
        expected = [records[t].utilities[i] for i in held]
        np.testing.assert_allclose(utilities, expected, rtol=UTILITY_TOLERANCE)


def check_stepwise(model, params, rows, prompts, policy, forced=None):
    """Decodes step by step; compares the state after each, and the token chosen."""
    tokens, lengths = padded(prompts)
    state, logits = prefill(model, params, tokens, lengths, policy)
    chosen = jnp.argmax(logits, axis=-1)
    for t in range(STEPS + 1):
        if t:
            token = chosen if forced is None else jnp.asarray(forced[:, t - 1])
            state, chosen = decode(model, params, state, token, steps=1, policy=policy)
            chosen = chosen[:, 0]
        check_step(state, t, rows, lengths)
        assert chosen.tolist() == [records[t].next_token for records in rows], f"{t=}"


def check_one_call(model, params, rows, prompts, policy):
    """Decodes greedily with one call; compares the answer, and the state after it."""
    tokens, lengths = padded(prompts)
    state, logits = prefill(model, params, tokens, lengths, policy, max_new_tokens=STEPS)
    first = jnp.argmax(logits, axis=-1)
    state, answer = decode(model, params, state, first, steps=STEPS, policy=policy)
    check_step(state, STEPS, rows, lengths)
    assert answer.tolist() == [[r.next_token for r in records[1:]] for records in rows]


def check_tiny(policy, *, config=CONFIG, lengths=LENGTHS, force=False):
    model, params, tree = tiny(config)
    prompts, text = ragged_batch(lengths)
    forced = text if force else None
    rows = run_oracle(tree, config, prompts, policy, forced)
    margins = [r.margin for records in rows for r in records if len(r.kept) > 1]
    assert min(margins) > CLEAR, "near-tie: choose another seed"
    check_stepwise(model, params, rows, prompts, policy, forced)
    if not force:
        check_one_call(model, params, rows, prompts, policy)
    return rows


@pytest.mark.parametrize("force", [False, True], ids=["greedy", "forced"])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 0.95])
@pytest.mark.parametrize("ratio", [0.5, 0.9, 0.97])
@pytest.mark.parametrize("refresh", [1, 2, 4, 8, 0])
def test_kept_positions(refresh, ratio, alpha, force):
    policy = policies.inertiakv(ratio, alpha=alpha, refresh=refresh)
    rows = check_tiny(policy, force=force)
    budgets = {0.5: [30, 67, 85], 0.9: [6, 13, 17], 0.97: [1, 4, 5]}[ratio]
    assert [len(records[-1].kept) for records in rows] == budgets


@pytest.mark.parametrize(
    ("tokens", "refresh", "held"),
    [
        (1, 1, [1, 1, 1]),
        (2, 1, [2, 2, 2]),
        (7, 4, [7, 7, 7]),
        (64, 1, [64, 64, 64]),  # row 0 grows from 60 first
        (150, 2, [100, 150, 150]),  # rows 0 and 1 grow, row 0 never reaches its budget
    ],
)
def test_token_budgets(tokens, refresh, held):
    policy = policies.inertiakv(tokens=tokens, refresh=refresh)
    rows = check_tiny(policy)
    assert [len(records[-1].kept) for records in rows] == held


def test_byte_budget_is_the_tokens_that_fit():
    model, params, tree = tiny()
    prompts, _ = ragged_batch()
    token_bytes = 2 * 3 * 2 * 8 * 4  # keys and values, layers, kv heads, head_dim, float32
    rows = run_oracle(tree, CONFIG, prompts, policies.inertiakv(tokens=7), None)
    policy = policies.inertiakv(kv_bytes=7 * token_bytes + token_bytes // 2)
    check_stepwise(model, params, rows, prompts, policy)


@pytest.mark.parametrize("refresh", [1, 4, 0])
@pytest.mark.parametrize(("first", "recent"), [(3, 0), (0, 2), (2, 3), (1, 5)])
def test_protected_positions(first, recent, refresh):
    # 18, 40, 51 tokens; at much less, Score-Free drifts to where the next to go equals the mean.
    policy = policies.inertiakv(0.7, refresh=refresh, protect_first=first, protect_recent=recent)
    rows = check_tiny(policy)
    for records, length in zip(rows, LENGTHS, strict=True):
        for t, record in enumerate(records):
            newest = length + t - 1
            protected = {*range(first), *range(newest - recent + 1, newest + 1)}
            assert protected <= record.kept


def test_every_token_of_the_budget_protected():
    rows = check_tiny(policies.inertiakv(tokens=6, protect_first=2, protect_recent=4))
    assert rows[0][-1].kept == {0, 1, 96, 97, 98, 99}


@pytest.mark.parametrize(
    "policy", [policies.full(), policies.inertiakv(0.0)], ids=["full", "ratio 0"]
)
def test_ratio_zero_keeps_everything(policy):
    model, params, tree = tiny()
    prompts, _ = ragged_batch()
    rows = run_oracle(tree, CONFIG, prompts, policy, None)
    assert [len(records[-1].kept) for records in rows] == [n + STEPS for n in LENGTHS]
    tokens, lengths = padded(prompts)
    state, logits = prefill(model, params, tokens, lengths, policy, max_new_tokens=STEPS)
    first = jnp.argmax(logits, axis=-1)
    state, answer = decode(model, params, state, first, steps=STEPS, policy=policy)
    # inertiakv at ratio 0 still has utilities in the oracle; the library computes none
    assert held_positions(state) == [records[-1].kept for records in rows]
    assert answer.tolist() == [[r.next_token for r in records[1:]] for records in rows]


@pytest.mark.parametrize("refresh", [2, 0])
def test_shortest_prompts(refresh):
    # budgets 1, 1, 1, 4: a step 1 that evicts one token, and prompts of a single token
    rows = check_tiny(policies.inertiakv(0.5, refresh=refresh), lengths=(1, 2, 3, 9))
    assert [len(records[1].evicted) for records in rows] == [1, 2, 3, 6]


VARIANTS = {
    "qwen2": {"family": "qwen2", "attention_bias": True, "tie_word_embeddings": True},
    "llama3": {"rope_theta": 500.0, "rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 32)},
    "one kv head": {"num_kv_heads": 1},
    "as many kv heads as query heads": {"num_kv_heads": 4},
    "one layer": {"num_layers": 1},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_models(variant):
    config = dataclasses.replace(CONFIG, **VARIANTS[variant])
    check_tiny(policies.lazy(4, 0.9), config=config)


def test_logits_of_every_step():
    model, params, tree = tiny()
    prompts, forced = ragged_batch()
    policy = policies.lazy(4, 0.9)
    rows = run_oracle(tree, CONFIG, prompts, policy, forced)
    tokens, lengths = padded(prompts)
    state, logits = prefill(model, params, tokens, lengths, policy)
    take_step = jax.jit(step, static_argnames=("model", "policy"))
    for t in range(STEPS + 1):
        if t:
            token = jnp.asarray(forced[:, t - 1], jnp.int32)
            state, logits = take_step(model, params, state, token, policy=policy)
        expected = [records[t].logits for records in rows]
        np.testing.assert_allclose(logits, expected, atol=LOGITS_TOLERANCE)
        check_step(state, t, rows, lengths)


STORY = """\
The lighthouse at the end of the causeway had not been lit for eleven years when Marta Lindqvist \
came to count the birds. She had been told that the keeper's cottage leaked, that the well was \
brackish, and that the boat from the mainland called on Thursdays if the weather allowed it and \
not at all if it did not. None of this troubled her. She carried two notebooks, a telescope that \
had belonged to her aunt, and enough oatmeal to last until the autumn. On the first evening she \
walked the whole shore of the island, which took forty minutes, and wrote down what she saw: \
three hundred and twelve terns, nine oystercatchers, one heron standing on one leg in the shallow \
water by the jetty, and a grey seal that watched her with great attention and then lost interest. \
On the second evening the terns had become four hundred, and the heron was standing on the other \
leg. By the end of the week she no longer needed the telescope for the oystercatchers, because \
they had decided that she was a kind of rock."""


@pytest.mark.real_weights
@pytest.mark.parametrize("refresh", [1, 4, 0])
def test_real_weights(smollm2, refresh):
    """SmolLM2 on a story of about 200 tokens, greedy; the oracle in float32 here."""
    question = "How many terns did Marta count on the second evening?"
    text = smollm2.chat_prompt([{"role": "user", "content": f"{STORY}\n\n{question}"}])
    prompt = np.array(smollm2.tokenizer(text, add_special_tokens=False)["input_ids"])
    assert 200 <= len(prompt) <= 300
    policy = policies.inertiakv(0.9, refresh=refresh)
    rows = run_oracle(smollm2.params, smollm2.config, [prompt], policy, None, np.float32)
    assert min(r.margin for r in rows[0] if len(r.kept) > 1) > CLEAR
    check_stepwise(smollm2.model, smollm2.params, rows, [prompt], policy)
