"""The eviction step compiles for TPUs, and costs less there than the plain version."""

import math

import pytest
from aot.compile_ahead import TPU_TOPOLOGIES, compile_cases

pytestmark = pytest.mark.aot

# Shared by layers and heads at a tenth of 64k and of 160k tokens; per layer; per layer and head.
SHAPES = [[8, 6528], [32, 16384], [8, 65536], [30, 1, 6528], [4, 8, 8, 6528], [4, 8, 4, 1024]]
# With XLA's version, whose sorts take the longest to compile.
COMPARED = [[32, 16384], [4, 8, 4, 1024]]


@pytest.mark.parametrize("target", TPU_TOPOLOGIES)
def test_kernel_is_the_default_and_moves_less(target):
    cases = [{"shape": shape, "implementation": None} for shape in SHAPES]
    cases += [{"shape": shape, "implementation": "xla"} for shape in COMPARED]
    compilations = compile_cases(target, "tpu_programs.py:evict", cases)
    for case, compilation in zip(cases, compilations, strict=True):
        assert compilation.error is None, (case, compilation.error)
        # Utilities and positions are updated in place.
        assert compilation.memory["alias"] >= 8 * math.prod(case["shape"])
    kernels, plain = compilations[: len(SHAPES)], compilations[len(SHAPES) :]
    for shape, kernel in zip(SHAPES, kernels, strict=True):
        assert kernel.text.count('custom_call_target="tpu_custom_call"') == 1, shape
        # 20 bytes a slot, and a little for each row. XLA makes 80 to 90 of it.
        assert kernel.cost["bytes accessed"] < 24 * math.prod(shape), shape
    for shape, compilation in zip(COMPARED, plain, strict=True):
        assert "tpu_custom_call" not in compilation.text
        assert compilation.cost["bytes accessed"] > 60 * math.prod(shape), shape


@pytest.mark.parametrize("target", TPU_TOPOLOGIES)
def test_refused_shapes_take_the_plain_version(target):
    cases = [
        {"shape": [8, 200_000], "implementation": None},
        {"shape": [4, 3, 64], "implementation": None},
    ]
    for compilation in compile_cases(target, "tpu_programs.py:evict", cases):
        assert compilation.error is None
        assert "tpu_custom_call" not in compilation.text


@pytest.mark.parametrize("target", ["v5e"])
def test_without_scores_it_moves_less(target):
    cases = [
        {"shape": [32, 16384], "implementation": "tpu", "scored": scored}
        for scored in (True, False)
    ]
    scored, unscored = compile_cases(target, "tpu_programs.py:evict", cases)
    saved = scored.cost["bytes accessed"] - unscored.cost["bytes accessed"]
    assert saved == pytest.approx(4 * 32 * 16384, rel=0.01)
