"""What a rotation has exchanged so far, and how far it has come: ready to be saved beside a checkpoint."""

import json
from collections.abc import Mapping, Sequence

from collab_heads.checks import check_choice, is_count, is_index
from collab_heads.errors import ArgumentError
from collab_heads.heads.choices import is_list
from collab_heads.rotation.exchange import Slot, slot_pairs
from collab_heads.sites import ROLES

KINDS = ("swap", "back")


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

    def add(self, epoch: int, kind: str, pairs: Sequence[tuple[Slot, Slot]]) -> None:
        """Note an exchange; one of no pairs is none."""
        self.epoch = epoch
        if pairs:
            self.entries.append({"epoch": epoch, "kind": kind, "pairs": pairs_to_json(pairs)})

    def state_dict(self) -> dict:
        """Numbers, strings, lists and dicts."""
        return plain_json({"epoch": self.epoch, "history": self.entries})

    @classmethod
    def of(cls, state: object) -> "History":
        """Read what `state_dict` returned.

        Raises:
            ArgumentError: if it is something else.
        """
        known = isinstance(state, Mapping) and is_list(state.get("history")) and is_index(state.get("epoch"), 1 << 62)
        if not known:
            raise ArgumentError(f"this is not the state of a rotation: {state!r:.200}")
        found = cls()
        for entry in state["history"]:
            if not isinstance(entry, Mapping) or entry.get("kind") not in KINDS or "pairs" not in entry:
                raise ArgumentError(f"this is not an exchange of heads: {entry!r:.200}")
            check_epoch("an exchange's epoch", entry.get("epoch"))
            found.add(entry["epoch"], entry["kind"], slot_pairs(entry["pairs"]))
        found.epoch = state["epoch"]
        return found


def check_epoch(what: str, epoch: object) -> None:
    """Raise ArgumentError unless `epoch` is a whole number from 1."""
    if not is_count(epoch):
        raise ArgumentError(f"{what} must be a whole number, counted from 1, not {epoch!r}")


def read_swapped(swapped: object) -> dict[str, tuple[int, list[tuple[Slot, Slot]]]]:
    """Read which heads are swapped now: role -> {"since": epoch, "pairs": ...}.

    Raises:
        ArgumentError: if it is something else.
    """
    if not isinstance(swapped, Mapping):
        raise ArgumentError(f"this is not the state of this rotation: swapped {swapped!r:.200}")
    found = {}
    for role, own in swapped.items():
        check_choice("role in swapped", role, ROLES)
        if not isinstance(own, Mapping) or own.keys() != {"since", "pairs"}:
            raise ArgumentError(f"swapped {role} must have 'since' and 'pairs', not {own!r:.200}")
        check_epoch("since", own["since"])
        found[role] = (own["since"], slot_pairs(own["pairs"]))
    return found


def check_settings(own: Mapping, found: Mapping) -> None:
    """Raise ArgumentError if a state comes from a rotation with other settings; both in JSON form."""
    if differing := [name for name in own if found.get(name) != own[name]]:
        names = "; ".join(f"{name} {found.get(name)!r:.200}, not {own[name]!r:.200}" for name in differing)
        raise ArgumentError(f"this is not the state of this rotation: {names}")


def pairs_to_json(pairs: Sequence[tuple[Slot, Slot]]) -> list[list[list]]:
    """[[path, head], [path, head]] for every pair: what `slot_pairs` reads."""
    return [[[slot.path, slot.head] for slot in pair] for pair in pairs]


def plain_json(value: object):
    """A copy as JSON gives it back: lists for tuples, keys that are strings."""
    return json.loads(json.dumps(value))
