"""The picture of the demo: which tokens each policy holds, step by step."""

import io
from collections.abc import Sequence

import numpy as np

from inertiakv_jax.demo import Answer, Question, one_line

# Okabe and Ito's colours: told apart by readers with any colour vision, and by their lightness.
TO_COME = "#ffffff"
GONE = "#e6e6e6"
HELD = "#0072b2"
NUMBER_GONE = "#f7d3bd"
NUMBER_HELD = "#d55e00"
COLOURS = (TO_COME, GONE, HELD, NUMBER_GONE, NUMBER_HELD)
STEP_COMPLETE = {"color": "black", "linewidth": 1.2, "linestyle": (0, (4, 3))}
PROMPT_END = {"color": "black", "linewidth": 0.8}

TOKENS_BEFORE, TOKENS_AFTER = 12, 6  # of the close-up, around the number


def draw(question: Question, answers: Sequence[Answer], title: str) -> bytes:
    """Draw one row of panels for each answer: the whole text, and a close-up of the number.

    Args:
      question: gives the tokens and the places of the number.
      answers: from ``demo.compare``, at least one.
      title: first line of the picture.

    Returns:
      A PNG file.
    """
    # By its classes, not by pyplot: no window system is asked for and no state left behind.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 1.8 * len(answers) + 2.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(
        len(answers), 2, squeeze=False, sharex="col", sharey=True, width_ratios=(3, 1)
    )
    for answer, (wide, close) in zip(answers, axes, strict=True):
        _draw_text(wide, question, answer)
        _draw_close_up(close, question, answer)
    axes[-1, 0].set_xlabel("position in the text (tokens)")
    axes[-1, 1].set_xlabel("the number and what is around it")
    figure.suptitle(title, fontsize=14, fontweight="bold")
    _add_legend(figure)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=150)
    return png.getvalue()


def _draw_text(axes, question: Question, answer: Answer) -> None:
    number = question.number_positions
    _draw_held(axes, question, answer, slice(0, answer.held.shape[1]))
    axes.axvline(len(question.token_ids) - 0.5, **PROMPT_END)
    axes.plot(
        (number.start + number.stop - 1) / 2,
        1.03,
        marker="v",
        color=NUMBER_HELD,
        transform=axes.get_xaxis_transform(),
        clip_on=False,
    )
    verdict = "right" if answer.right else "wrong"
    axes.set_title(
        f"{answer.policy.name}: “{_shortened(answer.text)}” ({verdict}), "
        f"{answer.kept_tokens:,} tokens kept",
        loc="left",
        fontsize=11,
        parse_math=False,
    )
    axes.set_ylabel("decode step")


def _draw_close_up(axes, question: Question, answer: Answer) -> None:
    number = question.number_positions
    window = slice(
        max(number.start - TOKENS_BEFORE, 0),
        min(number.stop + TOKENS_AFTER, len(question.token_ids)),
    )
    _draw_held(axes, question, answer, window)
    axes.set_xticks(
        range(window.start, window.stop),
        [_drawable(text) for text in question.token_texts[window]],
        rotation=90,
        fontsize=9,
        parse_math=False,
    )


def _draw_held(axes, question: Question, answer: Answer, window: slice) -> None:
    from matplotlib.colors import ListedColormap

    held = answer.held[:, window]
    positions = np.arange(window.start, window.stop)
    steps = np.arange(held.shape[0])
    kinds = 1 + held.astype(np.uint8)
    kinds[:, np.isin(positions, question.number_positions)] += 2
    # The token of step t stands at position T + t - 1; before that it is not there to be kept.
    kinds[positions[None] >= len(question.token_ids) + steps[:, None]] = 0
    axes.imshow(
        kinds,
        cmap=ListedColormap(COLOURS),
        vmin=0,
        vmax=len(COLOURS) - 1,
        aspect="auto",
        interpolation="nearest",
        extent=(window.start - 0.5, window.stop - 0.5, held.shape[0] - 0.5, -0.5),
    )
    axes.axhline(answer.steps + 0.5, **STEP_COMPLETE)


def _add_legend(figure) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [
        Patch(color=HELD, label="kept"),
        Patch(color=GONE, label="evicted"),
        Patch(color=NUMBER_HELD, label="the planted number, kept"),
        Patch(color=NUMBER_GONE, label="the planted number, evicted"),
        Line2D([], [], label="the answer is complete", **STEP_COMPLETE),
        Line2D([], [], label="end of the prompt", **PROMPT_END),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, fontsize=10)


def _shortened(text: str, limit: int = 40) -> str:
    line = _drawable(text)
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _drawable(text: str) -> str:
    """One line of what matplotlib's own font has; a question mark for the rest."""
    return one_line(text).encode("latin-1", "replace").decode("latin-1")
