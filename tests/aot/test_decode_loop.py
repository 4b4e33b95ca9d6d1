"""The whole decode loop of Llama-3.1-8B, kernels inside, over eight chips that are not there."""

import re

import pytest
from aot.compile_ahead import compile_cases

pytestmark = pytest.mark.aot

LAYERS, BATCH, SLOTS = 2, 8, 13_312  # a tenth of 128k tokens, in its bucket
KV_HEADS, HEAD_DIM, DEVICES = 8, 128, 8
LEAF = rf"bf16\[{BATCH},{KV_HEADS // DEVICES},{SLOTS},{HEAD_DIM}\]"
LEAF_BYTES = BATCH * SLOTS * HEAD_DIM * 2  # one kv head a device
KERNEL = {
    "v5e": "tpu_custom_call",
    "a100": re.escape("__gpu$xla.gpu.triton"),
    "h100": "mosaic_gpu_v2",
}
EVICT_KERNELS = {"v5e": 1, "a100": 0, "h100": 0}  # elsewhere eviction is left to XLA


@pytest.fixture(scope="module", params=sorted(KERNEL))
def programs(request):
    """By policy: a loop that scores at every step, and one that never does."""
    cases = [
        {
            "policy": policy,
            "layers": LAYERS,
            "batch": BATCH,
            "slots": SLOTS,
            "implementation": None,
        }
        for policy in ("inertiakv", "score-free")
    ]
    compiled = compile_cases(
        request.param,
        "decode_programs.py:decode_loop",
        cases,
        mesh={"data": 1, "model": DEVICES},
    )
    assert [c.error for c in compiled] == [None, None]
    scoring, plain = compiled
    return request.param, scoring, plain


def count(pattern, program):
    return len(re.findall(pattern, program.text))


def test_kernel_of_the_target_runs_once_a_layer(programs):
    target, *compiled = programs
    for program in compiled:
        kernels = count(rf'custom_call_target="{KERNEL[target]}"', program)
        assert kernels == LAYERS + EVICT_KERNELS[target]


def test_no_key_or_value_buffer_is_copied_or_transposed(programs):
    for program in programs[1:]:
        assert count(rf"= {LEAF}\S* (copy|transpose)\(", program) == 0
        assert program.memory["temp"] < LEAF_BYTES


def test_the_cache_is_updated_in_place(programs):
    for program in programs[1:]:
        assert program.memory["alias"] >= 2 * LAYERS * LEAF_BYTES


def test_scoring_adds_one_all_reduce_a_step(programs):
    _, scoring, plain = programs
    reduces = r" all-reduce(-start)?\("
    assert count(reduces, plain) == 2 * LAYERS  # after attention and after the MLP
    assert count(reduces, scoring) == 2 * LAYERS + 1


def test_nothing_is_gathered(programs):
    for program in programs[1:]:
        assert count(r" all-(gather|to-all)(-start)?\(", program) == 0
