"""What role a head has, by what was measured: for people (`str`) and for machines (`to_dict`)."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from collab_heads.analysis.roles.positional import Positional, PositionalNumbers
from collab_heads.analysis.roles.rare import RareNumbers, RareTokens
from collab_heads.analysis.roles.syntax import Baseline, Syntax
from collab_heads.errors import ArgumentError
from collab_heads.sites import AttentionSite
from collab_heads.text import text_table

ROUNDING = 1e-9  # of a difference of two shares: 0.35 - 0.25 is 0.09999999999999998
FIRST = "first token"
ROLE_KINDS = ("positional", FIRST, "rare tokens", "syntactic")


@dataclass(frozen=True)
class RoleThresholds:
    """How large a share must be for a head to have a role.

    Attributes:
        positional: share of the query tokens whose largest weight falls on one relative position.
        first_token: share of those after the first token whose largest weight falls on it. Such a head looks nowhere in
            particular, and is not positional.
        rare_tokens: share of those whose largest weight falls on the rarest token of the sentence. The paper names no
            threshold; the head that it shows has 0.66 (and 0.83 for one of the two rarest).
        syntactic: how far the accuracy on a relation, in one direction, is above that of the best fixed offset.

    Raises:
        ArgumentError: if one is not in 0..1.

    Source: "positional" and "syntactic": Voita et al. 2019, arXiv:1905.09418, section 5.
    """

    positional: float = 0.9
    first_token: float = 0.5
    rare_tokens: float = 0.5
    syntactic: float = 0.1

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ArgumentError(f"{name}={value!r}: a threshold is a share, between 0 and 1")


@dataclass(frozen=True, eq=False)
class HeadRoles:
    """What `head_roles` found. What was not measured is empty.

    Attributes:
        sites: the sites that have heads, in model order.
        heads: path -> the original numbers of the heads that the site has.
        thresholds: from when on a head has a role.
        labels: path -> per head its roles, such as "positional -1", "first token", "rare tokens", "nsubj
            dependent->head"; a head may have several, or none. "rare tokens" is a role of the first layer only, as in
            the paper.
        positional: path -> where its heads look; self-attention only.
        rare: path -> how often its heads look at rare tokens.
        syntax: path -> (relation, direction) -> accuracies, [H] float64; encoders only.
        baselines: (relation, direction) -> what the best fixed offset reaches; relations that the treebank lacks are
            not there.
        skipped: reason -> sentences of the treebank that were left out.
        sentences: those that were measured.
        limit: tokens of the longest sentence that the model takes; None if it has no limit.
    """

    sites: tuple[AttentionSite, ...]
    heads: Mapping[str, Sequence[int]]
    thresholds: RoleThresholds
    labels: Mapping[str, tuple[tuple[str, ...], ...]]
    positional: Mapping[str, PositionalNumbers] = field(default_factory=dict)
    rare: Mapping[str, RareNumbers] = field(default_factory=dict)
    syntax: Mapping[str, Mapping[tuple[str, str], Tensor]] = field(default_factory=dict)
    baselines: Mapping[tuple[str, str], Baseline] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)
    sentences: int = 0
    limit: int | None = None

    def to_dict(self) -> dict:
        """All numbers, ready for JSON. Relations are keyed "nsubj dependent->head"."""
        offsets = {
            path: {
                "offset": n.offset.tolist(),
                "share": n.share.tolist(),
                "tokens": n.tokens,
                "first_token": n.first_token.tolist(),
            }
            for path, n in self.positional.items()
        }
        rare = {
            path: {
                "rarest": n.rarest.tolist(),
                "two_rarest": n.two_rarest.tolist(),
                "chance": list(n.chance),
                "tokens": n.tokens,
            }
            for path, n in self.rare.items()
        }
        return {
            "sites": [site.to_dict() for site in self.sites],
            "heads": {path: list(numbers) for path, numbers in self.heads.items()},
            "thresholds": dataclasses.asdict(self.thresholds),
            "labels": {path: [list(each) for each in labels] for path, labels in self.labels.items()},
            "positional": offsets,
            "rare": rare,
            "syntax": {
                path: {" ".join(kind): each.tolist() for kind, each in accuracies.items()}
                for path, accuracies in self.syntax.items()
            },
            "baselines": {" ".join(kind): dataclasses.asdict(each) for kind, each in self.baselines.items()},
            "skipped": dict(self.skipped),
            "sentences": self.sentences,
            "limit": self.limit,
        }

    def __str__(self) -> str:
        rows = []
        for site in self.sites:
            for head, (number, labels) in enumerate(zip(self.heads[site.path], self.labels[site.path], strict=True)):
                if labels:
                    said = ", ".join(f"{each} {self.figure(site.path, head, each)}" for each in labels)
                    rows.append((site.path, site.role, str(number), said))
        return text_table(("site", "role", "head", "what it does"), rows, "\n".join(self.summary()))

    def figure(self, path: str, head: int, label: str) -> str:
        """The number behind a label."""
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
        """How many heads have which role, what that stands on, and what was left out."""
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
        return lines


def roles_from_measures(
    sites: Sequence[AttentionSite],
    heads: Mapping[str, Sequence[int]],
    *,
    positional: Positional | None = None,
    rare: RareTokens | None = None,
    syntax: Syntax | None = None,
    thresholds: RoleThresholds | None = None,
) -> HeadRoles:
    """Label heads by observers that have seen their data.

    Args:
        sites: the sites that have heads, in model order, as `observe` returns them.
        heads: path -> the original numbers of those heads.
        positional: None if not measured, as `rare` and `syntax`.
        rare: its first layer is labelled.
        syntax: its treebank says what was skipped.
        thresholds: None for the paper's.

    Raises:
        CalibrationError: if no token counted at a measured site.
        NonFiniteError: if attention weights were NaN.
    """
    thresholds = thresholds or RoleThresholds()
    offsets, rarity = positional.results() if positional else {}, rare.results() if rare else {}
    accuracies, baselines = syntax.results() if syntax else ({}, {})
    labels = {
        site.path: tuple(
            (
                *positional_labels(offsets.get(site.path), head, thresholds),
                *rare_labels(rarity.get(site.path) if site.layer == 0 else None, head, thresholds),
                *syntactic_labels(accuracies.get(site.path, {}), baselines, head, thresholds),
            )
            for head in range(site.num_heads)
        )
        for site in sites
    }
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
    )


def positional_labels(numbers: PositionalNumbers | None, head: int, thresholds: RoleThresholds) -> tuple[str, ...]:
    """The label "positional -1", or "first token", or nothing."""
    if numbers is None:
        return ()
    if numbers.first_token[head] >= thresholds.first_token:
        return (FIRST,)
    if numbers.share[head] < thresholds.positional:
        return ()
    offset = int(numbers.offset[head])
    return (f"positional {offset:+d}" if offset else "positional 0",)


def rare_labels(numbers: RareNumbers | None, head: int, thresholds: RoleThresholds) -> tuple[str, ...]:
    """The label "rare tokens", or nothing."""
    return () if numbers is None or numbers.rarest[head] < thresholds.rare_tokens else ("rare tokens",)


def syntactic_labels(
    accuracies: Mapping[tuple[str, str], Tensor],
    baselines: Mapping[tuple[str, str], Baseline],
    head: int,
    thresholds: RoleThresholds,
) -> tuple[str, ...]:
    """Relations and directions, such as "nsubj dependent->head"."""
    return tuple(
        " ".join(kind)
        for kind, each in accuracies.items()
        if float(each[head]) - baselines[kind].accuracy >= thresholds.syntactic - ROUNDING
    )


def role_kind(label: str) -> str:
    """Which of `ROLE_KINDS` a label is: "positional -1" is "positional"."""
    return next((kind for kind in ROLE_KINDS if label.split(" ")[0] == kind.split(" ")[0]), "syntactic")
