"""``inertiakv bench kernels``: what each kernel takes, beside a copy and beside XLA."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from inertiakv_jax.commands.terminal import check_output, console, progress, write_file

if TYPE_CHECKING:  # heavy, and not needed for --help
    from inertiakv_jax.pallas_kernels.decode_attention.bench import Case, Measured

DESCRIPTION = """Time the attention kernels at the decode shapes of real models.

With the probability mass and without it, against the bandwidth of a plain copy and against what
XLA makes of the same attention. All take turns: one round to warm up, then --repeats that count.

Example:
  inertiakv bench kernels --shapes llama-3.1-8b --slots 6402 16384 --json kernels.json
"""


@dataclasses.dataclass(frozen=True)
class BenchKernels:
    """Options of ``inertiakv bench kernels``."""

    shapes: Annotated[tuple[str, ...], arg(help_behavior_hint="")] = ()
    """Names of attention heads: llama-3.1-8b, llama-3.3-70b/8 (one of 8 devices), qwen2.5-7b,
    smollm2-135m. Default: all."""
    slots: Annotated[tuple[int, ...], arg(help_behavior_hint="")] = ()
    """Cache slots S. Default: 1024 6402 16384 65536, on a CPU the first two."""
    batch: Annotated[tuple[int, ...], arg(help_behavior_hint="")] = ()
    """Rows B. Default: 1 8 32, on a CPU 1."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Of query, keys and values."""
    implementation: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")] = None
    """Of decode attention. Default: the best for the device."""
    repeats: int = 5
    """Rounds that count."""
    json: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """Also write everything measured to this file."""

    def run(self) -> None:
        """Measure, print a table, write the JSON."""
        from inertiakv_jax.commands import bench_kernels_report as reports
        from inertiakv_jax.commands.bench_report import busy_cpus

        cases = self._cases()
        busy = busy_cpus()
        limit = reports.device_memory()
        rows: list[dict[str, Any]] = []
        skipped: list[dict[str, Any]] = []
        with progress(console()) as say:
            for number, case in enumerate(cases, 1):
                say(f"{number} of {len(cases)}: {reports.title(case)}")
                found = reports.too_large(case, limit) or self._measure(case)
                if isinstance(found, str):
                    skipped.append(reports.case_facts(case) | {"reason": found})
                else:
                    rows.append(reports.row(case, found))
        settings = {
            "dtype": self.dtype,
            "implementation": self.implementation,
            "repeats": self.repeats,
        }
        report = reports.report(rows, skipped, settings)
        report["device"]["cpus_busy_before"] = busy
        reports.print_report(report)
        if self.json is not None:
            write_file(self.json, (json.dumps(report, indent=2) + "\n").encode())

    def _measure(self, case: "Case") -> "Measured | str":
        """The seconds, or why there are none."""
        import jax

        from inertiakv_jax.pallas_kernels.decode_attention import bench

        try:
            return bench.measure(case, implementation=self.implementation, repeats=self.repeats)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return "the device's memory ran out"

    def _cases(self) -> list["Case"]:
        """Every shape asked for, after checking all options: measuring takes long."""
        if self.repeats < 1:
            raise ValueError(f"--repeats must be at least 1, got {self.repeats}")
        for option, sizes in (("slots", self.slots), ("batch", self.batch)):
            if min(sizes, default=1) < 1:
                raise ValueError(f"--{option} must be at least 1, got {min(sizes)}")
        if self.json is not None:
            check_output("--json", self.json)
        import jax

        from inertiakv_jax.pallas_kernels.decode_attention import shapes
        from inertiakv_jax.pallas_kernels.decode_attention.api import check_implementation
        from inertiakv_jax.pallas_kernels.decode_attention.bench import Case

        check_implementation(self.implementation)
        heads = {heads.name: heads for heads in shapes.MODELS}
        for name in self.shapes:
            if name not in heads:
                raise ValueError(f"unknown shape {name!r}: expected one of {', '.join(heads)}")
        cpu = jax.devices()[0].platform == "cpu"
        return [
            Case(heads[name], batch, slots, self.dtype)
            for name in self.shapes or heads
            for slots in self.slots or (shapes.SLOTS[:2] if cpu else shapes.SLOTS)
            for batch in self.batch or (shapes.BATCHES[:1] if cpu else shapes.BATCHES)
        ]
