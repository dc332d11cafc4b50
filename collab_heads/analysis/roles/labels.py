"""The roles of heads from their measures: for people (`str`) and for machines (`to_dict`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from collab_heads.analysis.roles.labelling import FIRST, ROLE_KINDS, Labels, RoleThresholds, label_heads, role_kind
from collab_heads.analysis.roles.positional import Positional, PositionalNumbers
from collab_heads.analysis.roles.rare import RareNumbers, RareTokens
from collab_heads.analysis.roles.syntax import Baseline, Syntax
from collab_heads.base.display import text_table
from collab_heads.base.report import Report
from collab_heads.sites.site import AttentionSite


@dataclass(frozen=True, eq=False)
class HeadRoles(Report):
    """The result of `head_roles`; what was not measured is empty.

    Attributes:
        sites: the sites that have heads, in model order.
        heads: path -> the original numbers of the heads that the site has.
        thresholds: the shares, and the amounts of data, that roles need.
        labels: path -> the roles of each head, such as "positional -1", "first token", "rare tokens", "nsubj
            dependent->head"; a head may have several, or none. "rare tokens" is a role of the first layer only, as in
            the paper.
        positional: path -> where its heads look; self-attention only.
        rare: path -> how often its heads look at rare tokens.
        syntax: path -> (relation, direction) -> accuracies, [H] float64; encoders only.
        baselines: (relation, direction) -> the best fixed offset; relations that the treebank lacks are left out.
        skipped: reason -> number of sentences of the treebank that were left out.
        sentences: number of sentences of the treebank that were measured.
        limit: the largest number of tokens that the model takes; None without a limit.
        warnings: labels that were withheld because there was too little data.
    """

    sites: tuple[AttentionSite, ...]
    heads: Mapping[str, Sequence[int]]
    thresholds: RoleThresholds
    labels: Labels
    positional: Mapping[str, PositionalNumbers] = field(default_factory=dict)
    rare: Mapping[str, RareNumbers] = field(default_factory=dict)
    syntax: Mapping[str, Mapping[tuple[str, str], Tensor]] = field(default_factory=dict)
    baselines: Mapping[tuple[str, str], Baseline] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)
    sentences: int = 0
    limit: int | None = None
    warnings: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        rows = []
        for site in self.sites:
            for head, (number, labels) in enumerate(zip(self.heads[site.path], self.labels[site.path], strict=True)):
                if labels:
                    said = ", ".join(f"{each} {self.figure(site.path, head, each)}" for each in labels)
                    rows.append((site.path, site.role, str(number), said))
        return [text_table(("site", "role", "head", "what it does"), rows, "\n".join(self.summary()))]

    def figure(self, path: str, head: int, label: str) -> str:
        """Return the numbers behind a label as text.

        Args:
            path: of the site.
            head: the place of the head in its site, counted from 0.
            label: one of its `labels`.
        """
        if label.startswith("positional "):
            return f"({self.positional[path].share[head]:.2f})"
        if label == FIRST:
            return f"({self.positional[path].first_token[head]:.2f})"
        if label == "rare tokens":
            rare = self.rare[path]
            return f"({rare.rarest[head]:.2f}, two rarest {rare.two_rarest[head]:.2f}, chance {rare.chance[0]:.2f})"
        kind = next(kind for kind in self.baselines if " ".join(kind) == label)
        return f"({self.syntax[path][kind][head]:.2f}, fixed offset {self.baselines[kind].accuracy:.2f})"

    def summary(self) -> list[str]:
        """Return lines on how many heads have which role, on how much data, and what was left out."""
        measured = {
            "positional": set(self.positional),
            FIRST: set(self.positional),
            "rare tokens": set(self.rare),
            "syntactic": set(self.syntax),
        }
        every = [
            labels
            for path, labels_of_site in self.labels.items()
            if any(path in paths for paths in measured.values())
            for labels in labels_of_site
        ]
        counts = [
            f"{sum(any(role_kind(label) == kind for label in labels) for labels in every)} {kind}"
            if measured[kind]
            else f"{kind} not measured"
            for kind in ROLE_KINDS
        ]
        of = "" if len(every) == (total := sum(map(len, self.labels.values()))) else f" of {total}"
        lines = [f"{len(every)}{of} heads: {', '.join(counts)}, {sum(not labels for labels in every)} without a role"]
        numbers: list[PositionalNumbers | RareNumbers] = [*self.positional.values(), *self.rare.values()]
        if tokens := {each.tokens for each in numbers}:
            lines.append(f"query tokens of a site: {' to '.join(map(str, sorted({min(tokens), max(tokens)})))}")
        if self.sentences:
            left_out = ", ".join(f"{count} {reason}" for reason, count in self.skipped.items())
            longest = "" if self.limit is None else f" (at most {self.limit} tokens)"
            lines.append(f"treebank: {self.sentences} sentences{longest}; skipped: {left_out}")
            queries = [
                f"{relation} {self.baselines[relation, direction].queries}"
                for relation, direction in self.baselines
                if direction == next(iter(self.baselines))[1]
            ]
            lines.append(f"dependents by relation: {', '.join(queries) or 'none of those asked for'}")
        return [*lines, *self.warnings]


def roles_from_measures(
    sites: Sequence[AttentionSite],
    heads: Mapping[str, Sequence[int]],
    *,
    positional: Positional | None = None,
    rare: RareTokens | None = None,
    syntax: Syntax | None = None,
    thresholds: RoleThresholds | None = None,
) -> HeadRoles:
    """Label heads from observers that have seen their data.

    Args:
        sites: the sites that have heads, in model order, as `observe` returns them.
        heads: path -> the original numbers of those heads.
        positional: None if not measured; the same holds for `rare` and `syntax`.
        rare: only heads of the first layer are labelled.
        syntax: its treebank tells what was skipped.
        thresholds: None for the defaults of `RoleThresholds`.

    Raises:
        CalibrationError: if no token counted at a measured site.
        NonFiniteError: if attention weights were NaN.
    """
    thresholds = thresholds or RoleThresholds()
    offsets, rarity = positional.results() if positional else {}, rare.results() if rare else {}
    accuracies, baselines = syntax.results() if syntax else ({}, {})
    labels, warnings = label_heads(sites, offsets, rarity, accuracies, baselines, thresholds)
    treebank = syntax.treebank if syntax else None
    return HeadRoles(
        tuple(sites),
        {site.path: tuple(heads[site.path]) for site in sites},
        thresholds,
        labels,
        offsets,
        rarity,
        accuracies,
        baselines,
        dict(treebank.skipped) if treebank else {},
        len(treebank.sentences) if treebank else 0,
        treebank.limit if treebank else None,
        warnings,
    )
