"""The whole decode loop of real models, kernels inside, on chips that are not there."""

import re

import pytest
from aot.compile_ahead import compile_cases, copies

pytestmark = pytest.mark.aot

# Too much for the VMEM of a TPU, where XLA may move a cache that fits.
LAYERS, BATCH, SLOTS = 2, 16, 36_864
KV_HEADS, HEAD_DIM, DEVICES = 8, 128, 8
LEAF_ELEMENTS = BATCH * (KV_HEADS // DEVICES) * SLOTS * HEAD_DIM  # of one device
LEAF_BYTES = 2 * LEAF_ELEMENTS
KERNEL = {
    "v5e": "tpu_custom_call",
    "a100": re.escape("__gpu$xla.gpu.triton"),
    "h100": "mosaic_gpu_v2",
}
EVICT_KERNELS = {"v5e": 1, "a100": 0, "h100": 0}  # elsewhere eviction is left to XLA


@pytest.fixture(scope="module", params=sorted(KERNEL))
def programs(request):
    """Of Llama-3.1-8B, by policy: a loop that scores at every step, and one that never does."""
    cases = [
        {
            "shapes": "llama-3.1-8b",
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
        assert copies(program.text, LEAF_ELEMENTS) == []
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


def test_cache_of_narrow_heads_is_not_copied_either():
    """SmolLM2's, which lies with its slots last: with a scatter, XLA would copy it every step."""
    batch, slots = 32, 16_384
    case = {
        "shapes": "smollm2-135m",
        "policy": "inertiakv",
        "layers": LAYERS,
        "batch": batch,
        "slots": slots,
        "implementation": None,
    }
    (program,) = compile_cases(
        "v5e", "decode_programs.py:decode_loop", [case], mesh={"data": 1, "model": 1}
    )
    assert program.error is None
    elements = batch * 3 * slots * 64
    assert copies(program.text, elements) == []
    assert program.memory["alias"] >= 2 * LAYERS * 2 * elements
    assert program.memory["temp"] < 2 * elements
    # A layer's attention and its writes of keys and values; one eviction.
    assert count(rf'custom_call_target="{KERNEL["v5e"]}"', program) == 3 * LAYERS + 1
