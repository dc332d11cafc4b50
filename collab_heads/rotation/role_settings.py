"""What is set for each role that rotates: which heads are exchanged, how many, and before which epochs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from collab_heads.checks import check_choice, is_count
from collab_heads.errors import ArgumentError
from collab_heads.rotation.history import Direction
from collab_heads.rotation.policies import POLICIES, UNRANKED, Scores, Stack, check_pairs, outermost
from collab_heads.rotation.slots import Slot
from collab_heads.sites import ROLES
from collab_heads.words import METRIC_WORDS, Metric, Policy

NUMBERS = ("count", "frequency", "rest", "start", "end", "layer_pairs")


@dataclass(frozen=True)
class RoleSettings:
    """Pairs of heads are exchanged, train in their new places, are exchanged back, rest, and so on.

    Attributes:
        policy: which heads change places.
        metric: what they are ranked by.
        count: pairs of heads in an exchange.
        frequency: epochs from an exchange until the exchange back.
        rest: epochs from there until the next exchange.
        start: epoch before which the first exchange is, from 1.
        end: the last epoch with exchanged heads; None for no end.
        layer_pairs: of the policy "soft": so many pairs of layers, the outermost ones; None for all.

    Raises:
        ArgumentError: on an unknown policy or metric, a number that is not a whole one from 1, a start after the end,
            or pairs of layers where the policy has none.
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
            raise ArgumentError(f"start {self.start} is after end {self.end}: no epoch would swap")
        if self.layer_pairs is not None and self.policy != "soft":
            raise ArgumentError(
                f"layer_pairs is for the policy 'soft', which pairs layers, not for {self.policy!r}: name the roles "
                "that it is for"
            )

    @property
    def numbers(self) -> dict[str, int | None]:
        """What is set beside policy and metric, by name; pairs of layers only where they are limited."""
        return {name: each for name in NUMBERS if (each := getattr(self, name)) is not None or name != "layer_pairs"}

    @property
    def ranks(self) -> bool:
        """Whether heads must be ranked."""
        return self.policy not in UNRANKED

    def check_stack(self, role: str, stack: Stack) -> None:
        """Raise ArgumentError if there are not enough heads, or layers, to choose so many from."""
        check_pairs(self.policy, role, stack, self.count, self.layer_pairs)

    def choose(self, stack: Stack, scores: Scores, seed: str) -> list[tuple[Slot, Slot]]:
        """The pairs of an exchange, in order."""
        return POLICIES[self.policy](outermost(stack, self.layer_pairs), scores, self.count, seed)

    def due(self, epoch: int, since: int | None) -> Direction | None:
        """What is due before an epoch.

        Args:
            epoch: counted from 1.
            since: the epoch before which heads were exchanged that are in other places now; None if none are.

        Returns:
            "swap", "back" or None.
        """
        ended = self.end is not None and epoch > self.end
        if since is not None:
            return "back" if ended or epoch >= since + self.frequency else None
        if ended or epoch < self.start:
            return None
        return None if (epoch - self.start) % (self.frequency + self.rest) else "swap"

    def check_epochs(self, epochs: int) -> None:
        """Raise ArgumentError if `start` or `end` is after the last epoch of a training."""
        for name, value in (("start", self.start), ("end", self.end)):
            if value is not None and value > epochs:
                raise ArgumentError(f"{name} {value} is beyond the last epoch, {epochs}")


def read_settings(roles: str | Iterable[str] | None, options: Mapping[str, Any]) -> dict[str | None, RoleSettings]:
    """The settings of every role, from options that are one value for all roles, or role -> value.

    Args:
        roles: the roles that rotate; None for those that the options name or, where they name none, all.
        options: name of a field of `RoleSettings` -> value, or role -> value.

    Returns:
        role -> settings, in the usual order of roles; None -> settings where they are those of all roles.

    Raises:
        ArgumentError: on unknown roles, options for other roles than those that rotate, and what `RoleSettings`
            refuses.
    """
    if roles is not None:
        roles = [roles] if isinstance(roles, str) else list(roles) if isinstance(roles, Iterable) else [roles]
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
    """Whether an option that is given per role must name a role with this policy."""
    return name != "layer_pairs" and not (name == "metric" and policy in UNRANKED)


def policy_of(role: str, options: Mapping[str, Any]) -> object:
    """The policy of a role; None if it is not named."""
    policy = options["policy"]
    return policy.get(role) if isinstance(policy, Mapping) else policy


def settings_of_role(role: str, options: Mapping[str, Any]) -> RoleSettings:
    """The settings of one role; errors name it."""
    given = {name: value for name, value in options.items() if not isinstance(value, Mapping) or role in value}
    values = {name: value[role] if isinstance(value, Mapping) else value for name, value in given.items()}
    try:
        return RoleSettings(**values)
    except ArgumentError as error:
        raise ArgumentError(f"{role}: {error}") from error


def settings_for(model_roles: Sequence[str], settings: Mapping[str | None, RoleSettings]) -> dict[str, RoleSettings]:
    """The settings for a model with these roles.

    Raises:
        ArgumentError: if a role that should rotate is not among them.
    """
    if None in settings:
        return dict.fromkeys(model_roles, settings[None])
    by_role = {role: of_role for role, of_role in settings.items() if role is not None}
    if missing := [role for role in by_role if role not in model_roles]:
        raise ArgumentError(f"the model has no {missing[0]} attention; its roles: {', '.join(model_roles)}")
    return by_role
