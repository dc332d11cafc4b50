"""From when on a head has a role: how large a share must be, and of how much."""

from dataclasses import dataclass

from collab_heads.checks import check_count
from collab_heads.errors import ArgumentError

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
