"""What ``inertiakv bench kernels`` found: figures for JSON, and a table of them."""

import datetime
import os
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import jax
from rich.table import Table

from inertiakv_jax.commands.bench_report import (
    device_facts,
    library_versions,
    rounds,
    spread,
    warn_if_busy,
)
from inertiakv_jax.commands.terminal import output_console, plain_table
from inertiakv_jax.pallas_kernels.bench import XLA, Case, Measured, is_cold, memory_bytes, num_sets


def title(case: Case) -> str:
    """One line that names a case."""
    return f"{case.kernel} {case.name}, batch {case.batch}, {case.slots:,} slots, {case.dtype}"


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
    if limit is None or memory_bytes(case) <= limit:
        return None
    return f"needs about {memory_bytes(case) / 2**30:.1f} GiB of {limit / 2**30:.1f}"


def case_facts(case: Case) -> dict[str, Any]:
    """The shapes of a case, ready for JSON."""
    return {
        "kernel": case.kernel,
        "shape": case.name,
        "batch": case.batch,
        "slots": case.slots,
        "dtype": case.dtype,
        **case.facts(),
    }


def row(case: Case, measured: Measured) -> dict[str, Any]:
    """The figures of a case, ready for JSON. A ratio is one of medians."""
    copied = statistics.median(measured.copy_bytes_per_second)

    def figures(seconds: dict[bool, list[float]], scored: bool) -> dict[str, Any] | None:
        if scored not in seconds:
            return None
        moved = case.bytes_moved(scored)
        rate = moved / statistics.median(seconds[scored])
        return {
            "ms": spread([1000 * value for value in seconds[scored]]),
            "bytes_moved": moved,
            "bytes_per_second": rate,
            "bandwidth_fraction": rate / copied,
        }

    scored, unscored = (figures(measured.seconds, flag) for flag in (True, False))
    xla = {
        "scored": figures(measured.xla_seconds, True),
        "unscored": figures(measured.xla_seconds, False),
    }
    return {
        **case_facts(case),
        "runs_as": measured.runs_as,
        "scored": scored,
        "unscored": unscored,
        "scored_over_unscored": _ratio(scored, unscored),
        "xla": xla if measured.xla_seconds else None,
        "speedup_over_xla": _ratio(xla["scored"], scored),
        "copy_bytes_per_second": spread(measured.copy_bytes_per_second),
        "calls": measured.calls,
        "operand_sets": num_sets(case),
        "cold": is_cold(case),
    }


def _ratio(a: dict[str, Any] | None, b: dict[str, Any] | None) -> float | None:
    """Of the medians, where both were measured."""
    return a["ms"]["median"] / b["ms"]["median"] if a and b else None


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
            f"\n{case['kernel']} {case['shape']}, batch {case['batch']}, {case['slots']:,} slots "
            f"left out: {case['reason']}",
            style="yellow",
        )
    if any(row["runs_as"] == XLA and row["xla"] is None for row in rows):
        where = "On a CPU no kernel runs" if device["platform"] == "cpu" else "Some have no kernel"
        out.print(
            f"\n{where}: what has no XLA ms is itself the reference, compiled by XLA.",
            style="yellow",
        )
    versions = ", ".join(f"{name} {v}" for name, v in measured["versions"].items() if v)
    settings = measured["settings"]
    out.print(
        f"\n{settings['dtype']}, evict float32. {rounds(settings['repeats'])}; "
        "each a program of many calls that need each other's results. MB and GB/s: each operand "
        "and result once, of a step that scores. Unscored: of one that does not. Of copy: against "
        "the bytes a second that a plain copy reads and writes. XLA ms: what XLA makes of the "
        "plain version. compact keeps a tenth; it has no kernel.\n"
        f"{device['kind']} ({device['cpu']}, {device['threads']} threads), {device['system']}; "
        f"{versions}; {measured['date']}."
    )
    if not all(row["cold"] for row in rows):
        out.print("* Operands small enough to stay in the device's cache between calls.")
    warn_if_busy(out, device.get("cpus_busy_before"))


HEADINGS = (*("B", "S", "ms", "unscored", "ratio", "MB", "GB/s", "of copy", "XLA ms", "speedup"),)


def kernel_table(rows: Sequence[dict[str, Any]]) -> Table:
    """One row a case: times of steps that score and that do not, bandwidth, XLA's time."""
    table = plain_table(header_style="bold")
    table.add_column("", no_wrap=True)
    table.add_column("", no_wrap=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for row in rows:
        scored, xla = row["scored"], row["xla"]
        table.add_row(
            row["kernel"],
            row["shape"],
            str(row["batch"]),
            f"{row['slots']:,}",
            _ms(scored),
            _ms(row["unscored"]),
            _number(row["scored_over_unscored"], ".3f"),
            _megabytes(scored["bytes_moved"]),
            f"{scored['bytes_per_second'] / 1e9:.1f}",
            f"{scored['bandwidth_fraction']:.0%}" + ("" if row["cold"] else "*"),
            _ms(xla["scored"] if xla else None),
            _number(row["speedup_over_xla"], ".2f"),
        )
    return table


def _ms(figures: dict[str, Any] | None) -> str:
    return _number(figures["ms"]["median"] if figures else None, ".4g")


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f}" if count >= 1e6 else f"{count / 1e6:.2g}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
