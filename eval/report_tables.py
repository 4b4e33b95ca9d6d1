"""The tables of a report: what stands in which cell, and as markdown."""

import dataclasses
from collections.abc import Sequence

from inertiakv_jax.eval import results
from inertiakv_jax.eval.bootstrap import Interval
from inertiakv_jax.eval.results import FULL, Run


@dataclasses.dataclass(frozen=True)
class Cell:
    """What a table shows, and the number that it is sorted by (None: by the text)."""

    text: str
    value: float | None = None


@dataclasses.dataclass(frozen=True)
class Table:
    """A titled table; the first column names the row."""

    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def markdown(runs: Sequence[Run]) -> str:
    """All tables of the runs."""
    parts = []
    for run in runs:
        parts.append(f"# {run.name}\n\n{subtitle(run)}")
        for table in tables(run):
            parts.append(f"## {table.title}\n\n{table.note}\n\n{_markdown_table(table)}")
    return "\n\n".join(parts) + "\n"


def subtitle(run: Run) -> str:
    """One line on the model, the device and how much of the run is there."""
    said = run.description
    settings, device = said["settings"], said["device"]
    line = (
        f"{settings['model']} ({said['model']['dtype']}) on {device['count']} x {device['kind']}, "
        f"jax {said['versions'].get('jax', '?')}; {len(run.records):,} records"
    )
    return line + (f", {run.missing:,} still missing" if run.missing > 0 else "")


def tables(run: Run) -> list[Table]:
    """Quality, per task, differences, breakdowns, the paper's numbers and the cost."""
    found = [_summary_table(run)]
    for benchmark in run.benchmarks:
        found += [_task_table(run, benchmark, over_full=False)]
        if FULL in run.variants and len(run.variants) > 1:
            found += [_task_table(run, benchmark, over_full=True)]
        found += [_tag_table(run, benchmark, tag) for tag in results.tag_names(run, benchmark)]
    if run.description["report"].get("paper"):
        found.append(_paper_table(run))
    return [*found, _cost_table(run)]


def _summary_table(run: Run) -> Table:
    measures: list[tuple[str, str | None]] = []
    for benchmark in run.benchmarks:
        measures.append((benchmark, None))
        measures += [(benchmark, metric) for metric in results.further_metrics(run, benchmark)]
    columns = ["policy", "kept, %"]
    for benchmark, metric in measures:
        label = benchmark if metric is None else f"{benchmark}, {metric}"
        columns += [label, f"{label} - full"]
    rows = []
    for variant in run.variants:
        kept = results.cost(run, variant).kept_percent
        row = [Cell(variant), Cell(f"{kept:.1f}", kept)]
        for benchmark, metric in measures:
            found = results.quality(run, benchmark, variant, metric)
            row += [_interval_cell(found.average), _interval_cell(found.over_full, sign=True)]
        rows.append(row)
    note = (
        "Macro average over tasks (and lengths), percent, with 95 % bootstrap intervals; "
        "differences to the full cache are paired by example, and bold where the interval excludes "
        "0."
    )
    return Table("Quality", note, columns, rows)


def _task_table(run: Run, benchmark: str, *, over_full: bool) -> Table:
    means = {v: results.quality(run, benchmark, v).groups for v in run.variants}
    groups = list(dict.fromkeys(group for found in means.values() for group in found))
    variants = [variant for variant in run.variants if not (over_full and variant == FULL)]
    rows = []
    for variant in variants:
        row = [Cell(variant)]
        for group in groups:
            value = means[variant].get(group)
            if value is not None and over_full:
                base = means[FULL].get(group)
                value = None if base is None else value - base
            row.append(Cell("", None) if value is None else Cell(f"{value:.2f}", value))
        rows.append(row)
    title = f"{benchmark}: {'difference to the full cache' if over_full else 'by task'}"
    return Table(title, "Percent, as the official scripts average them.", ["policy", *groups], rows)


def _tag_table(run: Run, benchmark: str, tag: str) -> Table:
    found = {variant: results.by_tag(run, benchmark, variant, tag) for variant in run.variants}
    values = sorted({value for cells in found.values() for value in cells})
    rows = [
        [Cell(v)] + [_number(cells.get(value)) for value in values] for v, cells in found.items()
    ]
    return Table(f"{benchmark}: by {tag}", "Percent, mean over tasks.", ["policy", *values], rows)


def _paper_table(run: Run) -> Table:
    rows = []
    for entry in results.published(run):
        ours = entry.ours
        label = entry.policy if entry.policy == FULL else f"{entry.policy} ratio={entry.ratio:g}"
        rows.append(
            [
                Cell(label),
                Cell(entry.benchmark),
                Cell(entry.model),
                _number(entry.theirs),
                _number(entry.theirs_over_full, sign=True),
                _interval_cell(None if ours is None else ours.average),
                _interval_cell(None if ours is None else ours.over_full, sign=True),
            ]
        )
    columns = [
        "policy",
        "benchmark",
        "paper's model",
        "paper",
        "paper - full",
        "here",
        "here - full",
    ]
    note = (
        "Published averages (arXiv 2609.03515) beside this run's. Averages of different models do "
        "not compare; differences to the full cache do, with care."
    )
    return Table("Beside the paper", note, columns, rows)


def _cost_table(run: Run) -> Table:
    columns = [
        *("policy", "kept, %", "evicted", "examples unevicted", "KV MiB, full", "KV MiB, kept"),
        *("prefill, s", "decode, tokens/s", "peak device, MiB", "peak host, MiB"),
    ]
    rows = []
    for variant in run.variants:
        found = results.cost(run, variant)
        peaks = (found.peak_device, found.peak_host)
        rows.append(
            [
                Cell(variant),
                _number(found.kept_percent, digits=1),
                _number(found.evicted, digits=1),
                _number(found.idle, digits=0),
                _number(found.kv_mib_full),
                _number(found.kv_mib_kept),
                _number(found.prefill_s),
                _number(found.tokens_per_s, digits=1),
                *(_number(None if peak is None else peak / 2**20, digits=0) for peak in peaks),
            ]
        )
    note = (
        "Means of tokens and bytes, medians of times. Examples unevicted: how many lost no token, "
        "for a policy removes none from a prompt within its budget. Prefill includes compilation "
        "where it was the first of its length; peaks are the process's so far, whatever policy ran."
    )
    return Table("Cost", note, columns, rows)


def _number(value: float | None, *, digits: int = 2, sign: bool = False) -> Cell:
    if value is None:
        return Cell("")
    return Cell(f"{value:+.{digits}f}" if sign else f"{value:,.{digits}f}", value)


def _interval_cell(found: Interval | None, *, sign: bool = False) -> Cell:
    if found is None:
        return Cell("")
    plus = "+" if sign else ""
    text = f"{found.value:{plus}.2f} [{found.low:{plus}.2f}, {found.high:{plus}.2f}]"
    excludes_zero = sign and not found.low <= 0 <= found.high
    return Cell(f"**{text}**" if excludes_zero else text, found.value)


def _markdown_table(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = "|".join(["", "---", *["--:"] * (len(table.columns) - 1), ""])
    rows = [line([cell.text for cell in row]) for row in table.rows]
    return "\n".join([line(table.columns), rule, *rows])
