"""The report of `analyze_heads`: what was measured, as text, as pictures and as a page."""

from pathlib import Path
from typing import TYPE_CHECKING

from transformers.utils.logging import tqdm

from collab_heads.analysis.plots import gate_animation
from collab_heads.analysis.plots.canvas import png_bytes, svg_bytes
from collab_heads.analysis.plots.files import save_drawings
from collab_heads.analysis.report.measurements import HeadMeasurements
from collab_heads.analysis.report.pictures import page_of, pictures_of
from collab_heads.files import write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class HeadReport(HeadMeasurements):
    """What `analyze_heads` measured, see `HeadMeasurements`, and how it is shown."""

    def plot(self) -> "dict[str, Figure]":
        """Every picture, by name; needs matplotlib (`pip install matplotlib`)."""
        pictures = pictures_of(self)
        return {each.name: each.draw() for each in tqdm(pictures, desc="drawing", leave=False)}

    def to_html(self) -> str:
        """One self-contained page: tables, pictures, legends; needs matplotlib."""
        return page_of(self, {name: png_bytes(figure) for name, figure in self.plot().items()})

    def save_html(self, path: str | Path) -> Path:
        """Write the page; an old one is replaced when the new one is complete."""
        return write_file(path, self.to_html().encode("utf-8"))

    def save(self, folder: str | Path) -> Path:
        """Write `report.html`, `report.json`, and every picture as PNG and SVG, into a folder.

        Gates over training become an animation, `gate_history.gif`, too. Everything is made before anything is written.
        """
        folder = Path(folder)
        drawn = {name: (png_bytes(figure), svg_bytes(figure)) for name, figure in self.plot().items()}
        page = page_of(self, {name: png for name, (png, _) in drawn.items()})
        for name, drawings in drawn.items():
            save_drawings(folder / name, *drawings)
        if self.gate_history is not None and self.gate_history.steps:
            gate_animation(self.gate_history, folder / "gate_history.gif")
        write_file(folder / "report.json", (self.to_json() + "\n").encode())
        return write_file(folder / "report.html", page.encode("utf-8"))
