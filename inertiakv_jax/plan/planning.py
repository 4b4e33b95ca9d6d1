"""A plan: what a run takes on its devices, and how fast it can be."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inertiakv_jax import policies
from inertiakv_jax.config import ModelConfig
from inertiakv_jax.plan.collectives import sent
from inertiakv_jax.plan.compiled import Phase, compile_phases
from inertiakv_jax.plan.layers import samples
from inertiakv_jax.plan.programs import DECODE_STEP, EVICTION, PREFILL, STEP_1
from inertiakv_jax.plan.request import Request
from inertiakv_jax.plan.roofline import Roofline, roofline, score_sent_bytes
from inertiakv_jax.plan.search import (
    Candidate,
    best_mesh,
    candidate,
    fitting,
    smallest_that_fit,
)
from inertiakv_jax.plan.sizes import abstract_mesh
from inertiakv_jax.plan.topology import parse_chips, parse_mesh, parse_topology
from inertiakv_jax.plan.workload import Workload, slots_of
from inertiakv_jax.sharding import repeats
from inertiakv_jax.weights import hub
from inertiakv_jax.weights.catalogue import CATALOGUE
from inertiakv_jax.weights.gguf_config import gguf_config
from inertiakv_jax.weights.gguf_file import open_gguf
from inertiakv_jax.weights.hf_config import config_from_hf
from inertiakv_jax.weights.load import HUB_ID
from inertiakv_jax.weights.params import checked_dtype, checked_quantization
from inertiakv_jax.weights.safetensors_files import read_json

MOST_COMPILED = 3
"""Topologies that a search compiles for before it gives up."""


def make_plan(request: Request, say: Callable[[str], None]) -> dict[str, Any]:
    """Everything that ``inertiakv plan --json`` prints.

    Raises:
      ValueError: an unknown model, topology, mesh or policy, or sizes that do not go together.
      ConnectionError: a hub id that is neither cached nor within reach.
    """
    workload = _workload(request)
    if not request.search:
        chosen = _named(request, workload)
        return _report(request, chosen, _compile(request, chosen, say)) | {"search": []}
    if request.mesh:
        raise ValueError("--search finds the mesh itself: leave out --mesh")
    chips = parse_chips(request.topology)
    found = smallest_that_fit(workload, chips)
    if not found:
        raise ValueError(
            f"weights and caches fit no known topology of {', '.join(chip.name for chip in chips)}"
        )
    say(f"By arithmetic the smallest is {found[0].topology.name}; compiling for it")
    plan: dict[str, Any] = {}
    larger = fitting(workload, found[0].topology.chip)
    for chosen, _ in zip(larger, range(MOST_COMPILED), strict=False):
        plan = _report(request, chosen, _compile(request, chosen, say))
        if plan["fits"]:
            break
        say(f"{chosen.topology.name} is too small for the temporaries; trying the next")
    return plan | {"search": [_found(one) for one in found]}


def find_config(name: str) -> ModelConfig:
    """The configuration of a model; no weights are read or downloaded.

    Raises:
      ValueError: nothing of that name, or a model that is not supported.
      ConnectionError: a hub id that is neither cached nor within reach.
    """
    path = Path(name).expanduser()
    if name in CATALOGUE:
        return CATALOGUE[name].config
    if not path.exists() and HUB_ID.fullmatch(name):
        path = hub.download_config(name)
    if (path / "config.json").is_file():
        path = path / "config.json"
    if path.is_file() and path.suffix == ".json":
        return config_from_hf(read_json(path))
    if path.is_file() and path.suffix == ".gguf":
        return gguf_config(open_gguf(path))
    raise ValueError(
        f"no model {name!r}; expected a catalogue name ({', '.join(CATALOGUE)}), a hub id, a "
        "folder with config.json, or a .gguf file"
    )


def _workload(request: Request) -> Workload:
    checked_dtype(request.dtype)
    checked_quantization(request.quantize)
    return Workload(
        config=find_config(request.model),
        dtype=request.dtype,
        quantization=request.quantize,
        policy=policies.by_name(request.policy, ratio=request.ratio),
        batch=request.batch,
        context=request.context,
        new_tokens=request.new_tokens,
    )


def _named(request: Request, workload: Workload) -> Candidate:
    topology = parse_topology(request.topology)
    if not request.mesh:
        return best_mesh(workload, topology)
    return candidate(workload, topology, parse_mesh(request.mesh, topology))


def _compile(request: Request, chosen: Candidate, say: Callable[[str], None]) -> dict[str, Phase]:
    return compile_phases(
        *(chosen.workload, chosen.slots, chosen.topology, chosen.mesh, say), whole=request.whole
    )


def _report(request: Request, chosen: Candidate, phases: dict[str, Phase]) -> dict[str, Any]:
    rows = _phase_rows(chosen, phases)
    full, own = _speeds(request, chosen, phases[DECODE_STEP])
    chip, workload = chosen.topology.chip, chosen.workload
    return {
        **dataclasses.asdict(request),
        "topology": chosen.topology.name,
        "devices": chosen.topology.devices,
        "mesh": dataclasses.asdict(chosen.mesh),
        "policy": workload.policy.name,
        "ratio": workload.policy.ratio,
        "padded_batch": workload.batch,
        "prompt_tokens": workload.prompt_tokens,
        "slots": dataclasses.asdict(chosen.slots),
        "memory_bytes": chip.memory,
        "usable_bytes": chip.usable,
        "chip_source": chip.source,
        "bytes_per_device": dataclasses.asdict(chosen.bytes),
        "compiled_layers": [
            config.num_layers for config in samples(workload.config, whole=request.whole)
        ],
        "num_layers": workload.config.num_layers,
        "repeated": repeats(abstract_mesh(chosen.mesh), workload.model),  # pyright: ignore[reportArgumentType]
        "prefill_method_compiled": None if workload.policy.prefill is None else False,
        "phases": rows,
        "fits": all(row["fits"] for row in rows),
        "roofline": {"full_cache": _speed(full), "policy": _speed(own)},
    }


def _phase_rows(chosen: Candidate, phases: dict[str, Phase]) -> list[dict[str, Any]]:
    sizes = chosen.bytes
    caches = {
        PREFILL: (sizes.full_cache, 0),
        STEP_1: (sizes.start_cache, 0),
        EVICTION: (sizes.start_cache, sizes.kept_cache),
        DECODE_STEP: (0, sizes.kept_cache),
    }
    if chosen.slots.decode == chosen.slots.full:
        caches[DECODE_STEP] = (sizes.kept_cache, 0)
    rows = []
    for name, phase in phases.items():
        full, kept = caches[name]
        total = sizes.weights + full + kept + phase.other_bytes
        rows.append(
            {
                "name": name,
                "weights": sizes.weights,
                "full_cache": full,
                "kept_cache": kept,
                "temporaries": phase.other_bytes,
                "total": total,
                "fits": total <= chosen.topology.chip.usable,
                "collectives": {
                    kind: dataclasses.asdict(exchange) for kind, exchange in phase.exchanges.items()
                },
            }
        )
    return rows


def _speeds(request: Request, chosen: Candidate, step: Phase) -> tuple[Roofline, Roofline]:
    """Of the full cache, and of the policy, with the collectives that were compiled."""
    workload, mesh, chip = chosen.workload, chosen.mesh, chosen.topology.chip
    policy_sends = sum(
        sent(kind, exchange.bytes, mesh.sharing) for kind, exchange in step.exchanges.items()
    )
    scores = 0.0
    if workload.policy.scores_some_steps:
        scores = score_sent_bytes(workload, mesh, chosen.slots.decode)
    full = dataclasses.replace(workload, policy=policies.full())
    full_sends = max(policy_sends - scores, 0.0)
    return (
        roofline(
            full,
            chip,
            mesh,
            slots_of(full, mesh.context).decode,
            rows=request.batch,
            sent_bytes=full_sends,
        ),
        roofline(
            workload,
            chip,
            mesh,
            chosen.slots.decode,
            rows=request.batch,
            sent_bytes=policy_sends,
        ),
    )


def _speed(one: Roofline) -> dict[str, Any]:
    return dataclasses.asdict(one) | {"seconds": one.seconds}


def _found(one: Candidate) -> dict[str, Any]:
    return {
        "topology": one.topology.name,
        "devices": one.topology.devices,
        "mesh": dataclasses.asdict(one.mesh),
        "peak_bytes": one.bytes.peak,
        "usable_bytes": one.topology.chip.usable,
        "tokens_per_second": one.speed.tokens_per_second,
    }
