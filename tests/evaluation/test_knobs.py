"""The grid of the two knobs: its rules, its table, its picture."""

from types import SimpleNamespace

import pytest
from cli.conftest import inertiakv as inertiakv  # a fixture
from evaluation.tiny import write_tiny

from inertiakv_jax import policies
from inertiakv_jax.eval import knobs

GRID = knobs.cells()


def test_the_grid_is_every_combination_once():
    assert len({cell.name for cell in GRID}) == len(GRID) == 5 * 5
    assert GRID[0].policy(0.9) == policies.inertiakv(0.9, decay=0.0, layer_weights="uniform")
    assert GRID[-1].policy(0.5) == policies.inertiakv(0.5, retention="per_head", decay=1.0)


def test_the_table_counts_right_answers():
    right = {cell.name: [True, False, False] for cell in GRID} | {"full": [True]}
    right["shared last 0.5"] = [True, True, True]
    table = dict(knobs.table(right))
    assert list(table) == [
        "one ranking, uniform layer weights",
        "one ranking, sequential layer weights",
        "one ranking, last layer weights",
        "one ranking a layer",
        "one ranking a kv head",
    ]
    assert table["one ranking, last layer weights"] == [33, 100, 33, 33, 33]
    assert knobs.draw("title", right).startswith(b"\x89PNG")


def test_command_tells_how_far_it_is(inertiakv, tmp_path, monkeypatch):
    """Without a terminal: a line for the first answer and each tenth of 2 x 26."""

    def measure(lm, questions, ratio, on_progress):
        for done in range(1, 53):
            on_progress(done, 52)
        return {cell.name: [True, False] for cell in GRID} | {"full": [True, True]}

    monkeypatch.setattr(knobs, "measure", measure)
    model = write_tiny(tmp_path / "model")
    out = ["--texts", 2, "--tokens", 200, "--out", tmp_path / "out"]
    done = inertiakv("knobs", "--model", model, *out)
    assert done.code == 0, done.err
    told = [1, 6, 11, 16, 21, 26, 32, 37, 42, 47, 52]
    assert done.err.splitlines() == [
        f"Loading {model}",
        "Compiling and asking",
        *(f"{answers} of 52 answers" for answers in told),
    ]


def test_every_answer_is_told_of(monkeypatch):
    reply = SimpleNamespace(texts=["it is 12"])
    monkeypatch.setattr(knobs, "answers", lambda lm, prompts, chosen, request: [reply] * 26)
    told = []
    questions = [knobs.Question([1], "12"), knobs.Question([1], "13")]
    lm = SimpleNamespace(eos_token_ids=(0,))
    right = knobs.measure(lm, questions, 0.9, lambda *progress: told.append(progress))
    assert told == [(done, 52) for done in range(1, 53)]
    assert set(map(tuple, right.values())) == {(True, False)}


@pytest.mark.real_weights
def test_planted_questions_hold_their_answer(smollm2):
    first, second = knobs.planted_questions(smollm2, 2, 200)
    assert first.number != second.number
    assert first.number in smollm2.tokenizer.decode(first.tokens)
    assert 200 <= len(first.tokens) < 400
