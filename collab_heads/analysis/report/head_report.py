"""`HeadReport`: what an analysis measured, as text, pictures and one page."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from collab_heads.analysis.report.html import Drawing, Section, page
from collab_heads.analysis.report.measurements import HeadMeasurements, group_name, text_of
from collab_heads.analysis.report.page_data import LEGENDS, TITLES, anchor, as_json, heads_of, layer_name, page_data
from collab_heads.analysis.report.pictures import pictures_in, pictures_of
from collab_heads.analysis.report.savings import cheapest, metric_without, savings_html
from collab_heads.analysis.roles.labels import role_kind
from collab_heads.base.extras import missing
from collab_heads.base.progress import progress_bar
from collab_heads.base.report import text_table
from collab_heads.compression.compression_plan import CompressionPlan
from collab_heads.files.atomic import write_file
from collab_heads.files.folders import alone_in
from collab_heads.plots.canvas import png_bytes, save_drawings, svg_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Table = tuple[list[str], list[list[str]]]
NO_ROLE = "no role"
MORE = "A row per head: print(report.to_string()); of collab-heads analyze, --all_heads"


def summary(report: HeadMeasurements) -> Table:
    """Return a table with a row per role: layers, heads, and the mean of every measure."""
    scores, rows = report.scores(), []
    for group in dict.fromkeys(map(group_name, report.sites)):
        sites = [site for site in report.sites if group_name(site) == group]
        row = [group, str(len(sites)), str(sum(site.num_heads for site in sites))]
        rows.append(row + [mean_of([values[s.path] for s in sites if s.path in values]) for values in scores.values()])
    return ["role", "layers", "heads", *(name.replace("_", " ") for name in scores)], rows


def mean_of(values: Sequence[Tensor]) -> str:
    return text_of(float(torch.cat([*values]).double().mean()) if values else None)


def summary_text(report: HeadMeasurements) -> str:
    """Return what was measured, means by role, what heads do, which can go, and notes."""
    about, notes = report.described()[:2], report.described()[2:]
    found = [*roles_text(report), *removal_text(report), *notes]
    compared = [] if report.compared_contributions is None else ["", str(report.compared_contributions)]
    return "\n".join([*about, "", text_table(*summary(report), "\n".join(["", *found])), *compared])


def full_text(report: HeadMeasurements) -> str:
    return f"{summary_text(report)}\n\n{text_table(*report.text_rows(), '')}"


def roles_text(report: HeadMeasurements) -> list[str]:
    if report.roles is None:
        return []
    every = [labels for of_site in report.roles.labels.values() for labels in of_site]
    counts = Counter(kind for labels in every for kind in dict.fromkeys(map(role_kind, labels)))
    counts[NO_ROLE] = sum(not labels for labels in every)
    return ["What heads do: " + ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)]


def removal_text(report: HeadMeasurements) -> list[str]:
    cheap = cheapest(report)
    if cheap is None or not cheap.heads:
        return []
    removed = cheap.by_path()
    where = [
        f"{layer_name(report, site)}: {', '.join(map(str, removed[site.path]))}"
        for site in report.sites
        if site.path in removed
    ]
    total = sum(site.num_heads for site in report.sites)
    measured = [said] if (said := metric_without(report)) else []
    return [
        f"What can go: {len(cheap.heads)} of {total} heads; {cheap.said}:",
        *(f"  {line}" for line in where),
        *measured,
    ]


WITHOUT_PICTURES = "Pictures of some measures are missing: they need matplotlib (pip install matplotlib)"


def full_page(report: HeadMeasurements, drawn: Mapping[str, bytes], plan: CompressionPlan | None = None) -> str:
    """Return the report as one HTML page."""
    figures: dict[str, list[Drawing]] = {}
    pictures = pictures_in(report)
    for picture in pictures:
        if picture.name in drawn:
            figures.setdefault(picture.section, []).append(Drawing(drawn[picture.name], picture.alt))
    names = [anchor(report, head) for head in heads_of(report)]
    sections = [
        Section("What can go, and how", name="savings", html=savings_html(report, plan)),
        Section("Explore", name="explore", html='<div id="explorer"></div>'),
        Section("All heads", LEGENDS["heads"], report.text_rows(), name="all", ids=names),
    ]
    tables = side_tables(report)
    for name in TITLES:
        if name in tables or name in figures:
            sections.append(Section(TITLES[name], LEGENDS[name], tables.get(name), tuple(figures.get(name, ()))))
    missing = [WITHOUT_PICTURES] if any(picture.name not in drawn for picture in pictures) else []
    lead, rest = report.described()[:2], [*report.described()[2:], *missing]
    sections.append(
        Section("What was measured", " ".join(f"{line}." for line in rest), summary(report), name="measured")
    )
    warnings = () if report.roles is None else report.roles.warnings
    return page(f"Heads of {report.model}", sections, as_json(page_data(report)), lead, warnings)


def side_tables(report: HeadMeasurements) -> dict[str, Table]:
    """Return section -> the table beside its pictures: dependencies, contributions, rank correlations."""
    tables = {}
    if report.roles is not None and report.roles.baselines:
        best = []
        for kind, baseline in report.roles.baselines.items():
            scores = [
                (float(value), site, report.heads[site.path][place])
                for site in report.sites
                for place, value in enumerate(report.roles.syntax.get(site.path, {}).get(kind, ()))
            ]
            value, site, head = max(scores, key=lambda each: each[0])
            where = f"{site.role}, layer {site.layer}, head {head}"
            best.append([" ".join(kind), str(baseline.queries), f"{baseline.accuracy:.3f}", f"{value:.3f}", where])
        tables["roles"] = (["dependency", "words", "best fixed offset", "best head", "which"], best)
    if report.compared_contributions is not None:
        tables["contributions"] = report.compared_contributions.table()
    elif report.contributions is not None:
        tables["contributions"] = report.contributions.table()
    if report.ablation is not None:
        rows = [[name.replace("_", " "), f"{value:+.2f}"] for name, value in report.correlations().items()]
        tables["ablation"] = (["measure", f"rank correlation with the harm to {report.ablation.metric}"], rows)
    return tables


class HeadReport(HeadMeasurements):
    """The result of `analyze_heads`: the measurements, see `HeadMeasurements`, and ways to show them.

    `print(report)` shows a summary: means by role, what heads do, which of them can go. `to_string()` adds a row per
    head, as pandas' `DataFrame.to_string()` does; `pandas.DataFrame(rows, columns=header)` takes what `rows()` returns.
    """

    def lines(self) -> list[str]:
        return [summary_text(self), MORE]

    def to_string(self) -> str:
        """Return the summary of `str(report)` and below it a table with a row per head."""
        return full_text(self)

    def plot(self) -> "dict[str, Figure]":
        """Draw every picture and return them by name; needs matplotlib (`pip install matplotlib`)."""
        pictures = pictures_of(self)
        with progress_bar(pictures, desc="drawing") as drawn:
            return {each.name: each.draw() for each in drawn}

    def to_html(self, plan: CompressionPlan | None = None) -> str:
        """Return one self-contained page to explore: maps, tables, sentences, legends.

        Curves and distributions are pictures, which need matplotlib; without it they are left out, and the page says
        so.

        Args:
            plan: the plan that `collab_heads.compression.plan` returned for the model, to show what budgets cost; or
                None.
        """
        pictures = [] if missing("plots") else pictures_in(self)
        return full_page(self, {each.name: png_bytes(each.draw()) for each in pictures}, plan)

    def save_html(self, path: str | Path, plan: CompressionPlan | None = None) -> Path:
        """Write the page of `to_html`; it replaces an existing file only when complete."""
        return write_file(path, self.to_html(plan).encode("utf-8"))

    def save(self, folder: str | Path, plan: CompressionPlan | None = None) -> Path:
        """Write `report.html`, `report.json`, and every picture as PNG and SVG into a folder.

        Pictures need matplotlib; without it they are left out, and the page says so. The page and the pictures are
        complete before the first file is written.

        Returns:
            The path of `report.html`.
        """
        with alone_in(folder):
            folder, figures = Path(folder), {} if missing("plots") else self.plot()
            drawn = {name: (png_bytes(figure), svg_bytes(figure)) for name, figure in figures.items()}
            page = full_page(self, {name: png for name, (png, _) in drawn.items()}, plan)
            for name, drawings in drawn.items():
                save_drawings(folder / name, *drawings)
            write_file(folder / "report.json", (self.to_json() + "\n").encode())
            return write_file(folder / "report.html", page.encode("utf-8"))
