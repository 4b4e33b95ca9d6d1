"""What a trace says, against the decode loop and against the method in plain Python."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from core.tiny_model import CONFIG, MODEL, decoded, params, prefilled, stepped
from diagnostics.tiny_lm import POLICIES, PROMPT, STEPS, lm, run, trace
from jax.sharding import AbstractMesh
from oracle import method
from oracle.tiny import random_params

from inertiakv_jax import diagnostics, make_mesh, policies
from inertiakv_jax.diagnostics import cache_run, tracing
from inertiakv_jax.diagnostics.measures import mean

TOLERANCE = 1e-5  # absolute, of measures; the method runs in float64
BUDGET = 6  # of 60 tokens at ratio 0.9
LENGTH = len(PROMPT) + STEPS
OF_ATTENTION = ("inertiakv", "lazy2", "score-free")
REFRESH = {"inertiakv": 1, "lazy2": 2, "score-free": 0}


def kept_by_ranking(state):
    """[E or 1, K or 1] sets of positions."""
    positions = np.asarray(state.positions)
    rankings = {2: (1, 1), 3: (positions.shape[0], 1), 4: positions.shape[::2]}[positions.ndim]
    rows = positions.reshape(*rankings, -1)
    return [[set(head[head >= 0].tolist()) for head in layer] for layer in rows]


def sets(masks):
    return [[set(np.flatnonzero(head).tolist()) for head in layer] for layer in masks]


# One of each retention and of each way to begin: a program of ``step`` is made for each.
@pytest.mark.parametrize("name", ["lazy2", "vnorm", "tova", "h2o", "adakv-ea", "snapkv+inertiakv"])
def test_run_is_the_decode_loop(name):
    ours = run(name)
    state, _ = prefilled(POLICIES[name], [np.asarray(PROMPT)], max_new_tokens=STEPS)
    assert sets(ours.kept(0)) == kept_by_ranking(state)
    for step, token in enumerate(trace().continuation, start=1):
        state, logits = stepped(state, jnp.asarray([token]), POLICIES[name])
        assert sets(ours.kept(step)) == kept_by_ranking(state)
        assert ours.chosen[step - 1] == logits[0].argmax()
        assert ours.chosen_logit[step - 1] == pytest.approx(logits[0].max(), abs=2e-5)
    assert ours.slots == state.num_slots


@pytest.mark.parametrize("name", ["vnorm", "h2o"])
def test_trace_on_a_mesh(name):
    mesh = make_mesh("model=1")
    (ours,) = diagnostics.trace(
        dataclasses.replace(lm(), mesh=mesh), PROMPT, [POLICIES[name]], steps=STEPS
    ).runs
    assert ours.evicted_at.tolist() == run(name).evicted_at.tolist()
    assert ours.chosen.tolist() == run(name).chosen.tolist()
    # It lies as sharding.layout cuts the mesh.
    read = cache_run.read(dataclasses.replace(lm(), mesh=mesh), PROMPT, POLICIES[name], STEPS)
    assert set(read.state.keys[0].sharding.mesh.axis_names) >= {"heads", "group"}


def test_mesh_that_divides_rows_is_refused():
    rows = dataclasses.replace(lm(), mesh=AbstractMesh((2, 4), ("data", "model")))
    with pytest.raises(ValueError, match="of one text, so mesh axis 'data' must be 1, got 2"):
        diagnostics.trace(rows, PROMPT, [POLICIES["vnorm"]], steps=STEPS)


def test_continuation_is_the_full_caches_greedy_one():
    state, first = prefilled(policies.full(), [np.asarray(PROMPT)])
    _, tokens = decoded(state, first, policies.full(), STEPS)
    assert trace().continuation == (int(first[0]), *tokens[0, :-1].tolist())
    assert trace().full_chosen.tolist() == tokens[0].tolist()


@pytest.mark.parametrize("name", OF_ATTENTION)
def test_evictions_are_the_methods(name):
    ours = run(name)
    records = oracle(ratio=0.9, refresh=REFRESH[name])
    for step, record in enumerate(records):
        assert sets(ours.kept(step)) == [[record.kept]]
        evicted = np.flatnonzero(ours.evicted_at[0, 0] == step).tolist()
        assert evicted == sorted(record.evicted)


def oracle(**options):
    return method.run(
        random_params(CONFIG, seed=5),
        CONFIG,
        PROMPT,
        steps=STEPS,
        forced_tokens=trace().continuation,
        **options,
    )


def highest(utilities):
    """The positions of the budget's highest; of equals the higher position."""
    return set(sorted(utilities, key=lambda i: (utilities[i], i))[-BUDGET:])


@pytest.mark.parametrize("name", OF_ATTENTION)
def test_measures_are_those_of_plain_sets(name):
    """Churn and the like, from the attention of a full cache in NumPy."""
    ours = run(name)
    full = oracle(ratio=0, refresh=1)[1:]
    aggregated = [
        highest(record.utilities) for record in oracle(ratio=0, refresh=REFRESH[name])[1:]
    ]
    raw = [[highest(scores) for scores in record.scores] for record in full]
    expected = {
        "raw_aggregated_jaccard": [
            [len(layer & now) / len(layer | now) for layer in layers]
            for layers, now in zip(raw, aggregated, strict=True)
        ],
        "aggregated_churn": churns([[now] for now in aggregated]),
        "raw_churn": churns(raw),
        "aggregated_small_change": small_changes([[now] for now in aggregated]),
        "raw_small_change": small_changes(raw),
        "raw_evicted": [[np.nan] * CONFIG.num_layers]
        + [
            [len(layer - held - {len(PROMPT) + step}) / BUDGET for layer in layers]
            for step, (layers, held) in enumerate(
                zip(
                    raw[1:], [sets(ours.kept(step))[0][0] for step in range(1, STEPS)], strict=True
                ),
                start=1,
            )
        ],
    }
    for key, values in expected.items():
        np.testing.assert_allclose(ours.measures[key], values, atol=TOLERANCE, err_msg=key)
    assert np.nanmax(ours.measures["raw_evicted"]) > 0.1  # something is measured
    assert np.nanmax(ours.measures["raw_churn"]) > 0.1


def churns(tops):
    unknown = [np.nan] * len(tops[0])
    return [unknown] + [
        [len(now - before) / BUDGET for now, before in zip(*layers, strict=True)]
        for layers in zip(tops[1:], tops, strict=False)
    ]


def small_changes(tops):
    return [
        [x if np.isnan(x) else float(round(x * BUDGET) <= 1) for x in layers]
        for layers in churns(tops)
    ]


def test_kept_jaccard_is_that_of_the_kept_sets():
    assert list(trace().kept_jaccard) == list(itertools.combinations(POLICIES, 2))
    for (first, second), values in trace().kept_jaccard.items():
        for step in range(1, STEPS + 1):
            one, other = np.broadcast_arrays(run(first).kept(step), run(second).kept(step))
            expected = [
                np.mean([len(a & b) / len(a | b) for a, b in zip(*layers, strict=True)])
                for layers in zip(sets(one), sets(other), strict=True)
            ]
            np.testing.assert_allclose(values[step - 1], expected, atol=1e-12)


def test_rank_correlation_of_attention_with_itself_is_one():
    for ours in map(run, ("inertiakv", "lazy2", "tova", "h2o")):
        for key in (
            *("spearman_held", "spearman_held_aggregated"),
            *("spearman_seen", "spearman_seen_aggregated"),
        ):
            np.testing.assert_allclose(ours.measures[key], 1.0, atol=1e-9, err_msg=ours.name)


def test_rank_correlations_differ_by_scorer():
    assert mean(run("vnorm").measures["spearman_seen"]) > 0.8
    assert abs(mean(run("random").measures["spearman_seen"])) < 0.4
    for ours in map(run, ("vnorm", "random", "recency")):
        assert (np.abs(ours.measures["spearman_held"]) <= 1 + 1e-9).all()
        assert ours.measures["spearman_held"].shape == (STEPS, CONFIG.num_layers)
        assert ours.measures["spearman_held_aggregated"].shape == (STEPS, 1)


def test_a_scorer_that_rises_with_position_has_the_rank_correlation_of_positions():
    """Recency against the method's attention: Spearman by the formula without ties."""
    ours = run("recency")
    for step, record in enumerate(oracle(ratio=0)[1:]):
        for layer, scores in enumerate(record.scores):
            by_attention = sorted(scores, key=scores.get)
            squares = sum((rank - i) ** 2 for rank, i in enumerate(by_attention))
            n = len(scores)
            assert ours.measures["spearman_seen"][step, layer] == pytest.approx(
                1 - 6 * squares / (n * (n * n - 1)), abs=TOLERANCE
            )


def test_boundary_has_the_last_to_go_and_the_lowest_to_stay():
    ours = run("inertiakv")
    records = oracle(ratio=0.9)[1:]
    gone = [i for record in records[1:] for i in record.evicted][-3:]
    last = records[-1]
    stay = sorted(last.kept, key=lambda i: (last.utilities[i], i))[:3]
    assert ours.boundary.positions.tolist() == gone + stay
    for position, utilities in zip(ours.boundary.positions, ours.boundary.utilities, strict=True):
        expected = [record.utilities.get(position, np.nan) for record in records]
        np.testing.assert_allclose(utilities, expected, rtol=2e-5)
    edge = [min(record.utilities[i] for i in record.kept) for record in records]
    np.testing.assert_allclose(ours.boundary.threshold, edge, rtol=2e-5)


def test_what_evicts_nothing_has_no_measures():
    for ours in map(run, ("full", "snapkv")):
        assert ours.measures == {}
        assert ours.boundary is None
        assert ours.slots == ours.prompt_slots


def test_full_cache_keeps_everything_and_agrees_with_itself():
    full = run("full")
    for step in range(STEPS + 1):
        assert sets(full.kept(step)) == [[set(range(len(PROMPT) + step))]]
    assert full.chosen.tolist() == trace().full_chosen.tolist()


def test_given_continuation_is_forced():
    forced = [3, 1, 4, 1, 5, 9, 2]
    given = diagnostics.trace(lm(), PROMPT, [POLICIES["inertiakv"]], steps=3, continuation=forced)
    assert given.continuation == (3, 1, 4)
    assert given.config["continuation"] == "given"
    records = method.run(
        random_params(CONFIG, seed=5), CONFIG, PROMPT, steps=3, forced_tokens=forced, ratio=0.9
    )
    assert [sets(given.runs[0].kept(step))[0][0] for step in range(4)] == [
        record.kept for record in records
    ]
    assert given.runs[0].chosen.tolist() == [record.next_token for record in records[1:]]


def test_prompt_is_read_once_for_all_that_note_the_same_of_it(monkeypatch):
    monkeypatch.setattr(tracing, "read", lambda lm, prompt, policy, *rest: policy.name)
    names = ("inertiakv", "vnorm", "snapkv", "tova")
    found = tracing._read(lm(), PROMPT, [POLICIES[name] for name in names], STEPS)
    assert found == ["inertiakv", "inertiakv", "snapkv", "inertiakv"]


def test_progress_counts_every_step_of_every_run():
    told = []
    diagnostics.trace(
        lm(), PROMPT, [POLICIES["inertiakv"], POLICIES["full"]], steps=2,
        on_progress=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    assert told == [(2, 6), (3, 6), (5, 6), (6, 6)]


def test_counterpart_without_ema():
    policy = policies.inertiakv(0.9, refresh=2)
    counterpart = diagnostics.without_ema(policy)
    assert counterpart == dataclasses.replace(
        policy, name="lazy2 without EMA", decay=0.0, layer_weights="last"
    )
    knobs = counterpart.knobs(MODEL)
    assert (float(knobs.decay), knobs.layer_weights.tolist()) == (0.0, [0.0, 0.0, 1.0])
    assert diagnostics.without_ema(policies.h2o(0.9)).prompt_queries == 0
    for name in ("full", "snapkv", "tova", "single-step", "streaming-llm"):
        assert diagnostics.without_ema(policies.by_name(name)) is None
    assert diagnostics.without_ema(policies.inertiakv(0.9, alpha=0.0)) is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"policies": []}, "policies must be a list of at least one Policy"),
        ({"policies": policies.full()}, "policies must be a list of at least one Policy"),
        ({"policies": ["inertiakv"]}, "policy must be a Policy, got 'inertiakv'"),
        ({"policies": [policies.full(), policies.full()]}, "distinct names, got full, full"),
        (
            {"policies": [policies.random(0.9), dataclasses.replace(policies.random(0.9, seed=1),
                                                                    name="other")]},
            "scorer 'random' must share theirs",
        ),
        ({"steps": 0}, "steps must be an integer of at least 1, got 0"),
        ({"steps": 2.0}, "steps must be an integer of at least 1, got 2.0"),
        ({"steps": 200}, "60 tokens and 200 new ones exceed the model's 256 positions"),
        ({"prompt": []}, "prompt 0 is empty"),
        ({"prompt": [97]}, "outside the vocabulary"),
        ({"continuation": []}, "the continuation has 0 tokens, fewer than 3 steps"),
        ({"continuation": [1, 2]}, "the continuation has 2 tokens, fewer than 3 steps"),
        ({"continuation": [1, 2, 97]}, "continuation: .*outside the vocabulary"),
        ({"policies": [policies.inertiakv(0.9, protect_first=9)]}, "must fit the smallest budget"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_anything_runs(options, expected, monkeypatch):
    monkeypatch.setattr("inertiakv_jax.diagnostics.tracing.CacheRun", None)
    arguments = {"prompt": PROMPT, "policies": [policies.full()], "steps": 3} | options
    prompt, chosen = arguments.pop("prompt"), arguments.pop("policies")
    with pytest.raises(ValueError, match=expected):
        diagnostics.trace(lm(), prompt, chosen, **arguments)


def test_nan_in_the_weights_is_reported():
    broken = {**params(), "final_norm": {"scale": jnp.full((32,), jnp.nan)}}
    with pytest.raises(FloatingPointError, match="'full' hold NaN or infinity after 61 tokens"):
        diagnostics.trace(
            dataclasses.replace(lm(), params=broken), PROMPT, [POLICIES["inertiakv"]], steps=1
        )
