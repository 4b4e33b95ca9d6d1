"""Figures of a report as SVG text."""

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from inertiakv_jax.eval.bootstrap import Interval

_MARKERS = "osD^vP*Xhd<>p"


def quality_over(
    points: Mapping[str, Sequence[tuple[float, Interval]]],
    *,
    full: float | None,
    x_label: str,
    y_label: str,
    name: str,
) -> str:
    """Lines of quality over something, one for each policy.

    Args:
      points: policy -> (x, average in percent with its interval), any order.
      full: the full cache's average, a dashed line across; None leaves it out.
      x_label: of the x axis.
      y_label: of the y axis.
      name: unique in the page; parts of the picture are called by it.
    """
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for index, (policy, found) in enumerate(points.items()):
        found = sorted(found, key=lambda point: point[0])
        values = [point[1].value for point in found]
        errors = [
            [max(0.0, value - point[1].low) for value, point in zip(values, found, strict=True)],
            [max(0.0, point[1].high - value) for value, point in zip(values, found, strict=True)],
        ]
        axes.errorbar(
            [point[0] for point in found],
            values,
            yerr=errors,
            marker=_MARKERS[index % len(_MARKERS)],
            color=f"C{index % 10}",
            linestyle="-" if len(found) > 1 else "none",
            elinewidth=0.8,
            capsize=2,
            label=policy,
        )
    if full is not None:
        axes.axhline(full, color="0.3", linestyle="--", linewidth=1, label="full")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.25)
    if points or full is not None:
        figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    return _svg(figure, name)


def needle_maps(grids: Mapping[str, Mapping[tuple[int, float], float]], *, name: str) -> str:
    """One heat map of lengths and depths for each policy.

    Args:
      grids: policy -> (length, depth) -> score in percent; at least one policy and cell.
      name: as of ``quality_over``.
    """
    columns = min(3, len(grids))
    rows = math.ceil(len(grids) / columns)
    figure = Figure(figsize=(0.6 + 3.2 * columns, 0.4 + 2.6 * rows), layout="constrained")
    panels: Any = figure.subplots(rows, columns, squeeze=False).flat
    image = None
    for panel, (policy, grid) in zip(panels, grids.items(), strict=False):
        lengths = sorted({length for length, _ in grid})
        depths = sorted({depth for _, depth in grid})
        cells = [[grid.get((n, depth), math.nan) for n in lengths] for depth in depths]
        image = panel.imshow(cells, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
        panel.set_title(policy, fontsize=9)
        panel.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths], fontsize=7)
        panel.set_yticks(range(len(depths)), [f"{depth:g} %" for depth in depths], fontsize=7)
        for y, line in enumerate(cells):
            for x, value in enumerate(line):
                if not math.isnan(value):
                    panel.text(x, y, f"{value:.0f}", ha="center", va="center", fontsize=7)
    for panel in list(panels)[len(grids) :]:
        panel.set_axis_off()
    figure.supxlabel("length, tokens", fontsize=8)
    figure.supylabel("depth of the needle", fontsize=8)
    if image is not None:
        figure.colorbar(image, ax=figure.axes, shrink=0.7, label="score, %")
    return _svg(figure, name)


def _svg(figure: Figure, name: str) -> str:
    """The figure as an element of a page: text as text, the same bytes for the same numbers."""
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
