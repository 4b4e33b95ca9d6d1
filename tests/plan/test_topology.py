"""Names of topologies and meshes."""

import pytest

from inertiakv_jax.plan.chips import CHIPS
from inertiakv_jax.plan.topology import (
    MeshShape,
    parse_chips,
    parse_mesh,
    parse_topology,
    possible_meshes,
)


@pytest.mark.parametrize(
    ("text", "devices"),
    [("v5e:4x4", 16), ("v5p:4x4x4", 64), ("v6e:8x8", 64), ("h100:8", 8), ("A100:1", 1)],
)
def test_a_topology(text, devices):
    topology = parse_topology(text)
    assert (topology.name, topology.devices) == (text.lower(), devices)


@pytest.mark.parametrize("text", ["", "v5e", "v5e:3x3", "v5p:4x4", "h100:16", "tpu:2x2"])
def test_an_unknown_topology_lists_the_known(text):
    with pytest.raises(ValueError, match="unknown topology") as caught:
        parse_topology(text)
    for known in ("v5e:2x4", "v5p:2x2x4", "v6e:8x8", "a100:8", "h100:8"):
        assert known in str(caught.value)


def test_a_mesh():
    topology = parse_topology("v5p:2x2x4")
    assert parse_mesh("data=2,model=8", topology) == MeshShape(2, 8)
    assert parse_mesh("model=16", topology) == MeshShape(1, 16)
    four = parse_mesh("context=2, data=2,model=2,expert=2", topology)
    assert four == MeshShape(data=2, model=2, expert=2, context=2)
    assert str(four) == "data=2,context=2,expert=2,model=2"
    assert str(MeshShape(1, 8)) == "data=1,model=8"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data=2,model=2", "has 4 devices, but v5e:2x4 has 8"),
        ("context=2,model=8", "--mesh data=1,context=2,model=8 has 16 devices"),
        ("rows=8", "mesh 'rows=8': unknown axis 'rows'"),
    ],
)
def test_a_mesh_that_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        parse_mesh(text, parse_topology("v5e:2x4"))


def test_possible_meshes():
    sixteen = parse_topology("v5e:4x4")
    assert possible_meshes(sixteen, 4) == [MeshShape(1, 16), MeshShape(2, 8), MeshShape(4, 4)]
    assert possible_meshes(sixteen, 1) == [MeshShape(1, 16)]
    assert possible_meshes(parse_topology("h100:2"), 3) == [MeshShape(1, 2), MeshShape(2, 1)]
    # Three experts go with no number of devices, six with two of them.
    assert possible_meshes(sixteen, 1, num_experts=3) == [MeshShape(1, 16)]
    assert possible_meshes(sixteen, 2, num_experts=6) == [MeshShape(1, 8, 2), MeshShape(2, 4, 2)]


def test_chips_of_a_search():
    assert parse_chips("") == list(CHIPS.values())
    assert [chip.name for chip in parse_chips("v5p,H100")] == ["v5p", "h100"]
    with pytest.raises(ValueError, match="chips of v5e, v5p, v6e, a100, h100"):
        parse_chips("v5e:2x4")


@pytest.mark.parametrize("chip", CHIPS.values(), ids=str)
def test_a_chip_is_plausible(chip):
    assert 0.7 * chip.memory < chip.usable < 1.01 * chip.memory
    # Decoding is bound by memory on all of them: hundreds of operations a byte.
    assert 100 < chip.flops / chip.bandwidth < 700
    assert chip.source.startswith("https://")
