"""What ``inertiakv bench kernels`` found: figures for JSON, and a table of them."""

import datetime
import os
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import jax
from rich.table import Table

from inertiakv_jax.commands.bench_report import TOO_BUSY, device_facts, library_versions, spread
from inertiakv_jax.commands.terminal import output_console, plain_table
from inertiakv_jax.pallas_kernels.decode_attention.bench import KERNEL, XLA, Case, Measured


def title(case: Case) -> str:
    """One line that names a case."""
    return f"{KERNEL} {case.heads.name}, batch {case.batch}, {case.slots:,} slots, {case.dtype}"


def device_memory() -> int | None:
    """Bytes that the default device lets us have; on a CPU half of the machine's. None: unknown."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    if jax.devices()[0].platform != "cpu" or sys.platform == "win32":
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def too_large(case: Case, limit: int | None) -> str | None:
    """Why a case cannot be measured in ``limit`` bytes; None if it can."""
    if limit is None or case.memory_bytes <= limit:
        return None
    return f"needs about {case.memory_bytes / 2**30:.1f} GiB of {limit / 2**30:.1f}"


def case_facts(case: Case) -> dict[str, Any]:
    """The shapes of a case, ready for JSON."""
    return {
        "kernel": KERNEL,
        "shape": case.heads.name,
        "heads": case.heads.num_heads,
        "kv_heads": case.heads.num_kv_heads,
        "head_dim": case.heads.head_dim,
        "batch": case.batch,
        "slots": case.slots,
        "dtype": case.dtype,
    }


def row(case: Case, measured: Measured) -> dict[str, Any]:
    """The figures of a case, ready for JSON. A ratio is one of medians."""
    copied = statistics.median(measured.copy_bytes_per_second)

    def figures(seconds: list[float], return_mass: bool) -> dict[str, Any]:
        moved = case.bytes_moved(return_mass)
        rate = moved / statistics.median(seconds)
        return {
            "ms": spread([1000 * value for value in seconds]),
            "bytes_moved": moved,
            "bytes_per_second": rate,
            "bandwidth_fraction": rate / copied,
        }

    found = {
        "with_mass": figures(measured.with_mass, True),
        "without_mass": figures(measured.without_mass, False),
    }
    xla = None
    if measured.runs_as != XLA:
        xla = {
            "with_mass": figures(measured.xla_with_mass, True),
            "without_mass": figures(measured.xla_without_mass, False),
        }
    return {
        **case_facts(case),
        "runs_as": measured.runs_as,
        **found,
        "with_over_without": _ms(found, "with_mass") / _ms(found, "without_mass"),
        "xla": xla,
        "speedup_over_xla": xla and _ms(xla, "with_mass") / _ms(found, "with_mass"),
        "copy_bytes_per_second": spread(measured.copy_bytes_per_second),
        "calls": measured.calls,
        "kv_caches": case.caches,
        "cold": case.cold,
    }


def _ms(figures: dict[str, Any], which: str) -> float:
    return figures[which]["ms"]["median"]


def report(
    rows: list[dict[str, Any]], skipped: list[dict[str, Any]], settings: dict[str, Any]
) -> dict[str, Any]:
    """Figures of all cases and what they rest on, ready for JSON.

    Args:
      rows: of ``row``.
      skipped: ``case_facts`` and a reason, of cases that could not be measured.
      settings: what the user chose.
    """
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device_facts(),
        "versions": library_versions(),
        "settings": settings,
        "results": rows,
        "skipped": skipped,
    }


def print_report(measured: dict[str, Any]) -> None:
    """Print the figures as a table, and what they rest on below it."""
    out = output_console()
    rows, device = measured["results"], measured["device"]
    if rows:
        out.print(kernel_table(rows))
    for case in measured["skipped"]:
        out.print(
            f"\n{case['shape']}, batch {case['batch']}, {case['slots']:,} slots left out: "
            f"{case['reason']}",
            style="yellow",
        )
    if any(row["runs_as"] == XLA for row in rows):
        where = "On a CPU no kernel runs" if device["platform"] == "cpu" else "No kernel ran"
        out.print(f"\n{where}: this is the reference, compiled by XLA.", style="yellow")
    versions = ", ".join(f"{name} {v}" for name, v in measured["versions"].items() if v)
    settings = measured["settings"]
    out.print(
        f"\n{KERNEL}, {settings['dtype']}. Medians of {settings['repeats']} rounds in turns; each "
        "a program of many calls, the output of one being the query of the next. MB and GB/s: "
        "keys, values, mass and what is small, once each. Of copy: against the bytes a second "
        "that a plain copy reads and writes.\n"
        f"{device['kind']} ({device['cpu']}, {device['threads']} threads), {device['system']}; "
        f"{versions}; {measured['date']}."
    )
    if not all(row["cold"] for row in rows):
        out.print("* Keys and values small enough to stay in the device's cache between calls.")
    if (device.get("cpus_busy_before") or 0.0) > TOO_BUSY:
        out.print(
            f"Other programs kept {device['cpus_busy_before']:.1f} of {device['threads']} CPUs "
            "busy before this began: do not trust these figures.",
            style="bold yellow",
        )


HEADINGS = (
    *("B", "S", "ms", "without mass", "ratio", "MB", "GB/s", "of copy", "XLA ms", "XLA / kernel"),
)


def kernel_table(rows: Sequence[dict[str, Any]]) -> Table:
    """One row a case: times with the mass and without it, bandwidth, and XLA's time."""
    table = plain_table(header_style="bold")
    table.add_column("", no_wrap=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for row in rows:
        found = row["with_mass"]
        xla = row["xla"] or row  # where XLA's is what ran, it stands there once more
        table.add_row(
            row["shape"],
            str(row["batch"]),
            f"{row['slots']:,}",
            f"{found['ms']['median']:.4g}",
            f"{row['without_mass']['ms']['median']:.4g}",
            f"{row['with_over_without']:.3f}",
            f"{found['bytes_moved'] / 1e6:.1f}",
            f"{found['bytes_per_second'] / 1e9:.1f}",
            f"{found['bandwidth_fraction']:.0%}" + ("" if row["cold"] else "*"),
            f"{xla['with_mass']['ms']['median']:.4g}",
            f"{row['speedup_over_xla']:.2f}" if row["speedup_over_xla"] else "-",
        )
    return table
