"""``inertiakv eval``: configurations, flags, what is refused, and a run that is killed."""

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from cli.conftest import inertiakv as inertiakv  # a fixture
from evaluation.conftest import needs
from evaluation.tiny import write_data, write_tiny

from inertiakv_jax.commands.evaluate import Evaluate
from inertiakv_jax.eval.settings import Settings, read_config, shipped_names

needs("rouge", "wonderwords")


def test_flags_go_before_the_configuration(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("model: m\ntasks: [vt]\nratios: [0.5]\npolicies: [full, {name: lazy4}]\n")
    made = Evaluate(out=tmp_path, config=str(config), ratios=(0.9,), data_dir=tmp_path).settings()
    assert (made.model, made.ratios, made.data_dir) == ("m", (0.9,), str(tmp_path))
    assert [variant.label for variant in made.variants()] == ["lazy4 ratio=0.9", "full"]


def test_policies_take_options_and_their_own_budgets():
    made = Settings(
        model="m",
        tasks=("vt",),
        ratios=(0.5, 0.9),
        policies=(
            "full",
            {"name": "inertiakv", "alpha": 0.9},
            {"name": "score-free", "tokens": 64},
            "inertiakv",
            "inertiakv",
        ),
    )
    assert [variant.label for variant in made.variants()] == [
        "inertiakv alpha=0.9 ratio=0.5",
        "inertiakv alpha=0.9 ratio=0.9",
        "score-free tokens=64",
        "inertiakv ratio=0.5",
        "inertiakv ratio=0.9",
        "full",
    ]
    assert made.variants()[0].make().alpha == 0.9


def test_a_budget_in_a_name_or_a_file_is_the_policys_own(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("name: lazy4\ntokens: 11\n")
    made = Settings(model="m", tasks=("vt",), policies=["tova,tokens=7", str(path), "h2o,decay=1"])
    found = {variant.label: variant.make() for variant in made.variants()}
    assert set(found) == {"tova,tokens=7", str(path), "h2o,decay=1 ratio=0.9"}
    assert (found["tova,tokens=7"].tokens, found[str(path)].tokens) == (7, 11)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tasks": "vt"}, "tasks must be a list"),
        ({"tasks": ["nope"]}, "unknown task 'nope'"),
        ({"policies": ["nope"]}, "unknown policy 'nope'"),
        ({"policies": [{"alpha": 0.5}]}, "a policy must be a name, or have one"),
        ({"policies": [{"name": "lazy4", "beta": 1}]}, "beta"),
        ({"policies": []}, "policies must not be empty"),
        ({"policies": [None]}, "policies must be a list, each of it a text or a mapping, got"),
        ({"policies": [{"name": "lazy4", 5: 1}]}, "a policy must be a name, or have one, got"),
        ({"policies": [{"name": "lazy4", "refresh": 2}]}, "has its refresh in its name"),
        ({"ratios": [1.5]}, "ratio must be"),
        ({"ratios": [None]}, "ratios must be a list, each of it a number, got"),
        ({"ratios": []}, "ratios must not be empty"),
        ({"tasks": [["vt"]]}, "tasks must be a list, each of it a text, got"),
        ({"depths": ["x"]}, "depths must be a list, each of it a number, got"),
        ({"depths": []}, "depths must not be empty"),
        ({"lengths": [True]}, "lengths must be a list, each of it a number, got"),
        ({"seed": None}, r"seed must be an integer below 2\*\*32, got None"),
        ({"seed": -1}, r"seed must be an integer below 2\*\*32, got -1"),
        ({"data_dir": 5}, "data_dir must be a text, got 5"),
        ({"paper": [5]}, "paper must be a list, each of it a mapping"),
        ({"paper": [{"policy": "full", "benchmark": "ruler"}]}, "must have policy, benchmark and"),
        (
            {"paper": [{"policy": "a", "benchmark": "b", "score": 1, "options": 3}]},
            "may have ratio, model and options, got .*'options': 3",
        ),
        ({"batch": 0}, "batch must be an integer of at least 1, got 0"),
        ({"samples": True}, "samples must be an integer"),
        ({"lengths": [0]}, "each of lengths must be"),
        ({"chat": "no"}, "chat must be true or false"),
        ({"model": 3}, "model must be a text"),
    ],
)
def test_bad_setting_is_named(fields, message):
    with pytest.raises(ValueError, match=message):
        Settings(**{"model": "m", "tasks": ["vt"]} | fields)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("tasks: [vt]\ncolour: red", r"unknown colour; expected .*batch"),
        ("[1, 2]", "must hold fields"),
        ("a: [", "is no YAML"),
        ("batch: 1\ntasks: [vt]\nbatch: 2", "c.yaml is no YAML: the key 'batch' is there twice"),
        ("policies: [{name: tova, tokens: 1, tokens: 2}]", "the key 'tokens' is there twice"),
        (b"\xff\xfe", "c.yaml is not valid UTF-8"),
        ("!!python/object/apply:os.system [ls]", "is no YAML"),
    ],
)
def test_bad_configuration_is_named(content, message, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        read_config(str(path))


@pytest.mark.parametrize("name", shipped_names())
def test_configuration_that_comes_along_is_sound(name):
    made = Settings(**read_config(name))
    assert made.variants()
    for entry in made.paper:
        assert {"policy", "benchmark", "score", "model"} <= set(entry)


def test_unknown_configuration_lists_those_that_come_along(inertiakv, tmp_path):
    done = inertiakv("eval", "--out", tmp_path, "--config", "nope")
    assert done.code == 2
    assert "eval/ruler-small" in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "vt", "--shard", "2/2"], "--shard must be I/N"),
        (["--policies", "full"], "say what to evaluate"),
        (["--tasks", "vt", "--model", "no/such/place"], "no/such/place"),
    ],
)
def test_bad_command_is_named_before_anything_is_written(arguments, message, inertiakv, tmp_path):
    done = inertiakv("eval", "--out", tmp_path / "run", *arguments)
    assert (done.code, message in done.err) == (2, True), done.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("file", "the folder file cannot be made: it is a file"),
        ("file/run", "the folder file/run cannot be made: file is a file"),
        ("locked/run", "the folder locked/run cannot be written to: locked is not writable"),
    ],
)
def test_folder_that_cannot_be_made_is_named(out, message, inertiakv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "locked").mkdir()
    may = os.access  # root may write everywhere
    monkeypatch.setattr(os, "access", lambda at, how: "locked" not in str(at) and may(at, how))
    done = inertiakv("eval", "--out", out, "--tasks", "vt", "--model", "no/such/place")
    assert (done.code, done.err) == (2, f"error: {message}\n")


@pytest.mark.parametrize(
    ("tasks", "options", "message"),
    [
        (["gov_report", "trec"], [], "gov_report: not installed: rouge"),
        (["vcsum_e", "vcsum"], [], "unknown task 'vcsum_e'"),
        (["vcsum", "dureader"], [], "vcsum, dureader: not installed: jieba, rouge"),
        (["gov_report_e"], [], "gov_report_e: not installed: rouge"),
        (["ruler-local"], [], "niah_single_1, niah_multikey_2, cwe: not installed: wonderwords"),
        (["niah_single_2"], ["--data-dir", "x"], "niah_single_2: not installed: wonderwords"),
        (["niah_single_2"], [], "niah_single_2: not installed: datasets, wonderwords"),
        (["qa_1"], [], "qa_1: not installed: datasets"),
        (["needle"], [], "not installed: datasets, rouge"),
        (["needle"], ["--haystack", "noise"], "not installed: rouge; pip install 'inertiakv-jax["),
        (["vt", "fwe", "hotpotqa", "longbench-v2", "niah_multikey_3"], [], "no/such/place"),
        (["qa_1"], ["--data-dir", "x"], "no/such/place"),
    ],
)
def test_missing_packages_are_named_before_a_model_is_loaded(
    tasks, options, message, inertiakv, tmp_path, monkeypatch
):
    gone, find = ("rouge", "jieba", "wonderwords", "datasets"), importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in gone else find(name)
    )
    out = ["--out", tmp_path / "run", "--model", "no/such/place"]
    done = inertiakv("eval", *out, *options, "--tasks", *tasks)
    assert done.code == 2
    assert message in done.err


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return write_tiny(folder / "model"), write_data(folder / "data", rows=8)


def arguments(tiny, out):
    model, data = tiny
    return [
        *("eval", "--model", str(model), "--data-dir", str(data), "--out", str(out)),
        *("--tasks", "hotpotqa", "--policies", "full", "inertiakv", "score-free"),
        *("--ratios", "0.5", "0.75"),
    ]


def test_command_runs_resumes_and_reports(inertiakv, tiny, tmp_path):
    done = inertiakv(*arguments(tiny, tmp_path / "run"))
    assert done.code == 0, done.err
    assert "hotpotqa: 40 of 40 records" in done.err or "hotpotqa: 1 of 40" in done.err
    content = (tmp_path / "run" / "records.jsonl").read_bytes()
    assert content.count(b"\n") == 40
    assert inertiakv(*arguments(tiny, tmp_path / "run")).code == 0
    assert (tmp_path / "run" / "records.jsonl").read_bytes() == content
    assert inertiakv("report", tmp_path / "run").code == 0
    refused = inertiakv(*arguments(tiny, tmp_path / "run")[:-1], "0.6")
    assert refused.code == 2
    assert "settings.ratios: [0.5, 0.75] there, [0.5, 0.6] here" in refused.err


def without_cost(folder):
    lines = (folder / "records.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "cost"} for line in lines]


@pytest.mark.slow
def test_run_killed_ten_times_ends_as_an_undisturbed_one(tiny, tmp_path):
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }

    def start(folder):
        command = [sys.executable, "-m", "inertiakv_jax", *arguments(tiny, tmp_path / folder)]
        return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)

    assert start("undisturbed").wait() == 0
    rng = random.Random(11)
    records = tmp_path / "killed" / "records.jsonl"
    lines = 0
    for _ in range(10):
        process = start("killed")
        wanted = lines + rng.randint(0, 3)
        while process.poll() is None:
            lines = records.read_bytes().count(b"\n") if records.exists() else 0
            if lines >= wanted and records.exists():
                time.sleep(rng.uniform(0, 0.05))
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        lines = records.read_bytes().count(b"\n")
    assert lines < 40, "the run ended before it was killed ten times"
    assert start("killed").wait() == 0
    assert without_cost(tmp_path / "killed") == without_cost(tmp_path / "undisturbed")
