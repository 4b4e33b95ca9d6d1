"""Training runs: what they learn, and that a killed one ends as if nothing had happened."""

import dataclasses
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from training.tiny_lm import LENGTH, prose, write_model

import inertiakv_jax as ikv
from inertiakv_jax.learned_scorer import save_learned
from inertiakv_jax.training import scorer as scorer_training
from inertiakv_jax.training.scorer import Settings, train

pytestmark = pytest.mark.optimized  # to the bit what a child process gets

TEXT = prose(1000)
SHORT = Settings(steps=15, context=LENGTH, queries=4, batch_size=2, held_out=2)
CHILD = """
import os, signal, sys
from pathlib import Path
import inertiakv_jax as ikv
from inertiakv_jax.training.scorer import Settings, train

model, text, folder, moment = sys.argv[1:]
killed_at = 0

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def on_step(step, loss):
    if moment == "between" and step == 13:
        die()

if moment == "writing":  # everything of the checkpoint is there, but not yet in its place
    for name in ("rename", "replace"):
        move = getattr(os, name)
        setattr(
            os, name,
            lambda source, target, move=move:
                die() if Path(target).name == "10" else move(source, target),
        )
train(
    ikv.load(model), Path(text).read_text(),
    Settings(steps=15, context=128, queries=4, batch_size=2, held_out=2),
    checkpoints=Path(folder), checkpoint_every=5, on_step=on_step,
)
"""


@pytest.fixture(scope="module")
def whole(tiny_lm):
    """A run that nothing happened to."""
    return train(tiny_lm, TEXT, SHORT)


def saved_bytes(trained, folder):
    path = folder / "scorer.safetensors"
    save_learned(str(path), trained.weights)
    return path.read_bytes()


def test_head_learns_what_attention_ranks(tiny_lm):
    trained = train(tiny_lm, TEXT, Settings(steps=80, context=LENGTH, queries=8, held_out=2))
    before, after = trained.before, trained.after
    assert np.mean(trained.losses[-10:]) < 0.5 * np.mean(trained.losses[:10])
    assert after.loss < 0.5 * before.loss
    assert after.spearman > before.spearman + 0.05
    assert after.jaccard > before.jaccard + 0.05
    assert after.shared_spearman > before.shared_spearman
    assert trained.resumed_at == 0


@pytest.mark.parametrize(("moment", "resumed_at"), [("between", 10), ("writing", 5)])
def test_killed_run_ends_like_one_that_was_not(
    moment, resumed_at, whole, tiny_lm, tiny_folder, tmp_path
):
    (tmp_path / "text.txt").write_text(TEXT)
    checkpoints = tmp_path / "checkpoints"
    arguments = [tiny_folder, tmp_path / "text.txt", checkpoints, moment]
    child = subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, arguments)], check=False, capture_output=True
    )
    assert child.returncode == -9, child.stderr.decode()
    steps = []
    trained = train(
        tiny_lm,
        TEXT,
        SHORT,
        checkpoints=checkpoints,
        checkpoint_every=5,
        on_step=lambda step, _: steps.append(step),
    )
    assert trained.resumed_at == resumed_at
    assert steps == list(range(resumed_at + 1, 16))
    assert trained.losses == whole.losses[resumed_at:]
    assert saved_bytes(trained, tmp_path) == saved_bytes(whole, tmp_path)
    assert (trained.before, trained.after) == (whole.before, whole.after)
    # The half-written one is gone, and so is all but the latest two.
    assert sorted(p.name for p in checkpoints.iterdir()) == ["10", "15"]


def test_finished_run_is_not_taken_up_again(whole, tiny_lm, tmp_path):
    first = train(tiny_lm, TEXT, SHORT, checkpoints=tmp_path / "run", checkpoint_every=4)
    again = train(tiny_lm, TEXT, SHORT, checkpoints=tmp_path / "run")
    assert (again.resumed_at, again.losses) == (15, ())
    assert saved_bytes(first, tmp_path) == saved_bytes(again, tmp_path)
    assert saved_bytes(first, tmp_path) == saved_bytes(whole, tmp_path)


def test_seed_decides_everything(whole, tiny_lm):
    assert train(tiny_lm, TEXT, SHORT).losses == whole.losses
    other = train(tiny_lm, TEXT, dataclasses.replace(SHORT, seed=1, steps=2))
    assert other.losses[0] != whole.losses[0]


def runs_here(lm, text=TEXT, settings=SHORT, **options):
    """Fails if the model is run: what is refused must be refused before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scorer_training, "_record", lambda *_: pytest.fail("the model was run"))
        return train(lm, text, settings, **options)


@pytest.fixture(scope="module")
def interrupted(tiny_lm, tmp_path_factory):
    """Checkpoints of a run of 2 steps."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    settings = dataclasses.replace(SHORT, steps=2)
    train(tiny_lm, TEXT, settings, checkpoints=folder, checkpoint_every=1)
    return folder


def test_checkpoints_of_another_run_are_refused(interrupted, tiny_lm, tmp_path):
    two = dataclasses.replace(SHORT, steps=2)
    with pytest.raises(ValueError, match=r"another run: settings\.steps is 2 there, 15 here"):
        runs_here(tiny_lm, checkpoints=interrupted)
    with pytest.raises(ValueError, match=r"settings\.seed is 0 there, 3 here"):
        runs_here(tiny_lm, settings=dataclasses.replace(two, seed=3), checkpoints=interrupted)
    with pytest.raises(ValueError, match=r"text\.tokens is '"):
        runs_here(tiny_lm, TEXT + " x" * 200, two, checkpoints=interrupted)
    retrained = ikv.load(write_model(tmp_path / "other", seed=1))
    with pytest.raises(ValueError, match=r"model\.parameters is '"):
        runs_here(retrained, settings=two, checkpoints=interrupted)
    half = ikv.load(tmp_path / "other", dtype="bfloat16")
    with pytest.raises(ValueError, match=r"model\.dtype is 'float32' there, 'bfloat16' here"):
        runs_here(half, settings=two, checkpoints=interrupted)


def test_broken_checkpoint_is_named(interrupted, tiny_lm, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(interrupted, folder)
    for file in (folder / "2" / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    with pytest.raises(ValueError, match=r"run/2 cannot be read .* delete it to go on from the"):
        runs_here(tiny_lm, settings=dataclasses.replace(SHORT, steps=2), checkpoints=folder)
    shutil.rmtree(folder / "2")
    trained = train(
        tiny_lm, TEXT, dataclasses.replace(SHORT, steps=2), checkpoints=folder, checkpoint_every=1
    )
    assert trained.resumed_at == 1


def test_folder_that_cannot_be_written_to(tiny_lm, tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "checkpoints"):
        with pytest.raises(ValueError, match="checkpoints cannot be written to"):
            runs_here(tiny_lm, checkpoints=folder)


def test_what_does_not_fit_the_model(tiny_lm):
    with pytest.raises(ValueError, match="at most the model's 2048 positions, got 2112"):
        runs_here(tiny_lm, settings=Settings(context=2112))
    with pytest.raises(ValueError, match="needs at least 256: one piece of 128"):
        runs_here(tiny_lm, "too short", SHORT)
    with pytest.raises(ValueError, match="checkpoint_every must be an integer >= 1, got 0"):
        runs_here(tiny_lm, checkpoint_every=0)
    windows = dataclasses.replace(tiny_lm.config, sliding_window=32, local_layers=(0, 1))
    model = dataclasses.replace(tiny_lm.model, config=windows)
    with pytest.raises(ValueError, match="sliding windows: none is ever scored"):
        runs_here(dataclasses.replace(tiny_lm, model=model))


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("steps", 0, "an integer >= 1"),
        ("batch_size", 1.5, "an integer >= 1"),
        ("queries", True, "an integer >= 1"),
        ("held_out", 0, "an integer >= 1"),
        ("context", 64, "a multiple of 64 tokens above 64"),
        ("context", 200, "a multiple of 64 tokens above 64"),
        ("learning_rate", 0.0, "a number above 0"),
        ("learning_rate", float("nan"), "a number above 0"),
        ("seed", -1, r"an integer below 2\*\*32"),
    ],
)
def test_settings_out_of_range(field, value, expected):
    with pytest.raises(ValueError, match=f"{field} must be {expected}, got {value!r}"):
        Settings(**{field: value})


def test_model_that_makes_no_numbers(tiny_lm):
    params = jax.tree.map(lambda x: x * float("nan"), tiny_lm.params)
    with pytest.raises(FloatingPointError, match="the loss of step 1 is nan"):
        train(dataclasses.replace(tiny_lm, params=params), TEXT, SHORT)
