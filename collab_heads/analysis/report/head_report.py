"""The report of `analyze_heads`: what was measured, as text, as pictures and as a page."""

from pathlib import Path
from typing import TYPE_CHECKING

from collab_heads.analysis.plots import gate_animation
from collab_heads.analysis.plots.canvas import png_bytes, svg_bytes
from collab_heads.analysis.plots.files import save_drawings
from collab_heads.analysis.report.full_page import full_page
from collab_heads.analysis.report.measurements import HeadMeasurements
from collab_heads.analysis.report.pictures import pictures_in, pictures_of
from collab_heads.analysis.report.savings import Plan
from collab_heads.bars import progress_bar
from collab_heads.extras import missing
from collab_heads.files import write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class HeadReport(HeadMeasurements):
    """What `analyze_heads` measured, see `HeadMeasurements`, and how it is shown."""

    def plot(self) -> "dict[str, Figure]":
        """Every picture, by name; needs matplotlib (`pip install matplotlib`)."""
        pictures = pictures_of(self)
        return {each.name: each.draw() for each in progress_bar(pictures, desc="drawing", leave=False)}

    def to_html(self, plan: Plan | None = None) -> str:
        """One page to explore, with all it needs: maps, tables, sentences, legends.

        Curves and distributions are pictures, which need matplotlib; without it they are left out, and it says so.

        Args:
            plan: what `collab_heads.compression.plan` returned for the model, to show what budgets cost; or None.
        """
        pictures = [] if missing("plots") else pictures_in(self)
        return full_page(self, {each.name: png_bytes(each.draw()) for each in pictures}, plan)

    def save_html(self, path: str | Path, plan: Plan | None = None) -> Path:
        """Write the page, see `to_html`; an old one is replaced when the new one is complete."""
        return write_file(path, self.to_html(plan).encode("utf-8"))

    def save(self, folder: str | Path, plan: Plan | None = None) -> Path:
        """Write `report.html`, `report.json`, and every picture as PNG and SVG, into a folder.

        Gates over training become an animation, `gate_history.gif`, too. Pictures need matplotlib; without it they are
        left out, and the page says so. Everything is made before anything is written.
        """
        folder, figures = Path(folder), {} if missing("plots") else self.plot()
        drawn = {name: (png_bytes(figure), svg_bytes(figure)) for name, figure in figures.items()}
        page = full_page(self, {name: png for name, (png, _) in drawn.items()}, plan)
        for name, drawings in drawn.items():
            save_drawings(folder / name, *drawings)
        if figures and self.gate_history is not None and self.gate_history.steps:
            gate_animation(self.gate_history, folder / "gate_history.gif")
        write_file(folder / "report.json", (self.to_json() + "\n").encode())
        return write_file(folder / "report.html", page.encode("utf-8"))
