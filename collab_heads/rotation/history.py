"""What a rotation has exchanged so far, and how far it has come: ready to be saved beside a checkpoint."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from collab_heads.checks import check_choice, is_count, is_index, is_list
from collab_heads.errors import ArgumentError
from collab_heads.rotation.slots import Slot, slot_pairs
from collab_heads.sites import ROLES

Direction = Literal["swap", "back"]  # to another place, and back from there


class Exchanged(NamedTuple):
    """Heads of a role that are not in their own places now.

    Attributes:
        since: the epoch before which they left them.
        pairs: the places that they changed.
    """

    since: int
    pairs: list[tuple[Slot, Slot]]


class History:
    """The exchanges of a training.

    Attributes:
        epoch: the last epoch before which exchanges were made, or found not to be due; 0 before the first.
        entries: one dict per exchange: epoch, kind ("swap" or "back") and pairs, each [[path, head], [path, head]].
    """

    def __init__(self):
        self.epoch = 0
        self.entries: list[dict] = []

    def comes(self, epoch: int) -> bool:
        """Whether an epoch is still to come; the last one again is a training resumed in its middle.

        Raises:
            ArgumentError: if it is no epoch, or an earlier one.
        """
        check_epoch("epoch", epoch)
        if epoch < self.epoch:
            raise ArgumentError(
                f"epoch {epoch} comes after epoch {self.epoch}, for which heads have changed places already: a new "
                "training needs a new rotation"
            )
        return epoch > self.epoch

    def add(self, epoch: int, kind: Direction, pairs: Sequence[tuple[Slot, Slot]]) -> None:
        """Note the exchange of some pairs; no pairs are no exchange."""
        self.epoch = epoch
        if pairs:
            self.entries.append({"epoch": epoch, "kind": kind, "pairs": pairs_to_json(pairs)})

    def state_dict(self) -> dict[str, Any]:
        """Numbers, strings, lists and dicts."""
        return plain_json({"epoch": self.epoch, "history": self.entries})

    @classmethod
    def of(cls, state: object) -> "History":
        """Read what `state_dict` returned.

        Raises:
            ArgumentError: if it is something else.
        """
        if (
            not isinstance(state, Mapping)
            or not is_list(state.get("history"))
            or not is_index(state.get("epoch"), 1 << 62)
        ):
            raise ArgumentError(f"this is not the state of a rotation: {state!r:.200}")
        history = cls()
        for entry in state["history"]:
            if not isinstance(entry, Mapping) or entry.get("kind") not in get_args(Direction) or "pairs" not in entry:
                raise ArgumentError(f"this is not an exchange of heads: {entry!r:.200}")
            check_epoch("an exchange's epoch", entry.get("epoch"))
            history.add(entry["epoch"], entry["kind"], slot_pairs(entry["pairs"]))
        history.epoch = state["epoch"]
        return history


def check_epoch(what: str, epoch: object) -> None:
    """Raise ArgumentError unless `epoch` is a whole number from 1."""
    if not is_count(epoch):
        raise ArgumentError(f"{what} must be a whole number, counted from 1, not {epoch!r}")


def read_exchanged(swapped: object) -> dict[str, Exchanged]:
    """Read which heads are in other places now: role -> {"since": epoch, "pairs": ...}.

    Raises:
        ArgumentError: if it is something else.
    """
    if not isinstance(swapped, Mapping):
        raise ArgumentError(f"this is not the state of this rotation: swapped {swapped!r:.200}")
    exchanged = {}
    for role, stored in swapped.items():
        check_choice("role in swapped", role, ROLES)
        if not isinstance(stored, Mapping) or stored.keys() != {"since", "pairs"}:
            raise ArgumentError(f"swapped {role} must have 'since' and 'pairs', not {stored!r:.200}")
        check_epoch("since", stored["since"])
        exchanged[role] = Exchanged(stored["since"], slot_pairs(stored["pairs"]))
    return exchanged


def check_settings(settings: Mapping, state: Mapping) -> None:
    """Raise ArgumentError if a state comes from a rotation with other settings; both in JSON form."""
    if differing := [name for name in settings if state.get(name) != settings[name]]:
        names = "; ".join(f"{name} {state.get(name)!r:.200}, not {settings[name]!r:.200}" for name in differing)
        raise ArgumentError(f"this is not the state of this rotation: {names}")


def pairs_to_json(pairs: Sequence[tuple[Slot, Slot]]) -> list[list[list]]:
    """[[path, head], [path, head]] for every pair: what `slot_pairs` reads."""
    return [[[slot.path, slot.head] for slot in pair] for pair in pairs]


def plain_json(value: object) -> Any:
    """A copy as JSON gives it back: lists for tuples, keys that are strings."""
    return json.loads(json.dumps(value))
