"""The adapter for lm-evaluation-harness: scores against forwards of every prefix, and its tasks."""

import dataclasses
import importlib.util
import json

import jax
import numpy as np
import pytest
from evaluation.tiny import write_tiny

import inertiakv_jax as ikv
from inertiakv_jax.eval import lm_eval_model
from inertiakv_jax.eval.lm_eval_model import loglikelihoods

CONTEXT = list(range(20, 70))
CONTINUATIONS = ([5], [7, 9, 11], list(range(100, 140)))


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    return ikv.load(write_tiny(tmp_path_factory.mktemp("model") / "tiny"))


def log_probabilities(lm, ids):
    """[V] of the token after ``ids``, from a prefill of all of them."""
    tokens, lengths = np.asarray([ids]), np.asarray([len(ids)])
    _, logits = ikv.prefill(
        lm.model, lm.params, tokens, lengths, ikv.policies.full(), max_new_tokens=1
    )
    return np.asarray(jax.nn.log_softmax(logits[0]))


def test_full_cache_scores_what_forwards_of_all_prefixes_score(lm):
    for ids, (score, greedy) in zip(
        CONTINUATIONS, loglikelihoods(lm, CONTEXT, CONTINUATIONS, ikv.policies.full()), strict=True
    ):
        rows = [log_probabilities(lm, CONTEXT + ids[:place]) for place in range(len(ids))]
        expected = sum(row[token] for row, token in zip(rows, ids, strict=True))
        assert score == pytest.approx(expected, abs=2e-4)
        assert greedy == all(row.argmax() == token for row, token in zip(rows, ids, strict=True))


def test_greedy_continuation_is_said_to_be_greedy(lm):
    out = ikv.generate(lm, [CONTEXT], policy="lazy4", ratio=0.5, max_new_tokens=20)
    ids = out.tokens[0]
    policy = ikv.policies.lazy(4, 0.5)
    ((_, greedy), (_, other)) = loglikelihoods(lm, CONTEXT, [ids, [*ids[:-1], 3]], policy)
    assert (greedy, other) == (True, ids[-1] == 3)


def test_eviction_changes_scores_from_the_second_token_on(lm):
    full = loglikelihoods(lm, CONTEXT, CONTINUATIONS, ikv.policies.full())
    thin = loglikelihoods(lm, CONTEXT, CONTINUATIONS, ikv.policies.inertiakv(0.9))
    assert thin[0] == full[0]
    assert thin[2][0] != pytest.approx(full[2][0], abs=1e-3)


def test_continuation_may_reach_the_last_position(lm):
    context = [5] * (lm.model.max_positions - 3)
    ((score, _),) = loglikelihoods(lm, context, [[6, 7, 8]], ikv.policies.full())
    assert np.isfinite(score)


def test_mesh_of_the_model_is_passed_on(lm, monkeypatch):
    mesh, passed = ikv.make_mesh("model=1"), []

    def noted(function):
        def call(*args, mesh, **options):
            passed.append((function.__name__, mesh))
            return function(*args, mesh=mesh, **options)

        return call

    for function in (lm_eval_model.prefill, lm_eval_model.step):
        monkeypatch.setattr(lm_eval_model, function.__name__, noted(function))
    policy = ikv.policies.lazy(4, 0.5)
    on_mesh = loglikelihoods(
        dataclasses.replace(lm, mesh=mesh), CONTEXT, CONTINUATIONS[1:2], policy
    )
    assert set(passed) == {("prefill", mesh), ("step", mesh)}
    monkeypatch.undo()
    ((expected, greedy),) = loglikelihoods(lm, CONTEXT, CONTINUATIONS[1:2], policy)
    assert on_mesh == [(pytest.approx(expected, abs=2e-5), greedy)]


@pytest.mark.parametrize(("context", "continuation"), [([], [1]), ([1], [])])
def test_nothing_to_score_is_refused(lm, context, continuation):
    with pytest.raises(ValueError, match="at least one token"):
        loglikelihoods(lm, context, [continuation], ikv.policies.full())


def test_sampling_is_refused():
    with pytest.raises(ValueError, match="greedily"):
        lm_eval_model._stops({"do_sample": True, "temperature": 0.7}, 256)
    assert lm_eval_model._stops({"until": "\n", "temperature": 0.0}, 9) == (("\n",), 9)
    assert lm_eval_model._stops({"until": ["a", ""], "max_gen_toks": 5}, 9) == (("a",), 5)


def write_tasks(folder):
    """Two tasks of lm-eval, asked on local rows, as its own files say otherwise."""
    tasks = importlib.util.find_spec("lm_eval.tasks")
    assert tasks is not None
    assert tasks.submodule_search_locations
    own = tasks.submodule_search_locations[0]
    rows = {
        "gsm8k": [
            {
                "question": f"Tom has {n} pens and buys {n}. How many has he?",
                "answer": f"#### {2 * n}",
            }
            for n in (2, 3)
        ],
        "arc_easy": [
            {
                "question": question,
                "choices": {"text": texts, "label": ["A", "B", "C"]},
                "answerKey": "B",
            }
            for question, texts in (
                ("What do bees make?", ["stone", "honey", "iron ore"]),
                ("Where do fish live?", ["in the sky", "in water", "on the moon"]),
                ("What is ice?", ["burnt wood", "frozen water", "a kind of bird"]),
            )
        ],
    }
    for name, own_file in (("gsm8k", "gsm8k/gsm8k.yaml"), ("arc_easy", "arc/arc_easy.yaml")):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        (folder / f"local_{name}.yaml").write_text(
            f"include: {own}/{own_file}\ntask: local_{name}\ndataset_path: json\n"
            f"dataset_name: null\ntraining_split: null\nvalidation_split: null\n"
            f"fewshot_split: null\ntest_split: train\nnum_fewshot: 0\n"
            f"dataset_kwargs: {{data_files: {data}, cache_dir: {folder / 'cache'}}}\n"
        )


def evaluated(model, folder):
    """lm-eval's scores and what the model said, by task."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    out = simple_evaluate(
        model=model,
        tasks=["local_gsm8k", "local_arc_easy"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        gen_kwargs="max_gen_toks=12",
        bootstrap_iters=0,
        log_samples=True,
        verbosity="ERROR",
    )
    said = {
        name: [sample["resps"] for sample in samples] for name, samples in out["samples"].items()
    }
    return out["results"], said


@pytest.fixture
def quiet(monkeypatch, tmp_path):
    """lm-eval and datasets stay offline and in a folder of their own."""
    pytest.importorskip("lm_eval", reason="needs lm-eval, a large package (extra 'lm-eval')")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.filterwarnings("default")
def test_lm_eval_runs_its_tasks_through_the_adapter(lm, tmp_path, quiet):
    write_tasks(tmp_path)
    results, said = evaluated(lm_eval_model.adapter()(lm=lm, policy="lazy4", ratio=0.5), tmp_path)
    assert set(results["local_gsm8k"]) >= {"exact_match,strict-match"}
    assert set(results["local_arc_easy"]) >= {"acc,none", "acc_norm,none"}
    assert [len(answers) for answers in said["local_arc_easy"]] == [3, 3, 3]
    question = "Question: Tom has 2 pens and buys 2. How many has he?\nAnswer:"
    out = ikv.generate(lm, [question], policy="lazy4", ratio=0.5, max_new_tokens=12)
    assert said["local_gsm8k"][0] == [[out.texts[0]]]


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.real_weights
@pytest.mark.filterwarnings("default")
def test_full_cache_agrees_with_lm_evals_own_model(smollm2, tmp_path, quiet):
    pytest.importorskip("torch", reason="torch is not installed (extra 'peers')")
    from lm_eval.models.huggingface import HFLM

    from inertiakv_jax.bench_peers import torch_model

    write_tasks(tmp_path)
    ours, we_said = evaluated(lm_eval_model.adapter()(lm=smollm2), tmp_path)
    theirs = HFLM(pretrained=torch_model(smollm2), tokenizer=smollm2.tokenizer, device="cpu")
    hf, they_said = evaluated(theirs, tmp_path)
    assert we_said["local_gsm8k"] == they_said["local_gsm8k"]
    for mine, other in zip(we_said["local_arc_easy"], they_said["local_arc_easy"], strict=True):
        for ((score, greedy),), ((hf_score, hf_greedy),) in zip(mine, other, strict=True):
            assert float(score) == pytest.approx(float(hf_score), abs=2e-3)
            assert greedy == hf_greedy
    for task, metric in (
        ("local_gsm8k", "exact_match,strict-match"),
        ("local_arc_easy", "acc,none"),
    ):
        assert ours[task][metric] == hf[task][metric]
