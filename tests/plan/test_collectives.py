"""Collectives read from the text of compiled programs, as XLA for TPUs and GPUs writes it."""

import pytest

from inertiakv_jax.plan.collectives import Collective, collectives, sent

TPU = """HloModule jit_run, is_scheduled=true

%add.3.clone (x: bf16[], y: bf16[]) -> bf16[] {
  ROOT %add = bf16[] add(%x, %y)
}

%body (carry: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %all-reduce.1 = bf16[8,16]{1,0:T(8,128)(2,1)S(1)} all-reduce(%fusion.1), channel_id=1
}

ENTRY %main (p: f32[8,6656]) -> f32[8,6656] {
  %while.1 = (s32[], bf16[8,16]{1,0}) while(%tuple), condition=%cond, body=%body
  %all-reduce.5 = f32[8,6656]{1,0:T(8,128)S(1)} all-reduce(%fusion.2), channel_id=7
  %all-gather.1 = (bf16[4,16]{1,0}, bf16[8,16]{1,0}) all-gather-start(%x), dimensions={0}
  %done = bf16[8,16]{1,0} all-gather-done(%all-gather.1)
}
"""
GPU = """
ENTRY %main.7_spmd (p: bf16[8,16]) -> bf16[8,16] {
  %all-reduce-start = bf16[8,16]{1,0} all-reduce-start(%p), channel_id=1, to_apply=%add
  %all-reduce-done = bf16[8,16]{1,0} all-reduce-done(%all-reduce-start)
  %both = (f32[2]{0}, s32[4]{0}) all-reduce-start(%a, %b), channel_id=2, to_apply=%add
  ROOT %permute = (bf16[2,3]{1,0}, bf16[2,3]{1,0}, u32[], u32[]) collective-permute-start(%p)
}
"""


def test_a_program_for_tpus():
    assert collectives(TPU) == [
        Collective("all-reduce", 8 * 16 * 2, repeated=True),
        Collective("all-reduce", 8 * 6_656 * 4, repeated=False),
        Collective("all-gather", 8 * 16 * 2, repeated=False),
    ]


def test_a_program_for_gpus():
    assert collectives(GPU) == [
        Collective("all-reduce", 8 * 16 * 2, repeated=False),
        Collective("all-reduce", 2 * 4 + 4 * 4, repeated=False),
        Collective("collective-permute", 2 * 3 * 2, repeated=False),
    ]


@pytest.mark.parametrize(
    ("kind", "expected"),
    # 800 bytes of result on 4 devices: three quarters of it, twice for a sum that all get.
    [
        *(("all-reduce", 1_200), ("all-gather", 600), ("all-to-all", 600)),
        *(("reduce-scatter", 2_400), ("collective-permute", 800)),
    ],
)
def test_bytes_sent(kind, expected):
    assert sent(kind, 800, 4) == expected


def test_one_device_sends_nothing():
    assert sent("all-reduce", 800, 1) == 0
