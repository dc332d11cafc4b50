"""Pictures: what stands in them is what they were given; what cannot be shown is refused."""

import io
import subprocess
import sys

import pytest
import torch

from collab_heads import AttentionSite, plots
from collab_heads.base.extras import MissingPackageError
from collab_heads.errors import ArgumentError, NonFiniteError, ShapeError
from collab_heads.heads.comparison import balance
from collab_heads.plots.canvas import png_bytes, svg_bytes

pytest.importorskip("matplotlib")
SITES = (
    AttentionSite("e0", "enc-self", 0, 2),
    AttentionSite("e1", "enc-self", 1, 3),
    AttentionSite("d0", "dec-self", 0, 3),
)
HEADS = {"e0": (0, 2), "e1": (0, 1, 2), "d0": (0, 1, 2)}
VALUES = {"e0": torch.tensor([0.1, 0.9]), "e1": torch.tensor([0.2, 0.3, 0.4]), "d0": torch.tensor([0.5, 0.6, 0.7])}


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def ticks(axis) -> list[str]:
    return [text.get_text() for text in axis.get_ticklabels()]


def panels(figure):
    return [axes for axes in figure.axes if axes.get_title()]


def grid_of(axes):
    return axes.collections[0].get_array()


def test_a_map_has_a_panel_per_role_and_heads_keep_their_numbers():
    figure = plots.head_map(SITES, VALUES, heads=HEADS, label="confidence")
    encoder, decoder = panels(figure)
    assert (encoder.get_title(), decoder.get_title()) == ("enc-self", "dec-self")
    assert ticks(encoder.xaxis) == ["0", "1", "2"] and ticks(encoder.yaxis) == ["0", "1"]
    assert ticks(decoder.yaxis) == ["0"] and encoder.get_ylabel() == "layer" and encoder.get_xlabel() == "head"
    grid = grid_of(encoder)
    assert grid.mask.tolist() == [[False, True, False], [False] * 3]
    assert grid.compressed().tolist() == pytest.approx([0.1, 0.9, 0.2, 0.3, 0.4])
    assert texts(encoder) == ["0.10", "0.90", "0.20", "0.30", "0.40"]
    (removed,) = [patch for patch in encoder.patches if patch.get_hatch()]
    assert removed.get_xy() == (0.5, -0.5) and not any(patch.get_hatch() for patch in decoder.patches)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["removed"]
    assert encoder.collections[0].get_clim() == decoder.collections[0].get_clim() == pytest.approx((0.1, 0.9))


def frames(axes) -> list[tuple[tuple[float, float], float]]:
    """Place and width of those around heads that share a key head."""
    found = [patch for patch in axes.patches if (patch.get_gid() or "").startswith("group")]
    return [(patch.get_xy(), patch.get_width()) for patch in found]


def test_heads_that_share_keys_are_framed():
    """By the original numbers of those that are left: the second head of the first group is gone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    sites = (
        AttentionSite("d0", "dec-self", 0, 4, (0, 0, 1, 1)),
        AttentionSite("d1", "dec-self", 1, 3, (0, 1, 1)),
        AttentionSite("d2", "dec-self", 2, 4, (0, 1, 2, 3)),
    )
    heads, kinds = {"d0": (0, 1, 2, 3), "d1": (0, 2, 3), "d2": (0, 1, 2, 3)}, [["first token"], [], "none", "syntactic"]
    values = {site.path: torch.rand(site.num_heads) for site in sites}
    figures = (
        plots.head_map(sites, values, heads=heads, label="x"),
        plots.role_map(sites, {site.path: kinds[: site.num_heads] for site in sites}, heads=heads),
    )
    for figure in figures:
        (axes,) = panels(figure)
        assert frames(axes) == [((-0.5, -0.5), 2), ((1.5, -0.5), 2), ((-0.5, 0.5), 1), ((1.5, 0.5), 2)]
        assert "one key head" in [text.get_text() for text in figure.legends[0].get_texts()]
        drawn = FigureCanvasAgg(figure)
        drawn.draw()
        width = figure.legends[0].get_window_extent(drawn.get_renderer()).width / figure.dpi
        assert width <= figure.get_figwidth()
    assert "first token (F)" in [text.get_text() for text in figures[1].legends[0].get_texts()]
    (alone,) = panels(plots.head_map(sites[2:], {"d2": values["d2"]}, label="x"))
    assert not frames(alone)


def test_totals_show_heads_that_are_gone_at_the_end_and_marks_stand_for_numbers():
    figure = plots.head_map(SITES, VALUES, heads=HEADS, totals=4, label="x", marks={"e0": ["a", "b"]})
    encoder = panels(figure)[0]
    assert ticks(encoder.xaxis) == ["0", "1", "2", "3"] and texts(encoder) == ["a", "b", "", "", ""]
    assert sum(bool(patch.get_hatch()) for patch in encoder.patches) == 3


def test_values_of_both_signs_are_centred_on_zero():
    figure = plots.head_map(SITES, {"d0": torch.tensor([-1.0, 0.5, 0.2])}, label="change")
    (only,) = panels(figure)
    assert only.get_title() == "dec-self" and only.collections[0].get_clim() == (-1.0, 1.0)
    low, zero, high = (only.collections[0].cmap(only.collections[0].norm(v))[:3] for v in (-1.0, 0.0, 1.0))
    assert min(zero) > 0.9 and max(low) < 0.6 and max(high) < 0.6  # white in the middle


@pytest.mark.parametrize(
    "values, error, said",
    (
        ({"e0": torch.tensor([0.1, float("nan")])}, NonFiniteError, "e0"),
        ({"e0": torch.tensor([0.1])}, ShapeError, "e0"),
        ({"nowhere": torch.tensor([0.1])}, ArgumentError, "nowhere"),
        ({}, ArgumentError, "nothing|no "),
    ),
)
def test_what_a_map_refuses(values, error, said):
    with pytest.raises(error, match=said):
        plots.head_map(SITES, values, label="x")


def test_roles_have_colours_and_letters():
    kinds = {"e0": ["positional", ["syntactic", "rare tokens"]], "e1": ["none", "", "positional"]}
    figure = plots.role_map(SITES, kinds, heads=HEADS)
    (encoder,) = panels(figure)
    assert texts(encoder) == ["P", "S", "R", "", "", "P"]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["positional (P)", "rare tokens (R)", "syntactic (S)", "none", "removed"]
    filled = [patch.get_facecolor() for patch in encoder.patches if patch.get_fill() and not patch.get_hatch()]
    assert len(set(filled)) == 4 and filled[0] == filled[-1]


def test_matrices_and_alphas():
    matrix = torch.tensor([[1.0, 0.2], [0.4, 1.0]])
    figure = plots.matrix_maps(SITES, {"e0": matrix}, heads=HEADS, label="cosine", diagonal=False)
    (only,) = panels(figure)
    assert only.get_title() == "enc-self, layer 0" and ticks(only.xaxis) == ["0", "2"] == ticks(only.yaxis)
    assert grid_of(only).compressed().tolist() == pytest.approx([0.2, 0.4])
    mixed = panels(plots.alpha_maps(SITES, {"e0": torch.eye(2) + torch.tensor([[0.0, 0.3], [0.0, -0.1]])}))[0]
    assert grid_of(mixed).ravel().tolist() == pytest.approx([0.0, 0.3, 0.0, -0.1])
    assert mixed.collections[0].get_clim() == pytest.approx((-0.3, 0.3))
    with pytest.raises(ShapeError, match="e0"):
        plots.matrix_maps(SITES, {"e0": torch.eye(3)}, label="x")


def test_curves_differ_without_colour():
    figure = plots.quality_curves(
        {"a": [(2, 1.0), (8, 3.0)], "b": [(8, 3.0), (4, 2.0)]}, original=3.5, metric="BLEU", total=8
    )
    (axes,) = figure.axes
    whole, *lines = axes.get_lines()
    assert whole.get_ydata()[0] == 3.5 and axes.get_ylabel() == "BLEU" and axes.get_xlabel() == "heads kept of 8"
    assert [list(line.get_xdata()) for line in lines] == [[2, 8], [4, 8]] and list(lines[1].get_ydata()) == [2.0, 3.0]
    assert len({line.get_linestyle() for line in lines}) == len({line.get_marker() for line in lines}) == 2
    for curves, error in (
        ({}, ArgumentError),
        ({"a": [(9, 1.0)]}, ArgumentError),
        ({"a": [(2, float("nan"))]}, NonFiniteError),
    ):
        with pytest.raises(error):
            plots.quality_curves(curves, metric="x", total=8)


def test_a_budget_has_a_line_of_predictions_and_points_of_measurements():
    figure = plots.budget_curve([(0.2, 0.5), (1.0, 0.0)], [(0.5, 0.3)], of="cache")
    (axes,) = figure.axes
    line, points = axes.get_lines()
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([0.2, 1.0], [0.5, 0.0])
    assert (list(points.get_xdata()), list(points.get_ydata())) == ([0.5], [0.3])
    assert points.get_marker() != "None" and points.get_linestyle() == "None"
    assert "cache" in axes.get_xlabel()
    assert len(plots.budget_curve([(1.0, 0.0)], of="time").axes[0].get_lines()) == 1
    with pytest.raises(ArgumentError, match="no points"):
        plots.budget_curve([], of="cache")


def test_distributions_of_two_models():
    models = {"plain": VALUES, "mixed": {path: torch.ones_like(v) for path, v in VALUES.items()}}
    figure = plots.importance_distributions(models, SITES, "relevance")
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert len(titles) == 4 and titles[1] == "mixed, enc-self\nbalance 1.00"
    bars = [patch.get_height() for patch in figure.axes[0].patches if hasattr(patch, "get_height")][:5]
    # two heads with the mean 0.5, three with the mean 0.3
    assert bars == pytest.approx([0.9 / 0.5, 0.4 / 0.3, 1.0, 0.2 / 0.3, 0.1 / 0.5])


def test_a_layer_that_lost_heads_is_no_less_balanced():
    """Shares of a layer add up to 1 however many heads it has: no layers are put together, here as in tables."""
    sites = [
        AttentionSite("a", "enc-self", 0, 8),
        AttentionSite("b", "enc-self", 1, 2),
        AttentionSite("c", "enc-self", 2, 1),
    ]
    shares = {site.path: torch.full((site.num_heads,), 1 / site.num_heads) for site in sites}
    figure = plots.importance_distributions({"gated": shares}, sites, "relevance")
    assert figure.axes[0].get_title() == "gated, enc-self\nbalance 1.00"
    assert [patch.get_height() for patch in figure.axes[0].patches][:11] == pytest.approx([1.0] * 11)
    shares["b"] = torch.tensor([0.75, 0.25])  # evenness 0.5
    titles = plots.importance_distributions({"gated": shares}, sites, "relevance").axes[0].get_title()
    assert titles.endswith(f"balance {balance(shares[site.path] for site in sites):.2f}") and "0.75" in titles
    alone = plots.importance_distributions({"gated": {"c": shares["c"]}}, sites, "relevance")
    assert "one head a layer" in alone.axes[0].get_title()


@pytest.mark.slow
def test_files_of_maps_with_many_cells_are_light():
    """Twelve heads that look everywhere alike, in a long sentence: noise, the heaviest there is."""
    weights, tokens = torch.rand(12, 40, 40).softmax(-1), [f"token{n}" for n in range(40)]
    figure = plots.attention_map(weights, tokens, tokens)
    assert len(png_bytes(figure)) < 200_000 and len(drawn := svg_bytes(figure)) < 200_000
    assert drawn.count(b"<image") == 13  # the colour bar, too
    few = svg_bytes(plots.attention_map(weights[:2, :3, :3], tokens[:3], tokens[:3]))
    assert few.count(b"<image") == 1


def test_attention_of_a_sentence_with_its_tokens():
    weights = torch.tensor([[[0.7, 0.3], [0.2, 0.8]], [[0.1, 0.9], [0.5, 0.5]]])
    figure = plots.attention_map(weights, ["$a_b$", "▁x"], ["y", "</s>"], heads=(1, 3), site=SITES[0])
    first, second = panels(figure)
    assert [first.get_title(), second.get_title()] == ["head 1", "head 3"]
    assert grid_of(first).ravel().tolist() == pytest.approx([0.7, 0.3, 0.2, 0.8])
    assert ticks(first.yaxis) == ["$a_b$", "▁x"] and ticks(first.xaxis) == ["y", "</s>"]
    assert not any(label.get_parse_math() for label in first.get_yticklabels())  # a dollar is a dollar
    assert "enc-self, layer 0" in figure.get_suptitle()
    cut = plots.attention_map(torch.full((1, 3, 3), 1 / 3), list("abc"), list("abc"), longest=2)
    assert ticks(panels(cut)[0].yaxis) == ["a", "b"] and "first 2 of 3" in cut.get_suptitle()
    with pytest.raises(ShapeError, match=r"\(2, 2, 2\)"):
        plots.attention_map(weights, ["a"], ["b", "c"])
    with pytest.raises(NonFiniteError, match="head 0"):
        plots.attention_map(weights * float("nan"), ["a", "b"], ["c", "d"])


@pytest.mark.slow
def test_files_are_the_same_every_time_and_settings_stay(tmp_path):
    import matplotlib
    from PIL import Image

    before = dict(matplotlib.rcParams)
    drawn = []
    for name in ("one", "two"):
        figure = plots.source_share([0.9, 0.6], [4, 2])
        png, svg = plots.save_figure(figure, tmp_path / name)
        drawn.append((png.read_bytes(), svg.read_bytes()))
    assert drawn[0] == drawn[1] and drawn[0][1].startswith(b"<?xml")
    with Image.open(io.BytesIO(drawn[0][0])) as picture:
        assert picture.format == "PNG" and len(set(picture.convert("L").tobytes())) > 20
    assert dict(matplotlib.rcParams) == before and sorted(p.name for p in tmp_path.iterdir()) == [
        "one.png", "one.svg", "two.png", "two.svg",
    ]  # fmt: skip
    with pytest.raises(ArgumentError, match="without"):
        plots.save_figure(figure, tmp_path / "three.png")


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.style", None)
    with pytest.raises(MissingPackageError, match=r"pictures need matplotlib: pip install matplotlib$"):
        plots.check_matplotlib()


@pytest.mark.slow
def test_the_package_does_not_import_it():
    code = "import collab_heads, sys; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
