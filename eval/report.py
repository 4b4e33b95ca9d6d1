"""The report of runs: one HTML page that loads nothing."""

import html
import json
from collections.abc import Sequence

from inertiakv_jax.eval import figures, results
from inertiakv_jax.eval.bootstrap import Interval
from inertiakv_jax.eval.report_tables import Cell, Table, subtitle, tables
from inertiakv_jax.eval.results import FULL, Run

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem;
  color: #1b1b1b; background: #fff; }
table { border-collapse: collapse; margin: .6rem 0 1.4rem; font-size: 13px; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: right;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { cursor: pointer; user-select: none; border-bottom: 2px solid #888; }
th[aria-sort=ascending]::after { content: " ▲"; }
th[aria-sort=descending]::after { content: " ▼"; }
.scroll { overflow-x: auto; }
figure { margin: 1rem 0; } figure svg { max-width: 100%; height: auto; }
.pair { display: flex; gap: 1rem; } .pair figure { flex: 1; min-width: 0; }
figcaption, .note { color: #555; font-size: 13px; }
pre { background: #f5f5f5; padding: .8rem; overflow-x: auto; font-size: 12px; }
"""
_SCRIPT = """
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") !== "descending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = (row) => {
      const value = row.cells[column].dataset.value;
      return value === "" ? -Infinity : isNaN(value) ? value : Number(value);
    };
    const rows = [...table.tBodies[0].rows];
    rows.sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1);
    });
    table.tBodies[0].append(...rows);
  }));
}
"""


def page(runs: Sequence[Run]) -> str:
    """Tables and figures of the runs as one HTML document that loads nothing."""
    title = html.escape(", ".join(run.name for run in runs))
    body = "\n".join(_section(run, f"run{index}") for index, run in enumerate(runs))
    parts = (
        *("<!doctype html>", '<html lang="en">', "<head>", '<meta charset="utf-8">'),
        f"<title>{title}</title>",
        '<link rel="icon" href="data:,">',
        f"<style>{_STYLE}</style>",
        *("</head>", "<body>", body, f"<script>{_SCRIPT}</script>", "</body>", "</html>"),
    )
    return "\n".join(parts) + "\n"


def _section(run: Run, name: str) -> str:
    found = tables(run)
    parts = [
        f"<h1>{html.escape(run.name)}</h1>",
        f'<p class="note">{html.escape(subtitle(run))}</p>',
    ]
    parts.append(_html_table(found[0]))
    for index, benchmark in enumerate(run.benchmarks):
        pair = "".join(_curves(run, benchmark, f"{name}-{index}"))
        parts.append(f'<div class="pair">{pair}</div>')
    if "needle" in run.benchmarks:
        grids = {variant: results.needle_grid(run, variant) for variant in run.variants}
        svg = figures.needle_maps(grids, name=f"{name}-needle")
        parts.append(_figure(svg, "needle: score by length and depth"))
    parts += [_html_table(table) for table in found[1:]]
    said = html.escape(json.dumps(run.description, indent=1, ensure_ascii=False))
    parts.append(f"<details><summary>What was run</summary><pre>{said}</pre></details>")
    return "<section>\n" + "\n".join(parts) + "\n</section>"


def _curves(run: Run, benchmark: str, name: str) -> list[str]:
    kept: dict[str, list[tuple[float, Interval]]] = {}
    speed: dict[str, list[tuple[float, Interval]]] = {}
    full = None
    for variant in run.variants:
        average = results.quality(run, benchmark, variant).average
        spent = results.cost(run, variant, benchmark)
        policy = _line_of(run, variant)
        if variant == FULL:
            full = average.value
        else:
            kept.setdefault(policy, []).append((spent.kept_percent, average))
        if spent.tokens_per_s is not None:
            speed.setdefault(policy, []).append((spent.tokens_per_s, average))
    label = f"{benchmark}, %"
    return [
        _figure(
            figures.quality_over(
                kept,
                full=full,
                x_label="tokens kept at the end, % of those seen",
                y_label=label,
                name=f"{name}-kept",
            ),
            f"{benchmark}: quality over budget",
        ),
        _figure(
            figures.quality_over(
                speed, full=None, x_label="decode, tokens/s", y_label=label, name=f"{name}-speed"
            ),
            f"{benchmark}: quality over throughput",
        ),
    ]


def _line_of(run: Run, variant: str) -> str:
    """The policy without its budget: what is one line of a figure."""
    record = next(record for record in run.records if record["variant"] == variant)
    options = {k: v for k, v in record["options"].items() if k not in ("ratio", "tokens")}
    return " ".join([record["policy"], *(f"{k}={v}" for k, v in sorted(options.items()))])


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in table.columns)
    body = "\n".join("<tr>" + "".join(map(_html_cell, row)) + "</tr>" for row in table.rows)
    return (
        f"<h2>{html.escape(table.title)}</h2>\n"
        f'<p class="note">{html.escape(table.note)}</p>\n<div class="scroll"><table>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def _html_cell(cell: Cell) -> str:
    value = cell.text if cell.value is None else repr(float(cell.value))
    text = html.escape(cell.text)
    if cell.text.startswith("**"):
        text = f"<b>{html.escape(cell.text.strip('*'))}</b>"
    return f'<td data-value="{html.escape(value)}">{text}</td>'


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>"
