"""What one accelerator chip has: memory, bandwidth, arithmetic and links, from public sources."""

import dataclasses

TPU, GPU = "tpu", "cuda"

GIB = 1 << 30
SQUARES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
CUBES = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8))
ONE_HOST = ((1,), (2,), (4,), (8,))


@dataclasses.dataclass(frozen=True)
class GpuTarget:
    """What XLA is told about a GPU that is not there: fields of its GpuTargetConfigProto."""

    name: str  # Pallas reads the architecture from it
    compute_capability: tuple[int, int]
    features: str  # ACCELERATED_FEATURES makes compute capability 9.0 into sm_90a
    cores: int
    fpus_per_core: int
    shared_memory_per_block: int  # bytes, opted in
    shared_memory_per_core: int  # bytes
    l2_cache: int  # bytes
    clock_ghz: float


@dataclasses.dataclass(frozen=True)
class Chip:
    """One chip, which is one jax device.

    Attributes:
      name: as topologies name it.
      platform: of jax, ``TPU`` or ``GPU``.
      memory: bytes on the data sheet.
      usable: bytes that one program's arrays may take: on TPUs what libtpu reports when it refuses
        a program ("exceeds available HBM (15.75G)"), on GPUs the 75 % that jax takes unless
        XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
      bandwidth: of the memory, bytes per second.
      flops: peak of dense bfloat16, per second.
      links: bytes per second that a chip can send to others, all its links together; half of what
        data sheets call bidirectional.
      shapes: of the topologies, from few chips to many.
      source: of the numbers.
      gpu: what the compiler must know of a GPU; it knows the TPUs.
    """

    name: str
    platform: str
    memory: int
    usable: int
    bandwidth: float
    flops: float
    links: float
    shapes: tuple[tuple[int, ...], ...]
    source: str
    gpu: GpuTarget | None = None


_ALL = (
    Chip(
        name="v5e",
        platform=TPU,
        memory=16 * GIB,
        usable=int(15.75 * GIB),
        bandwidth=819e9,
        flops=197e12,
        links=200e9,
        shapes=SQUARES,
        source="https://docs.cloud.google.com/tpu/docs/v5e",
    ),
    Chip(
        name="v5p",
        platform=TPU,
        memory=95 * GIB,
        usable=int(95.74 * GIB),  # more than the data sheet's
        bandwidth=2765e9,
        flops=459e12,
        links=600e9,
        shapes=CUBES,
        source="https://docs.cloud.google.com/tpu/docs/v5p",
    ),
    Chip(
        name="v6e",
        platform=TPU,
        memory=32 * GIB,
        usable=int(31.25 * GIB),
        bandwidth=1638e9,
        flops=918e12,
        links=400e9,
        shapes=SQUARES,
        source="https://docs.cloud.google.com/tpu/docs/v6e",
    ),
    Chip(
        name="a100",
        platform=GPU,
        memory=80 * GIB,
        usable=60 * GIB,
        bandwidth=2039e9,
        flops=312e12,
        links=300e9,
        shapes=ONE_HOST,
        source="https://www.nvidia.com/en-us/data-center/a100 (SXM, 80 GB)",
        gpu=GpuTarget(
            name="NVIDIA A100-SXM4-80GB",
            compute_capability=(8, 0),
            features="NONE",
            cores=108,
            fpus_per_core=64,
            shared_memory_per_block=166912,
            shared_memory_per_core=167936,
            l2_cache=41943040,
            clock_ghz=1.41,
        ),
    ),
    Chip(
        name="h100",
        platform=GPU,
        memory=80 * GIB,
        usable=60 * GIB,
        bandwidth=3352e9,
        flops=989e12,
        links=450e9,
        shapes=ONE_HOST,
        source="https://www.nvidia.com/en-us/data-center/h100 (SXM, 80 GB)",
        gpu=GpuTarget(
            name="NVIDIA H100 80GB HBM3",
            compute_capability=(9, 0),
            features="ACCELERATED_FEATURES",
            cores=132,
            fpus_per_core=128,
            shared_memory_per_block=232448,
            shared_memory_per_core=233472,
            l2_cache=52428800,
            clock_ghz=1.98,
        ),
    ),
)
CHIPS = {chip.name: chip for chip in _ALL}
"""By name."""
