"""When heads swap and swap back: a cycle counted in epochs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from collab_heads.checks import check_choice, is_count
from collab_heads.errors import ArgumentError
from collab_heads.sites import ROLES


@dataclass(frozen=True)
class Cycle:
    """Swap, train so many epochs, swap back, rest so many, again.

    Attributes:
        count: pairs of heads in a swap.
        frequency: epochs from a swap until the swap back.
        rest: epochs from there until the next swap.
        start: epoch before which the first swap is, from 1.
        end: last epoch before which a swap may be, and the last one with swapped heads; None for no end.

    Raises:
        ArgumentError: on a number that is not a whole one from 1, or a start after the end.
    """

    count: int = 1
    frequency: int = 1
    rest: int = 1
    start: int = 1
    end: int | None = None

    def __post_init__(self):
        for name, value in vars(self).items():
            if not is_count(value) and not (name == "end" and value is None):
                raise ArgumentError(f"{name} must be a whole number from 1, not {value!r}")
        if self.end is not None and self.start > self.end:
            raise ArgumentError(f"start {self.start} is after end {self.end}: no epoch would swap")

    def kind(self, epoch: int, since: int | None) -> str | None:
        """What is due before an epoch.

        Args:
            epoch: counted from 1.
            since: the epoch before which the heads that are swapped now were; None if all are in their places.

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
        """Raise ArgumentError if the cycle starts or ends after the last epoch of a training."""
        for name, value in (("start", self.start), ("end", self.end)):
            if value is not None and value > epochs:
                raise ArgumentError(f"{name} {value} is beyond the last epoch, {epochs}")


def read_cycles(roles: str | Iterable[str] | None, settings: Mapping[str, object]) -> dict[str | None, Cycle]:
    """One cycle per role, from settings that are numbers for all roles or role -> number.

    Args:
        roles: the roles that rotate; None for those that the settings name or, where they name none, all.
        settings: name of a field of `Cycle` -> number, or role -> number.

    Returns:
        role -> cycle, in the usual order of roles; None -> cycle where it is that of all roles.

    Raises:
        ArgumentError: on unknown roles, settings for other roles than those that rotate, and what `Cycle` refuses.
    """
    if roles is not None:
        roles = [roles] if isinstance(roles, str) else list(roles) if isinstance(roles, Iterable) else [roles]
        if not roles:
            raise ArgumentError("roles is empty: name roles, or pass None for all")
    per_role = {name: value for name, value in settings.items() if isinstance(value, Mapping)}
    for value in [roles or (), *per_role.values()]:
        for role in value:
            check_choice("role", role, ROLES)
    for name, value in per_role.items():
        roles = list(value) if roles is None else roles
        if set(value) != set(roles) or not value:
            raise ArgumentError(
                f"{name} is for {', '.join(value) or 'no role'}, the roles that rotate are {', '.join(roles)}: give "
                "one number for each, or one for all"
            )
    if roles is None:
        return {None: Cycle(**settings)}
    return {role: role_cycle(role, settings) for role in ROLES if role in roles}


def role_cycle(role: str, settings: Mapping[str, object]) -> Cycle:
    """The cycle of a role; errors name it."""
    try:
        return Cycle(**{name: v[role] if isinstance(v, Mapping) else v for name, v in settings.items()})
    except ArgumentError as error:
        raise ArgumentError(f"{role}: {error}") from error


def present_cycles(cycles: Mapping[str | None, Cycle], present: Sequence[str]) -> dict[str, Cycle]:
    """The cycles for a model with these roles.

    Raises:
        ArgumentError: if a role that should rotate is not among them.
    """
    if None in cycles:
        return dict.fromkeys(present, cycles[None])
    if missing := [role for role in cycles if role not in present]:
        raise ArgumentError(f"the model has no {missing[0]} attention; its roles: {', '.join(present)}")
    return dict(cycles)
