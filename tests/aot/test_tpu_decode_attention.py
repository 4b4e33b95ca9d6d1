"""The TPU kernel of decode attention compiles for TPUs, at the shapes of real models."""

import re

import pytest
from aot.compile_ahead import TPU_TOPOLOGIES, compile_cases, copies

from inertiakv_jax.pallas_kernels.decode_attention import shapes

pytestmark = pytest.mark.aot


def case(heads, batch, slots, **options):
    heads = [heads.num_heads, heads.num_kv_heads, heads.head_dim]
    return {"heads": heads, "batch": batch, "slots": slots, **options}


CASES = [
    case(shapes.LLAMA_3_1_8B, 8, 16384),
    case(shapes.LLAMA_3_1_8B, 8, 16384, return_mass=False),
    case(shapes.LLAMA_3_1_8B, 1, 65536),
    case(shapes.LLAMA_3_1_8B, 32, 1024),
    case(shapes.LLAMA_3_1_8B, 1, 1000, dtype="float32", valid_per_head=True),
    case(shapes.LLAMA_3_3_70B_SHARD, 8, 65536),
    case(shapes.LLAMA_3_3_70B_SHARD, 1, 16384, soft_cap=30.0),
    case(shapes.QWEN2_5_7B, 8, 6464),
    case(shapes.SMOLLM2_135M, 32, 1024),
    case(shapes.SMOLLM2_135M, 1, 6464, dtype="float32"),
    {"heads": [32, 8, 96], "batch": 8, "slots": 6464},
    {"heads": [16, 8, 256], "batch": 8, "slots": 6464, "valid_per_head": True},
    {"heads": [32, 32, 128], "batch": 1, "slots": 6464},
    # Rows of which a core's VMEM holds no logits: they go through HBM.
    {"heads": [16, 1, 128], "batch": 1, "slots": 1 << 20},
]
# Larger than VMEM, to which XLA may move caches that fit.
LOOPS = [
    case(shapes.LLAMA_3_1_8B, 8, 16384),
    case(shapes.SMOLLM2_135M, 32, 16384),
    {"heads": [32, 8, 96], "batch": 16, "slots": 6464, "dtype": "float32", "slot_per_head": True},
]


def kv_elements(case) -> int:
    _, num_kv_heads, head_dim = case["heads"]
    return case["batch"] * num_kv_heads * case["slots"] * head_dim


def scoped_vmem(text: str) -> int:
    """Bytes that the kernel was given."""
    (call,) = [line for line in text.splitlines() if "tpu_custom_call" in line]
    used = re.search(
        r'"used_scoped_memory_configs":\[\{"memory_space":"1"[^}]*"size":"(\d+)"', call
    )
    assert used is not None
    return int(used[1])


@pytest.mark.parametrize("target", TPU_TOPOLOGIES)
def test_compiles(target):
    compilations = compile_cases(target, "tpu_programs.py:decode_attention", CASES)
    for case, compilation in zip(CASES, compilations, strict=True):
        assert compilation.error is None, (case, compilation.error)
        assert compilation.text.count('custom_call_target="tpu_custom_call"') == 1, case
        assert copies(compilation.text, kv_elements(case)) == [], case
        assert scoped_vmem(compilation.text) <= 48 << 20, case
    whole, without_mass = compilations[:2]
    # [8, 8, 16384] float32 is all that the mass adds to what the program returns.
    assert whole.memory["output"] - without_mass.memory["output"] == pytest.approx(
        4 << 20, abs=4096
    )


@pytest.mark.parametrize("target", TPU_TOPOLOGIES)
def test_loop_updates_the_cache_in_place(target):
    compilations = compile_cases(target, "tpu_programs.py:decode_loop", LOOPS)
    for case, compilation in zip(LOOPS, compilations, strict=True):
        assert compilation.error is None, (case, compilation.error)
        assert "tpu_custom_call" in compilation.text
        assert copies(compilation.text, kv_elements(case)) == [], case
        kv_bytes = 2 * kv_elements(case) * (4 if case.get("dtype") == "float32" else 2)
        assert compilation.memory["alias"] >= kv_bytes
        assert compilation.memory["temp"] < 0.1 * kv_bytes


@pytest.mark.parametrize("target", ["v5e"])
def test_copies_are_seen(target):
    """Of caches whose S is no multiple of 8; the check above would be blind otherwise."""
    case = {"heads": [32, 8, 128], "batch": 8, "slots": 6402}
    (compilation,) = compile_cases(target, "tpu_programs.py:decode_attention", [case])
    assert compilation.error is None
    assert len(copies(compilation.text, kv_elements(case))) >= 2
