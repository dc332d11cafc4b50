"""The measurements of an analysis, and for machines all of their numbers (`to_dict`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from collab_heads.analysis.measures.ablation import Ablation
from collab_heads.analysis.measures.results import OF_HEADS, HeadStatistics
from collab_heads.analysis.measures.sentences import AttentionExample
from collab_heads.analysis.measures.worth import HeadWorth
from collab_heads.analysis.relevance.contribution_comparison import ContributionComparison
from collab_heads.analysis.relevance.contribution_results import ContributionExample, TokenContributions
from collab_heads.analysis.relevance.head_relevance import HeadRelevance
from collab_heads.analysis.roles.labels import HeadRoles
from collab_heads.base.report import Report, plain
from collab_heads.heads.comparison import rank_correlation
from collab_heads.heads.history import HeadHistory
from collab_heads.sites.site import AttentionSite

Scores = Mapping[str, Tensor]
Cell = str | int | float | None
# measures of how much a head matters: they are compared with leaving heads out, and each orders a curve
IMPORTANCE = ("confidence", "value_zeroing", "contribution", "relevance", "absolute_relevance", "gradient")


@dataclass(frozen=True, eq=False)
class HeadMeasurements(Report):
    """All measurements of an analysis; what was not measured is None or empty.

    Attributes:
        model: the class of the model and, if known, where it was loaded from.
        model_type: the model type in its config.
        sites: the sites that have heads, in model order.
        heads: path -> the original numbers of their heads.
        totals: path -> number of heads before any was removed, also for sites that lost all.
        data: the data: a description, the number of sentences (or images, as `kind` says), the query tokens of every
            role.
        statistics: confidence, entropy, attention distance, attention to the first token, similarity, alphas.
        roles: positional, first-token, rare-token and syntactic heads.
        worth: norms of the values of heads, value zeroing, and shares in the residual stream.
        relevance: relevance by conservative propagation.
        gradient: path -> [H], importance by gradients of the loss.
        reconstruction: path -> [H], the squared error once a head and those of its site that cost less are removed
            together, as a share of the variance of the residual stream, see `criteria.Reconstruction`.
        reconstruction_of_stream: whether it is; else it is a share of that of the site's output.
        contributions: contributions of source and target to generated tokens, after the first kind of prefixes.
        compared_contributions: the same after other prefixes, and for other models.
        contribution_example: the contributions of the tokens of one sentence.
        ablation: the metric without each head.
        curves: measure -> (heads kept, metric).
        without_cheapest: the metric without all heads that `savings.cheapest` names, W_O as it is.
        gates: path -> [H], P(open) of the model's present gates.
        gate_history: the history of a training, of which the gates are shown.
        examples: attention maps of some sentences.
        seconds: part -> seconds it took.
        notes: notes for the reader, such as what was left out, and why.
    """

    model: str
    model_type: str
    sites: tuple[AttentionSite, ...]
    heads: Mapping[str, tuple[int, ...]]
    totals: Mapping[str, int]
    data: Mapping[str, Any]
    statistics: HeadStatistics | None = None
    roles: HeadRoles | None = None
    worth: HeadWorth | None = None
    relevance: HeadRelevance | None = None
    gradient: Scores | None = None
    reconstruction: Scores | None = None
    reconstruction_of_stream: bool = True
    contributions: TokenContributions | None = None
    compared_contributions: ContributionComparison | None = None
    contribution_example: ContributionExample | None = None
    ablation: Ablation | None = None
    curves: Mapping[str, list[tuple[int, float]]] = field(default_factory=dict)
    without_cheapest: float | None = None
    gates: Scores = field(default_factory=dict)
    gate_history: HeadHistory | None = None
    examples: tuple[AttentionExample, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def scores(self) -> dict[str, Scores]:
        """Return measure -> path -> [H], for all measures with a number per head; float64 on the CPU."""
        scores: dict[str, Scores] = {}
        if (statistics := self.statistics) is not None:
            scores |= {name: measured for name in OF_HEADS if (measured := getattr(statistics, name))}
            if "l2" in statistics.measures:
                scores["l2_distance"] = {site.path: statistics.distance(site.path) for site in self.sites}
        if self.worth is not None:
            scores |= {name: values for name, values in self.worth.values.items() if values}
        if self.relevance is not None:
            scores["relevance"] = self.relevance.relevance
            scores["absolute_relevance"] = {path: signed.abs() for path, signed in self.relevance.signed.items()}
        if self.gradient is not None:
            scores["gradient"] = self.gradient
        if self.reconstruction is not None:
            scores["reconstruction"] = self.reconstruction
        if self.ablation is not None:
            scores["leave_one_out"] = self.ablation.harm()
        if self.gates:
            scores["gate"] = self.gates
        return scores

    def correlations(self) -> dict[str, float]:
        """Return measure -> rank correlation with the harm of leaving each head out, of measures that every site has.

        Empty without an ablation.
        """
        scores = self.scores()
        harm = scores.get("leave_one_out")
        if harm is None:
            return {}
        paths = list(harm)
        loss = torch.cat([harm[path] for path in paths])
        return {
            name: rank_correlation(torch.cat([scores[name][path].double() for path in paths]), loss)
            for name in IMPORTANCE
            if name in scores and scores[name].keys() >= harm.keys()
        }

    def rows(self) -> tuple[list[str], list[list[Cell]]]:
        """Return a table of all heads: its header, and a row per head, with None where a site has no such number.

        If heads share keys, a column holds the present key head of each.
        """
        scores, shares_keys = self.scores(), any(site.shares_keys for site in self.sites)
        header = ["role", "layer", "head", *["key head"] * shares_keys, *(name.replace("_", " ") for name in scores)]
        rows: list[list[Cell]] = []
        for site in self.sites:
            for index, number in enumerate(self.heads[site.path]):
                row: list[Cell] = [group_name(site), site.layer, number]
                row += [index if site.groups is None else site.groups[index]] * shares_keys
                row += [float(s[site.path][index]) if site.path in s else None for s in scores.values()]
                rows.append(row + ([", ".join(self.roles.labels[site.path][index])] if self.roles else []))
        return header + (["what it does"] if self.roles else []), rows

    def text_rows(self) -> tuple[list[str], list[list[str]]]:
        """Return the same table as text."""
        header, rows = self.rows()
        return header, [[text_of(cell) for cell in row] for row in rows]

    def counted(self) -> str:
        """Return how many examples were measured, such as "256 sentences" (reports made by hand may name no kind)."""
        count = self.data["sentences"]
        return f"{count:,} {self.data.get('kind', 'sentence')}{'s' * (count != 1)}"

    def described(self) -> list[str]:
        tokens = ", ".join(f"{count:,} of {role}" for role, count in self.data["query_tokens"].items())
        lines = [f"{self.model} ({self.model_type}): {sum(site.num_heads for site in self.sites)} heads"]
        lines[0] += f" of {sum(self.totals.values())}" if sum(self.totals.values()) > len(self.rows()[1]) else ""
        if any(site.shares_keys for site in self.sites):
            lines[0] += f", which share {sum(site.num_key_heads for site in self.sites)} key heads"
        lines.append(f"Data: {self.data['name']}, {self.counted()}" + (f"; query tokens: {tokens}" if tokens else ""))
        if self.contributions is not None:
            count = self.data["contribution_sentences"]
            of = f" of {count:,} of the {self.counted()}"
            lines.append(f"Contributions{of * (count < self.data['sentences'])}: {self.contributions.summary()}")
        for name, value in self.correlations().items():
            said = name.replace("_", " ")
            lines.append(f"Rank correlation of {said} with the harm of leaving a head out: {value:+.2f}")
        return lines + [note[:1].upper() + note[1:] for note in self.notes]

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers, ready for JSON, without the attention maps of the examples."""
        names = [each.name for each in fields(self) if each.name not in ("contribution_example", "gate_history")]
        numbers = {name: plain(getattr(self, name)) for name in names if name != "examples"}
        examples = [plain(each.tokens) for each in self.examples]
        return numbers | {"correlations": self.correlations(), "examples": examples}


def text_of(cell: Cell) -> str:
    """Return a cell as text, measures with three decimals, or with three digits where decimals would say less."""
    if isinstance(cell, float):
        return f"{cell:.3f}" if cell == 0 or abs(cell) >= 0.1 else f"{cell:.3g}"
    return "" if cell is None else str(cell)


def group_name(site: AttentionSite) -> str:
    """Return the name of a site's group: the role and, if a model has two stacks, which one."""
    return site.role if site.stack is None else f"{site.role} of {site.stack}"
