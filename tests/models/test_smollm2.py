"""SmolLM2-135M: against transformers on the same weights, and a ragged batch against its rows."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from peer_models import transformers_model

from inertiakv_jax import decode, policies, prefill

pytestmark = pytest.mark.real_weights

NEW_TOKENS = 32
LOGITS_TOLERANCE = 2e-3  # absolute, of logits up to 24; observed 3.7e-5
LENGTHS = (520, 580, 630)  # one bucket of capacity, so that programs are shared
FULL, EVICTING = policies.full(), policies.inertiakv(0.9)
SENTENCES = (
    "The harbour of the little town lies open to the west, and in winter the wind drives the spray "
    "over the wall as far as the market.",
    "On the {n} of the month the keeper counted {m} boats, wrote their names into his book and "
    "went up to trim the lamp.",
    "Nobody in the street believed the story that the miller told about the {m} lanterns.",
    "When the bells had rung {n} times, the children ran down to the water to look for shells.",
    "An old map in the library shows {m} wells, of which {n} still have water in a dry summer.",
)


def prompt(tokenizer, length, seed=0):
    """The first tokens of a running text."""
    rng = np.random.default_rng(seed)
    text = " ".join(
        SENTENCES[rng.integers(len(SENTENCES))].format(
            n=rng.integers(2, 30), m=rng.integers(40, 900)
        )
        for _ in range(40)
    )
    ids = tokenizer(text)["input_ids"]
    assert len(ids) >= length
    return np.asarray(ids[:length])


def prefilled(lm, rows, policy):
    tokens = np.zeros((len(rows), max(map(len, rows))), int)
    for padded, row in zip(tokens, rows, strict=True):
        padded[: len(row)] = row
    lengths = np.array([len(row) for row in rows])
    return prefill(lm.model, lm.params, tokens, lengths, policy, max_new_tokens=NEW_TOKENS)


def greedy(lm, state, first, policy):
    """[B, NEW_TOKENS] token ids, and the positions held at the end; leaves ``state`` as it is."""
    state, tokens = decode(
        lm.model, lm.params, state, first, steps=NEW_TOKENS - 1, policy=policy, donate=False
    )
    held = [
        sorted(positions[valid].tolist())
        for positions, valid in zip(
            np.asarray(state.positions), np.asarray(state.valid), strict=True
        )
    ]
    return np.concatenate([np.asarray(first)[:, None], tokens], axis=1).tolist(), held


@pytest.fixture(scope="module")
def starts(smollm2):
    """By prefill policy: state and first tokens of the batch, then of each of its rows alone."""
    rows = [prompt(smollm2.tokenizer, length, seed) for seed, length in enumerate(LENGTHS, start=1)]

    @functools.cache
    def start(policy):
        runs = [prefilled(smollm2, batch, policy) for batch in (rows, *([row] for row in rows))]
        return [(state, jnp.argmax(logits, axis=-1)) for state, logits in runs]

    return start


@pytest.mark.torch
def test_against_transformers(smollm2):
    torch = pytest.importorskip("torch", reason="needs torch (extra 'peers')")
    theirs, tokens = transformers_model(smollm2, torch), prompt(smollm2.tokenizer, 600)
    ids = torch.from_numpy(tokens)[None]
    with torch.no_grad():
        expected = theirs(ids).logits[0, -1].numpy()
    state, logits = prefilled(smollm2, [tokens], FULL)
    np.testing.assert_allclose(logits[0], expected, atol=LOGITS_TOLERANCE)
    out = theirs.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        pad_token_id=0,
    )
    answer, _ = greedy(smollm2, state, jnp.argmax(logits, axis=-1), FULL)
    assert answer == [out[0, 600:].tolist()]


@pytest.mark.parametrize(
    "policy",
    [FULL, EVICTING, policies.lazy(4, 0.9), policies.score_free(0.9)],
    ids=lambda policy: policy.name,
)
def test_a_row_of_a_ragged_batch_gets_the_tokens_it_gets_alone(smollm2, starts, policy):
    batch, *alone = starts(EVICTING if policy.evicts else FULL)
    tokens, held = greedy(smollm2, *batch, policy)
    kept = [52, 58, 63] if policy.evicts else [n + NEW_TOKENS - 1 for n in LENGTHS]
    assert [len(row) for row in held] == kept
    for index, start in enumerate(alone):
        assert greedy(smollm2, *start, policy) == ([tokens[index]], [held[index]])
