"""The roles of heads: their thresholds, labels and numbers, for people (`str`) and for machines (`to_dict`)."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from collab_heads.analysis.roles.positional import Positional, PositionalNumbers
from collab_heads.analysis.roles.rare import RareNumbers, RareTokens
from collab_heads.analysis.roles.syntax import Baseline, Syntax
from collab_heads.base.checks import check_count
from collab_heads.base.report import Report, text_table
from collab_heads.errors import ArgumentError
from collab_heads.sites.site import AttentionSite

# A share p of n things seen is known with a standard error of sqrt(p (1 - p) / n), at most 0.5 / sqrt(n).
LEAST_TOKENS = 100  # standard error at most 0.05: it tells a share of 0.5 from 0.35, and 0.9 from 0.8
# Whatever its length, a sentence has one rarest token. A head that finds a quarter of them is 3 standard errors from
# one half in 30 sentences.
LEAST_SENTENCES = 30
LEAST_DEPENDENCIES = 100  # standard error at most 0.05, half of what a head must be better by
MOST_CHANCE = 0.5  # in few sentences nearly all tokens occur once: all are the rarest, and any head finds one


@dataclass(frozen=True)
class SampleSizes:
    """The amounts of data that roles need; with less, a warning takes the place of the label.

    Attributes:
        tokens: query tokens of a site, for "positional" and "first token".
        sentences: sentences with a query token, for "rare tokens".
        dependencies: words that have a relation, for "syntactic".
        chance: the largest share that a head which looks anywhere may reach, as a fraction of the threshold for "rare
            tokens".

    Raises:
        ArgumentError: if the number of tokens, sentences or dependencies is not a whole number of 0 or more.
    """

    tokens: int = LEAST_TOKENS
    sentences: int = LEAST_SENTENCES
    dependencies: int = LEAST_DEPENDENCIES
    chance: float = MOST_CHANCE

    def __post_init__(self):
        for name in ("tokens", "sentences", "dependencies"):
            check_count(name, getattr(self, name))


@dataclass(frozen=True)
class RoleThresholds:
    """The shares that a head needs for its roles.

    Attributes:
        positional: share of the query tokens whose largest weight falls on one relative position.
        first_token: share of the query tokens after the first whose largest weight falls on the first. Such a head
            looks nowhere in particular and is not positional. For the label it also needs `first_token_above`.
        rare_tokens: share of the query tokens whose largest weight falls on the rarest token of the sentence. The paper
            names no threshold; the head that it shows has 0.66 (and 0.83 for one of the two rarest).
        syntactic: how far the accuracy on a relation, in one direction, exceeds that of the best fixed offset.
        samples: how much data each role needs.
        first_token_above: how far that share of a "first token" head exceeds the share of the median head of its role,
            and that of a head which looks anywhere. In models where most heads rest on the first token, this is no
            role of a single one.

    Raises:
        ArgumentError: if a share is not between 0 and 1.

    Source: "positional" and "syntactic": Voita et al. 2019, arXiv:1905.09418, section 5.
    """

    positional: float = 0.9
    first_token: float = 0.5
    rare_tokens: float = 0.5
    syntactic: float = 0.1
    samples: SampleSizes = SampleSizes()
    first_token_above: float = 0.25

    def __post_init__(self):
        for name in ("positional", "first_token", "rare_tokens", "syntactic", "first_token_above"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ArgumentError(f"{name}={value!r}: a threshold is a share, between 0 and 1")


ROUNDING = 1e-9  # of a difference of two shares: 0.35 - 0.25 is 0.09999999999999998
FIRST = "first token"
ROLE_KINDS = ("positional", FIRST, "rare tokens", "syntactic")
Labels = Mapping[str, tuple[tuple[str, ...], ...]]
Kind = tuple[str, str]  # relation and direction
# a label, and why there is too little data to give it; "" if there is enough
Judged = tuple[str, str]


def label_heads(
    sites: Sequence[AttentionSite],
    positional: Mapping[str, PositionalNumbers],
    rare: Mapping[str, RareNumbers],
    syntax: Mapping[str, Mapping[Kind, Tensor]],
    baselines: Mapping[Kind, Baseline],
    thresholds: RoleThresholds,
) -> tuple[Labels, tuple[str, ...]]:
    """Label every head.

    Returns:
        path -> the labels of each head, and the warnings: which labels were withheld, and why.
    """
    labels, withheld, usual = {}, Counter[Judged](), usual_on_first(sites, positional)
    for site in sites:
        judged = [
            [
                *judge_position(positional.get(site.path), head, thresholds, usual.get(site.role, 0.0)),
                *judge_rarity(rare.get(site.path) if site.layer == 0 else None, head, thresholds),
                *judge_syntax(syntax.get(site.path, {}), baselines, head, thresholds),
            ]
            for head in range(site.num_heads)
        ]
        labels[site.path] = tuple(tuple(label for label, why in each if not why) for each in judged)
        withheld.update((role_kind(label), why) for each in judged for label, why in each if why)
    return labels, tuple(
        f"{number} {'head' if number == 1 else 'heads'} would be called {label!r}, but {why}"
        for (label, why), number in withheld.items()
    )


def usual_on_first(sites: Sequence[AttentionSite], positional: Mapping[str, PositionalNumbers]) -> dict[str, float]:
    """Return role -> the share of the median head's largest weights on the first token."""
    shares: dict[str, list[Tensor]] = {}
    for site in sites:
        if site.path in positional:
            shares.setdefault(site.role, []).append(positional[site.path].first_token)
    return {role: float(torch.cat(each).median()) for role, each in shares.items()}


def judge_position(
    numbers: PositionalNumbers | None, head: int, thresholds: RoleThresholds, usual: float
) -> Iterator[Judged]:
    """Yield the label "first token", or one such as "positional -1", or nothing.

    Args:
        numbers: those of the site; None if not measured.
        head: the place of the head in its site.
        thresholds: the shares that labels need.
        usual: the share of the median head on the first token.
    """
    if numbers is None:
        return
    least = thresholds.samples.tokens
    few = "" if numbers.tokens >= least else f"{numbers.tokens} query tokens are too few to tell: it takes {least}"
    if numbers.first_token[head] >= thresholds.first_token:
        above = float(numbers.first_token[head]) - max(usual, numbers.first_chance)
        if above >= thresholds.first_token_above - ROUNDING:
            yield FIRST, few
    elif numbers.share[head] >= thresholds.positional:
        offset = int(numbers.offset[head])
        yield f"positional {offset:+d}" if offset else "positional 0", few


def judge_rarity(numbers: RareNumbers | None, head: int, thresholds: RoleThresholds) -> Iterator[Judged]:
    if numbers is None or numbers.rarest[head] < thresholds.rare_tokens:
        return
    least, most = thresholds.samples.sentences, thresholds.samples.chance * thresholds.rare_tokens
    few = ""
    if numbers.sentences < least:
        s, are = ("", "is") if numbers.sentences == 1 else ("s", "are")
        few = f"{numbers.sentences} sentence{s} {are} too few to tell: it takes {least}"
    elif numbers.chance[0] > most:
        few = f"a head that looks anywhere would reach {numbers.chance[0]:.2f}, as so many tokens are equally rare"
    yield "rare tokens", few


def judge_syntax(
    accuracies: Mapping[Kind, Tensor], baselines: Mapping[Kind, Baseline], head: int, thresholds: RoleThresholds
) -> Iterator[Judged]:
    """Yield labels of relation and direction, such as "nsubj dependent->head"."""
    least = thresholds.samples.dependencies
    for kind, each in accuracies.items():
        if float(each[head]) - baselines[kind].accuracy >= thresholds.syntactic - ROUNDING:
            asked = baselines[kind].queries
            s, are = ("", "is") if asked == 1 else ("s", "are")
            few = f"{asked} word{s} with the relation {kind[0]} {are} too few to tell: it takes {least}"
            yield " ".join(kind), "" if asked >= least else few


def role_kind(label: str) -> str:
    """Return the entry of `ROLE_KINDS` that a label belongs to: "positional" for "positional -1"."""
    return next((kind for kind in ROLE_KINDS if label.split(" ")[0] == kind.split(" ")[0]), "syntactic")


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
            numbers, role = self.positional[path], next(site.role for site in self.sites if site.path == path)
            usual = usual_on_first(self.sites, self.positional)[role]
            return f"({numbers.first_token[head]:.2f}, median head {usual:.2f}, chance {numbers.first_chance:.2f})"
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
            queries = [
                f"{relation} {self.baselines[relation, direction].queries}"
                for relation, direction in self.baselines
                if direction == next(iter(self.baselines))[1]
            ]
            lines += [*self.read(), f"dependents by relation: {', '.join(queries) or 'none of those asked for'}"]
        return [*lines, *self.habits(), *self.warnings]

    def read(self) -> list[str]:
        """Return a line on how much of the treebank was measured, and what was left out; none without a treebank."""
        left_out = ", ".join(f"{count} {reason}" for reason, count in self.skipped.items())
        longest = "" if self.limit is None else f" (at most {self.limit} tokens)"
        return [f"treebank: {self.sentences} sentences{longest}; skipped: {left_out}"] if self.sentences else []

    def habits(self) -> list[str]:
        """Return a line per role whose heads mostly look at the first token: it is no role of single heads there."""
        lines, least = [], self.thresholds.first_token
        for role, usual in usual_on_first(self.sites, self.positional).items():
            paths = [site.path for site in self.sites if site.role == role and site.path in self.positional]
            shares = torch.cat([self.positional[path].first_token for path in paths])
            tokens = min(self.positional[path].tokens for path in paths)
            if usual >= least and tokens >= self.thresholds.samples.tokens:
                lines.append(
                    f"{int((shares >= least).sum())} of {len(shares)} heads of {role} look most at the first token, "
                    f"the median head for {usual:.0%} of the tokens: heads that do so far more often have the role"
                )
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
    """Label heads from observers that have seen their data.

    Args:
        sites: the sites that have heads, in model order, as `observe` returns them.
        heads: path -> the original numbers of those heads.
        positional: None if not measured; the same holds for `rare` and `syntax`.
        rare: only heads of the first layer are labelled.
        syntax: its treebank tells what was skipped.
        thresholds: None for the defaults of `RoleThresholds`.
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
