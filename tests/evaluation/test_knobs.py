"""The grid of the two knobs: its rules, its table, its picture."""

import pytest

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


@pytest.mark.real_weights
def test_planted_questions_hold_their_answer(smollm2):
    first, second = knobs.planted_questions(smollm2, 2, 200)
    assert first.number != second.number
    assert first.number in smollm2.tokenizer.decode(first.tokens)
    assert 200 <= len(first.tokens) < 400
