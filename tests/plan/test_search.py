"""The roofline, and what a search finds by arithmetic."""

import pytest
from plan.test_sizes import workload

from inertiakv_jax.plan.chips import CHIPS
from inertiakv_jax.plan.roofline import expected_sent_bytes, score_sent_bytes
from inertiakv_jax.plan.search import best_mesh, candidate, smallest_that_fit
from inertiakv_jax.plan.topology import MeshShape, parse_topology


def test_the_roofline_of_llama_8b():
    one = candidate(workload("llama-3.1-8b", ratio=0.9), parse_topology("v5e:2x4"), MeshShape(1, 8))
    # Weights but the embedding, 1,876,697,088 bytes, and 32 * 2 * 8 * 6,656 * 128 * 2 of cache.
    assert one.speed.memory_seconds == pytest.approx(
        (1_876_697_088 + 872_415_232) / 819e9, rel=0.01
    )
    # 2 * 7.5e9 operations a token in matrices, 4 * 4,096 a slot and layer in attention; 8 rows.
    operations = 2 * 8 * (7_504_658_432 + 32 * 2 * 4_096 * 6_656)
    assert one.speed.compute_seconds == pytest.approx(operations / 8 / 197e12)
    assert one.speed.seconds == pytest.approx(one.speed.memory_seconds + one.speed.exchange_seconds)
    assert one.speed.tokens_per_second == pytest.approx(8 / one.speed.seconds)


def test_bytes_that_a_step_sends():
    run, mesh = workload("llama-3.1-8b", ratio=0.9), MeshShape(1, 8)
    # 65 sums of 8 rows of 4,096 numbers; each sends 7/8 of it twice.
    assert expected_sent_bytes(run, mesh) == 65 * 8 * 4_096 * 2 * 2 * 7 / 8
    assert score_sent_bytes(run, mesh, 6_656) == 8 * 6_656 * 4 * 2 * 7 / 8
    per_head = workload("llama-3.1-8b", "inertiakv,retention=per_head", ratio=0.9)
    assert score_sent_bytes(per_head, mesh, 6_656) == 0
    assert expected_sent_bytes(run, MeshShape(8, 1)) == 0


def test_the_full_cache_is_slower():
    eight = parse_topology("v5e:2x4")
    full = best_mesh(workload("llama-3.1-8b", "full"), eight)
    thin = best_mesh(workload("llama-3.1-8b", ratio=0.9), eight)
    assert 3 < thin.speed.tokens_per_second / full.speed.tokens_per_second < 5


def test_the_smallest_that_fit():
    run = workload("llama-3.3-70b", ratio=0.9)
    in_order = smallest_that_fit(run, CHIPS.values())
    found = {one.topology.chip.name: one for one in in_order}
    # 141 GB of weights and 172 of cache, and 17 of kept cache at step 1: 330, of which a chip of a
    # v5p has 103, of an h100 64 to give. Those of v6e and v5e have copies of the 8 kv heads.
    assert found["v5p"].topology.name == "v5p:2x2x1"
    assert found["h100"].topology.name == "h100:8"
    assert found["v6e"].topology.name == "v6e:4x4"
    assert found["v5e"].topology.name == "v5e:8x8"
    assert found["v5p"].mesh == MeshShape(1, 4)
    devices = [one.topology.devices for one in in_order]
    assert devices == sorted(devices)


def test_a_mixture_is_divided_by_its_experts():
    run = workload("qwen3-30b-a3b", context=32_768, batch=1)
    found = best_mesh(run, parse_topology("v5e:16x16"))
    assert found.mesh == MeshShape(1, 2, expert=128)


def test_a_batch_is_padded_to_the_mesh():
    run = workload("llama-3.3-70b", ratio=0.9, batch=3)
    one = candidate(run, parse_topology("v5p:2x2x4"), MeshShape(2, 8))
    assert one.workload.batch == 4
    assert one.speed.tokens_per_second == pytest.approx(3 / one.speed.seconds)


def test_more_devices_than_kv_heads_have_copies_of_the_cache():
    run = workload("llama-3.1-8b", ratio=0.9)
    sixteen = parse_topology("v5e:4x4")
    shared = candidate(run, sixteen, MeshShape(1, 16)).bytes
    eight = candidate(run, parse_topology("v5e:2x4"), MeshShape(1, 8)).bytes
    assert shared.full_cache == eight.full_cache
    assert shared.weights < 0.6 * eight.weights
