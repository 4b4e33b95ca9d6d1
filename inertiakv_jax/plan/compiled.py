"""Compile the programs of a run for chips that need not be there, and read off what they take."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import jax
from jax.sharding import Mesh

from inertiakv_jax.plan.chips import GPU
from inertiakv_jax.plan.collectives import KINDS, Collective, collectives
from inertiakv_jax.plan.layers import extrapolate, samples
from inertiakv_jax.plan.programs import (
    DECODE_STEP,
    EVICTION,
    PREFILL,
    STEP_1,
    Program,
    programs,
)
from inertiakv_jax.plan.sizes import device_bytes
from inertiakv_jax.plan.topology import MeshShape, Topology, compile_only_mesh
from inertiakv_jax.plan.workload import Slots, Workload

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Collectives of one kind in a program.

    Attributes:
      count: how many run.
      bytes: of their results on a device, together.
    """

    count: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Phase:
    """One program with all layers, carried over from few.

    Attributes:
      other_bytes: on each device, beside weights and caches: temporaries, tokens, logits, and what
        the compiler pads arrays with.
      exchanges: by kind; of prefill those of one chunk.
    """

    other_bytes: int
    exchanges: Mapping[str, Exchange]


@dataclasses.dataclass(frozen=True)
class _Sample:
    """The same of a program of few layers."""

    other_bytes: int
    found: tuple[Collective, ...]


def compile_phases(
    workload: Workload,
    slots: Slots,
    topology: Topology,
    mesh: MeshShape,
    say: Callable[[str], None],
    *,
    whole: bool = False,
) -> dict[str, Phase]:
    """Compile each program with few layers, and carry what it takes over to all.

    Args:
      workload: what is to run.
      slots: of its caches.
      topology: whose compiler runs.
      mesh: over its devices.
      say: told of each program that is done.
      whole: compile all layers instead.

    Raises:
      ValueError: a program does not fit the memory even with one layer of a kind.
    """
    devices = compile_only_mesh(topology, mesh)
    cut = [
        dataclasses.replace(workload, config=config)
        for config in samples(workload.config, whole=whole)
    ]
    lowered = [
        (name, index, _lower(program, topology, devices))
        for index, part in enumerate(cut)
        for name, program in programs(part, slots, devices).items()
    ]

    def compile_one(job) -> _Sample:
        name, index, program = job
        start = time.perf_counter()
        sample = _compile(program, name, _held(cut[index], slots, mesh, name))
        layers = cut[index].config.num_layers
        say(f"Compiled {name} with {layers} layers in {time.perf_counter() - start:.0f} s")
        return sample

    # The longest first: the compiler is one thread for the most part, and leaves Python's lock.
    lowered.sort(key=lambda job: (job[0] == DECODE_STEP, job[0] == PREFILL, -job[1]))
    with ThreadPoolExecutor(max_workers=min(os.cpu_count() or 1, 4)) as pool:
        compiled = list(pool.map(compile_one, lowered))
    found = {job[:2]: sample for job, sample in zip(lowered, compiled, strict=True)}
    names = [name for name in (PREFILL, STEP_1, EVICTION, DECODE_STEP) if (name, 0) in found]
    return {
        name: _phase(workload, [found[name, index] for index in range(len(cut))], whole=whole)
        for name in names
    }


def _lower(program: Program, topology: Topology, devices: Mesh) -> jax.stages.Lowered:
    gpu = topology.chip.platform == GPU
    # Tells Pallas the architecture (jax 0.11 and later; TPU kernels don't ask).
    with jax.default_device(devices.devices.flat[0]) if gpu else contextlib.nullcontext():
        return program.lower()


def _held(workload: Workload, slots: Slots, mesh: MeshShape, name: str) -> int:
    """Bytes of weights and caches that are arguments or results of a program."""
    sizes = device_bytes(workload, slots, mesh)
    return {
        PREFILL: sizes.weights + sizes.full_cache,
        STEP_1: sizes.weights + sizes.start_cache,
        EVICTION: sizes.start_cache + sizes.kept_cache,
        DECODE_STEP: sizes.weights + sizes.kept_cache,
    }[name]


def _compile(lowered: jax.stages.Lowered, name: str, held: int) -> _Sample:
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if OUT_OF_MEMORY not in str(error):
            raise
        reason = str(error).split("\n", 1)[0]
        raise ValueError(f"{name} does not fit, whatever the number of layers: {reason}") from error
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert text is not None
    total = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    found = collectives(text)
    if name == PREFILL:
        found = [collective for collective in found if collective.repeated]
    return _Sample(total - held, tuple(found))


def _phase(workload: Workload, parts: list[_Sample], *, whole: bool) -> Phase:
    def of_all_layers(values) -> int:
        values = list(values)
        return max(0, values[0] if whole else round(extrapolate(workload.config, values)))

    exchanges = {}
    for kind in KINDS:
        own = [[one for one in part.found if one.kind == kind] for part in parts]
        if any(own):
            exchanges[kind] = Exchange(
                count=of_all_layers(len(found) for found in own),
                bytes=of_all_layers(sum(one.bytes for one in found) for found in own),
            )
    return Phase(of_all_layers(part.other_bytes for part in parts), exchanges)
