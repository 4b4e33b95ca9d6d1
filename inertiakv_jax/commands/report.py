"""``inertiakv report``: tables and figures of evaluation runs."""

import dataclasses
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from inertiakv_jax.commands.terminal import check_output, console, write_file

DESCRIPTION = """Make tables and figures of evaluation runs.

Writes one HTML page, which loads nothing, and the tables as markdown: quality by policy and budget
with intervals, differences to the full cache paired by example, quality over budget and over
throughput, needle heat maps, and what each policy cost.

Examples:
  inertiakv report runs/ruler
  inertiakv report runs/ruler runs/longbench --out both.html
"""


@dataclasses.dataclass(frozen=True)
class Report:
    """Options of ``inertiakv report``."""

    runs: Positional[tuple[Path, ...]]
    """Folders that `inertiakv eval` wrote."""
    out: Annotated[
        Path | None, arg(metavar="PATH", help_behavior_hint="(default: RUN/report.html)")
    ] = None
    """The page; the tables go beside it, with the ending .md."""

    def run(self) -> None:
        """Read the runs and write both files."""
        if not self.runs:
            raise ValueError("name at least one folder that `inertiakv eval` wrote")
        out = self.out or self.runs[0] / "report.html"
        tables = out.with_suffix(".md")
        if tables == out:
            raise ValueError(f"--out is the page and ends in .html, got {out}")
        from inertiakv_jax.eval.report import page
        from inertiakv_jax.eval.report_tables import markdown
        from inertiakv_jax.eval.results import load_run

        runs = [load_run(folder) for folder in self.runs]
        for path in (out, tables):
            check_output("--out", path)
        write_file(out, page(runs).encode())
        write_file(tables, markdown(runs).encode())
        console().print(f"Wrote {out} and {tables}")
