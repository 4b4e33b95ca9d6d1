"""Chips that are joined, ``v5e:2x4`` or ``h100:8``, and the meshes that fit them."""

import dataclasses
import math

from inertiakv_jax.plan.chips import CHIPS, GPU, Chip
from inertiakv_jax.sharding import parse_mesh_sizes


@dataclasses.dataclass(frozen=True)
class Topology:
    """Chips of one kind in a torus (TPUs), or the GPUs of one host."""

    chip: Chip
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """As on the command line."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def devices(self) -> int:
        """Number of jax devices, one a chip."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Sizes of the axes of a mesh, which ``inertiakv_jax.sharding`` explains."""

    data: int
    model: int
    expert: int = 1
    context: int = 1

    def __str__(self):
        context = f"context={self.context}," if self.context > 1 else ""
        expert = f"expert={self.expert}," if self.expert > 1 else ""
        return f"data={self.data},{context}{expert}model={self.model}"

    @property
    def sharing(self) -> int:
        """Devices that share the heads and widths of a row."""
        return self.expert * self.model

    @property
    def devices(self) -> int:
        """All of them."""
        return self.data * self.context * self.sharing


def topologies_of(chip: Chip) -> list[Topology]:
    """From few chips to many."""
    return [Topology(chip, shape) for shape in chip.shapes]


def known_topologies() -> str:
    """All of them, for an error message."""
    return "\n".join(
        f"  {' '.join(topology.name for topology in topologies_of(chip))}"
        for chip in CHIPS.values()
    )


def parse_topology(text: str) -> Topology:
    """Read ``CHIP:SHAPE``.

    Raises:
      ValueError: not a known one; lists those that are.
    """
    for chip in CHIPS.values():
        for topology in topologies_of(chip):
            if topology.name == text.lower():
                return topology
    raise ValueError(f"unknown topology {text!r}; known are\n{known_topologies()}")


def parse_chips(text: str) -> list[Chip]:
    """Read what a search may choose from: chips by name, separated by commas; none means all."""
    names = [name for name in text.lower().split(",") if name] or list(CHIPS)
    for name in names:
        if name not in CHIPS:
            raise ValueError(
                f"--search chooses the topology itself: expected chips of {', '.join(CHIPS)}, "
                f"separated by commas, got {text!r}"
            )
    return [CHIPS[name] for name in names]


def parse_mesh(text: str, topology: Topology) -> MeshShape:
    """Read ``data=2,model=8``, as ``sharding.parse_mesh_sizes``.

    Raises:
      ValueError: as there, or a mesh that does not take up the topology.
    """
    mesh = MeshShape(**parse_mesh_sizes(text))
    if mesh.devices != topology.devices:
        raise ValueError(
            f"--mesh {mesh} has {mesh.devices} devices, but {topology.name} has {topology.devices}"
        )
    return mesh


def possible_meshes(topology: Topology, batch: int, num_experts: int = 1) -> list[MeshShape]:
    """Meshes over all devices whose axis ``data`` is at most the batch, the widest models first.

    Devices beyond the batch would compute rows that nobody asked for. Whole experts lie on as many
    devices as divide their number; ``context`` is left to who needs it.
    """
    meshes = []
    for data in range(1, min(batch, topology.devices) + 1):
        if topology.devices % data == 0:
            sharing = topology.devices // data
            expert = math.gcd(sharing, num_experts)
            meshes.append(MeshShape(data, sharing // expert, expert))
    return meshes


def gpu_target_config(chip: Chip) -> str:
    """The text that jax's ``get_topology_desc`` wants for a GPU."""
    gpu = chip.gpu
    assert gpu is not None
    major, minor = gpu.compute_capability
    return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {gpu.features} }}
  core_count: {gpu.cores} fpus_per_core: {gpu.fpus_per_core}
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {gpu.shared_memory_per_block}
  shared_memory_per_core: {gpu.shared_memory_per_core}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  l2_cache_size: {gpu.l2_cache} device_memory_size: {chip.memory}
  memory_bandwidth: {int(chip.bandwidth)} clock_rate_ghz: {gpu.clock_ghz}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{gpu.name}"
"""


def compile_only_mesh(topology: Topology, shape: MeshShape):
    """A ``jax.sharding.Mesh`` of devices that can be compiled for and nothing else."""
    import jax
    import numpy as np
    from jax.experimental import topologies

    from inertiakv_jax.sharding import MESH_AXES

    if topology.chip.platform == GPU:
        # "<slices>x<hosts>x<GPUs of a host>"
        description = topologies.get_topology_desc(
            platform=GPU,
            target_config=gpu_target_config(topology.chip),
            topology=f"1x1x{topology.devices}",
        )
    else:
        # libtpu describes whole hosts: a single chip is the first of four.
        name = topology.name if topology.devices > 1 else f"{topology.chip.name}:2x2"
        description = topologies.get_topology_desc(platform="tpu", topology_name=name)
    sizes = {axis: getattr(shape, axis) for axis in MESH_AXES}
    devices = np.array(description.devices[: topology.devices]).reshape(*sizes.values())
    return jax.sharding.Mesh(devices, tuple(sizes))
