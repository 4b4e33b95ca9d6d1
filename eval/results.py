"""Records of a run, put together to what a report shows. Pure: records in, numbers out."""

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from inertiakv_jax.eval import records
from inertiakv_jax.eval.bootstrap import Interval, interval, paired_interval
from inertiakv_jax.eval.run_check import check_run

Record = dict[str, Any]
FULL = "full"


@dataclasses.dataclass(frozen=True)
class Run:
    """A run as it lies in its folder.

    Attributes:
      folder: of the run.
      description: run.json.
      records: of all shards.
    """

    folder: Path
    description: dict[str, Any]
    records: list[Record]

    @property
    def name(self) -> str:
        """Title, as the settings have it."""
        return str(self.description["report"]["name"])

    @property
    def variants(self) -> list[str]:
        """Labels of the policies: the full cache first, then in the order of the settings."""
        named = [
            entry if isinstance(entry, str) else entry["name"]
            for entry in self.description["settings"]["policies"]
        ]
        policies = {record["variant"]: record["policy"] for record in self.records}
        return sorted(policies, key=lambda v: (v != FULL, named.index(policies[v])))

    @property
    def benchmarks(self) -> list[str]:
        """Names, in the order of the records."""
        return list(dict.fromkeys(record["benchmark"] for record in self.records))

    @property
    def missing(self) -> int:
        """Records that an unfinished run still lacks, as far as its policies are known."""
        wanted = sum(group["count"] for group in self.description["examples"].values())
        return wanted * len(self.variants) - len(self.records)


def load_run(folder: Path) -> Run:
    """Read a run's folder.

    Raises:
      ValueError: it is none, it has no records yet, or something of it is missing.
    """
    run = Run(folder, records.read_description(folder), records.read_records(folder))
    if not run.records:
        raise ValueError(f"{folder} has no records yet")
    check_run(folder, run.description, run.records)
    return run


@dataclasses.dataclass(frozen=True)
class Quality:
    """A policy's average on a benchmark, in percent.

    Attributes:
      average: macro average over tasks (and lengths), with its 95 % interval.
      over_full: difference to the full cache on the same examples; None for the full cache, or
        without one.
      groups: task (and length) -> mean score, rounded as the official scripts do.
      examples: how many were averaged.
    """

    average: Interval
    over_full: Interval | None
    groups: dict[str, float]
    examples: int


def quality(run: Run, benchmark: str, variant: str, metric: str | None = None) -> Quality:
    """Average of a policy on a benchmark.

    Args:
      run: has records of both.
      benchmark: one of ``run.benchmarks``.
      variant: one of ``run.variants``.
      metric: None is each task's own.
    """
    mine = _scores(run, benchmark, variant, metric)
    over_full = None
    if variant != FULL and FULL in run.variants:
        full = _scores(run, benchmark, FULL, metric)
        common = {g: [e for e in mine[g] if e in full[g]] for g in mine if g in full}
        common = {group: found for group, found in common.items() if found}
        if common:
            over_full = _percent(
                paired_interval(
                    {g: [mine[g][e] for e in found] for g, found in common.items()},
                    {g: [full[g][e] for e in found] for g, found in common.items()},
                )
            )
    columns = {group: list(found.values()) for group, found in mine.items()}
    return Quality(
        average=_percent(interval(columns)),
        over_full=over_full,
        groups={group: round(100 * sum(c) / len(c), 2) for group, c in columns.items()},
        examples=sum(map(len, columns.values())),
    )


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a policy's answers cost; medians over examples unless said otherwise.

    Attributes:
      kept_percent: mean share of all tokens seen that is in the cache at the end.
      evicted: mean tokens evicted.
      idle: examples of which nothing was evicted.
      kv_mib_full: mean MiB of all tokens' keys and values.
      kv_mib_kept: mean MiB held at the end.
      prefill_s: seconds of the prefill.
      tokens_per_s: decode steps after step 1; None if no answer was long enough to tell.
      peak_device: bytes, most of the process so far; None where the device does not say.
      peak_host: bytes, likewise.
    """

    kept_percent: float
    evicted: float
    idle: int
    kv_mib_full: float
    kv_mib_kept: float
    prefill_s: float
    tokens_per_s: float | None
    peak_device: int | None
    peak_host: int | None


def cost(run: Run, variant: str, benchmark: str | None = None) -> Cost:
    """What a policy's answers cost, on one benchmark or all."""
    found = [
        record
        for record in run.records
        if record["variant"] == variant and benchmark in (None, record["benchmark"])
    ]
    costs = [record["cost"] for record in found]
    rates = [c["decode_tokens_per_s"] for c in costs if c["decode_tokens_per_s"]]
    peaks = {
        where: [c["peak_bytes"][where] for c in costs if c["peak_bytes"][where] is not None]
        for where in ("device", "host")
    }
    return Cost(
        kept_percent=100 * _mean(record["kept_fraction"] for record in found),
        evicted=_mean(record["evicted"] for record in found),
        idle=sum(record["evicted"] == 0 for record in found),
        kv_mib_full=_mean(record["kv_bytes_full"] for record in found) / 2**20,
        kv_mib_kept=_mean(record["kv_bytes_kept"] for record in found) / 2**20,
        prefill_s=statistics.median(c["prefill_s"] for c in costs),
        tokens_per_s=statistics.median(rates) if rates else None,
        peak_device=max(peaks["device"], default=None),
        peak_host=max(peaks["host"], default=None),
    )


def further_metrics(run: Run, benchmark: str) -> list[str]:
    """Metrics of a benchmark's tasks beside each task's own."""
    names: dict[str, None] = {}
    for record in run.records:
        if record["benchmark"] == benchmark:
            names |= dict.fromkeys(list(record["scores"])[1:])
    return list(names)


def tag_names(run: Run, benchmark: str) -> list[str]:
    """Tags with text values, which results are broken down by: bucket, difficulty, words."""
    names: dict[str, None] = {}
    for record in run.records:
        if record["benchmark"] == benchmark:
            names |= dict.fromkeys(n for n, v in record["tags"].items() if isinstance(v, str))
    return list(names)


def by_tag(run: Run, benchmark: str, variant: str, tag: str) -> dict[str, float]:
    """Tag's value -> percent: mean over tasks of the mean of the examples that have it."""
    cells: dict[str, dict[str, list[float]]] = {}
    for record in _of(run, benchmark, variant):
        if tag in record["tags"]:
            tasks = cells.setdefault(str(record["tags"][tag]), {})
            tasks.setdefault(record["group"], []).append(_own_score(record))
    return {
        value: 100 * _mean(_mean(found) for found in tasks.values())
        for value, tasks in sorted(cells.items())
    }


def needle_grid(run: Run, variant: str) -> dict[tuple[int, float], float]:
    """(length, depth) -> mean score in percent, of the benchmark "needle"."""
    cells: dict[tuple[int, float], list[float]] = {}
    for record in _of(run, "needle", variant):
        length = int(record["group"].partition("@")[2])
        cells.setdefault((length, record["tags"]["depth"]), []).append(_own_score(record))
    return {cell: 100 * _mean(found) for cell, found in cells.items()}


@dataclasses.dataclass(frozen=True)
class Published:
    """A number of the paper with ours beside.

    Attributes:
      policy: label of the paper's number.
      ratio: fraction removed.
      benchmark: as in results.
      model: the paper's.
      theirs: published average.
      theirs_over_full: its difference to the published full cache, if that is there.
      ours: of the variant with the same policy and ratio, if the run has it.
    """

    policy: str
    ratio: float
    benchmark: str
    model: str
    theirs: float
    theirs_over_full: float | None
    ours: Quality | None


def published(run: Run) -> list[Published]:
    """The paper's numbers that the settings came with, each with ours where there is one."""
    entries = run.description["report"].get("paper", [])
    full = {
        (entry["benchmark"], entry.get("model", "")): entry["score"]
        for entry in entries
        if entry["policy"] == FULL
    }
    found = []
    for entry in entries:
        base = full.get((entry["benchmark"], entry.get("model", "")))
        over = None if base is None or entry["policy"] == FULL else entry["score"] - base
        found.append(
            Published(
                policy=entry["policy"],
                ratio=float(entry.get("ratio", 0.0)),
                benchmark=entry["benchmark"],
                model=entry.get("model", ""),
                theirs=float(entry["score"]),
                theirs_over_full=over,
                ours=_ours(run, entry),
            )
        )
    return found


def _ours(run: Run, entry: Record) -> Quality | None:
    wanted = dict(entry.get("options", {}))
    if entry["policy"] != FULL:
        wanted["ratio"] = float(entry.get("ratio", 0.0))
    for record in run.records:
        same = record["policy"] == entry["policy"] and record["options"] == wanted
        if same and record["benchmark"] == entry["benchmark"]:
            return quality(run, entry["benchmark"], record["variant"])
    return None


def _of(run: Run, benchmark: str, variant: str) -> list[Record]:
    return [r for r in run.records if (r["benchmark"], r["variant"]) == (benchmark, variant)]


def _own_score(record: Record) -> float:
    return next(iter(record["scores"].values()))


def _scores(
    run: Run, benchmark: str, variant: str, metric: str | None
) -> dict[str, dict[str, float]]:
    """Group -> example -> score."""
    found: dict[str, dict[str, float]] = {}
    for record in _of(run, benchmark, variant):
        scores = record["scores"]
        if metric is None or metric in scores:
            score = _own_score(record) if metric is None else scores[metric]
            found.setdefault(record["group"], {})[record["example"]] = score
    return found


def _percent(found: Interval) -> Interval:
    return Interval(100 * found.value, 100 * found.low, 100 * found.high)


def _mean(values: Iterable[float]) -> float:
    listed: Sequence[float] = list(values)
    return sum(listed) / len(listed)
