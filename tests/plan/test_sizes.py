"""Bytes on each device, against products of sizes worked out by hand."""

import dataclasses

import jax
import numpy as np
import pytest
from core import tiny_model

from inertiakv_jax import policies, prefilling
from inertiakv_jax.plan.sizes import cache_bytes, device_bytes, weight_bytes, weight_bytes_read
from inertiakv_jax.plan.topology import MeshShape
from inertiakv_jax.plan.workload import Slots, Workload, slots_of
from inertiakv_jax.weights.catalogue import CATALOGUE

ONE = MeshShape(1, 1)


def workload(name, policy="inertiakv", *, batch=8, context=65_536, new_tokens=128, **options):
    return Workload(
        config=CATALOGUE[name].config,
        dtype="bfloat16",
        quantization=options.pop("quantization", None),
        policy=policies.by_name(policy, **options),
        batch=batch,
        context=context,
        new_tokens=new_tokens,
    )


def close(number, expected):
    return number == pytest.approx(expected, rel=0.02)


# Llama-3.1-8B: 2 * 128,256 * 4,096 of embedding and head; a layer has 4,096 * (2 * 4,096 + 2 *
# 1,024 + 3 * 14,336) = 218,103,808, 32 of them: 8,029,995,008 in matrices, split over 8 devices.
# Norms, 65 * 4,096 numbers, lie on each. Two bytes a number.
LLAMA_8B_WEIGHTS = 8_029_995_008 * 2 // 8 + 65 * 4_096 * 2

# Llama-3.3-70B: 2 * 128,256 * 8,192 + 80 * 8,192 * (2 * 8,192 + 2 * 1,024 + 3 * 28,672).
LLAMA_70B_WEIGHTS = 70_552_387_584 * 2 // 8 + 161 * 8_192 * 2


def test_llama_8b_on_eight_devices():
    run = workload("llama-3.1-8b", ratio=0.9)
    sizes = device_bytes(run, slots_of(run), MeshShape(1, 8))
    assert sizes.weights == LLAMA_8B_WEIGHTS
    # 32 layers, keys and values, 8 rows, 1 of 8 kv heads, 65,536 tokens, 128 numbers, 2 bytes.
    assert close(sizes.full_cache, 32 * 2 * 8 * 1 * 65_536 * 128 * 2)
    assert sizes.start_cache == sizes.full_cache
    # A tenth of 65,408 prompt tokens, and the one that is being decoded.
    assert close(sizes.kept_cache, 32 * 2 * 8 * 1 * 6_541 * 128 * 2)
    assert close(sizes.peak, 2_008_031_232 + 8_589_934_592 + 857_341_952)


@pytest.mark.parametrize(("mesh", "rows"), [(MeshShape(2, 8), 4), (MeshShape(1, 8), 8)])
def test_llama_70b(mesh, rows):
    run = workload("llama-3.3-70b", ratio=0.9)
    sizes = device_bytes(run, slots_of(run), mesh)
    assert sizes.weights == LLAMA_70B_WEIGHTS  # axis data repeats them
    assert close(sizes.full_cache, 80 * 2 * rows * 65_536 * 128 * 2)
    assert close(sizes.kept_cache, 80 * 2 * rows * 6_541 * 128 * 2)


def test_context_divides_the_full_cache_up_to_step_1():
    run = workload("llama-3.1-8b", ratio=0.9)
    mesh = MeshShape(1, 8, context=2)
    without, divided = (
        device_bytes(run, slots_of(run, shape.context), shape) for shape in (MeshShape(1, 8), mesh)
    )
    assert divided.weights == without.weights == LLAMA_8B_WEIGHTS
    assert close(divided.full_cache, 32 * 2 * 8 * 1 * (65_536 // 2) * 128 * 2)
    assert divided.start_cache == divided.full_cache
    assert divided.kept_cache == without.kept_cache
    # What is never evicted from is gathered before the first step.
    full = workload("llama-3.1-8b", "full")
    held = device_bytes(full, slots_of(full, 2), mesh)
    assert held.full_cache == divided.full_cache
    assert held.kept_cache == held.start_cache == without.full_cache
    assert held.peak == held.weights + held.full_cache + held.start_cache


def test_parts_of_a_divided_cache_have_whole_chunks():
    run = workload("llama-3.1-8b", ratio=0.9, context=664, new_tokens=64)
    # 600 tokens and a new one: 768 slots, in halves of 384, which chunks of 256 fill as 512.
    assert [slots_of(run, parts).full for parts in (1, 2, 4)] == [768, 1_024, 768]


def test_experts_lie_on_the_devices_of_their_axis():
    # Qwen3-30B-A3B: 48 layers of 128 experts, 3 * 2,048 * 768 numbers each.
    model = workload("qwen3-30b-a3b", context=32_768).model
    experts = 48 * 128 * 3 * 2_048 * 768 * 2
    eight = weight_bytes(model, MeshShape(1, 8))
    # Without the axis the devices of model divide the experts: as with it, of any size.
    assert weight_bytes(model, MeshShape(1, 2, expert=4)) == eight
    assert weight_bytes(model, MeshShape(2, 8)) == eight
    assert experts / 8 < eight < experts / 8 + 0.5e9
    # 256 devices cannot divide 128 experts; 128 can, and 2 their width.
    many = weight_bytes(model, MeshShape(1, 256))
    assert many > experts
    assert close(many - weight_bytes(model, MeshShape(1, 2, expert=128)), experts * 255 / 256)


def test_weights_in_int8_take_half():
    model = workload("llama-3.1-8b", quantization="int8").model
    in_layers = 32 * 218_103_808 // 8
    assert close(weight_bytes(model, MeshShape(1, 8)), in_layers + 2 * 128_256 * 4_096 * 2 // 8)


def test_windows_hold_no_more_than_the_window():
    # Gemma-2-2B has 26 layers, half of them with a window of 4,096; 4 kv heads of 256.
    run = workload("gemma-2-2b", batch=1, context=8_192)
    assert close(
        cache_bytes(run.model, MeshShape(1, 1), 1, "shared", 8_192),
        13 * 2 * 4 * (8_192 + 4_096) * 256 * 2,
    )


def test_an_embedding_that_is_looked_up_is_not_read():
    untied = workload("llama-3.1-8b").model
    assert (
        weight_bytes_read(untied, MeshShape(1, 8), 8) == LLAMA_8B_WEIGHTS - 128_256 * 4_096 * 2 // 8
    )
    tied = workload("llama-3.2-1b").model
    assert weight_bytes_read(tied, MeshShape(1, 8), 8) == weight_bytes(tied, MeshShape(1, 8))


def test_experts_are_read_when_a_token_is_sent_to_them():
    # Qwen3-30B-A3B: 48 layers of 128 experts, 3 * 2,048 * 768 numbers each; 8 a token.
    model = workload("qwen3-30b-a3b", context=32_768).model
    rest = weight_bytes(model, ONE) - 48 * 128 * 3 * 2_048 * 768 * 2 - 151_936 * 2_048 * 2
    one_token = weight_bytes_read(model, ONE, 1)
    assert one_token == pytest.approx(rest + 48 * 8 * 3 * 2_048 * 768 * 2)
    assert weight_bytes_read(model, ONE, 10_000) == pytest.approx(
        weight_bytes(model, ONE) - 151_936 * 2_048 * 2
    )


@pytest.mark.parametrize(
    ("policy", "options", "expected"),
    [
        ("inertiakv", {"ratio": 0.9}, Slots(65_536, 65_536, 6_656)),
        ("full", {}, Slots(65_536, 65_536, None)),
        # 1 - 0.9 of all 65,536 tokens seen is 6,553, and one slot more.
        ("inertiakv", {"ratio": 0.9, "ratio_of": "seen"}, Slots(65_536, 65_536, 6_656)),
        ("tova", {"tokens": 1_000}, Slots(65_536, 65_536, 1_024)),
        # 6,540 of the prompt's tokens stay, and 128 are decoded: 6,668 in steps of 512.
        ("snapkv", {"ratio": 0.9}, Slots(65_536, 7_168, None)),
    ],
)
def test_slots(policy, options, expected):
    assert slots_of(workload("llama-3.1-8b", policy, **options)) == expected


@pytest.mark.parametrize("policy", [policies.inertiakv(0.9), policies.full()])
def test_slots_and_bytes_are_those_of_a_run(policy):
    prompt, new_tokens = 100, 20
    state, _ = prefilling.prefill(
        tiny_model.MODEL,
        tiny_model.params(),
        np.ones((2, prompt), np.int32),
        np.array([prompt, prompt]),
        policy,
        max_new_tokens=new_tokens,
    )
    run = Workload(tiny_model.CONFIG, "float32", None, policy, 2, prompt + new_tokens, new_tokens)
    slots = slots_of(run)
    assert (state.num_slots, state.kept_slots) == (slots.full, slots.kept)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert device_bytes(run, slots, MeshShape(1, 1)).full_cache == held


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch": 0}, "batch and new tokens must be at least 1, got 0 and 128"),
        ({"context": 200_000}, "at most the model's 131072 positions, got 200000"),
        ({"context": 128}, "more than the 128 new tokens"),
    ],
)
def test_sizes_that_do_not_go_together(changes, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(workload("llama-3.1-8b"), **changes)
