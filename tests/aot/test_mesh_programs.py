"""What crosses between the chips of a v5e in a decode step, read off the compiled programs."""

import math
import re

import pytest
from aot.compile_ahead import compile_cases

pytestmark = pytest.mark.aot

LAYERS, BATCH, SLOTS, KEPT, HEAD_DIM = 2, 4, 32_768, 3_328, 128
REDUCES = r" all-reduce(-start)?\("
GATHERED = r"= \(?\w+\[([\d,]*)\]\S* all-(?:gather|to-all)(?:-start)?\("
SMALL = 2**16
"""Numbers: far below a key of every slot, or a row of the vocabulary."""


def compiled(mesh, **case):
    (program,) = compile_cases(
        "v5e", "mesh_programs.py:one_step", [{"layers": LAYERS, "batch": BATCH} | case], mesh=mesh
    )
    assert program.error is None
    return program


def gathered(program):
    """How many numbers each all-gather and all-to-all gives, largest last."""
    shapes = re.findall(GATHERED, program.text)
    return sorted(math.prod(map(int, filter(None, shape.split(",")))) for shape in shapes)


@pytest.mark.parametrize("mesh", [{"data": 2, "model": 4}, {"data": 1, "model": 8}], ids=str)
def test_scoring_adds_one_all_reduce(mesh):
    scoring = compiled(mesh, slots=KEPT)
    plain = compiled(mesh, slots=KEPT, rescore=False)
    assert len(re.findall(REDUCES, scoring.text)) == len(re.findall(REDUCES, plain.text)) + 1
    for program in (scoring, plain):
        assert max(gathered(program), default=0) < SMALL
        cache = 2 * LAYERS * BATCH * 8 * KEPT * HEAD_DIM * 2 // 8  # bfloat16, over eight chips
        assert program.memory["alias"] >= cache


def test_step_1_never_gathers_a_cache_whose_slots_are_divided():
    program = compiled({"data": 1, "context": 4, "model": 2}, slots=SLOTS, kept_slots=KEPT)
    kept = BATCH * 4 * KEPT * HEAD_DIM  # of four kv heads
    assert gathered(program)[-1] <= kept
    full = BATCH * 8 * SLOTS * HEAD_DIM * 2 * 2 * LAYERS
    assert program.memory["argument"] > full // 8
    assert program.memory["temp"] < full // 4  # parts of the softmax, not keys
