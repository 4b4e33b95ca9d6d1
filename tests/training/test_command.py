"""``inertiakv train-scorer``: from a text file to a policy."""

import json
import subprocess
import sys

import numpy as np
import pytest
from cli.conftest import inertiakv  # noqa: F401
from training.tiny_lm import prose

import inertiakv_jax as ikv

OPTIONS = ("--steps", 12, "--context", 128, "--queries", 4, "--held-out", 1)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(prose(600))
    return path


def test_trained_scorer_serves_a_policy(inertiakv, text, tiny_folder, tiny_lm, tmp_path):  # noqa: F811
    scorer, measured = tmp_path / "scorer.safetensors", tmp_path / "measured.json"
    command = ("train-scorer", "--text", text, "--model", tiny_folder, *OPTIONS)
    command += ("--output", scorer, "--json", measured, "--checkpoint-every", 5)
    done = inertiakv(*command)
    assert done.code == 0, done.err
    assert "step 12 of 12: loss " in done.err
    assert [line.split()[0] for line in done.out.splitlines()[:3]] == ["on", "untrained", "trained"]
    assert f"Scorer: {scorer}" in done.out
    result = json.loads(measured.read_text())
    assert len(result["losses"]) == 12
    assert np.mean(result["losses"][-4:]) < np.mean(result["losses"][:4])
    assert result["after"]["loss"] < result["before"]["loss"]
    assert result["settings"]["context"] == 128
    assert sorted(p.name for p in (tmp_path / "scorer.safetensors.checkpoints").iterdir()) == [
        *("10", "12")
    ]

    again = inertiakv(*command)
    assert "Went on from the checkpoint of step 12" in again.err
    assert again.out == done.out

    policy = ikv.policies.learned(0.9, scorer_weights=str(scorer))
    output = ikv.generate(tiny_lm, ["the cat " * 30], policy=policy, max_new_tokens=4)
    assert output.stats.kept_tokens[0] == output.stats.prompt_tokens[0] // 10


def test_progress_bar_on_a_terminal(inertiakv, text, tiny_folder, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    output = tmp_path / "scorer.safetensors"
    done = inertiakv(
        *("train-scorer", "--text", text, "--model", tiny_folder, *OPTIONS, "--output", output)
    )
    assert done.code == 0
    assert "12/12" in done.err
    assert "loss" in done.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--text PATH or --dataset NAME, one of them"),
        (("--text", "a", "--dataset", "b"), "one of them"),
        (("--text", "missing.txt"), "cannot read the text missing.txt: No such file"),
        (("--text", "empty.txt"), "the text to train on is empty"),
        (("--text", "empty.txt", "--output", "no/folder"), "the folder no does not exist"),
        (("--text", "empty.txt", "--output", "."), "--output must be a file"),
        (("--text", "empty.txt", "--output", "a", "--json", "./a"), "--json and --output must dif"),
        (("--text", "empty.txt", "--json", "no/folder"), "--json no/folder: the folder no"),
        (("--text", "empty.txt", "--output", "empty.txt/a"), "the folder empty.txt is a file"),
        (("--text", "empty.txt", "--checkpoints", "empty.txt"), "cannot be made: it is a file"),
        (("--text", "empty.txt", "--context", 100), "context must be a multiple of 64"),
    ],
)
def test_bad_input(options, message, inertiakv, tiny_folder, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("\n")
    done = inertiakv("train-scorer", "--model", tiny_folder, *options)
    assert done.code == 2
    assert message in done.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty.txt"]


@pytest.mark.parametrize("package", ["optax", "orbax.checkpoint"])
def test_missing_extra_is_named(package, text):
    hidden = f"import sys; sys.modules[{package!r}] = None; "
    code = "from inertiakv_jax.cli import run; sys.exit(run(['train-scorer', *sys.argv[1:]]))"
    done = subprocess.run(
        [sys.executable, "-c", hidden + code, "--text", text],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    name = package.replace(".", "-")
    assert f"error: training the scorer needs {name}: pip install 'inertiakv-jax[train]'" in (
        done.stderr
    )
