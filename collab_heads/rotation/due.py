"""What is due for the heads of every role before an epoch: to change places, or to change back."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from collab_heads.errors import ArgumentError
from collab_heads.rotation.history import Direction, Exchanged
from collab_heads.rotation.policies import Stack
from collab_heads.rotation.role_settings import RoleSettings
from collab_heads.rotation.slots import Slot

SlotPairs = list[tuple[Slot, Slot]]


class Due(NamedTuple):
    """What is due for a role.

    Attributes:
        direction: "swap" or "back".
        settings: of the role.
        stack: the places of its heads, layer by layer.
        back: the pairs that change back, in order; none if heads are to leave their places.
    """

    direction: Direction
    settings: RoleSettings
    stack: Stack
    back: SlotPairs


def due_before(
    epoch: int, stacks: Mapping[str, tuple[RoleSettings, Stack]], exchanged: Mapping[str, Exchanged]
) -> dict[str, Due]:
    """The roles for which something is due.

    Args:
        epoch: counted from 1.
        stacks: role -> its settings, and the places of its heads.
        exchanged: role -> its heads that are in other places now.
    """
    due = {}
    for role, (settings, stack) in stacks.items():
        away = exchanged.get(role)
        if direction := settings.due(epoch, None if away is None else away.since):
            due[role] = Due(direction, settings, stack, [] if away is None else away.pairs[::-1])
    return due


def pairs_by_role(
    epoch: int, pairs: Iterable[tuple[Slot, Slot]], due: Mapping[str, Due], roles: Mapping[str, str]
) -> dict[str, SlotPairs]:
    """Pairs by their role.

    Args:
        epoch: before which they are to be exchanged.
        pairs: of all roles.
        due: what is due before it.
        roles: path of a site -> its role.

    Raises:
        ArgumentError: unless the pairs are what is due.
    """
    by_role: dict[str, SlotPairs] = {role: [] for role in due}
    for first, second in pairs:
        role = roles.get(first.path)
        if role is None or role not in due:
            raise ArgumentError(f"{first} and {second}: nothing of {role or 'this path'} is due at epoch {epoch}")
        by_role[role].append((first, second))
    for role, what in due.items():
        if not by_role[role] or (what.direction == "back" and by_role[role] != what.back):
            raise ArgumentError(f"the pairs of {role} are not what is due before epoch {epoch}: {what.direction}")
    return by_role
