"""What an analysis found about the heads of a model: for people, for machines, as pictures, as a page."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.utils.logging import tqdm

from collab_heads.analysis.ablation import Ablation
from collab_heads.analysis.contributions import TokenContributions
from collab_heads.analysis.correlation import rank_correlation
from collab_heads.analysis.examples import Example
from collab_heads.analysis.gate_history import GateHistory
from collab_heads.analysis.labels import HeadRoles
from collab_heads.analysis.relevance import HeadRelevance
from collab_heads.analysis.results import OF_HEADS, HeadStatistics
from collab_heads.files import write_file
from collab_heads.sites import AttentionSite
from collab_heads.tables import text_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Scores = Mapping[str, Tensor]
# what says how much a head matters: the measures that are compared with leaving heads out, and that order a curve
IMPORTANCE = ("confidence", "relevance", "absolute_relevance", "gradient")


@dataclass(frozen=True, eq=False)
class HeadReport:
    """What `analyze_heads` measured. What was not measured is None or empty.

    Attributes:
        model: its class and, where it was loaded from somewhere, that.
        model_type: as its config says.
        sites: the sites that have heads, in model order.
        heads: path -> the original numbers of their heads.
        totals: path -> how many heads the site had, also of sites that lost all.
        data: what was measured on: a description, sentences, query tokens of every role.
        statistics: confidence, entropy, attention distance, similarity, alphas.
        roles: positional, rare-token and syntactic heads.
        relevance: by conservative propagation.
        gradient: path -> [H], importance by gradients of the loss.
        contributions: of source and target to generated tokens.
        ablation: the metric without each head.
        curves: measure -> (heads kept, metric).
        gates: path -> [H], P(open) of the gates that the model has now.
        gate_history: the same over training.
        examples: attention maps of some sentences.
        seconds: part -> how long it took.
        notes: what a reader must know: what was left out, and why.
    """

    model: str
    model_type: str
    sites: tuple[AttentionSite, ...]
    heads: Mapping[str, tuple[int, ...]]
    totals: Mapping[str, int]
    data: Mapping[str, object]
    statistics: HeadStatistics | None = None
    roles: HeadRoles | None = None
    relevance: HeadRelevance | None = None
    gradient: Scores | None = None
    contributions: TokenContributions | None = None
    ablation: Ablation | None = None
    curves: Mapping[str, list[tuple[int, float]]] = field(default_factory=dict)
    gates: Scores = field(default_factory=dict)
    gate_history: GateHistory | None = None
    examples: tuple[Example, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def scores(self) -> dict[str, Scores]:
        """Measure -> path -> [H]: everything that is a number per head, float64 on the CPU."""
        found: dict[str, Scores] = {}
        if (statistics := self.statistics) is not None:
            found |= {name: getattr(statistics, name) for name in OF_HEADS if name in statistics.measures}
            if "l2" in statistics.measures:
                found["l2_distance"] = {site.path: statistics.distance(site.path) for site in self.sites}
        if self.relevance is not None:
            found["relevance"] = self.relevance.relevance
            found["absolute_relevance"] = {path: signed.abs() for path, signed in self.relevance.signed.items()}
        if self.gradient is not None:
            found["gradient"] = self.gradient
        if self.ablation is not None:
            found["leave_one_out"] = self.ablation.harm()
        if self.gates:
            found["gate"] = self.gates
        return found

    def correlations(self) -> dict[str, float]:
        """Measure -> rank correlation with the harm of leaving each head out; empty without an ablation."""
        scores = self.scores()
        harm = scores.get("leave_one_out")
        if harm is None:
            return {}
        paths = list(harm)
        loss = torch.cat([harm[path] for path in paths])
        return {
            name: rank_correlation(torch.cat([scores[name][path].double() for path in paths]), loss)
            for name in IMPORTANCE
            if name in scores
        }

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """A table of all heads: its header, and a row per head."""
        scores = self.scores()
        header = ["role", "layer", "head", *(name.replace("_", " ") for name in scores)]
        rows = []
        for site in self.sites:
            for place, number in enumerate(self.heads[site.path]):
                row = [site.role, str(site.layer), str(number)]
                row += [f"{float(s[site.path][place]):.3f}" if site.path in s else "" for s in scores.values()]
                rows.append(row + ([", ".join(self.roles.labels[site.path][place])] if self.roles else []))
        return header + (["what it does"] if self.roles else []), rows

    def described(self) -> list[str]:
        """What was measured on which data, in sentences."""
        tokens = ", ".join(f"{count:,} of {role}" for role, count in self.data["query_tokens"].items())
        lines = [f"{self.model} ({self.model_type}): {sum(site.num_heads for site in self.sites)} heads"]
        lines[0] += f" of {sum(self.totals.values())}" if sum(self.totals.values()) > len(self.rows()[1]) else ""
        lines.append(f"Data: {self.data['name']}, {self.data['sentences']:,} sentences; query tokens: {tokens}")
        for name, value in self.correlations().items():
            lines.append(f"Rank correlation of {name} with the harm of leaving a head out: {value:+.2f}")
        return lines + [note[:1].upper() + note[1:] for note in self.notes]

    def __str__(self) -> str:
        return text_table(*self.rows(), "\n".join(self.described()))

    def to_dict(self) -> dict:
        """All numbers, ready for JSON; without the attention maps of the examples."""
        whole = {
            "model": self.model,
            "model_type": self.model_type,
            "sites": [asdict(site) for site in self.sites],
            "heads": {path: list(numbers) for path, numbers in self.heads.items()},
            "totals": dict(self.totals),
            "data": dict(self.data),
            "curves": {name: [list(point) for point in points] for name, points in self.curves.items()},
            "gates": as_lists(self.gates),
            "seconds": dict(self.seconds),
            "notes": list(self.notes),
            "correlations": self.correlations(),
            "gradient": None if self.gradient is None else as_lists(self.gradient),
            "examples": [{side: list(tokens) for side, tokens in each.tokens.items()} for each in self.examples],
        }
        for name in ("statistics", "roles", "relevance", "contributions", "ablation"):
            found = getattr(self, name)
            whole[name] = None if found is None else found.to_dict()
        return whole

    def to_json(self) -> str:
        """All numbers, as `to_dict` has them."""
        return json.dumps(self.to_dict(), allow_nan=False)

    def plot(self) -> "dict[str, Figure]":
        """Every picture, by name; needs matplotlib (`pip install matplotlib`)."""
        from collab_heads.analysis.pictures import pictures_of

        pictures = pictures_of(self)
        return {each.name: each.draw() for each in tqdm(pictures, desc="drawing", leave=False)}

    def to_html(self) -> str:
        """One self-contained page: tables, pictures, legends; needs matplotlib."""
        from collab_heads.analysis.pictures import page_of
        from collab_heads.analysis.plots.canvas import png_bytes

        return page_of(self, {name: png_bytes(figure) for name, figure in self.plot().items()})

    def save_html(self, path: str | Path) -> Path:
        """Write the page, aside and renamed; what was there is replaced."""
        return write_file(path, self.to_html().encode("utf-8"))

    def save(self, folder: str | Path) -> Path:
        """Write `report.html`, `report.json`, and every picture as PNG and SVG, into a folder.

        Gates over training become an animation, `gate_history.gif`, too. Everything is made before anything is written.
        """
        from collab_heads.analysis.pictures import page_of
        from collab_heads.analysis.plots import gate_animation
        from collab_heads.analysis.plots.canvas import png_bytes, svg_bytes
        from collab_heads.analysis.plots.files import save_drawings

        folder = Path(folder)
        drawn = {name: (png_bytes(figure), svg_bytes(figure)) for name, figure in self.plot().items()}
        page = page_of(self, {name: png for name, (png, _) in drawn.items()})
        for name, drawings in drawn.items():
            save_drawings(folder / name, *drawings)
        if self.gate_history is not None and self.gate_history.steps:
            gate_animation(self.gate_history, folder / "gate_history.gif")
        write_file(folder / "report.json", (self.to_json() + "\n").encode())
        return write_file(folder / "report.html", page.encode("utf-8"))


def as_lists(scores: Scores) -> dict[str, list[float]]:
    """Numbers of heads, ready for JSON."""
    return {path: values.tolist() for path, values in scores.items()}
