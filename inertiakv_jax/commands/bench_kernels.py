"""``inertiakv bench kernels``: what each kernel takes, beside a copy and beside XLA."""

import dataclasses
import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from inertiakv_jax.commands.terminal import check_output, console, progress, write_file

if TYPE_CHECKING:  # heavy, and not needed for --help
    from inertiakv_jax.pallas_kernels.bench import Case, Measured
    from inertiakv_jax.pallas_kernels.decode_attention.shapes import Heads

DESCRIPTION = """Time the kernels at the decode shapes of real models.

decode_attention with the probability mass and without it; evict for one ranking a row and for one a
kv head; compact, the gather at step 1. Each against the bandwidth of a plain copy and against what
XLA makes of the plain version. All take turns: one round to warm up, then --repeats that count.

Example:
  inertiakv bench kernels --shapes llama-3.1-8b --slots 6402 16384 --json kernels.json
"""

KERNELS = ("decode_attention", "evict", "compact")


@dataclasses.dataclass(frozen=True)
class BenchKernels:
    """Options of ``inertiakv bench kernels``."""

    kernels: Annotated[tuple[str, ...], arg(help_behavior_hint="")] = ()
    """decode_attention, evict, compact. Default: all."""
    shapes: Annotated[tuple[str, ...], arg(help_behavior_hint="")] = ()
    """llama-3.1-8b, llama-3.3-70b/8 (one of 8 devices), qwen2.5-7b, smollm2-135m. Default: all."""
    slots: Annotated[tuple[int, ...], arg(help_behavior_hint="")] = ()
    """Cache slots S. Default: 1024 6402 16384 65536, on a CPU the first two."""
    batch: Annotated[tuple[int, ...], arg(help_behavior_hint="")] = ()
    """Rows B. Default: 1 8 32, on a CPU 1."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Of query, keys and values."""
    implementation: Annotated[str | None, arg(metavar="{xla,tpu,gpu}", help_behavior_hint="")] = (
        None
    )
    """Of the kernels; those that lack it are left out. Default: the best for the device."""
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

        from inertiakv_jax.pallas_kernels import bench

        if self.implementation not in (None, *case.implementations):
            return f"it has no implementation {self.implementation!r}"
        try:
            return bench.measure(case, implementation=self.implementation, repeats=self.repeats)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return "the device's memory ran out"
        except ValueError as error:
            if self.implementation is None:
                raise
            return str(error)  # this shape or dtype is not for the implementation named

    def _cases(self) -> list["Case"]:
        """Every shape asked for, after checking all options: measuring takes long."""
        if self.repeats < 1:
            raise ValueError(f"--repeats must be at least 1, got {self.repeats}")
        for option, sizes in (("slots", self.slots), ("batch", self.batch)):
            if min(sizes, default=1) < 1:
                raise ValueError(f"--{option} must be at least 1, got {min(sizes)}")
        if self.json is not None:
            check_output("--json", self.json)
        from inertiakv_jax.pallas_kernels.decode_attention import api, shapes

        platform = _platform()
        api.check_implementation(self.implementation, platform=platform)
        heads = {heads.name: heads for heads in shapes.MODELS}
        _check_names("shape", self.shapes, heads)
        _check_names("kernel", self.kernels, KERNELS)
        cpu = platform == "cpu"
        sizes = [
            (slots, batch)
            for slots in self.slots or (shapes.SLOTS[:2] if cpu else shapes.SLOTS)
            for batch in self.batch or (shapes.BATCHES[:1] if cpu else shapes.BATCHES)
        ]
        chosen = [heads[name] for name in self.shapes or heads]
        return [
            case
            for kernel in self.kernels or KERNELS
            for case in _cases_of(kernel, chosen, sizes, self.dtype)
        ]


def _platform() -> str:
    import jax

    return jax.devices()[0].platform


def _check_names(what: str, names: Iterable[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"unknown {what} {name!r}: expected one of {', '.join(known)}")


def _cases_of(
    kernel: str, chosen: "list[Heads]", sizes: list[tuple[int, int]], dtype: str
) -> "list[Case]":
    from inertiakv_jax.pallas_kernels.compact import bench as compact
    from inertiakv_jax.pallas_kernels.decode_attention import bench as decode_attention
    from inertiakv_jax.pallas_kernels.evict import bench as evict

    if kernel == "evict":
        rankings = [(evict.SHARED, None), *((heads.name, heads.num_kv_heads) for heads in chosen)]
        return [
            evict.Case(name, num_kv_heads, batch, slots)
            for name, num_kv_heads in rankings
            for slots, batch in sizes
        ]
    case = {"decode_attention": decode_attention.Case, "compact": compact.Case}[kernel]
    return [case(heads, batch, slots, dtype) for heads in chosen for slots, batch in sizes]
