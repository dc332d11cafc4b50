"""A report as text: a summary first, and a row per head if it is asked for."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from collab_heads.analysis.report.measurements import HeadMeasurements, group_name
from collab_heads.analysis.report.page_data import layer_name
from collab_heads.analysis.report.savings import cheapest
from collab_heads.analysis.roles.labels import role_kind
from collab_heads.base.display import text_table

Table = tuple[list[str], list[list[str]]]
NO_ROLE = "no role"
MORE = "A row per head: print(report.to_string()); on the command line --all_heads"


def summary(report: HeadMeasurements) -> Table:
    """Return a table with a row per role: layers, heads, and the mean of every measure."""
    scores, rows = report.scores(), []
    for group in dict.fromkeys(map(group_name, report.sites)):
        sites = [site for site in report.sites if group_name(site) == group]
        row = [group, str(len(sites)), str(sum(site.num_heads for site in sites))]
        rows.append(row + [mean_of([values[s.path] for s in sites if s.path in values]) for values in scores.values()])
    return ["role", "layers", "heads", *(name.replace("_", " ") for name in scores)], rows


def mean_of(values: Sequence[Tensor]) -> str:
    """Format the mean over the heads of some sites for a table; empty without values."""
    return f"{float(torch.cat([*values]).double().mean()):.3f}" if values else ""


def summary_text(report: HeadMeasurements) -> str:
    """Return what was measured, means by role, what heads do, which can go, and notes."""
    about, notes = report.described()[:2], report.described()[2:]
    found = [*roles_text(report), *removal_text(report), *notes]
    compared = [] if report.compared_contributions is None else ["", str(report.compared_contributions)]
    return "\n".join([*about, "", text_table(*summary(report), "\n".join(["", *found])), *compared])


def full_text(report: HeadMeasurements) -> str:
    """Return the summary and a row per head."""
    return f"{summary_text(report)}\n\n{text_table(*report.rows(), '')}"


def roles_text(report: HeadMeasurements) -> list[str]:
    """Return a line on how many heads have a role; a head may have several."""
    if report.roles is None:
        return []
    every = [labels for of_site in report.roles.labels.values() for labels in of_site]
    counts = Counter(kind for labels in every for kind in dict.fromkeys(map(role_kind, labels)))
    counts[NO_ROLE] = sum(not labels for labels in every)
    return ["What heads do: " + ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)]


def removal_text(report: HeadMeasurements) -> list[str]:
    """Return lines on the heads that can go, and what the layers lose without them."""
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
    return [f"What can go: {len(cheap.heads)} of {total} heads; {cheap.said}:", *(f"  {line}" for line in where)]
