"""The pictures and the page of a report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from collab_heads.analysis import plots
from collab_heads.analysis.measures.ablation import Ablation
from collab_heads.analysis.report.html import Section, page
from collab_heads.analysis.report.legends import LEGENDS, TITLES
from collab_heads.analysis.report.measurements import HeadMeasurements
from collab_heads.analysis.roles.labels import HeadRoles, role_kind
from collab_heads.sites import ROLES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN_AS_DISTRIBUTION = ("relevance", "gradient")  # whose distribution over heads is shown
# measure -> its section of the page, where that has another name
SECTIONS = {"leave_one_out": "ablation", "absolute_relevance": "relevance"}


@dataclass(frozen=True)
class Picture:
    """One picture of a report.

    Attributes:
        name: of its file.
        section: of the page.
        draw: makes it.
    """

    name: str
    section: str
    draw: "Callable[[], Figure]"


def pictures_of(report: HeadMeasurements) -> list[Picture]:
    """Every picture that the report has numbers for, in the order of the page."""
    pictures = [*head_maps_of(report), *matrices_of(report)]
    if report.contributions is not None:
        shares, counts = report.contributions.source, report.contributions.counts.tolist()
        label = f"share of the {report.contributions.names[0]}"
        draw_shares = partial(plots.source_share, shares, counts, label=label)
        pictures.append(Picture("source_share", "contributions", draw_shares))
    if report.curves and report.ablation is not None:
        pictures.append(Picture("quality", "ablation", partial(quality, report, report.ablation)))
    if report.gate_history is not None and report.gate_history.steps:
        pictures.append(Picture("gate_history", "gate", lambda: plots.gate_strip(report.gate_history)))
    for number, example in enumerate(report.examples):
        for site in report.sites:

            def draw(example=example, site=site) -> "Figure":
                return plots.attention_map(*example.of(site), heads=report.heads[site.path], site=site)

            pictures.append(Picture(f"attention_{number}_{site.role}_{site.layer}", "examples", draw))
    return pictures


def head_maps_of(report: HeadMeasurements) -> list[Picture]:
    """Layer by head: a map of every measure, one of what heads do, and how evenly importance is spread."""
    pictures, common = [], {"heads": report.heads, "totals": {s.path: report.totals[s.path] for s in report.sites}}
    if report.roles is not None:
        kinds = {
            path: [[role_kind(label) for label in labels] or "none" for labels in every]
            for path, every in report.roles.labels.items()
        }
        pictures.append(Picture("roles", "roles", lambda: plots.role_map(report.sites, kinds, **common)))
        pictures += shares_of(report, report.roles, common)
    for name, scores in report.scores().items():

        def draw(name=name, scores=scores) -> "Figure":
            return plots.head_map(report.sites, scores, label=name.replace("_", " "), **common)

        pictures.append(Picture(name, SECTIONS.get(name, name), draw))
        if name in SHOWN_AS_DISTRIBUTION:

            def spread(name=name, scores=scores) -> "Figure":
                return plots.importance_distributions({report.model_type: scores}, report.sites, name)

            pictures.append(Picture(f"{name}_distribution", name, spread))
    return pictures


def shares_of(report: HeadMeasurements, roles: HeadRoles, common: dict) -> list[Picture]:
    """How close every head comes to a role: the largest share of its best offset, and that of the rarest token."""
    offsets = {path: numbers.share for path, numbers in roles.positional.items()}
    rare = {path: numbers.rarest for path, numbers in roles.rare.items()}
    named = {"positional": (offsets, "share on the best offset"), "rare_tokens": (rare, "share on the rarest token")}
    return [
        Picture(name, "roles", partial(plots.head_map, report.sites, shares, label=label, **common))
        for name, (shares, label) in named.items()
        if shares
    ]


def matrices_of(report: HeadMeasurements) -> list[Picture]:
    """Head by head: similarity, and the alphas of mixed heads."""
    pictures, statistics = [], report.statistics
    for name, label in (("cosine", "cosine of outputs"), ("l2", "distance of outputs")):
        matrices = {} if statistics is None else getattr(statistics, name)
        if any(len(matrix) > 1 for matrix in matrices.values()):

            def draw(matrices=matrices, label=label, name=name) -> "Figure":
                centre = 0.0 if name == "cosine" else None
                return plots.matrix_maps(
                    report.sites, matrices, heads=report.heads, label=label, centre=centre, diagonal=False
                )

            pictures.append(Picture(name, "similarity", draw))
    if statistics is not None and statistics.alphas:
        alphas, heads = statistics.alphas, report.heads
        pictures.append(Picture("alphas", "alphas", lambda: plots.alpha_maps(report.sites, alphas, heads=heads)))
    return pictures


def quality(report: HeadMeasurements, ablation: Ablation) -> "Figure":
    """Quality against heads kept, a curve per measure."""
    total = sum(site.num_heads for site in report.sites)
    curves = {name.replace("_", " "): points for name, points in report.curves.items()}
    return plots.quality_curves(curves, original=ablation.original, metric=ablation.metric, total=total)


def page_of(report: HeadMeasurements, drawn: Mapping[str, bytes]) -> str:
    """The whole report as one HTML page, with its pictures as PNG, by name."""
    figures: dict[str, list] = {}
    for picture in pictures_of(report):
        figures.setdefault(picture.section, []).append(drawn[picture.name])
    tables = {"heads": report.rows(), "summary": summary(report)} | side_tables(report)
    sections = [Section("What was measured", " ".join(f"{line}." for line in report.described()), tables["summary"])]
    for name in TITLES:
        if name in tables or name in figures:
            sections.append(Section(TITLES[name], LEGENDS[name], tables.get(name), tuple(figures.get(name, ()))))
    return page(f"Heads of {report.model}", sections)


def summary(report: HeadMeasurements) -> tuple[list[str], list[list[str]]]:
    """A row per role: heads, and the mean of every measure."""
    scores = report.scores()
    rows = []
    for role in ROLES:
        sites = [site for site in report.sites if site.role == role]
        if not sites:
            continue
        count = sum(site.num_heads for site in sites)
        row = [role, str(len(sites)), str(count)]
        rows.append(row + [mean_of([values[s.path] for s in sites if s.path in values]) for values in scores.values()])
    return ["role", "layers", "heads", *(name.replace("_", " ") for name in scores)], rows


def mean_of(values: Sequence[Tensor]) -> str:
    """The mean over the heads of some sites, for a table; empty where there are none."""
    return f"{float(torch.cat([*values]).double().mean()):.3f}" if values else ""


def side_tables(report: HeadMeasurements) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Tables beside pictures: rank correlations, curves, baselines of dependencies."""
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
            best.append([" ".join(kind), f"{baseline.accuracy:.3f}", f"{value:.3f}", where])
        tables["roles"] = (["dependency", "best fixed offset", "best head", "which"], best)
    if report.ablation is not None:
        rows = [[name.replace("_", " "), f"{value:+.2f}"] for name, value in report.correlations().items()]
        tables["ablation"] = (["measure", f"rank correlation with the harm to {report.ablation.metric}"], rows)
    return tables
