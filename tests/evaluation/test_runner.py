"""Runs over a tiny model: what is recorded, resumed, shared and refused."""

import dataclasses
import json

import numpy as np
import pytest
from evaluation.conftest import needs
from evaluation.tiny import write_data, write_tiny

import inertiakv_jax as ikv
from inertiakv_jax.eval import continuation, records, runner
from inertiakv_jax.eval.settings import Settings

needs("rouge")


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    return ikv.load(write_tiny(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


def settings(data, **options):
    fields = {
        "model": "tiny",
        "tasks": ("hotpotqa", "samsum"),
        "policies": ("full", "inertiakv", "lazy4"),
        "ratios": (0.5,),
        "data_dir": str(data),
    }
    return Settings(**fields | options)


@pytest.fixture(scope="module")
def whole(lm, data, tmp_path_factory):
    """An undisturbed run."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    runner.run(settings(data), lm, folder)
    return folder


def timeless(folder, name="records.jsonl"):
    """Lines of a run, without what it cost."""
    lines = (folder / name).read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "cost"} for line in lines]


def test_every_example_has_a_record_of_every_policy(whole):
    found = timeless(whole)
    assert [(r["example"], r["variant"]) for r in found] == [
        (f"{task}/{index}", variant)
        for task in ("hotpotqa", "samsum")
        for index in range(3)
        for variant in ("inertiakv ratio=0.5", "lazy4 ratio=0.5", "full")
    ]
    for record in found:
        seen = record["prompt_tokens"] + record["new_tokens"] - 1
        if record["policy"] == "full":
            assert (record["evicted"], record["kept_fraction"]) == (0, 1.0)
        elif record["new_tokens"] > 1:
            assert record["kept_tokens"] == record["prompt_tokens"] // 2
            assert record["evicted"] == seen - record["kept_tokens"]
            assert record["kept_fraction"] == record["kept_tokens"] / seen
        assert record["new_tokens"] <= {"hotpotqa": 32, "samsum": 128}[record["group"]]


def test_cost_is_in_every_record(whole):
    for line in (whole / "records.jsonl").read_text().splitlines():
        cost = json.loads(line)["cost"]
        assert cost["prefill_shared"] is True
        assert cost["prefill_s"] > 0
        assert cost["peak_bytes"]["host"] > 2**20
        assert cost["kv_bytes_allocated"] > 0


def test_run_says_what_it_is_before_anything_else(whole, data):
    said = json.loads((whole / "run.json").read_text())
    assert said["settings"]["policies"] == ["full", "inertiakv", "lazy4"]
    assert "data_dir" not in said["settings"]
    assert {group: e["count"] for group, e in said["examples"].items()} == {
        "hotpotqa": 3,
        "samsum": 3,
    }
    assert said["versions"]["jax"]
    assert said["device"]["platform"] == "cpu"


def test_predictions_are_those_of_generate(lm, data, whole):
    for record in timeless(whole):
        if record["group"] == "hotpotqa" and record["policy"] != "lazy4":
            row = json.loads(
                (data / "longbench" / "hotpotqa.jsonl")
                .read_text()
                .splitlines()[int(record["example"][-1])]
            )
            text = runner.tasks_named(["hotpotqa"])[0].examples(
                runner.Request(runner.Sources(data), len)
            )[int(record["example"][-1])]
            assert row["input"] in text.prompt
            ratio = record["options"].get("ratio", 0.0)
            out = ikv.generate(
                lm,
                [[{"role": "user", "content": text.prompt}]],
                policy=record["policy"],
                ratio=ratio,
                max_new_tokens=32,
            )
            assert record["prediction"] == out.texts[0]
            assert record["new_tokens"] == out.stats.new_tokens[0]
            assert record["evicted"] == out.stats.evicted[0]


def test_samsum_never_begins_with_what_ends_it(lm, whole):
    newline = lm.tokenizer("\n", add_special_tokens=False)["input_ids"][-1]
    for record in timeless(whole):
        if record["group"] == "samsum":
            ids = lm.tokenizer(record["prediction"], add_special_tokens=False)["input_ids"]
            assert newline not in ids[:-1]
            assert record["new_tokens"] > 0


@pytest.mark.parametrize("lines", [0, 1, 7, 18])
def test_torn_run_resumes_to_the_same_records(lm, data, whole, tmp_path, lines):
    runner.run(settings(data), lm, tmp_path)  # warm: makes run.json and all
    content = (tmp_path / "records.jsonl").read_bytes().splitlines(keepends=True)
    torn = content[lines][: len(content[lines]) // 2] if lines < len(content) else b""
    (tmp_path / "records.jsonl").write_bytes(b"".join(content[:lines]) + torn)
    runner.run(settings(data), lm, tmp_path)
    assert timeless(tmp_path) == timeless(whole)
    assert (tmp_path / "records.jsonl").read_bytes().startswith(b"".join(content[:lines]))


def test_two_hosts_share_a_run(lm, data, whole, tmp_path):
    for shard in (0, 1):
        runner.run(settings(data), lm, tmp_path, shard=shard, shards=2)
    assert len(timeless(tmp_path, "records-0-of-2.jsonl")) == 9
    both = records.read_records(tmp_path)
    for record in both:
        del record["cost"]
    key = records.record_key
    assert sorted(both, key=key) == sorted(timeless(whole), key=key)


def test_batches_give_rows_what_they_get_alone(lm, data, whole, tmp_path):
    runner.run(settings(data, batch=2), lm, tmp_path)
    batched = {records.record_key(r): r for r in timeless(tmp_path)}
    for record in timeless(whole):
        assert batched[records.record_key(record)] == record


def test_other_settings_are_refused_in_the_same_folder(lm, data, whole):
    with pytest.raises(ValueError, match=r"settings\.ratios: \[0\.5\] there, \[0\.9\] here"):
        runner.run(settings(data, ratios=(0.9,)), lm, whole)


def test_other_data_is_refused_in_the_same_folder(lm, whole, tmp_path):
    other = write_data(tmp_path, words=61)
    with pytest.raises(ValueError, match=r"examples\.hotpotqa\.sha256"):
        runner.run(settings(other), lm, whole)


def test_task_without_examples_is_loud(lm, tmp_path):
    (write_data(tmp_path) / "longbench" / "hotpotqa.jsonl").write_text("")
    with pytest.raises(ValueError, match="there are no examples of hotpotqa"):
        runner.run(settings(tmp_path), lm, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_policy_that_should_evict_and_does_not_is_loud(lm, data, tmp_path, monkeypatch):
    lazy = dataclasses.replace(ikv.policies.full(), name="lazy4")
    monkeypatch.setattr(
        "inertiakv_jax.eval.settings.Variant.make",
        lambda self: (
            Idle(**dataclasses.asdict(lazy)) if self.policy == "lazy4" else ikv.policies.full()
        ),
    )
    with pytest.raises(ValueError, match=r"lazy4 ratio=0\.5 evicted nothing of hotpotqa/0"):
        runner.run(settings(data, policies=("lazy4",)), lm, tmp_path)


class Idle(ikv.Policy):
    """Says that it evicts, and never does."""

    evicts = True

    def budgets(self, lengths, model):
        return np.full(len(lengths), 2**31 - 1, np.int32)


def test_budget_that_no_prompt_reaches_is_loud_at_the_end(lm, data, tmp_path):
    policy = {"name": "inertiakv", "tokens": 1500}
    with pytest.raises(ValueError, match="inertiakv tokens=1500 evicted nothing in any example"):
        runner.run(settings(data, policies=("full", policy)), lm, tmp_path)


def test_shared_prefill_gives_what_each_policy_gives_alone(lm):
    prompts = [list(range(20, 150)), list(range(30, 90))]
    names = ("snapkv", "h2o", "inertiakv", "score-free", "tova", "keydiff", "random", "full")
    policies = [ikv.policies.by_name(name, ratio=0.7) for name in names]
    policies.insert(0, ikv.policies.snapkv(0.5))
    request = continuation.Request(max_new_tokens=24, rows=(3, 8))
    together = list(continuation.answers(lm, prompts, policies, request))
    for policy, shared in zip(policies, together, strict=True):
        (alone,) = continuation.answers(lm, prompts, [policy], request)
        assert (shared.prefill_shared, alone.prefill_shared) == (policy.name != "h2o", False)
        for name in ("texts", "new_tokens", "kept_tokens", "evicted", "kv_bytes_kept"):
            assert getattr(shared, name) == getattr(alone, name)


def test_one_prefill_serves_all_that_share_it(lm, monkeypatch):
    calls = []
    real = continuation.read_prompts
    monkeypatch.setattr(
        continuation,
        "read_prompts",
        lambda *a, **k: calls.append([policy.name for policy in a[4]]) or real(*a, **k),
    )
    policies = [ikv.policies.inertiakv(0.8), ikv.policies.lazy(4, 0.8), ikv.policies.full()]
    list(continuation.answers(lm, [[5] * 40], policies, continuation.Request(4)))
    assert calls == [["inertiakv", "lazy4", "full"]]


def test_answer_ends_at_a_text_and_at_a_token(lm):
    request = continuation.Request(max_new_tokens=24)
    (free,) = continuation.answers(lm, [list(range(20, 80))], [ikv.policies.full()], request)
    text = free.texts[0]
    cut = dataclasses.replace(request, stop=(text[4:6],))
    (stopped,) = continuation.answers(lm, [list(range(20, 80))], [ikv.policies.full()], cut)
    assert stopped.texts[0] == text[: text.index(text[4:6])]


@pytest.mark.shared
def test_real_rows_of_all_of_longbench_run_to_the_end(lm, shared_dir, tmp_path):
    needs("jieba")
    wanted = settings(
        shared_dir / "data",
        tasks=("longbench",),
        policies=("full", "lazy4"),
        samples=1,
        max_prompt_tokens=200,
    )
    runner.run(wanted, lm, tmp_path)
    found = timeless(tmp_path)
    assert len(found) == 42
    for record in found:
        assert 0.0 <= next(iter(record["scores"].values())) <= 1.0
        assert record["prompt_tokens"] <= 200 + 60  # text cut by tokens may have more letters
