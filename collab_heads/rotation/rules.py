"""The rules of a rotation: policies that choose, by scores, the heads of a stack to exchange, and their settings.

A stack is all layers of one role, each a list of places; count is the number of pairs. Higher scores are stronger; of
equal ones the earlier place is weaker.

Source: Azov and Landau 2020 (MHR-NLP-Transformers), dynamic swapping; "soft" and "local" as described there, not as
computed (its code uses the indices of one layer for the other, and its "local" leaves the layer).
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar, cast

from transformers import PreTrainedModel

from collab_heads.analysis.measures.head_scores import head_scores
from collab_heads.base.checks import check_choice, is_count
from collab_heads.base.option_values import METRIC_WORDS, Metric, Policy
from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.errors import ArgumentError
from collab_heads.heads.selection import check_scores
from collab_heads.rotation.exchange import Slot, moving
from collab_heads.rotation.schedule import Direction
from collab_heads.sites.record import CollabConfig, kept_heads
from collab_heads.sites.site import ROLES

Stack = Sequence[Sequence[Slot]]
Scores = Mapping[Slot, float]
SlotPairs = list[tuple[Slot, Slot]]
Layer = TypeVar("Layer")


def weakest_first(slots: Iterable[Slot], scores: Scores) -> list[Slot]:
    """Sort places by ascending score."""
    return sorted(slots, key=scores.__getitem__)


def hard(stack: Stack, scores: Scores, count: int, seed: str) -> SlotPairs:
    """Pair the strongest heads of the stack with its weakest."""
    ranked = weakest_first(chain(*stack), scores)
    return list(zip(ranked[::-1][:count], ranked[:count], strict=True))


def soft(stack: Stack, scores: Scores, count: int, seed: str) -> SlotPairs:
    """Pair the weakest heads of layer i with the weakest of layer L - 1 - i; a middle layer stays."""
    ranked = [weakest_first(layer, scores)[:count] for layer in stack]
    half = len(stack) // 2
    layers = zip(ranked[:half], ranked[::-1][:half], strict=True)
    return [pair for low, high in layers for pair in zip(low, high, strict=True)]


def local(stack: Stack, scores: Scores, count: int, seed: str) -> SlotPairs:
    """Pair, in every layer, its weakest heads with its strongest."""
    ranked = [weakest_first(layer, scores) for layer in stack]
    return [pair for layer in ranked for pair in zip(layer[:count], layer[::-1][:count], strict=True)]


def at_random(stack: Stack, scores: Scores, count: int, seed: str) -> SlotPairs:
    """Draw pairs of the stack that share no head; scores are not used."""
    drawn = random.Random(seed).sample(list(chain(*stack)), 2 * count)
    return list(zip(drawn[::2], drawn[1::2], strict=True))


POLICIES: dict[str, Callable[[Stack, Scores, int, str], SlotPairs]] = {
    "hard": hard,
    "soft": soft,
    "local": local,
    "random": at_random,
}
UNRANKED = ("random",)  # policies that need no scores


def outermost(layers: Sequence[Layer], pairs: int | None) -> Sequence[Layer]:
    """Return this many first layers, and as many last ones, which form the first pairs of "soft"; None for all."""
    return layers if pairs is None else [*layers[:pairs], *layers[-pairs:]]


def check_pairs(policy: str, role: str, stack: Stack, count: int, layer_pairs: int | None = None) -> None:
    """Raise ArgumentError if a policy needs more heads or layers than there are: each can be in one pair only."""
    pools = {f"all {len(stack)} layers": sum(map(len, stack))}
    if policy == "local":
        pools = {f"layer {index}": len(layer) for index, layer in enumerate(stack)}
    if policy == "soft":
        half = len(stack) // 2
        if not half:
            raise ArgumentError(f"the policy 'soft' pairs layers, {role} attention has one site: take 'local'")
        if layer_pairs is not None and layer_pairs > half:
            raise ArgumentError(
                f"layer_pairs {layer_pairs} is more than the {half} that the {len(stack)} {role} layers make: leave it "
                "out for all of them"
            )
        taken = outermost(list(enumerate(stack)), layer_pairs or half)
        pools = {f"layer {index}": len(layer) for index, layer in taken}
    for where, heads in pools.items():
        if count > heads // 2:
            raise ArgumentError(
                f"count {count} is more than half of the {heads} {role} heads of {where}: the policy {policy!r} takes "
                f"up to {heads // 2}; choose fewer, another policy, or other roles"
            )


NUMBERS = ("count", "frequency", "rest", "start", "end", "layer_pairs")


@dataclass(frozen=True)
class RoleSettings:
    """The settings of one role: heads are exchanged, train in their new places, are exchanged back, rest, and so on.

    Attributes:
        policy: the rule that chooses the heads.
        metric: the score by which they are ranked.
        count: pairs of heads in an exchange.
        frequency: epochs from an exchange until the exchange back.
        rest: epochs from there until the next exchange.
        start: epoch before which the first exchange is made, from 1.
        end: the last epoch with exchanged heads; None for no end.
        layer_pairs: of the policy "soft": the number of pairs of layers, the outermost ones; None for all.
    """

    policy: Policy
    metric: Metric = "confidence"
    count: int = 1
    frequency: int = 1
    rest: int = 1
    start: int = 1
    end: int | None = None
    layer_pairs: int | None = None

    def __post_init__(self):
        check_choice("policy", self.policy, POLICIES)
        check_choice("metric", self.metric, METRIC_WORDS)
        for name in NUMBERS:
            value = getattr(self, name)
            if not is_count(value) and not (name in ("end", "layer_pairs") and value is None):
                raise ArgumentError(f"{name} must be a whole number from 1, not {value!r}")
        if self.end is not None and self.start > self.end:
            raise ArgumentError(f"start {self.start} is after end {self.end}: no epoch would rotate")
        if self.layer_pairs is not None and self.policy != "soft":
            raise ArgumentError(
                f"layer_pairs is for the policy 'soft', which pairs layers, not for {self.policy!r}: name the roles "
                "that it is for"
            )

    @property
    def numbers(self) -> dict[str, int | None]:
        """The numeric settings by name; `layer_pairs` only where it is set."""
        return {name: each for name in NUMBERS if (each := getattr(self, name)) is not None or name != "layer_pairs"}

    @property
    def ranks(self) -> bool:
        """True if heads must be ranked."""
        return self.policy not in UNRANKED

    def check_stack(self, role: str, stack: Stack) -> None:
        """Raise ArgumentError if there are too few heads, or layers, for the number of pairs."""
        check_pairs(self.policy, role, stack, self.count, self.layer_pairs)

    def choose(self, stack: Stack, scores: Scores, seed: str) -> list[tuple[Slot, Slot]]:
        """Return the pairs of an exchange, in order."""
        return POLICIES[self.policy](outermost(stack, self.layer_pairs), scores, self.count, seed)

    def due(self, epoch: int, since: int | None) -> Direction | None:
        """Return what is due before an epoch.

        Args:
            epoch: counted from 1.
            since: the epoch before which the heads that are exchanged now were exchanged; None if none are.

        Returns:
            "swap", "back" or None.
        """
        ended = self.end is not None and epoch > self.end
        if since is not None:
            return "back" if ended or epoch >= since + self.frequency else None
        if ended or epoch < self.start:
            return None
        return None if (epoch - self.start) % (self.frequency + self.rest) else "swap"

    def check_epochs(self, epochs: int | None) -> None:
        """Raise ArgumentError if `start` or `end` is after the last epoch of a training."""
        for name, value in (("start", self.start), ("end", self.end)):
            if value is not None and epochs is not None and value > epochs:
                raise ArgumentError(f"{name} {value} is beyond the last epoch, {epochs}")


def read_settings(roles: str | Iterable[str] | None, options: Mapping[str, Any]) -> dict[str | None, RoleSettings]:
    """Read the settings of every role from options that are one value for all roles, or role -> value.

    Args:
        roles: the roles that rotate; None for those that the options name or, if they name none, all.
        options: name of a field of `RoleSettings` -> value, or role -> value.

    Returns:
        role -> settings, in the usual order of roles; None -> settings where they are those of all roles.
    """
    if roles is not None:
        is_scalar = getattr(roles, "ndim", None) == 0  # a tensor without dimensions only seems to be iterable
        is_several = isinstance(roles, Iterable) and not isinstance(roles, str) and not is_scalar
        roles = list(roles) if is_several else [cast(str, roles)]
        if not roles:
            raise ArgumentError("roles is empty: name roles, or pass None for all")
    by_role = {name: value for name, value in options.items() if isinstance(value, Mapping)}
    for named in [roles or (), *by_role.values()]:
        for role in named:
            check_choice("role", role, ROLES)
    for name, value in by_role.items():
        roles = list(value) if roles is None else roles
        needed = {role for role in roles if needs(name, policy_of(role, options))}
        if not needed <= value.keys() <= set(roles) or not value:
            raise ArgumentError(
                f"{name} is for {', '.join(value) or 'no role'}, the roles that rotate are {', '.join(roles)}: give "
                "one value for each, or one for all"
            )
    if roles is None:
        return {None: RoleSettings(**options)}
    return {role: settings_of_role(role, options) for role in ROLES if role in roles}


def needs(name: str, policy: object) -> bool:
    """Return True if an option that is given per role must name a role with this policy."""
    return name != "layer_pairs" and not (name == "metric" and policy in UNRANKED)


def policy_of(role: str, options: Mapping[str, Any]) -> object:
    policy = options["policy"]
    return policy.get(role) if isinstance(policy, Mapping) else policy


def settings_of_role(role: str, options: Mapping[str, Any]) -> RoleSettings:
    """Return the settings of one role; errors name it."""
    given = {name: value for name, value in options.items() if not isinstance(value, Mapping) or role in value}
    values = {name: value[role] if isinstance(value, Mapping) else value for name, value in given.items()}
    try:
        return RoleSettings(**values)
    except ArgumentError as error:
        raise ArgumentError(f"{role}: {error}") from error


def settings_for(model_roles: Sequence[str], settings: Mapping[str | None, RoleSettings]) -> dict[str, RoleSettings]:
    if None in settings:
        return dict.fromkeys(model_roles, settings[None])
    by_role = {role: of_role for role, of_role in settings.items() if role is not None}
    if missing := [role for role in by_role if role not in model_roles]:
        raise ArgumentError(f"the model has no {missing[0]} attention; its roles: {', '.join(model_roles)}")
    return by_role


def scores_for(
    settings: Iterable[RoleSettings],
    model: PreTrainedModel,
    batches: Iterable[Mapping] | None,
    adapter: AttentionAdapter,
    exclude: Iterable[int] | None,
) -> dict[str, dict[Slot, float]]:
    """Return the scores of heads for the settings that rank them: metric -> place -> score."""
    ranking = [each for each in settings if each.ranks]
    if not ranking:
        return {}
    if batches is None:
        first = ranking[0]
        raise ArgumentError(f"the policy {first.policy!r} ranks heads by {first.metric}: it needs batches")
    return slot_scores(model, batches, adapter, dict.fromkeys(each.metric for each in ranking), exclude)


def slot_scores(
    model: PreTrainedModel,
    batches: Iterable[Mapping],
    adapter: AttentionAdapter,
    metrics: Iterable[Metric],
    exclude: Iterable[int] | None = None,
) -> dict[str, dict[Slot, float]]:
    """Score all heads by some metrics.

    Heads that share a key head move together; the place of the first of them has their mean score. The arguments are
    those of `head_scores`.

    Returns:
        metric -> place -> score; higher is stronger.
    """
    by_metric = head_scores(model, batches, metrics, exclude=exclude)
    record, sites = CollabConfig.on(model).sites, adapter.sites_with_heads(model)
    found = {}
    for metric, values in by_metric.items():
        scores = check_scores(values, sites)
        found[metric] = {
            slot: sum(of_site[index] for index in members) / len(members)
            for site in sites
            for of_site in [scores[site.path].tolist()]
            for slot, members in moving(site, kept_heads(record, site)).items()
        }
    return found
