"""The GPU kernels of decode attention compile for GPUs, at the shapes of real models.

``compile_cases`` has the compiler fail where registers spill.
"""

import math
import re

import pytest
from aot.compile_ahead import compile_cases

from inertiakv_jax.pallas_kernels.decode_attention import shapes

pytestmark = pytest.mark.aot

CALL = {"triton": "__gpu$xla.gpu.triton", "mosaic": "mosaic_gpu"}


def case(heads, batch, slots, **options):
    heads = [heads.num_heads, heads.num_kv_heads, heads.head_dim]
    return {"heads": heads, "batch": batch, "slots": slots, **options}


# What both kernels take. S: 6,656 is the bucket of a budget of 6,401.
COMMON = [
    case(shapes.LLAMA_3_1_8B, 8, 16384),
    case(shapes.LLAMA_3_1_8B, 8, 16384, return_mass=False),
    case(shapes.LLAMA_3_1_8B, 1, 6656),
    case(shapes.LLAMA_3_1_8B, 32, 65536),
    case(shapes.LLAMA_3_3_70B_SHARD, 1, 65536, dtype="float16"),
    case(shapes.QWEN2_5_7B, 8, 6656, valid_per_head=True),
    case(shapes.SMOLLM2_135M, 1, 1024, soft_cap=30.0),
    {"heads": [16, 8, 256], "batch": 1, "slots": 4096},
    {"heads": [16, 1, 128], "batch": 2, "slots": 1000, "return_mass": False},
]
# What only Triton takes: any S, D and G, float32.
TRITON_ONLY = [
    case(shapes.LLAMA_3_1_8B, 1, 6402),
    case(shapes.LLAMA_3_1_8B, 1, 6402, dtype="float32"),
    case(shapes.SMOLLM2_135M, 8, 6402, dtype="float32"),
    {"heads": [32, 32, 96], "batch": 1, "slots": 4001},
    {"heads": [8, 1, 96], "batch": 1, "slots": 4001, "dtype": "float32"},
    {"heads": [12, 1, 128], "batch": 1, "slots": 1, "dtype": "float16"},
    {"heads": [32, 2, 256], "batch": 1, "slots": 77, "dtype": "float32"},
    # Other tiles of these would spill.
    {"heads": [12, 1, 96], "batch": 1, "slots": 77, "dtype": "float32"},
    {"heads": [32, 1, 96], "batch": 1, "slots": 77, "dtype": "float32"},
    {"heads": [32, 1, 128], "batch": 1, "slots": 77, "dtype": "float32"},
]
NAMED = [{**options, "kernel": "triton"} for options in COMMON]
RUNS = {
    "a100": [(options, "triton") for options in COMMON + TRITON_ONLY],
    "h100": [
        *((options, "mosaic") for options in COMMON),
        *((options, "triton") for options in TRITON_ONLY + NAMED),
    ],
}


def kv_bytes(options) -> int:
    _, num_kv_heads, head_dim = options["heads"]
    itemsize = 4 if options.get("dtype") == "float32" else 2
    return 2 * options["batch"] * num_kv_heads * options["slots"] * head_dim * itemsize


def readers(text: str, shape: list[int]) -> list[str]:
    """The instructions that read the parameters of a shape: what names them, the rest left out."""
    dimensions = re.escape(",".join(map(str, shape)))
    entry = text[text.index("ENTRY ") :]
    names = re.findall(rf"%(\S+) = \w+\[{dimensions}\]\S* parameter\(", entry)
    assert len(names) == 2, names  # keys and values
    lines = [line for line in entry.splitlines() if "parameter(" not in line]
    return [line for line in lines if any(re.search(rf"%{re.escape(n)}[,)]", line) for n in names)]


@pytest.mark.parametrize("target", sorted(RUNS))
def test_compiles(target):
    cases = [options for options, _ in RUNS[target]]
    compilations = compile_cases(target, "gpu_programs.py:decode_attention", cases)
    for (options, kernel), compilation in zip(RUNS[target], compilations, strict=True):
        assert compilation.error is None, (options, compilation.error)
        _, num_kv_heads, head_dim = options["heads"]
        shape = [options["batch"], num_kv_heads, options["slots"], head_dim]
        # Only the kernel, called once, reads keys and values: no copy, no second pass.
        (reader,) = readers(compilation.text, shape)
        assert CALL[kernel] in reader, (options, reader[:200])
        # The merge: one kernel for the output, three for the mass and, from jax 0.12 on, one to cut
        # it to slots that no tile divides; two to pack Mosaic's mask.
        of_mass = 3 + (options["slots"] % 16 > 0)
        most = 1 + of_mass * options.get("return_mass", True) + 2 * (kernel == "mosaic")
        assert len(re.findall(r" fusion\(", compilation.text)) <= most, options
        if math.prod(shape) > 1 << 24:
            assert compilation.memory["temp"] < 0.05 * kv_bytes(options), options
    whole, without_mass = compilations[:2]
    # [8, 8, 16384] float32 is all that the mass adds to what the program returns.
    added = whole.memory["output"] - without_mass.memory["output"]
    assert added == pytest.approx(4 << 20, abs=4096)


@pytest.mark.parametrize("target", sorted(RUNS))
def test_spilled_registers_are_seen(target):
    """Of tiles that are not chosen; the test above would be blind otherwise."""
    options = {"heads": [32, 1, 128], "batch": 1, "slots": 4096, "dtype": "float32"}
    tiles = {"kernel": "triton", "triton_tiles": [32, 64, 4]}
    (compilation,) = compile_cases(target, "gpu_programs.py:decode_attention", [options | tiles])
    assert compilation.error is not None
    assert "register spilling" in compilation.error
