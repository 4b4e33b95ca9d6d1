"""``inertiakv trace``: files, table, replay, and what is refused."""

import json
import re

import pytest
from diagnostics.test_file import small_trace

from inertiakv_jax.diagnostics import to_json

NAMES = ("trace.json", "kept_sets.png", "kept_over_steps.png", "boundary.png")


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "prompt.txt"
    path.write_text("the inn by the sea and the hill " * 6)
    return path


@pytest.fixture
def trace(inertiakv, tiny_model, prompt_file, tmp_path):
    def run(*arguments):
        return inertiakv(
            "trace", "--model", tiny_model, "--prompt-file", prompt_file,
            "--steps", 3, "--out", tmp_path / "out", *arguments,
        )  # fmt: skip

    return run


def rows(table):
    return [re.split(r"\s{2,}", line.strip()) for line in table.splitlines()]


def test_trace_writes_draws_and_prints(trace, inertiakv, tiny_model, tmp_path):
    done = trace("--policy", "inertiakv", "--policy", "kvzip,ratio=0.5", "--policy", "full")
    assert done.code == 0, done.err
    table, legend, end = done.out.split("\n\n")
    (heading, *runs), (last,) = rows(table), rows(end)
    explained = f" {' '.join(legend.split())} "
    assert [name for name in heading[1:] if f" {name}: " not in explained] == []
    assert heading[:3] == ["policy", "kept", "Jaccard"]
    assert [run[0] for run in runs] == [
        "inertiakv", "kvzip,ratio=0.5", "full", "inertiakv without EMA",
    ]  # fmt: skip
    content = json.loads((tmp_path / "out" / "trace.json").read_text())
    length = len(content["prompt"])
    kept = [length - -(-9 * length // 10), length - -(-length // 2) + 3, length + 3]
    assert [int(run[1]) for run in runs[:3]] == kept
    assert [run["evicts"] for run in content["runs"]] == [True, False, False, True]
    assert content["config"]["continuation"] == "greedy"
    assert last == [f"Trace and pictures: {tmp_path / 'out'}"]
    for name in NAMES[1:]:
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(NAMES)

    done = inertiakv("trace", "--model", tiny_model, "--replay", tmp_path / "out" / "trace.json")
    assert done.code == 0, done.err
    heading, *runs = rows(done.out)
    assert heading == ["policy", "same tokens", "logit difference"]
    assert [run[1:] for run in runs] == [["3/3", "0"]] * 4


def test_continuation_can_be_given(trace, tmp_path):
    given = tmp_path / "given.txt"
    given.write_text("the inn by the sea and the hill")
    options = ("--policy", "inertiakv", "--continuation-file", given, "--ema-only")
    options += ("--prompt-tokens", 40)
    assert trace(*options).code == 0
    content = json.loads((tmp_path / "out" / "trace.json").read_text())
    assert content["config"]["continuation"] == "given"
    assert content["continuation"][0] == content["prompt"][0]
    assert len(content["prompt"]) == 40
    assert [run["name"] for run in content["runs"]] == ["inertiakv"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--policy", "nothing"], "--policy nothing: unknown policy 'nothing'"),
        (["--policy", "snapkv+nothing"], "unknown policy 'nothing'"),
        (["--policy", "nowhere.yaml"], "no policy at 'nowhere.yaml'"),
        (["--policy", "inertiakv,alpha"], "expected OPTION=VALUE once each, got 'alpha'"),
        (["--policy", "inertiakv,alpha=0.1,alpha=0.2"], "expected OPTION=VALUE once each"),
        (["--policy", "inertiakv,alpha=7"], "alpha must be a number in [0, 1), got 7"),
        (["--policy", "inertiakv,alfa=0.7"], "has no option 'alfa'"),
        (["--policy", "inertiakv,alpha=["], "'[' is no YAML value"),
        (["--ratio", "1.5"], "ratio must be a number in [0, 1), got 1.5"),
        (["--policy", "inertiakv", "--policy", "inertiakv"], "must have distinct names"),
        (["--steps", "0"], "steps must be an integer of at least 1, got 0"),
        (["--prompt-tokens", "0"], "--prompt-tokens must be at least 1, got 0"),
        (["--prompt-file", "nowhere.txt"], "cannot read --prompt-file nowhere.txt: No such file"),
        (["--continuation-file", "nowhere.txt"], "cannot read --continuation-file nowhere.txt"),
        (["--replay", "trace.json"], "--replay goes with --model, --dtype and --mesh only"),
    ],
)
def test_bad_input_is_refused(trace, tmp_path, arguments, expected):
    done = trace(*arguments)
    assert done.code == 2
    assert expected in done.err
    assert not list(tmp_path.glob("out/*"))


def test_out_in_a_file_is_named(inertiakv, tmp_path):
    (tmp_path / "file").touch()
    done = inertiakv("trace", "--model", "no-such-model", "--out", tmp_path / "file" / "out")
    assert done.code == 2
    assert f"{tmp_path}/file/out cannot be made: {tmp_path}/file is a file" in done.err


@pytest.mark.parametrize("option", ["--prompt-file", "--continuation-file"])
def test_text_is_not_empty(option, inertiakv, tiny_model, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    done = inertiakv("trace", "--model", tiny_model, option, empty, "--out", tmp_path)
    assert done.code == 2
    assert f"{option} {empty} is empty" in done.err


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{}", 'expected an object with "format": "inertiakv-trace"'),
        (to_json(small_trace())[:-100], "is no trace: "),
        (to_json(small_trace()), "the trace is of a model of"),
    ],
)
def test_what_cannot_be_replayed_is_refused(content, expected, inertiakv, tiny_model, tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(content)
    done = inertiakv("trace", "--model", tiny_model, "--replay", path)
    assert done.code == 2
    assert expected in done.err
