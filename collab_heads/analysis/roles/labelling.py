"""From when on a head has a role: how large a share must be, and of how much."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from collab_heads.analysis.roles.positional import PositionalNumbers
from collab_heads.analysis.roles.rare import RareNumbers
from collab_heads.analysis.roles.syntax import Baseline
from collab_heads.base.checks import check_count
from collab_heads.errors import ArgumentError
from collab_heads.sites.site import AttentionSite

# A share p of n things seen is known with a standard error of sqrt(p (1 - p) / n), at most 0.5 / sqrt(n).
LEAST_TOKENS = 100  # standard error at most 0.05: a share of 0.5 is none of 0.35, and one of 0.9 none of 0.8
# Whatever its length, a sentence has one rarest token. A head that finds a quarter of them is 3 standard errors from
# one half in 30 sentences.
LEAST_SENTENCES = 30
LEAST_DEPENDENCIES = 100  # standard error at most 0.05, half of what a head must be better by
MOST_CHANCE = 0.5  # in few sentences nearly every token is seen once, they are all the rarest, and any head finds one


@dataclass(frozen=True)
class SampleSizes:
    """How much must have been seen for a head to have a role; of less there is a warning instead.

    Attributes:
        tokens: query tokens of a site, for "positional" and "first token".
        sentences: those with a query token, for "rare tokens".
        dependencies: words that have a relation, for "syntactic".
        chance: of the threshold for "rare tokens", the most that a head may reach which looks anywhere.

    Raises:
        ArgumentError: if a number of things is no whole number of 0 or more.
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
    """How large a share must be for a head to have a role.

    Attributes:
        positional: share of the query tokens whose largest weight falls on one relative position.
        first_token: share of those after the first token whose largest weight falls on it. Such a head looks nowhere in
            particular, and is not positional.
        rare_tokens: share of those whose largest weight falls on the rarest token of the sentence. The paper names no
            threshold; the head that it shows has 0.66 (and 0.83 for one of the two rarest).
        syntactic: how far the accuracy on a relation, in one direction, is above that of the best fixed offset.
        samples: how much must have been seen.

    Raises:
        ArgumentError: if a share is not in 0..1.

    Source: "positional" and "syntactic": Voita et al. 2019, arXiv:1905.09418, section 5.
    """

    positional: float = 0.9
    first_token: float = 0.5
    rare_tokens: float = 0.5
    syntactic: float = 0.1
    samples: SampleSizes = SampleSizes()

    def __post_init__(self):
        for name in ("positional", "first_token", "rare_tokens", "syntactic"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ArgumentError(f"{name}={value!r}: a threshold is a share, between 0 and 1")


ROUNDING = 1e-9  # of a difference of two shares: 0.35 - 0.25 is 0.09999999999999998
FIRST = "first token"
ROLE_KINDS = ("positional", FIRST, "rare tokens", "syntactic")
Labels = Mapping[str, tuple[tuple[str, ...], ...]]
Kind = tuple[str, str]  # relation and direction
# a label, and why too little was seen to give it; "" where there was enough
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

    Args:
        sites: whose heads.
        positional: path -> where its heads look.
        rare: path -> how often they look at rare tokens; those of the first layer are labelled.
        syntax: path -> (relation, direction) -> accuracies, [H].
        baselines: what the best fixed offset reaches.
        thresholds: from when on a head has a role.

    Returns:
        path -> per head its labels, and the warnings: which labels were not given, and why.
    """
    labels, withheld = {}, Counter[Judged]()
    for site in sites:
        judged = [
            [
                *judge_position(positional.get(site.path), head, thresholds),
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


def judge_position(numbers: PositionalNumbers | None, head: int, thresholds: RoleThresholds) -> Iterator[Judged]:
    """The label "positional -1", or "first token", or nothing."""
    if numbers is None:
        return
    least = thresholds.samples.tokens
    few = "" if numbers.tokens >= least else f"{numbers.tokens} query tokens are too few to tell: it takes {least}"
    if numbers.first_token[head] >= thresholds.first_token:
        yield FIRST, few
    elif numbers.share[head] >= thresholds.positional:
        offset = int(numbers.offset[head])
        yield f"positional {offset:+d}" if offset else "positional 0", few


def judge_rarity(numbers: RareNumbers | None, head: int, thresholds: RoleThresholds) -> Iterator[Judged]:
    """The label "rare tokens", or nothing."""
    if numbers is None or numbers.rarest[head] < thresholds.rare_tokens:
        return
    least, most = thresholds.samples.sentences, thresholds.samples.chance * thresholds.rare_tokens
    few = ""
    if numbers.sentences < least:
        few = f"{numbers.sentences} sentences are too few to tell: it takes {least}"
    elif numbers.chance[0] > most:
        few = f"a head that looks anywhere would reach {numbers.chance[0]:.2f}, as so many tokens are equally rare"
    yield "rare tokens", few


def judge_syntax(
    accuracies: Mapping[Kind, Tensor], baselines: Mapping[Kind, Baseline], head: int, thresholds: RoleThresholds
) -> Iterator[Judged]:
    """Relations and directions, such as "nsubj dependent->head"."""
    least = thresholds.samples.dependencies
    for kind, each in accuracies.items():
        if float(each[head]) - baselines[kind].accuracy >= thresholds.syntactic - ROUNDING:
            asked = baselines[kind].queries
            few = f"{asked} words with the relation {kind[0]} are too few to tell: it takes {least}"
            yield " ".join(kind), "" if asked >= least else few


def role_kind(label: str) -> str:
    """Which of `ROLE_KINDS` a label is: "positional -1" is "positional"."""
    return next((kind for kind in ROLE_KINDS if label.split(" ")[0] == kind.split(" ")[0]), "syntactic")
