"""What can go, and how, as HTML."""

from collections.abc import Sequence
from html import escape

from collab_heads.analysis.report.html import table_html
from collab_heads.analysis.report.measurements import HeadMeasurements
from collab_heads.analysis.report.page_data import Head, heads_of, layer_name
from collab_heads.analysis.report.savings import ALIKE, Plan, cheapest, kept_heads, most_alike, predicted

PLAN = ("python -m collab_heads compress MODEL \\", "    --data TEXT --plan")
COMPRESS = ("python -m collab_heads compress MODEL \\", "    --data TEXT --budget 0.5 \\", "    --output_dir smaller")
WITHOUT_COSTS = "What a head costs was not measured: ask for relevance, for the ablation, or give batches with labels."
WITHOUT_PLAN = (
    "Fewer heads, narrower queries and keys, narrower values: what a budget of parameters, cache or time costs, a plan "
    "tells before anything is changed. Then make the model smaller:"
)


def savings_html(report: HeadMeasurements, plan: Plan | None = None) -> str:
    """Heads that cost least, heads that are alike, the price of budgets, and the lines that do it."""
    parts = [each for each in (cheap_html(report), alike_html(report), price_html(report, plan)) if each]
    return f'<div class="savings">{"".join(f"<div>{part}</div>" for part in parts)}</div>'


def cheap_html(report: HeadMeasurements) -> str:
    """The heads whose removal costs least."""
    title, cheap = "<h3>Heads that cost least</h3>", cheapest(report)
    if cheap is None:
        return title + paragraph(WITHOUT_COSTS)
    text = (
        f"Of {len(heads_of(report))} heads these cost least by {cheap.said}, on {report.data['sentences']:,} "
        "sentences. Each was looked at alone: together they may cost more."
    )
    items = [
        f"{link(report, head, f'{layer_name(report, head.site)}, head {head.number}')} <small>{cost:.3g}</small>"
        for head, cost in cheap.heads
    ]
    removed = [f"    {path!r}: {numbers}," for path, numbers in cheap.by_path().items()]
    lines = ["from collab_heads import prune_heads", "", "prune_heads(model, batches, heads={", *removed, "})"]
    return title + paragraph(text) + listed(items) + code(lines)


def alike_html(report: HeadMeasurements) -> str:
    """The heads that put out nearly the same as another."""
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


def price_html(report: HeadMeasurements, plan: Plan | None) -> str:
    """What is known of the price of budgets."""
    parts, known = ["<h3>What a budget costs</h3>"], kept_heads(report)
    if known is not None and report.ablation is not None:
        name, points = known
        total, metric = len(heads_of(report)), report.ablation.metric
        rows = [[str(kept), f"{kept / total:.0%}", f"{value:.4g}"] for kept, value in points]
        parts.append(
            paragraph(f"Measured, without training: with only the most important heads, by {name.replace('_', ' ')}.")
        )
        parts.append(table_html(["heads kept", "share", metric], rows, "Price of fewer heads"))
    if plan is not None:
        of, curve = predicted(plan)
        rows = [[f"{budget:.2f}", f"{error:.4f}"] for budget, error in curve]
        parts.append(paragraph(f"Predicted by the plan: the error of the model's output, by budget of {of}."))
        parts.append(table_html(["budget", "predicted error"], rows, "Price of budgets"))
    parts += [] if plan is not None else [paragraph(WITHOUT_PLAN)]
    return "".join(parts) + code(COMPRESS if plan is not None else [*PLAN, *COMPRESS])


def link(report: HeadMeasurements, head: Head, text: str) -> str:
    """A head that can be opened."""
    return f'<a href="#explore" data-head="{heads_of(report).index(head)}">{escape(text)}</a>'


def paragraph(text: str) -> str:
    """Plain text."""
    return f"<p>{escape(text)}</p>"


def listed(items: Sequence[str]) -> str:
    """HTML side by side."""
    return f'<ul class="heads">{"".join(f"<li>{item}</li>" for item in items)}</ul>'


def code(lines: Sequence[str]) -> str:
    """Lines to copy."""
    return f'<pre tabindex="0"><code>{escape(chr(10).join(lines))}</code></pre>'
