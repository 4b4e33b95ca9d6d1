"""Compile programs for TPUs and NVIDIA GPUs that this machine does not have.

The target's real compiler runs (XLA:TPU and Mosaic; XLA:GPU, Triton or Mosaic GPU, ptxas), so an
unsupported operation, a bad tiling, too much on-chip memory or a spilled register is an error here.
Nothing runs: numbers are checked in interpret mode.

Each call of ``compile_cases`` is a process of its own. The compilers read environment variables
when they load, some faults abort the process, and the first Mosaic GPU compilation fixes the
architecture for all later ones.

A program is a function in a file beside this one, ``program(mesh, **case)``, that returns the
function to compile and its arguments: arrays' ``jax.ShapeDtypeStruct`` (without a sharding they are
replicated over the mesh), and, if wanted, the numbers of the donated ones.
"""

import dataclasses
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from inertiakv_jax.plan.child import ENVIRONMENT
from inertiakv_jax.plan.chips import CHIPS, GPU
from inertiakv_jax.plan.topology import gpu_target_config

HERE = Path(__file__).parent

# Chips of one generation; a mesh of fewer devices takes the first ones.
TPU_TOPOLOGIES = {"v5e": "v5e:2x4", "v5p": "v5p:2x2x2", "v6e": "v6e:2x4"}

GPUS = {name: chip for name, chip in CHIPS.items() if chip.platform == GPU}


@dataclasses.dataclass(frozen=True)
class Compilation:
    """What the compiler said about one case."""

    error: str | None  # None: it compiled; else the exception, and the fields below are empty
    seconds: float = 0.0
    memory: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """argument, output, temp and alias, in bytes per device."""
    cost: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The compiler's estimate; empty on GPUs and for a program that is one Pallas call."""
    text: str = ""
    """The optimised HLO."""


def copies(text: str, elements: int) -> list[str]:
    """Instructions that move a whole array of so many elements, in HBM or on the way to VMEM."""
    found = []
    for line in text.splitlines():
        match = re.search(r"= \(?\w+\[([\d,]+)\]\S*(?:,.*\))? (copy|copy-start|transpose)\(", line)
        if match and math.prod(map(int, match[1].split(","))) == elements:
            found.append(line.strip()[:200])
    return found


def skip_unless_installed(target: str) -> None:
    """Skips the calling test, with the reason, where the compiler for ``target`` is absent."""
    if target in TPU_TOPOLOGIES:
        needed = {"libtpu": None}
    else:
        plugin = "jax-cuda12-plugin"
        needed = {plugin: importlib.metadata.version("jax"), "nvidia-cuda-nvcc-cu12": None}
    for package, version in needed.items():
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"compiling for {target} needs {package}: pip install '.[aot]'")
        if version is not None and found != version:
            pytest.skip(f"{package} {found} does not fit jax {version}: pip install '.[aot]'")


def compile_cases(
    target: str,
    program: str,
    cases: Sequence[Mapping[str, Any]],
    *,
    mesh: Mapping[str, int] | None = None,
    options: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float = 900.0,
) -> list[Compilation]:
    """Compile a program for a target, once per case, in one process.

    Args:
      target: a key of ``TPU_TOPOLOGIES`` or ``GPUS``.
      program: "file.py:function", the file in this folder.
      cases: keyword arguments of the program, of what JSON knows.
      mesh: axis name -> size; None means one device.
      options: compiler options, beside the one that refuses spilled registers on a GPU.
      environment: more environment variables of the process.
      timeout: seconds for all cases.

    Returns:
      One result a case. A case that raises in Python has its ``error``; the others go on.

    Raises:
      RuntimeError: the process died, with the end of what it wrote.
    """
    skip_unless_installed(target)
    request = {
        "target": target,
        "program": program,
        "cases": list(cases),
        "mesh": dict(mesh or {"x": 1}),
        "options": dict(options or {}),
    }
    with tempfile.TemporaryDirectory() as folder:
        request_file, result_file = Path(folder, "request.json"), Path(folder, "result.json")
        request_file.write_text(json.dumps(request))
        child = subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), str(request_file), str(result_file)],
            env={**os.environ, **ENVIRONMENT, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        if child.returncode or not result_file.exists():
            raise RuntimeError(
                f"compiling {program} for {target} ended the process with {child.returncode}:\n"
                + child.stdout[-4000:]
            )
        return [Compilation(**result) for result in json.loads(result_file.read_text())]


def _main(request_file: str, result_file: str) -> None:
    """The child process."""
    import jax

    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    sys.path.insert(0, str(HERE.parent))  # as pytest has it
    request = json.loads(Path(request_file).read_text())
    file, name = request["program"].split(":")
    spec = importlib.util.spec_from_file_location(Path(file).stem, HERE / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    program = getattr(module, name)
    mesh = _mesh(request["target"], request["mesh"])
    options = request["options"]
    if request["target"] in GPUS:
        options = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True, **options}
    results = []
    for case in request["cases"]:
        try:
            results.append(_compile(mesh, request["target"], program, case, options))
        except Exception:
            results.append({"error": traceback.format_exc(limit=-4)})
    Path(result_file).write_text(json.dumps(results))


def _mesh(target: str, axes: Mapping[str, int]):
    import jax
    import numpy as np
    from jax.experimental import topologies

    count = math.prod(axes.values())
    if target in TPU_TOPOLOGIES:
        topology = topologies.get_topology_desc(
            platform="tpu", topology_name=TPU_TOPOLOGIES[target]
        )
    else:
        # "<slices>x<hosts>x<GPUs of a host>"
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=gpu_target_config(GPUS[target]), topology=f"1x1x{count}"
        )
    devices = np.array(topology.devices[:count]).reshape(tuple(axes.values()))
    return jax.sharding.Mesh(devices, tuple(axes))


def _compile(mesh, target, program, case, options) -> dict[str, Any]:
    import contextlib

    import jax

    function, arguments, *donate = program(mesh, **case)
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    arguments = jax.tree.map(
        lambda x: (
            x
            if x.sharding is not None
            else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated)
        ),
        arguments,
    )
    start = time.perf_counter()
    # Tells Pallas the target's architecture (jax 0.11 and later; TPU kernels don't ask).
    device = jax.default_device(mesh.devices.flat[0])
    with device if target in GPUS else contextlib.nullcontext():
        lowered = jax.jit(function, donate_argnums=tuple(donate[0]) if donate else ()).lower(
            *arguments
        )
    compiled = lowered.compile(compiler_options=options)
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    parts = ("argument", "output", "temp", "alias")
    return {
        "error": None,
        "seconds": seconds,
        "memory": {part: getattr(memory, f"{part}_size_in_bytes") for part in parts},
        "cost": dict(compiled.cost_analysis() or {}) if target in TPU_TOPOLOGIES else {},
        "text": compiled.as_text(),
    }


if __name__ == "__main__":
    _main(*sys.argv[1:])
