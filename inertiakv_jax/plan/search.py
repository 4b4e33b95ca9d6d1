"""The best mesh of a topology, and the smallest topology that a run fits: arithmetic only."""

import dataclasses
from collections.abc import Iterable, Iterator

from inertiakv_jax.plan.chips import Chip
from inertiakv_jax.plan.roofline import (
    Roofline,
    expected_sent_bytes,
    roofline,
    score_sent_bytes,
)
from inertiakv_jax.plan.sizes import DeviceBytes, device_bytes
from inertiakv_jax.plan.topology import (
    MeshShape,
    Topology,
    possible_meshes,
    topologies_of,
)
from inertiakv_jax.plan.workload import Slots, Workload, slots_of


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A mesh over a topology, and what arithmetic says of it.

    Attributes:
      workload: its batch is padded for the mesh.
    """

    topology: Topology
    mesh: MeshShape
    workload: Workload
    slots: Slots
    bytes: DeviceBytes
    speed: Roofline

    @property
    def fits(self) -> bool:
        """Whether weights and caches do; temporaries are known once it is compiled."""
        return self.bytes.peak <= self.topology.chip.usable


def candidate(workload: Workload, topology: Topology, mesh: MeshShape) -> Candidate:
    """A mesh, measured by arithmetic."""
    rows = workload.batch
    padded = dataclasses.replace(workload, batch=-(-rows // mesh.data) * mesh.data)
    slots = slots_of(padded, mesh.context)
    sent = expected_sent_bytes(padded, mesh)
    if padded.policy.scores_some_steps:
        sent += score_sent_bytes(padded, mesh, slots.decode)
    speed = roofline(padded, topology.chip, mesh, slots.decode, rows=rows, sent_bytes=sent)
    return Candidate(topology, mesh, padded, slots, device_bytes(padded, slots, mesh), speed)


def best_mesh(workload: Workload, topology: Topology) -> Candidate:
    """The fastest mesh that fits; if none does, the one that needs least."""
    experts = workload.config.experts
    meshes = possible_meshes(
        topology, workload.batch, 1 if experts is None else experts.num_experts
    )
    found = [candidate(workload, topology, mesh) for mesh in meshes]
    fitting = [one for one in found if one.fits]
    if fitting:
        return max(fitting, key=lambda one: one.speed.tokens_per_second)
    return min(found, key=lambda one: one.bytes.peak)


def smallest_that_fit(workload: Workload, chips: Iterable[Chip]) -> list[Candidate]:
    """Of each chip the smallest topology whose best mesh fits, the cheapest of them first.

    That is the one with fewest devices, and of equals the one with the least memory.
    """
    found = [next(fitting(workload, chip), None) for chip in chips]
    return sorted((one for one in found if one is not None), key=_cost)


def fitting(workload: Workload, chip: Chip) -> Iterator[Candidate]:
    """Best meshes of a chip's topologies that fit, from few devices to many."""
    for topology in topologies_of(chip):
        best = best_mesh(workload, topology)
        if best.fits:
            yield best


def _cost(one: Candidate) -> tuple[int, int]:
    return one.topology.devices, one.topology.chip.memory
