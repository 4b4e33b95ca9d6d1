"""Pictures of a trace: kept sets by scorer, held positions over steps, the budget's edge."""

import dataclasses
import io
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from inertiakv_jax.demo import one_line
from inertiakv_jax.diagnostics.measures import mean
from inertiakv_jax.diagnostics.records import WITHOUT_EMA, Trace, TracedRun

# Okabe and Ito's colours, as in the demo's picture.
KEPT = ("#f4f4f4", "#0072b2")
GOES, STAYS, EDGE = "#d55e00", "#0072b2", "#555555"
STYLES = ("-", (0, (4, 2)), (0, (1, 1)), (0, (4, 2, 1, 2)))
MOST_COLUMNS = 512  # of a map, so that each is drawn; a longer text has several tokens in one
MOST_LABEL = 40
POSITION = "position in the text (tokens)"


def kept_sets(trace: Trace) -> bytes:
    """Draw the kept set of each policy after the last step, with and without moving average.

    Beside each stands its Jaccard with the first policy of its column, mean over steps and layers.

    Returns:
      A PNG file.

    Source: arXiv 2609.03515 figure 1.
    """
    columns = _columns(trace)
    most = max(map(len, columns.values()))
    figure = _figure((6.5 * len(columns), 0.42 * most + 1.6))
    grid = figure.subplots(1, len(columns), squeeze=False)
    for axes, (heading, runs) in zip(grid[0], columns.items(), strict=True):
        steps = len(trace.continuation)
        image = np.stack([_shares(run, steps) for run in runs])
        _draw_map(axes, image, trace, (-0.5, len(runs) - 0.5))
        axes.set_yticks(
            range(len(runs)), [_drawable(_base(run.name)) for run in runs], parse_math=False
        )
        for row, run in enumerate(runs):
            if row:
                value = mean(trace.kept_jaccard[runs[0].name, run.name])
                axes.text(
                    1.01, row, f"{value:.2f}", transform=axes.get_yaxis_transform(), va="center"
                )
        if len(runs) > 1:
            axes.text(1.01, 0, "Jaccard", transform=axes.get_yaxis_transform(), va="center")
        axes.set_title(heading)
    return _png(
        figure, f"Kept after {len(trace.continuation)} steps, of {len(trace.prompt):,} tokens"
    )


def kept_over_steps(trace: Trace) -> bytes:
    """Draw what each policy holds after each step: the share of layers and heads that do.

    Returns:
      A PNG file.
    """
    steps = len(trace.continuation)

    def draw(axes, run: TracedRun) -> None:
        image = np.stack([_shares(run, step) for step in range(1, steps + 1)])
        _draw_map(axes, image, trace, (0.5, steps + 0.5))
        axes.set_ylabel("step")

    return _panels("Positions held after each step", trace, draw, POSITION, height=1.25)


def boundary(trace: Trace, token_texts: Sequence[str] | None = None) -> bytes:
    """Draw the utilities of the tokens nearest to the edge of the budget, in the last ranking.

    Args:
      trace: the trace.
      token_texts: text of each token of prompt and continuation, for the labels.

    Returns:
      A PNG file.
    """
    evicting = tuple(run for run in trace.runs if run.boundary is not None)
    return _panels(
        "Utilities of the last tokens to go (dot) and of the next in line",
        dataclasses.replace(trace, runs=evicting),
        lambda axes, run: _draw_boundary(axes, run, token_texts),
        "step",
        height=2.4,
    )


def _panels(
    title: str, trace: Trace, draw: Callable[[Any, TracedRun], None], xlabel: str, height: float
) -> bytes:
    """One panel a run, counterparts without EMA in a column of their own."""
    columns = _columns(trace)
    rows = max(1, *map(len, columns.values()))
    figure = _figure((6.5 * len(columns), height * rows + 1.0))
    grid = figure.subplots(rows, len(columns), squeeze=False, sharex=True)
    for column, runs in enumerate(columns.values()):
        for axes, run in zip(grid[:, column], runs, strict=False):
            draw(axes, run)
            axes.set_title(_drawable(run.name), loc="left", fontsize=10, parse_math=False)
            axes.set_xlabel("")
        if runs:
            last = grid[len(runs) - 1, column]
            last.set_xlabel(xlabel)
            last.tick_params(labelbottom=True)
        for axes in grid[len(runs) :, column]:
            axes.set_axis_off()
    return _png(figure, title)


def _draw_boundary(axes, run: TracedRun, token_texts: Sequence[str] | None) -> None:
    near = run.boundary
    assert near is not None
    steps = np.arange(1, len(run.chosen) + 1)
    gone = run.evicted_at[-1, -1, near.positions] <= len(run.chosen)
    for goes, colour in ((True, GOES), (False, STAYS)):
        for index, style in zip(np.flatnonzero(gone == goes), itertools.cycle(STYLES)):
            utilities, position = near.utilities[index], near.positions[index]
            text = "" if token_texts is None else f" {_drawable(token_texts[int(position)])!r}"
            axes.plot(
                *(steps, utilities),
                color=colour,
                linestyle=style,
                linewidth=1,
                label=f"{position}{text}",
            )
            if goes:
                last = np.flatnonzero(~np.isnan(utilities))[-1]
                axes.plot(steps[last], utilities[last], marker="o", color=colour, markersize=4)
    axes.plot(steps, near.threshold, color=EDGE, linewidth=0.8, label="edge")
    if np.nanmax(near.utilities) > 10 * np.nanmin(near.utilities) > 0:
        axes.set_yscale("log")
    legend = axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=7, frameon=False)
    for label in legend.get_texts():
        label.set_parse_math(False)
    axes.set_ylabel("utility")


def _columns(trace: Trace) -> dict[str, list[TracedRun]]:
    """Runs by heading: those with a moving average, or just as they are, and their counterparts."""
    without = [run for run in trace.runs if run.name.endswith(WITHOUT_EMA)]
    other = [run for run in trace.runs if not run.name.endswith(WITHOUT_EMA)]
    if not without or not other:
        return {"": list(trace.runs)}
    return {"without EMA: the last layer's scores of one step": without, "with EMA": other}


def _base(name: str) -> str:
    return name.removesuffix(WITHOUT_EMA)


def _shares(run: TracedRun, step: int) -> np.ndarray:
    """[P] share of a run's rankings that hold a place after a step."""
    return run.kept(step).mean(axis=(0, 1))


def _draw_map(axes, image: np.ndarray, trace: Trace, rows: tuple[float, float]) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    length = image.shape[1]
    width = -(-length // MOST_COLUMNS)
    padding = -length % width
    binned = np.pad(image, ((0, 0), (0, padding)), mode="edge")
    binned = binned.reshape(len(image), -1, width).mean(axis=2)
    axes.imshow(
        binned,
        cmap=LinearSegmentedColormap.from_list("kept", KEPT),
        vmin=0.0,
        vmax=1.0,
        aspect="auto",
        interpolation="nearest",
        extent=(-0.5, length + padding - 0.5, rows[1], rows[0]),
    )
    axes.axvline(len(trace.prompt) - 0.5, color="black", linewidth=0.8)
    axes.set_xlim(-0.5, length - 0.5)
    axes.set_xlabel(POSITION)


def _figure(size: tuple[float, float]):
    # By its classes, not by pyplot: no window system is asked for and no state left behind.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _png(figure, title: str) -> bytes:
    figure.suptitle(title, fontsize=13, fontweight="bold")
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    return png.getvalue()


def _drawable(text: str) -> str:
    """One short line of what matplotlib's own font has; a question mark for the rest."""
    line = one_line(text).encode("latin-1", "replace").decode("latin-1")
    return line if len(line) <= MOST_LABEL else line[: MOST_LABEL - 3] + "..."
