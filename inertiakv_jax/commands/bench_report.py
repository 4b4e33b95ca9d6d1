"""What ``inertiakv bench`` found: figures for JSON, and tables of them."""

import datetime
import importlib.metadata
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from inertiakv_jax.bench import Contestant, Run, cpu_threads
from inertiakv_jax.commands.terminal import output_console, plain_table
from inertiakv_jax.config import ModelConfig
from inertiakv_jax.language_model import LanguageModel

LIBRARIES = ("inertiakv-jax", "jax", "jaxlib", "flax", "torch", "transformers", "kvpress")
REFERENCES = ("full", "transformers", "kvpress-tova")
"""Contestants that the others are compared with, by name."""

TOO_BUSY = 0.3
"""CPUs kept busy by other programs from which on the figures come with a warning."""


def report(
    lm: LanguageModel,
    contestants: Sequence[Contestant],
    runs: Sequence[Sequence[Run]],
    settings: dict[str, Any],
    skipped: dict[str, str],
) -> dict[str, Any]:
    """Figures of a benchmark and what they rest on, ready for JSON.

    Args:
      lm: the model measured.
      contestants: as given to ``bench.take_turns``.
      runs: as returned by it.
      settings: what the user chose.
      skipped: contestants that could not take part -> why.
    """
    rows = [_row(contestant, done) for contestant, done in zip(contestants, runs, strict=True)]
    tokens = {row["name"]: done[0].tokens for row, done in zip(rows, runs, strict=True)}
    for row in rows:
        row["speedup_over"] = _speedups(row, rows)
        if "full" in tokens:
            row["tokens_as_full"] = _common(tokens["full"], tokens[row["name"]])
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": lm.name,
        "shape": _shape(lm.config),
        "device": device_facts(),
        "versions": library_versions(),
        "settings": settings,
        "results": rows,
        "skipped": skipped,
    }


def _row(contestant: Contestant, runs: Sequence[Run]) -> dict[str, Any]:
    steps = len(runs[0].tokens) - 2  # the prefill's token and step 1's are timed apart
    decode_ms = spread([run.decode_s * 1000 / steps for run in runs])
    return {
        "name": contestant.name,
        "library": contestant.library,
        "prefill_s": spread([run.prefill_s for run in runs]),
        "first_step_ms": spread([run.first_step_s * 1000 for run in runs]),
        "decode_ms_per_token": decode_ms,
        "decode_tokens_per_s": 1000 / decode_ms["median"],
        "held_tokens": runs[0].held_tokens,
        "cache_slots": runs[0].cache_slots,
        "kv_bytes": runs[0].kv_bytes,
    }


def spread(values: list[float]) -> dict[str, Any]:
    """Median, least, most and all of the values, ready for JSON."""
    median = statistics.median(values)
    return {"median": median, "min": min(values), "max": max(values), "all": values}


def _speedups(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many times as fast as each reference: ratios of the medians."""
    return {
        other["name"]: {
            name: other[measure]["median"] / row[measure]["median"]
            for name, measure in (("prefill", "prefill_s"), ("decode", "decode_ms_per_token"))
        }
        for other in rows
        if other["name"] in REFERENCES and other is not row
    }


def _common(expected: list[int], got: list[int]) -> int:
    """Tokens that agree before the first one that differs."""
    pairs = enumerate(zip(expected, got, strict=True))
    return next((index for index, (a, b) in pairs if a != b), len(got))


def _shape(config: ModelConfig) -> dict[str, int]:
    return {
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocabulary": config.vocab_size,
    }


def device_facts() -> dict[str, Any]:
    """The default device and the machine around it, ready for JSON."""
    (first, *_) = jax.devices()
    return {
        "platform": first.platform,
        "kind": first.device_kind,
        "cpu": _cpu_name(),
        "threads": cpu_threads(),
        "system": platform.platform(),
    }


def _cpu_name() -> str:
    name = platform.processor() or platform.machine()
    if sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = names[0] if names else name
    return name


def busy_cpus(seconds: float = 1.0) -> float | None:
    """CPUs that the whole machine keeps busy while this process waits; None where not known."""
    if sys.platform != "linux":
        return None

    def idle_and_total() -> tuple[int, int]:
        # user, nice, system, idle, waiting for input, ... in ticks since the machine started
        ticks = [int(n) for n in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
        return ticks[3] + ticks[4], sum(ticks[:8])

    idle_before, before = idle_and_total()
    time.sleep(seconds)
    idle_after, after = idle_and_total()
    busy_share = 1 - (idle_after - idle_before) / max(after - before, 1)
    return round(busy_share * cpu_threads(), 2)


def library_versions() -> dict[str, str | None]:
    """Versions of Python and of the libraries that are measured; None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def print_report(measured: dict[str, Any]) -> None:
    """Print the figures as tables, and what they rest on below them."""
    out = output_console()
    out.print(time_table(measured["results"]))
    if len(measured["results"]) > 1:
        out.print()
        out.print(speedup_table(measured["results"]))
    for peer, reason in measured["skipped"].items():
        out.print(f"\n{peer} left out: {reason}", style="yellow")
    settings, device, shape = measured["settings"], measured["device"], measured["shape"]
    versions = ", ".join(f"{name} {v}" for name, v in measured["versions"].items() if v)
    least_most = " (least-most)" if settings["repeats"] > 1 else ""
    out.print(
        f"\n{rounds(settings['repeats'])}{least_most}. "
        f"{measured['model']}, {settings['dtype']}: {shape['layers']} layers, "
        f"{shape['heads']} query and {shape['kv_heads']} key-value heads of {shape['head_dim']}. "
        f"Batch 1, a prompt of {settings['prompt_tokens']:,} tokens, step 1 by itself, then "
        f"{settings['new_tokens']} steps; ratio {settings['ratio']}.\n"
        f"{device['kind']} ({device['cpu']}, {device['threads']} threads), {device['system']}; "
        f"{versions}; {measured['date']}."
    )
    warn_if_busy(out, device["cpus_busy_before"])


def rounds(count: int) -> str:
    """What a table's figures are, of so many rounds."""
    return "One round" if count == 1 else f"Medians of {count} rounds in turns"


def warn_if_busy(out: Console, busy: float | None) -> None:
    """Print that figures are not to be trusted, if other programs kept the CPUs busy.

    Args:
      out: where.
      busy: as ``busy_cpus`` found, before anything was timed.
    """
    if busy is not None and busy > TOO_BUSY:
        out.print(
            f"Other programs kept {busy:.1f} of {cpu_threads()} CPUs busy before this began. "
            "Threads that wait for each other suffer most from it: do not trust these figures.",
            style="bold yellow",
        )


def time_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Times, and what the cache holds at the end: one row a contestant."""
    table = plain_table(header_style="bold")
    table.add_column("", no_wrap=True)
    for heading in ("prefill s", "step 1 ms", "decode ms/token", "kept", "KV MiB"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["name"],
            _range(row["prefill_s"], 2),
            f"{row['first_step_ms']['median']:.0f}",
            _range(row["decode_ms_per_token"], 1),
            f"{row['held_tokens']:,}",
            f"{row['kv_bytes'] / 2**20:.1f}",
        )
    return table


def speedup_table(rows: Sequence[dict[str, Any]]) -> Table:
    """How many times as fast as each reference: one row a contestant."""
    names = [row["name"] for row in rows]
    references = [name for name in REFERENCES if name in names]
    table = plain_table(header_style="bold")
    table.add_column("times as fast as\n")
    for name in references:
        table.add_column(f"{name}\nprefill", justify="right")
        table.add_column("\ndecode", justify="right")
    for row in rows:
        speedups = [row["speedup_over"].get(name) for name in references]
        table.add_row(
            row["name"],
            *(
                f"{speedup[what]:.2f}" if speedup else "-"
                for speedup in speedups
                for what in ("prefill", "decode")
            ),
        )
    return table


def _range(values: dict[str, Any], digits: int) -> str:
    low, high = values["min"], values["max"]
    around = f" ({low:.{digits}f}-{high:.{digits}f})" if len(values["all"]) > 1 else ""
    return f"{values['median']:.{digits}f}{around}"
