"""The pictures of a report."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from collab_heads import plots
from collab_heads.analysis.measures.ablation import Ablation
from collab_heads.analysis.relevance.contribution_results import PARTS, TokenContributions
from collab_heads.analysis.report.measurements import HeadMeasurements, Scores, group_name
from collab_heads.analysis.report.page_data import SECTIONS, first_shown, measure_title
from collab_heads.analysis.roles.labels import HeadRoles, role_kind
from collab_heads.heads.comparison import balance
from collab_heads.heads.history import GATES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN_AS_DISTRIBUTION = ("relevance", "gradient")  # measures whose distribution over heads is shown


@dataclass(frozen=True)
class Picture:
    """One picture of a report.

    Attributes:
        name: the name of its file.
        section: its section of the page.
        draw: draws it.
        alt: a description, for the page; empty if the page shows the same as something to explore.
    """

    name: str
    section: str
    draw: "Callable[[], Figure]"
    alt: str = ""


def pictures_of(report: HeadMeasurements) -> list[Picture]:
    """Return every picture that the report has numbers for, in the order of the page."""
    pictures = [*head_maps_of(report), *matrices_of(report)]
    if report.contributions is not None:
        shares, counts = report.contributions.source, report.contributions.counts.tolist()
        label = f"share of the {report.contributions.names[0]}"
        draw_shares = partial(plots.source_share, shares, counts, label=label)
        ends = f"{shares[0]:.2f} at the first token, {shares[-1]:.2f} at the last"
        alt = f"{label[:1].upper()}{label[1:]} by position: {ends}"
        pictures.append(Picture("source_share", "contributions", draw_shares, alt))
        pictures += contributions_of(report, report.contributions)
    if report.curves and report.ablation is not None:
        draw_quality = partial(quality, report, report.ablation)
        pictures.append(Picture("quality", "ablation", draw_quality, quality_in_words(report, report.ablation)))
    if report.gate_history is not None and (seen := report.gate_history.where(GATES)):
        alt = f"The probability of every gate to be open, over {len(seen)} steps of training"
        pictures.append(Picture("gate_history", "gate", lambda: plots.history_strip(report.gate_history, GATES), alt))
    return pictures + attention_of(report)


def pictures_in(report: HeadMeasurements) -> list[Picture]:
    """Return the pictures of the page: those that it shows in no other form."""
    return [picture for picture in pictures_of(report) if picture.alt]


def contributions_of(report: HeadMeasurements, contributions: TokenContributions) -> list[Picture]:
    pictures, compared = [], report.compared_contributions
    draw = partial((compared or contributions).plot, PARTS)
    alt = f"Contributions over a sentence: {contributions.summary()}"
    pictures.append(Picture("contributions", "contributions", draw, alt))
    if compared is not None and len(compared.models()) > 1:
        means = zip(compared.models(), compared.over_models("source"), strict=True)
        ends = [f"{share:.2f} of {name}" for name, (share, _) in means]
        alt = f"Contributions by model: the share of the {contributions.names[0]} is {', '.join(ends)}"
        pictures.append(Picture("contribution_history", "contributions", compared.plot_history, alt))
    if (example := report.contribution_example) is not None:
        words = (example.source_tokens, example.target_tokens, example.said)
        show = partial(plots.contribution_map, example.source, example.target, *words, names=example.names)
        alt = f"What each token gives to each of the {len(example.said)} generated tokens of a sentence"
        pictures.append(Picture("contribution_map", "contributions", show, alt))
    return pictures


def attention_of(report: HeadMeasurements) -> list[Picture]:
    pictures = []
    for example in report.examples[first_shown(report) :][:1]:
        for site in report.sites:

            def draw(example=example, site=site) -> "Figure":
                return plots.attention_map(*example.of(site), heads=report.heads[site.path], site=site)

            pictures.append(Picture(f"attention_{group_name(site).replace(' ', '-')}_{site.layer}", "examples", draw))
    return pictures


def head_maps_of(report: HeadMeasurements) -> list[Picture]:
    """Return maps layer x head: of every measure and of roles, with the distributions of importance."""
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

            alt = f"{measure_title(name)} of all heads, sorted, in units of the mean of their layer"
            pictures.append(Picture(f"{name}_distribution", name, spread, f"{alt}: {balances(report, scores)}"))
    return pictures


def shares_of(report: HeadMeasurements, roles: HeadRoles, common: dict) -> list[Picture]:
    """Return maps of how close heads come to a role: the share on the best offset, and on the rarest token."""
    offsets = {path: numbers.share for path, numbers in roles.positional.items()}
    rare = {path: numbers.rarest for path, numbers in roles.rare.items()}
    named = {"positional": (offsets, "share on the best offset"), "rare_tokens": (rare, "share on the rarest token")}
    return [
        Picture(name, "roles", partial(plots.head_map, report.sites, shares, label=label, **common))
        for name, (shares, label) in named.items()
        if shares
    ]


def matrices_of(report: HeadMeasurements) -> list[Picture]:
    """Return maps head x head: similarity, and the alphas of mixed heads."""
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
        far = max(float((alpha - torch.eye(len(alpha)).double()).abs().max()) for alpha in alphas.values())
        alt = f"The difference of every alpha from the identity: {far:.2f} at most"
        pictures.append(Picture("alphas", "alphas", lambda: plots.alpha_maps(report.sites, alphas, heads=heads), alt))
    return pictures


def quality(report: HeadMeasurements, ablation: Ablation) -> "Figure":
    total = sum(site.num_heads for site in report.sites)
    curves = {name.replace("_", " "): points for name, points in report.curves.items()}
    return plots.quality_curves(curves, original=ablation.original, metric=ablation.metric, total=total)


def quality_in_words(report: HeadMeasurements, ablation: Ablation) -> str:
    ends = [(name.replace("_", " "), min(points)) for name, points in report.curves.items()]
    worst = ", ".join(f"{value:.4g} with {kept} heads by {name}" for name, (kept, value) in ends)
    return f"The {ablation.metric} against heads kept, by measure: {ablation.original:.4g} with all heads, {worst}"


def balances(report: HeadMeasurements, scores: Scores) -> str:
    said = []
    for role in dict.fromkeys(site.role for site in report.sites):
        number = balance(scores[site.path] for site in report.sites if site.role == role)
        said += [] if number is None else [f"balance {number:.2f} in {role}"]
    return ", ".join(said) or "one head a layer"
