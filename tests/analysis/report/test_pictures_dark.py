"""Pictures for dark pages: ink and ground change places, data keeps its colours."""

import io

import pytest
import torch

pytest.importorskip("matplotlib")

from collab_heads import AttentionSite
from collab_heads.analysis import plots
from collab_heads.analysis.plots.canvas import OKABE_ITO, png_bytes
from collab_heads.analysis.report.pictures import GROUND, INK, dark_png_bytes

image = pytest.importorskip("PIL.Image")
SITES = [AttentionSite("one", "enc-self", 0, 4)]


def colours(png: bytes) -> dict[str, int]:
    """Colour -> its number of pixels."""
    with image.open(io.BytesIO(png)) as picture:
        found = picture.convert("RGB").getcolors(1 << 24)
    return {f"#{red:02x}{green:02x}{blue:02x}": count for count, (red, green, blue) in found}


def test_ground_and_ink_are_those_of_the_page_and_lines_keep_their_colours():
    figure = plots.quality_curves({"one": [(1, 2.0), (4, 1.0)]}, original=0.9, metric="loss", total=4)
    light, dark = colours(png_bytes(figure)), colours(dark_png_bytes(figure))
    assert max(light, key=light.get) == "#ffffff" and max(dark, key=dark.get) == GROUND
    assert "#ffffff" not in dark and "#000000" not in dark and dark[INK] > 100
    line = OKABE_ITO[0].lower()
    assert dark[line] == pytest.approx(light[line], rel=0.05)


def test_numbers_on_cells_stay_as_they_can_be_read():
    figure = plots.head_map(SITES, {"one": torch.tensor([0.0, 0.3, 0.6, 1.0])}, label="share")
    before = [text.get_color() for text in figure.axes[0].texts]
    assert {*before} == {"black", "white"}
    dark = colours(dark_png_bytes(figure))
    assert [text.get_color() for text in figure.axes[0].texts] == before
    assert {"#440154", "#fde725"} <= dark.keys()  # the ends of the scale
    assert {label.get_color() for label in figure.axes[0].get_xticklabels()} == {INK}


def test_markers_and_steps_are_ink_once():
    """A colour that follows another one is not changed twice; black that is data becomes ink, too."""
    values = {"one": torch.tensor([1.0, 2.0, 3.0, 4.0])}
    figure = plots.importance_distributions({"a": values, "b": values}, SITES)
    assert GROUND not in {line.get_color() for axes in figure.axes for line in axes.lines}
    dark_png_bytes(figure)
    for line in (line for axes in figure.axes for line in axes.lines):
        assert sum(line.get_color()[:3]) > 1.5
    assert figure.get_facecolor()[:3] == pytest.approx([int(GROUND[i : i + 2], 16) / 255 for i in (1, 3, 5)])
