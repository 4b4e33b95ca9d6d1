"""A trace's evictions forced on another run: the same tokens and logits, bit for bit."""

import dataclasses
import re

import numpy as np
import pytest
from diagnostics.tiny_lm import POLICIES, PROMPT, STEPS, lm, run, trace

from inertiakv_jax import diagnostics
from inertiakv_jax.diagnostics import read_trace, to_json

LENGTH = len(PROMPT) + STEPS


@pytest.fixture(scope="module")
def replayed():
    return {found.name: found for found in diagnostics.replay(lm(), trace())}


@pytest.mark.parametrize("name", POLICIES)
def test_replay_is_bit_identical(name, replayed):
    assert replayed[name].chosen.tolist() == run(name).chosen.tolist()
    assert replayed[name].chosen_logit.tobytes() == run(name).chosen_logit.tobytes()
    assert replayed[name].same_tokens == STEPS
    assert replayed[name].logit_difference == 0.0


def test_replay_of_a_file_is_that_of_the_trace(replayed, tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(to_json(trace()))
    for found in diagnostics.replay(lm(), read_trace(path)):
        assert found.chosen_logit.tobytes() == replayed[found.name].chosen_logit.tobytes()


def test_replay_evicts_what_the_trace_says():
    """Other evictions give other logits, those of a policy that would make them."""
    names = ("inertiakv", "recency")
    first, second = map(run, names)
    swapped = dataclasses.replace(
        trace(), runs=(dataclasses.replace(first, evicted_at=second.evicted_at),)
    )
    (found,) = diagnostics.replay(lm(), swapped)
    assert found.chosen_logit.tobytes() == second.chosen_logit.tobytes()
    assert found.same_tokens == (first.chosen == second.chosen).sum()
    assert found.logit_difference == np.abs(first.chosen_logit - second.chosen_logit).max() > 0


def test_progress_counts_every_step_of_every_run():
    told = []
    two = dataclasses.replace(trace(), runs=(run("inertiakv"), run("full")))
    diagnostics.replay(lm(), two, on_progress=lambda done, total: told.append((done, total)))
    assert told == [(done, 2 * STEPS) for done in range(1, 2 * STEPS + 1)]


def changed(name="inertiakv", **fields):
    return dataclasses.replace(trace(), runs=(dataclasses.replace(run(name), **fields),))


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (lambda: dataclasses.replace(trace(), prompt=(97,) * 60), "outside the vocabulary"),
        (lambda: dataclasses.replace(trace(), continuation=(97,) * 5), "outside the vocabulary"),
        (lambda: dataclasses.replace(trace(), prompt=(1,) * 255), "exceed the model's 256"),
        (
            lambda: changed(evicted_at=np.full((2, 1, LENGTH), STEPS + 1)),
            "run 'inertiakv' has rankings of (2, 1) layers and heads, the model has (1, 1)",
        ),
        (
            lambda: changed("h2o", evicted_at=np.full((3, 1, LENGTH), STEPS + 1)),
            "run 'h2o' has rankings of (3, 1) layers and heads, the model has (3, 2)",
        ),
        (lambda: changed(slots=10**9), "1000000000 slots, but the model's positions fill 512"),
        (lambda: changed(prompt_slots=10**9), "1000000000 and 64 slots"),
        (lambda: changed(slots=1), "128 and 1 slots"),
        (lambda: dataclasses.replace(trace(), config={}), "of a model of {'num_layers': None,"),
        (
            lambda: dataclasses.replace(trace(), config={**trace().config, "num_kv_heads": 8}),
            "'num_kv_heads': 8, 'head_dim': 8, 'hidden_size': 32, 'vocab_size': 97}, not of tiny",
        ),
    ],
)
def test_trace_of_another_model_is_refused_before_anything_runs(wrong, expected, monkeypatch):
    monkeypatch.setattr("inertiakv_jax.diagnostics.replaying.CacheRun", None)
    with pytest.raises(ValueError, match=re.escape(expected)):
        diagnostics.replay(lm(), wrong())
