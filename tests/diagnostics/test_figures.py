"""Pictures of a trace: PNG files that show what was kept where."""

import dataclasses
import io

import numpy as np
import pytest
from diagnostics.test_file import small_trace
from diagnostics.tiny_lm import trace
from matplotlib.axes import Axes
from matplotlib.image import imread

from inertiakv_jax.diagnostics import figures

KEPT = np.array([0x00, 0x72, 0xB2]) / 255


def pixels(png):
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return imread(io.BytesIO(png), format="png")[..., :3]


def share_kept(png):
    return np.isclose(pixels(png), KEPT, atol=0.01).all(axis=-1).mean()


def holding(last):
    """A trace of one run, of which ``last`` of the five places are held to the end."""
    run = small_trace().runs[1]
    evicted_at = np.zeros((2, 1, 5), np.int32)
    evicted_at[..., 5 - last :] = 3
    return dataclasses.replace(
        small_trace(), runs=(dataclasses.replace(run, evicted_at=evicted_at),), kept_jaccard={}
    )


@pytest.mark.parametrize("draw", [figures.kept_sets, figures.kept_over_steps])
def test_kept_places_are_painted(draw):
    two, four = (share_kept(draw(holding(last))) for last in (2, 4))
    assert two > 0.05
    assert four > 1.5 * two


@pytest.mark.parametrize("draw", [figures.kept_sets, figures.kept_over_steps, figures.boundary])
def test_whole_trace_is_drawn(draw):
    assert pixels(draw(trace())).std() > 0.01
    assert pixels(draw(small_trace())).std() > 0.01


def test_one_policy_has_no_jaccard_beside_it(monkeypatch):
    """There is nothing that it could be compared with."""
    written, write = [], Axes.text

    def text(axes, x, y, said, **options):
        written.append(said)
        return write(axes, x, y, said, **options)

    monkeypatch.setattr(Axes, "text", text)
    figures.kept_sets(holding(2))
    assert written == []
    figures.kept_sets(small_trace())
    assert "Jaccard" in written
    assert len(written) == 2


def test_counterparts_stand_beside_their_policies():
    one, two = small_trace().runs
    paired = dataclasses.replace(
        small_trace(),
        runs=(one, dataclasses.replace(two, name="one without EMA")),
        kept_jaccard={("one", "one without EMA"): np.ones((2, 2))},
    )
    assert (
        pixels(figures.kept_sets(paired)).shape[1]
        == 2 * (pixels(figures.kept_sets(small_trace())).shape[1])
    )


def test_labels_may_hold_anything():
    """Dollar signs, line breaks and letters that the font lacks, as tokens do."""
    texts = ["$x_1$", "\n", "\u4e2d", "\x1b[2J", "$"]
    odd = dataclasses.replace(small_trace().runs[0], name="$\\frac{1}{$\n\u4e2d")
    wrong = dataclasses.replace(small_trace(), runs=(odd,), kept_jaccard={})
    for png in (
        figures.boundary(wrong, texts),
        figures.kept_sets(wrong),
        figures.kept_over_steps(wrong),
    ):
        assert pixels(png).std() > 0.01


def test_long_text_has_several_tokens_in_a_column():
    run = small_trace().runs[1]
    evicted_at = np.tile(np.array([0, 3], np.int32), 2500)[None, None]
    long = dataclasses.replace(
        small_trace(),
        prompt=(1,) * 4998,
        runs=(dataclasses.replace(run, evicted_at=evicted_at),),
        kept_jaccard={},
    )
    half = (np.array([0xF4, 0xF4, 0xF4]) / 255 + KEPT) / 2
    found = pixels(figures.kept_sets(long))
    assert np.isclose(found, half, atol=0.1).all(axis=-1).mean() > 0.3
