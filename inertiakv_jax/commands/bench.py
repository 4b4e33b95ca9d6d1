"""``inertiakv bench``: seconds of prefill and milliseconds a token, policies against peers."""

import dataclasses
import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes, UseAppendAction, arg, subcommand

from inertiakv_jax.commands import bench_kernels
from inertiakv_jax.commands.devices import MeshOption, mesh_of
from inertiakv_jax.commands.terminal import check_output, console, progress, write_file

if TYPE_CHECKING:  # heavy, and not needed for --help
    from inertiakv_jax.bench import Contestant
    from inertiakv_jax.language_model import LanguageModel

DESCRIPTION = """Time prefill and decoding, beside other libraries.

Policies and peers take turns in one process: one round to warm up, then --repeats that count. Peers
run on the CPU with the same weights, dtype and number of threads; they need the extra 'peers'.

Examples:
  inertiakv bench --peer transformers --peer kvpress --json bench.json
  inertiakv bench kernels
"""


@dataclasses.dataclass(frozen=True)
class Policies:
    """The measurement without a name, whose options are those of ``Bench``."""


What = (
    Annotated[Policies, subcommand("policies", description="What --policies and --peer name.")]
    | Annotated[
        bench_kernels.BenchKernels,
        subcommand("kernels", description=bench_kernels.DESCRIPTION),
    ]
)


@dataclasses.dataclass(frozen=True)
class Bench:
    """Options of ``inertiakv bench``."""

    model: str = "smollm2-135m"
    """Catalogue name, hub id, folder with config.json, or .gguf file."""
    dtype: str = "float32"
    """float32 or bfloat16."""
    mesh: MeshOption = None
    """Devices that share the one row, like model=4."""
    prompt_tokens: int = 4096
    """Length of the prompt, generated prose."""
    new_tokens: int = 64
    """Decode steps timed, after step 1."""
    repeats: int = 5
    """Rounds that count."""
    policies: tuple[str, ...] = ("full", "inertiakv", "lazy4", "score-free")
    """Policies to time, separated by spaces, each as of `inertiakv generate` (tova,tokens=64)."""
    ratio: float = 0.9
    """Fraction of the prompt's cache removed, in [0, 1), by policies that do not say; full removes
    nothing."""
    implementation: Annotated[str | None, arg(metavar="{xla,tpu,gpu}", help_behavior_hint="")] = (
        None
    )
    """Of the kernels that decode: plain JAX, or those for TPUs or NVIDIA GPUs. Default: the best
    for the device."""
    peer: UseAppendAction[tuple[Literal["transformers", "kvpress"], ...]] = ()
    """Also time transformers with its full cache, or kvpress with TOVA at every step."""
    json: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """Also write everything measured to this file."""
    what: Annotated[What, OmitArgPrefixes, OmitSubcommandPrefixes] = Policies()

    def run(self) -> None:
        """Measure, print a table, write the JSON."""
        if isinstance(self.what, Policies):
            self._run_policies()
        elif dataclasses.replace(self, what=Policies()) != Bench():
            raise ValueError("options of `bench kernels` come after the word kernels")
        else:
            self.what.run()

    def _run_policies(self) -> None:
        self._check()
        log, reasons = console(), self._peers()
        skipped = {peer: reason for peer, reason in reasons.items() if reason is not None}
        for peer, reason in skipped.items():
            log.print(f"{peer} left out: {reason}", style="yellow")
        if not self.policies and len(skipped) == len(reasons):
            raise ValueError("nothing to time: --policies is empty, and every peer left out")
        log.print(f"Loading {self.model}")
        import numpy as np

        from inertiakv_jax import bench
        from inertiakv_jax.commands import bench_report
        from inertiakv_jax.prompt_input import check_lengths
        from inertiakv_jax.weights.load import load

        mesh = mesh_of(self.mesh, batch=1)
        if mesh is not None and mesh.shape["data"] > 1:
            raise ValueError(f"--mesh {self.mesh}: there is one row, which axis data cannot divide")
        busy = bench_report.busy_cpus()
        lm = load(self.model, dtype=self.dtype, mesh=mesh)
        prompt = bench.prompt_of(lm, self.prompt_tokens)
        check_lengths(lm.model, np.asarray([len(prompt)]), self.new_tokens + 1)
        contestants = self._contestants(lm, reasons.keys() - skipped.keys())
        with progress(log) as say:
            runs = bench.take_turns(
                contestants,
                prompt,
                new_tokens=self.new_tokens,
                repeats=self.repeats,
                on_progress=say,
            )
        settings = {
            "batch": 1,
            "dtype": self.dtype,
            "mesh": self.mesh,
            "prompt_tokens": len(prompt),
            "new_tokens": self.new_tokens,
            "repeats": self.repeats,
            "ratio": self.ratio,
            "implementation": self.implementation,
        }
        measured = bench_report.report(lm, contestants, runs, settings, skipped)
        measured["device"]["cpus_busy_before"] = busy
        bench_report.print_report(measured)
        if self.json is not None:
            write_file(self.json, (json.dumps(measured, indent=2) + "\n").encode())

    def _check(self) -> None:
        for name in ("prompt_tokens", "new_tokens", "repeats"):
            if getattr(self, name) < 1:
                option = name.replace("_", "-")
                raise ValueError(f"--{option} must be at least 1, got {getattr(self, name)}")
        if not self.policies and not self.peer:
            raise ValueError("nothing to time: --policies and --peer are empty")
        if self.json is not None:
            check_output("--json", self.json)
        import jax

        from inertiakv_jax import policies
        from inertiakv_jax.attention import check_implementation

        check_implementation(self.implementation, platform=jax.devices()[0].platform)
        for name in self.policies:
            policies.as_written(name, self.ratio)
        if len(set(self.policies)) < len(self.policies):
            raise ValueError(f"--policies must differ, got {' '.join(self.policies)}")

    def _peers(self) -> dict[str, str | None]:
        """Each peer, and why it cannot take part: None if it can."""
        from inertiakv_jax import bench_peers

        return {peer: bench_peers.why_not(peer) for peer in dict.fromkeys(self.peer)}

    def _contestants(self, lm: "LanguageModel", peers: Collection[str]) -> list["Contestant"]:
        from inertiakv_jax import bench, bench_peers, policies

        found: list[Contestant] = [
            bench.PolicyContestant(lm, policies.as_written(name, self.ratio), self.implementation)
            for name in self.policies
        ]
        if peers:
            model = bench_peers.torch_model(lm)
            if "transformers" in peers:
                found.append(bench_peers.transformers_contestant(model))
            if "kvpress" in peers:
                kept = policies.tokens_kept(self.prompt_tokens, self.ratio)
                found.append(bench_peers.kvpress_contestant(model, kept))
        return found
