"""Explain all measures on the page of a report, and prepare the data for its script."""

import base64
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from collab_heads.analysis.measures.sentences import AttentionExample
from collab_heads.analysis.report.measurements import HeadMeasurements, Scores, group_name
from collab_heads.analysis.report.scales import scale_of
from collab_heads.analysis.report.words import words_of
from collab_heads.analysis.roles.labels import HeadRoles, role_kind
from collab_heads.plots.head_maps import KINDS, NONE
from collab_heads.plots.token_maps import token_text
from collab_heads.running.batches import sides
from collab_heads.sites.site import ROLES, AttentionSite

# measure -> its section of the page, if that has another name
SECTIONS = {
    "leave_one_out": "ablation",
    "absolute_relevance": "relevance",
    "positional": "roles",
    "rare_tokens": "roles",
    "value_norm": "worth",
    "value_zeroing": "worth",
    "contribution": "worth",
}
# measure -> the title of its map, if its section has several maps
MAPS = {
    "absolute_relevance": "Absolute relevance",
    "positional": "Share on the best offset",
    "rare_tokens": "Share on the rarest token",
    "value_norm": "Norm of weighted values",
    "value_zeroing": "Value zeroing",
    "contribution": "Contribution to the stream",
}

TITLES = {
    "heads": "All heads",
    "roles": "What heads do",
    "confidence": "Confidence",
    "entropy": "Entropy",
    "attention_distance": "Attention distance",
    "first_token": "Attention to the first token",
    "similarity": "Similarity",
    "l2_distance": "Distance to the other heads",
    "worth": "What heads write",
    "relevance": "Relevance",
    "gradient": "Gradient importance",
    "reconstruction": "Cost of removal",
    "ablation": "Without each head",
    "contributions": "Source and target",
    "alphas": "Alphas",
    "gate": "Gates",
    "examples": "Attention maps",
}
LEGENDS = {
    "heads": "Every head that the model has now, by the numbers of the original model.",
    "roles": "By default, positional: the largest weight falls on one relative position for at least 90 "
    "% of the tokens. First token: it falls on the first token of the sequence for at least half of the "
    "tokens after it, and 25 points more often than with the median head and by chance; a head that looks there "
    "for half of the tokens is not positional. Rare tokens: in the first layer, it falls on the rarest token of the "
    "sentence for at least half of them. Syntactic: it finds the other end of a dependency at "
    "least 10 points more often than the best fixed offset does, from dependent to head or back "
    "(Voita et al. 2019).",
    "confidence": "The mean over query tokens of the largest attention weight; ends of sentences and padding "
    "do not count (Voita et al. 2019). 1 is a head that always looks at a single token.",
    "entropy": "The mean entropy of the attention weights of a query token, in nats: 0 where it looks at "
    "one token, the logarithm of the sentence's length where it looks at all alike.",
    "attention_distance": "How many tokens away a query token looks, averaged by its weights; between the two "
    "sentences of a translation, positions are compared as they are.",
    "first_token": "The mean weight on the first token of the sequence, over the query tokens after it, in "
    "self-attention. A head with nothing to look for rests there: a sink (Xiao et al. 2023).",
    "similarity": "The mean cosine and Euclidean distance between the outputs of two heads of a layer, for "
    "the same token. Heads that do the same have a cosine near 1.",
    "l2_distance": "The mean Euclidean distance of a head's outputs to those of the layer's other heads.",
    "worth": "The vectors that a head adds to the residual stream, as means over query tokens. The norm of weighted "
    "values is the sum of the norms of all values, projected by W_O, times their attention weights (Kobayashi et al. "
    "2020). Value zeroing is how far the stream turns, 1 - cosine, if the head's values are zero (after Mohebbi et al. "
    "2023). The contribution is the head's share in the stream behind the layer's attention, by L1 distances (ALTI, "
    "Ferrando et al. 2022).",
    "relevance": "What the head contributes to the top-1 logit (in a model without logits, to the squared length of "
    "the mean of its last states) by layer-wise relevance propagation, "
    "attention weights and scales of norms held constant (Ali et al. 2022): absolute values, as "
    "shares of the layer's heads. Absolute relevance is the size of the mean itself, which layers "
    "can be compared by. The balance is 1 where all heads matter alike and 0 where one head has "
    "everything.",
    "gradient": "The mean absolute gradient of the loss by a gate on the head (Michel et al. 2019): an "
    "estimate, in one backward pass, of how much the loss depends on it.",
    "reconstruction": "The squared error that is left in the residual stream, as a share of its variance, once the "
    "head is removed together with all heads of the layer that cost less, and W_O is refitted for those that stay. "
    "Where one module serves several layers, as a share of the layer's output.",
    "ablation": "How much worse the metric is without the head, all else as it is (Michel et al. 2019); and "
    "the metric with only the most important heads, by each measure.",
    "contributions": "How much of each generated token's top-1 logit comes from the source, the rest from the "
    "target prefix (of a decoder alone: from the prompt, the rest from its continuation so far): shares of "
    "absolute relevance (after Voita, Sennrich, Titov 2021). Entropies say how widely a share is spread over its "
    "tokens, in nats; the influence of a source token is what it gives to the whole output, where 1 is the mean. "
    "Curves are means over sentences, with 95 % intervals; \u00b1 in the table is one standard error over sentences. "
    "Prefixes of its own are the model's translations, random ones those of other sentences.",
    "alphas": "Mixed heads: row i makes the new head i. Shown is the difference from the identity, where "
    "each head is itself.",
    "gate": "The probability that a head's gate is open (Voita et al. 2019): below one half it is more likely closed.",
    "examples": "Where sentences of typical lengths look: rows attend, columns are attended to, one map per head.",
}


def measure_title(name: str) -> str:
    return MAPS.get(name) or TITLES[SECTIONS.get(name, name)]


STEPS = 255  # of a byte
# Bytes hold square roots of weights: a token looks at few others much and at most of them little, and roots tell both
# apart. They hardly compress, so a sentence with more weights than this has the weights themselves, a third as large.
MOST_ROOTS = 4_000_000
# Above this, which is 512 tokens of 144 heads, a page would be too large to open: the sentence is cut.
MOST_WEIGHTS = 40_000_000
LEVEL = 6  # of zlib: 9 takes ten times as long for a tenth less


def sentence_data(
    example: AttentionExample, sites: Sequence[AttentionSite], text: Callable[[str], str]
) -> dict[str, Any]:
    """Return a sentence for the page's script.

    Args:
        example: the sentence.
        sites: the sites of the report, in order.
        text: makes a token readable.

    Returns:
        tokens: side -> the tokens; all of them, unless there are more than `MOST_WEIGHTS` weights. length: side -> the
        number of all tokens. words: side -> the words that these tokens are pieces of, see `words_of`; only sides of
        which they are known. power: 2 or 1, of a byte / 255, which gives the weight. maps: the bytes [H, T, S] of site
        after site, compressed with zlib, in base64.
    """
    longest = max(map(len, example.tokens.values()), default=0)
    while (count := weights_in(example, sites, longest)) > MOST_WEIGHTS:
        longest = min(longest - 1, int(longest * (MOST_WEIGHTS / count) ** 0.5))
    power = 2 if count <= MOST_ROOTS else 1
    packed = b"".join(
        (weights[:, :longest, :longest] ** (1 / power) * STEPS).round().to(torch.uint8).contiguous().numpy().tobytes()
        for weights, _, _ in (example.of(site) for site in sites)
    )
    texts = {side: [text(token) for token in tokens[:longest]] for side, tokens in example.tokens.items()}
    words = {side: words_of(tokens[:longest], texts[side]) for side, tokens in example.tokens.items()}
    return {
        "tokens": texts,
        "length": {side: len(tokens) for side, tokens in example.tokens.items()},
        "words": {side: found for side, found in words.items() if found and len(found["starts"]) < len(texts[side])},
        "power": power,
        "maps": base64.b64encode(zlib.compress(packed, LEVEL)).decode(),
    }


def weights_in(example: AttentionExample, sites: Sequence[AttentionSite], longest: int) -> int:
    shapes = (example.weights[site.path].shape for site in sites)
    return sum(heads * min(queries, longest) * min(keys, longest) for heads, queries, keys in shapes)


SPACES = str.maketrans("\u2581\u0120", "  ")  # of sentencepiece, and of byte-level vocabularies
DIGITS = 4  # of a number: more cannot be seen
NEAREST = 5  # heads of the same layer that are named


@dataclass(frozen=True)
class Head:
    """A head of a report.

    Attributes:
        site: its site.
        number: its number in the original model.
        index: its index among the present heads of the site.
    """

    site: AttentionSite
    number: int
    index: int


def heads_of(report: HeadMeasurements) -> list[Head]:
    return [Head(site, number, index) for site in report.sites for index, number in enumerate(report.heads[site.path])]


def layer_name(report: HeadMeasurements, site: AttentionSite) -> str:
    """Return the name of a site's layer, with its role if the model has several."""
    several = len({group_name(each) for each in report.sites}) > 1
    return f"{group_name(site)}, layer {site.layer}" if several else f"Layer {site.layer}"


def anchor(report: HeadMeasurements, head: Head) -> str:
    """Return the name of a head in links to the page: "3-7", after the role if the model has several."""
    several = len({group_name(each) for each in report.sites}) > 1
    group = f"{group_name(head.site)}-".replace(" ", "-") if several else ""
    return f"{group}{head.site.layer}-{head.number}"


def page_data(report: HeadMeasurements) -> dict[str, Any]:
    """Return all data that the page's script shows."""
    measures = measures_of(report)
    return {
        "measures": [described(name, scores) for name, scores in measures.items()],
        "roles": None if report.roles is None else {"title": TITLES["roles"], "legend": role_legend(report.roles)},
        "kinds": {
            name: {"colour": None if name == NONE else colour, "letter": letter}
            for name, (colour, letter) in KINDS.items()
        },
        "none": NONE,
        "groups": sorted({group_name(site) for site in report.sites}, key=group_order),
        "sites": [site_data(report, site) for site in report.sites],
        "heads": [head_data(report, head, measures) for head in heads_of(report)],
        "sentences": [sentence_data(example, report.sites, shown) for example in report.examples],
        "first": first_shown(report),
    }


def role_legend(roles: HeadRoles) -> str:
    return " ".join([LEGENDS["roles"], *(f"{line}." for line in roles.habits())])


def first_shown(report: HeadMeasurements) -> int:
    """Return the place of the sentence that is shown first: the first that was chosen, or the one of middle length."""
    chosen = [place for place, example in enumerate(report.examples) if example.chosen]
    return chosen[0] if chosen else max(0, (len(report.examples) - 1) // 2)


def group_order(name: str) -> tuple[int, str]:
    return ROLES.index(next(role for role in ROLES if name.startswith(role))), name


def measures_of(report: HeadMeasurements) -> dict[str, Scores]:
    """Return all measures with a number per head, and how close heads come to a role."""
    measures = dict(report.scores())
    if report.roles is not None:
        if report.roles.positional:
            measures["positional"] = {path: numbers.share for path, numbers in report.roles.positional.items()}
        if report.roles.rare:
            measures["rare_tokens"] = {path: numbers.rarest for path, numbers in report.roles.rare.items()}
    return measures


def described(name: str, scores: Scores) -> dict[str, Any]:
    """Return a measure's names, what it means, and the scale of its colours."""
    scale = scale_of(torch.cat([each.double().flatten() for each in scores.values()]))
    return {
        "name": name.replace("_", " "),
        "title": measure_title(name),
        "legend": LEGENDS[SECTIONS.get(name, name)],
        "scale": scale.name,
        "stops": [rounded(stop) for stop in scale.stops],
    }


def site_data(report: HeadMeasurements, site: AttentionSite) -> dict[str, Any]:
    return {
        "path": site.path,
        "group": group_name(site),
        "layer": site.layer,
        "heads": site.num_heads,
        "total": report.totals[site.path],
        "sides": list(sides(site)),
        "sharesKeys": site.shares_keys,
    }


def head_data(report: HeadMeasurements, head: Head, measures: dict[str, Scores]) -> dict[str, Any]:
    """Return a head: its place, its numbers in the order of the measures, its labels, its nearest heads."""
    path, index = head.site.path, head.index
    labels = () if report.roles is None else report.roles.labels[path][index]
    figures = [] if report.roles is None else [report.roles.figure(path, index, label) for label in labels]
    return {
        "site": report.sites.index(head.site),
        "number": head.number,
        "anchor": anchor(report, head),
        "key": index if head.site.groups is None else head.site.groups[index],
        "values": [rounded(each[path][index]) if path in each else None for each in measures.values()],
        "labels": list(labels),
        "figures": figures,
        "kinds": list(dict.fromkeys(map(role_kind, labels))),
        "nearest": list(nearest(report, head)),
    }


def nearest(report: HeadMeasurements, head: Head) -> Iterator[tuple[int, float]]:
    """Yield the heads of the layer whose outputs are most similar: original number and cosine."""
    cosines = {} if report.statistics is None else report.statistics.cosine
    if head.site.path in cosines:
        of_head: Tensor = cosines[head.site.path][head.index]
        others = [other for other in of_head.argsort(descending=True, stable=True).tolist() if other != head.index]
        for other in others[:NEAREST]:
            yield report.heads[head.site.path][other], rounded(of_head[other])


def shown(token: str) -> str:
    """Return a readable token; a vocabulary's mark of a space becomes an open box, as does a space."""
    return token_text(token.translate(SPACES))


def rounded(value: Tensor | float) -> float:
    return float(f"{float(value):.{DIGITS}g}")


def as_json(data: dict[str, Any]) -> str:
    """Return JSON that may stand in a script element: no token can end it."""
    return json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
