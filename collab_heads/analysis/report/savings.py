"""Savings: what can be removed from a model, and how, from the measurements of the report alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import combinations

from collab_heads.analysis.report.html import table_html
from collab_heads.analysis.report.measurements import HeadMeasurements
from collab_heads.analysis.report.page_data import Head, anchor, heads_of, layer_name
from collab_heads.compression.compression_plan import CompressionPlan

CHEAPEST = 0.1  # share of the heads that is named
MOST = 12  # heads that are named, at most
KEPT = (0.9, 0.75, 0.5, 0.25)  # shares of the heads, for the price of fewer
PAIRS = 5  # pairs of heads that are named
ALIKE = 0.7  # the cosine of heads that put out nearly the same: the angle between them is below 45 degrees
BUDGETS = (0.9, 0.75, 0.5, 0.33, 0.25, 0.1)


@dataclass(frozen=True)
class Cheap:
    """The heads that cost least when all of them are removed and W_O is refitted.

    Attributes:
        heads: the heads, each with its cost once it and the cheaper ones of its site are removed. The cheapest first.
        of_stream: whether costs are shares of the variance of the residual stream, or of that of the layer's output.
    """

    heads: Sequence[tuple[Head, float]]
    of_stream: bool

    def by_path(self) -> dict[str, list[int]]:
        """Return the heads as `prune_heads` takes them."""
        chosen: dict[str, list[int]] = {}
        for head, _ in self.heads:
            chosen.setdefault(head.site.path, []).append(head.number)
        return {path: sorted(numbers) for path, numbers in chosen.items()}

    def lost(self) -> dict[str, float]:
        """Return path -> the cost of all heads that a site loses, for the sites that lose heads."""
        # costs are joint and rise within a site: the last removal has the cost of all
        return {head.site.path: cost for head, cost in self.heads}

    @property
    def said(self) -> str:
        worst = percent(max(self.lost().values()))
        return f"without them, W_O refitted, {what_changes(self.of_stream)} by {worst} of its variance at most"


def what_changes(of_stream: bool) -> str:
    return "a layer changes the residual stream" if of_stream else "the output of a layer changes"


def percent(share: float) -> str:
    """Return a share in per cent, with one decimal, or with two digits where it is small."""
    return f"{share:.1%}" if share >= 0.01 or share < 1e-6 else f"{100 * share:.2g}%"


def cheapest(report: HeadMeasurements, count: int | None = None) -> Cheap | None:
    """Return the heads that cost least together; every site keeps at least one. None if costs were not measured."""
    if report.reconstruction is None:
        return None
    costs = report.reconstruction
    ranked = sorted(
        ((head, float(costs[head.site.path][head.index])) for head in heads_of(report)), key=lambda each: each[1]
    )
    wanted = min(MOST, math.ceil(CHEAPEST * len(ranked))) if count is None else count
    left = {site.path: site.num_heads for site in report.sites}
    chosen: list[tuple[Head, float]] = []
    for head, cost in ranked:
        if len(chosen) < wanted and left[head.site.path] > 1:
            left[head.site.path] -= 1
            chosen.append((head, cost))
    return Cheap(chosen, report.reconstruction_of_stream)


def fewer_heads(report: HeadMeasurements) -> list[tuple[int, float, float]]:
    """Return (heads kept, cost of the heads that a site loses on average, the largest such cost), for some numbers."""
    total, found = len(heads_of(report)), []
    for kept in sorted({round(share * total) for share in KEPT}, reverse=True):
        cheap = cheapest(report, total - kept)
        if cheap is not None and 0 < len(cheap.heads) == total - kept:
            lost = cheap.lost().values()
            found.append((kept, sum(lost) / len(report.sites), max(lost)))
    return found


def most_alike(report: HeadMeasurements) -> list[tuple[Head, Head, float]]:
    cosines = {} if report.statistics is None else report.statistics.cosine
    pairs = [
        (one, other, float(cosines[one.site.path][one.index, other.index]))
        for one, other in combinations(heads_of(report), 2)
        if one.site == other.site and one.site.path in cosines
    ]
    return sorted(pairs, key=lambda pair: -pair[2])[:PAIRS]


def kept_heads(report: HeadMeasurements) -> tuple[str, list[tuple[int, float]]] | None:
    """Return the measure with the best curve, and its points (heads kept, metric); None without a curve.

    The best curve is the one whose metric is best on average.
    """
    if report.ablation is None or not report.curves:
        return None
    sign = -1.0 if report.ablation.higher_is_better else 1.0

    def mean(points: Sequence[tuple[int, float]]) -> float:
        return sign * sum(value for _, value in points) / len(points)

    name = min(report.curves, key=lambda each: mean(report.curves[each]))
    return name, sorted(report.curves[name], reverse=True)


def predicted(plan: CompressionPlan) -> tuple[str, list[tuple[float, float]]]:
    curve = plan.curve()
    nearest = {budget: min(curve, key=lambda point: abs(point[0] - budget)) for budget in BUDGETS}
    # a curve of 64 points has one nearby, unless the budget is below the smallest possible one
    near = (1 - curve[0][0]) / max(1, len(curve) - 1)
    return plan.of, [point for budget, point in nearest.items() if abs(point[0] - budget) <= near]


PLAN = ("python -m collab_heads compress MODEL \\", "    --data TEXT --plan")
COMPRESS = ("python -m collab_heads compress MODEL \\", "    --data TEXT --budget 0.5 \\", "    --output_dir smaller")
WITHOUT_COSTS = "What removal costs was not measured: ask for the part 'reconstruction'."
FEWER = (
    "With prune_heads(model, batches, keep=…), which refits W_O: by how much of its variance {changes}. How much that "
    "changes what the model puts out differs by layer; a plan measures it."
)
WITHOUT_PLAN = (
    "Fewer heads, narrower queries and keys, narrower values: what a budget of parameters, cache or time costs, a plan "
    "tells before anything is changed. Then make the model smaller:"
)


def savings_html(report: HeadMeasurements, plan: CompressionPlan | None = None) -> str:
    parts = [each for each in (cheap_html(report), alike_html(report), price_html(report, plan)) if each]
    return f'<div class="savings">{"".join(f"<div>{part}</div>" for part in parts)}</div>'


def cheap_html(report: HeadMeasurements) -> str:
    title, cheap = "<h3>Heads that can go together</h3>", cheapest(report)
    if cheap is None:
        return title + paragraph(WITHOUT_COSTS)
    if not cheap.heads:
        return title + paragraph("Every layer has one head, and keeps it.")
    text = (
        f"{len(cheap.heads)} of {len(heads_of(report))} heads, by the cost of all of them together: {cheap.said}, on "
        f"{report.counted()}. Every layer keeps at least one head."
    )
    items = [
        f"{link(report, head, f'{layer_name(report, head.site)}, head {head.number}')} <small>{percent(cost)}</small>"
        for head, cost in cheap.heads
    ]
    removed = [f"    {path!r}: {numbers}," for path, numbers in cheap.by_path().items()]
    lines = ["from collab_heads import prune_heads", "", "prune_heads(model, batches, heads={", *removed, "})"]
    measured = paragraph(f"{said}.") if (said := metric_without(report)) else ""
    return title + paragraph(text) + measured + listed(items) + code(lines)


def metric_without(report: HeadMeasurements) -> str:
    """Return what the metric is without the cheapest heads, beside that of all; "" if it was not measured."""
    if report.ablation is None or report.without_cheapest is None:
        return ""
    name, whole = report.ablation.metric, report.ablation.original
    rest = f"{report.without_cheapest:.4g} without them, W_O as it is"
    return f"{name[:1].upper()}{name[1:]}: {whole:.4g} with all heads, {rest}"


def alike_html(report: HeadMeasurements) -> str:
    pairs = most_alike(report)
    if not pairs:
        return ""
    near = "One of two could do the work of both." if pairs[0][2] >= ALIKE else "No two put out nearly the same."
    items = [
        f"{layer_name(report, one.site)}, heads {link(report, one, str(one.number))} and "
        f"{link(report, other, str(other.number))} <small>{cosine:.2f}</small>"
        for one, other, cosine in pairs
    ]
    text = f"{near} The mean cosine of the outputs of two heads of a layer, 1 for the same direction:"
    return "<h3>Heads that are most alike</h3>" + paragraph(text) + listed(items)


def price_html(report: HeadMeasurements, plan: CompressionPlan | None) -> str:
    parts, known = ["<h3>What a budget costs</h3>"], kept_heads(report)
    if known is not None and report.ablation is not None:
        name, points = known
        total, metric = len(heads_of(report)), report.ablation.metric
        rows = [[str(kept), f"{kept / total:.0%}", f"{value:.4g}"] for kept, value in points]
        parts.append(
            paragraph(f"Measured, without training: with only the most important heads, by {name.replace('_', ' ')}.")
        )
        parts.append(table_html(["heads kept", "share", metric], rows, "Price of fewer heads"))
    if fewer := fewer_heads(report):
        rows = [[str(kept), percent(mean), percent(most)] for kept, mean, most in fewer]
        parts.append(paragraph(FEWER.format(changes=what_changes(report.reconstruction_of_stream))))
        parts.append(table_html(["heads kept", "changed on average", "at most"], rows, "Change by heads kept"))
    if plan is not None:
        of, curve = predicted(plan)
        rows = [[f"{budget:.2f}", f"{error:.4f}"] for budget, error in curve]
        parts.append(paragraph(f"Predicted by the plan: the error of the model's output, by budget of {of}."))
        parts.append(table_html(["budget", "predicted error"], rows, "Price of budgets"))
    parts += [] if plan is not None else [paragraph(WITHOUT_PLAN)]
    return "".join(parts) + code(COMPRESS if plan is not None else [*PLAN, *COMPRESS])


def link(report: HeadMeasurements, head: Head, text: str) -> str:
    return f'<a href="#{anchor(report, head)}" data-head="{heads_of(report).index(head)}">{escape(text)}</a>'


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def listed(items: Sequence[str]) -> str:
    """Return pieces of HTML as a list, side by side."""
    return f'<ul class="heads">{"".join(f"<li>{item}</li>" for item in items)}</ul>'


def code(lines: Sequence[str]) -> str:
    return f'<pre tabindex="0"><code>{escape(chr(10).join(lines))}</code></pre>'
