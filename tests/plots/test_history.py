"""Heads over a training as curves, strips and an animation: what stands in them is what was recorded."""

import math

import numpy as np
import pytest
import torch
from model_sizes import EXACT64

from collab_heads import AttentionSite, plots
from collab_heads.errors import ArgumentError
from collab_heads.heads.history import ALPHAS, HeadHistory, Moment
from collab_heads.plots import history as drawing
from collab_heads.plots.history import norms

pytest.importorskip("matplotlib")
SITES = (
    AttentionSite("e1", "enc-self", 1, 2),
    AttentionSite("e0", "enc-self", 0, 2),
    AttentionSite("d0", "dec-enc", 0, 2),
)
HEADS = {"e0": (0, 1), "e1": (0, 2), "d0": (0, 1)}  # head 1 of "e1" was gone when it began


@pytest.fixture(scope="module")
def history() -> HeadHistory:
    """Two trainings of ten steps; head 0 of "e1" goes between them, and then there are alphas on "d0"."""
    found = HeadHistory(SITES, HEADS)
    for step in (0, 5, 10):
        share = step / 100
        values = {"e0": [0.1 + share, 0.3], "e1": [0.5, 0.7], "d0": [0.2, 0.4]}
        found = found.record(Moment(step, 1, "first"), {"confidence": values})
    for step, mixed in ((10, 0.0), (20, 0.5)):
        values = {"confidence": {"e0": [0.2, 0.3], "e1": [0.9], "d0": [0.2, 0.4]}}
        values[ALPHAS] = {"d0": [[1.0 + mixed, 0.0], [0.0, 1.0]]}
        found = found.record(Moment(step, 2, "second"), values, {**HEADS, "e1": (2,)})
    return found


def lines(axes, width: float) -> list[tuple[list, list]]:
    """(steps, values) of the lines of so many points."""
    found = [line for line in axes.lines if line.get_linewidth() == width and line.get_linestyle() == "-"]
    return [(list(line.get_xdata()), list(np.round(line.get_ydata(), 6))) for line in found]


def upright(axes, style: str) -> list[float]:
    return [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == style]


def test_curves_of_heads_and_of_the_means_of_layers(history):
    figure = plots.history_curves(history, "confidence", exchanges={"dec-enc": [5]}, title="ours")
    encoder, cross = figure.axes
    assert (encoder.get_title(), cross.get_title()) == ("enc-self", "dec-enc")
    assert encoder.get_ylabel() == "confidence" and figure.get_suptitle() == "ours"
    steps = [0, 5, 10, 10, 20]
    assert lines(encoder, 1.8) == [(steps, [0.2, 0.225, 0.25, 0.25, 0.25]), (steps, [0.6, 0.6, 0.6, 0.9, 0.9])]
    heads = [values for _, values in lines(encoder, 0.5)]
    assert heads[0] == [0.1, 0.15, 0.2, 0.2, 0.2] and heads[3] == [0.7, 0.7, 0.7, 0.9, 0.9]
    assert heads[2][:3] == [0.5] * 3 and all(map(math.isnan, heads[2][3:]))  # the line of a removed head ends
    assert [upright(axes, "--") for axes in figure.axes] == [[10], [10]]
    assert [upright(axes, ":") for axes in figure.axes] == [[], [5]]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["layer 0", "layer 1"]


def test_alphas_are_shown_by_their_nuclear_norm(history):
    figure = plots.history_curves(history, ALPHAS)
    (axes,) = figure.axes
    assert lines(axes, 1.8) == [([10, 20], [1.0, 1.25])] and lines(axes, 0.5) == []
    nan = math.nan
    rows = torch.tensor([[[nan] * 2] * 2, [[3.0, nan], [nan, nan]], [[0.0, 2.0], [1.0, 0.0]]], dtype=torch.float64)
    found = norms(rows)
    assert math.isnan(found[0]) and found[1:].tolist() == pytest.approx([3.0, 1.5], abs=EXACT64)


def test_a_strip_has_a_row_per_head(history):
    figure = plots.history_strip(history, "confidence")
    encoder = figure.axes[0]
    grid = encoder.collections[0].get_array().reshape(4, 5)
    assert grid[0].tolist() == [0.1, 0.15, 0.2, 0.2, 0.2]
    assert grid.mask.tolist() == [[False] * 5, [False] * 5, [False] * 3 + [True] * 2, [False] * 5]
    assert [text.get_text() for text in encoder.get_yticklabels(minor=True)] == ["0", "1", "0", "2"]


@pytest.mark.slow
def test_an_animation_shows_every_step(history, tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    path = plots.history_animation(history, tmp_path / "moving.gif", "confidence", title="ours")

    def frames() -> list[bytes]:
        with image.open(path) as moving:
            seen = []
            for number in range(moving.n_frames):
                moving.seek(number)
                seen.append(moving.convert("RGB").tobytes())
        return seen

    assert len(frames()) == 5 == len(set(frames()))
    before = path.read_bytes()
    assert plots.history_animation(history, path, "confidence", title="ours").read_bytes() == before
    monkeypatch.setattr(drawing, "FRAMES", 2)
    plots.history_animation(history, path, "confidence")
    assert len(frames()) == 2 and list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_drawn(history, tmp_path):
    for draw in (plots.history_curves, plots.history_strip):
        with pytest.raises(ArgumentError, match="no 'gates' at any step; it has confidence, alphas"):
            draw(history, "gates")
        with pytest.raises(ArgumentError, match="it has nothing"):
            draw(HeadHistory(SITES, HEADS), "confidence")
    with pytest.raises(ArgumentError, match="alphas are a matrix per site"):
        plots.history_strip(history, ALPHAS)
    with pytest.raises(ArgumentError, match="alphas are a matrix per site"):
        plots.history_animation(history, tmp_path / "moving.gif", ALPHAS)
    with pytest.raises(ArgumentError, match="no 'gates' at any step"):
        plots.history_animation(history, tmp_path / "moving.gif")
    with pytest.raises(ArgumentError, match=r"ends in \"\.gif\", not .*moving\.mp4"):
        plots.history_animation(history, tmp_path / "moving.mp4", "confidence")
    assert list(tmp_path.iterdir()) == []
