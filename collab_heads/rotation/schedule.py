"""Schedules of exchanges, epoch by epoch: their forms in files, their places in a model, and the history."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from collab_heads.base.checks import check_choice, is_count, is_index, is_list
from collab_heads.errors import ArgumentError
from collab_heads.rotation.exchange import Slot, slot_pairs
from collab_heads.sites.site import ROLES, AttentionSite, check_name

# (stack, module) in the source's files -> role.
MODULES = {
    ("encoder", "self_attn"): "enc-self",
    ("decoder", "self_attn"): "dec-self",
    ("decoder", "encoder_attn"): "dec-enc",
    ("decoder", "enc_attn"): "dec-enc",
}
SOURCE_KEYS = {f"{side}_{name}" for side in "sd" for name in ("layer", "head", "layer_module", "transformer_module")}
FORMS = "'role', 'layers' and 'heads'; or 'paths' and 'heads'; or the eight keys of the source's files (s_layer, ...)"


@dataclass(frozen=True)
class End:
    """One end of an exchange, named by a path, or by role and layer (from 0).

    Attributes:
        head: number of the head in the original model.
        path: of the site, or None.
        role: of the site, where there is no path.
        layer: of the site in its stack, where there is no path.
    """

    head: int
    path: str | None = None
    role: str | None = None
    layer: int | None = None

    def slot(self, sites: Sequence[AttentionSite]) -> Slot:
        """Return the place in a model with these sites. `rotate_heads` refuses an unknown path."""
        if self.path is not None:
            return Slot(self.path, self.head)
        check_name(sites, self.role)
        paths = {site.layer: site.path for site in sites if site.role == self.role}
        if self.layer not in paths:
            raise ArgumentError(f"the model has no {self.role} layer {self.layer}; it has {', '.join(map(str, paths))}")
        return Slot(paths[self.layer], self.head)


Schedule = dict[int, tuple[tuple[End, End], ...]]


def distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Make a dict from the entries of a JSON object."""
    unique = dict(pairs)
    if len(unique) < len(pairs):
        names = [name for name, _ in pairs]
        raise ArgumentError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return unique


def read_schedule(schedule: object) -> Schedule:
    """Read a schedule: epoch -> exchanges.

    Args:
        schedule: epoch, counted from 1 and possibly a string -> list of exchanges, each a dict in one of the `FORMS`.

    Returns:
        epoch -> pairs of ends, by ascending epoch.
    """
    if not isinstance(schedule, Mapping) or not schedule:
        raise ArgumentError(f"a schedule must be a dict, epoch -> list of exchanges, not {schedule!r:.200}")
    by_epoch: Schedule = {}
    for key, exchanges in schedule.items():
        epoch = whole_number(key, "an epoch")
        if epoch < 1 or epoch in by_epoch:
            raise ArgumentError(f"epoch {key!r} " + ("is there twice" if epoch in by_epoch else "must be 1 or more"))
        if not is_list(exchanges) or not exchanges:
            raise ArgumentError(f"epoch {epoch} must have a list of exchanges, not {exchanges!r:.200}")
        pairs = []
        for index, exchange in enumerate(exchanges):
            try:
                pairs.append(read_exchange(exchange))
            except ArgumentError as error:
                raise ArgumentError(f"epoch {epoch}, exchange {index}: {error}") from error
        by_epoch[epoch] = tuple(pairs)
    return dict(sorted(by_epoch.items()))


def read_exchange(exchange: Any) -> tuple[End, End]:
    keys = set(exchange) if isinstance(exchange, Mapping) else set()
    if keys == SOURCE_KEYS:
        return source_end(exchange, "s"), source_end(exchange, "d")
    if keys == {"role", "layers", "heads"}:
        check_choice("role", exchange["role"], ROLES)
        layers, heads = (pair_of(exchange[name], name) for name in ("layers", "heads"))
        ends = [
            End(whole_number(head, "a head"), role=exchange["role"], layer=whole_number(layer, "a layer"))
            for layer, head in zip(layers, heads, strict=True)
        ]
    elif keys == {"paths", "heads"}:
        paths, heads = (pair_of(exchange[name], name) for name in ("paths", "heads"))
        if not all(isinstance(path, str) for path in paths):
            raise ArgumentError(f"paths must be strings, not {paths!r:.200}")
        ends = [End(whole_number(head, "a head"), path=path) for path, head in zip(paths, heads, strict=True)]
    else:
        raise ArgumentError(f"an exchange must have {FORMS}; this one is {exchange!r:.300}")
    return ends[0], ends[1]


def source_end(exchange: Mapping, side: str) -> End:
    """Read one end of an exchange in the source's form; the side is "s" or "d"."""
    stack, module = (exchange[f"{side}_{name}_module"] for name in ("transformer", "layer"))
    if not isinstance(stack, str) or not isinstance(module, str) or (stack, module) not in MODULES:
        known = ", ".join(f"{stack} {module}" for stack, module in MODULES)
        raise ArgumentError(f"there is no attention {module!r} in a stack {stack!r}; known: {known}")
    layer, head = whole_number(exchange[f"{side}_layer"], "a layer"), whole_number(exchange[f"{side}_head"], "a head")
    return End(head, role=MODULES[stack, module], layer=layer)


def pair_of(value: object, what: str) -> Sequence[Any]:
    """Return a list of two values, or raise ArgumentError."""
    if not is_list(value) or len(value) != 2:
        raise ArgumentError(f"{what} must be a list of two, not {value!r:.200}")
    return value


def whole_number(value: object, what: str) -> int:
    """Read a whole number from 0, or a string of one; raise ArgumentError for anything else."""
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ArgumentError(f"{what} must be a whole number, not {value!r:.200}")
    return value


Direction = Literal["swap", "back"]  # to another place, and back from there


class Exchanged(NamedTuple):
    """The heads of a role that are exchanged now.

    Attributes:
        since: the epoch before which they were exchanged.
        pairs: the exchanged places.
    """

    since: int
    pairs: list[tuple[Slot, Slot]]


class History:
    """The exchanges of a training.

    Attributes:
        epoch: the last epoch for which exchanges were made, or found not to be due; 0 before the first.
        entries: one dict per exchange: epoch, kind ("swap" or "back") and pairs, each [[path, head], [path, head]].
    """

    def __init__(self):
        self.epoch = 0
        self.entries: list[dict] = []

    def comes(self, epoch: int) -> bool:
        """Return True if an epoch is new; the last one can come again when a training is resumed in its middle."""
        check_epoch("epoch", epoch)
        if epoch < self.epoch:
            raise ArgumentError(
                f"epoch {epoch} comes after epoch {self.epoch}, for which heads have changed places already: a new "
                "training needs a new rotation"
            )
        return epoch > self.epoch

    def add(self, epoch: int, kind: Direction, pairs: Sequence[tuple[Slot, Slot]]) -> None:
        """Note the exchange of some pairs before an epoch; an empty list adds no entry."""
        self.epoch = epoch
        if pairs:
            self.entries.append({"epoch": epoch, "kind": kind, "pairs": pairs_to_json(pairs)})

    def state_dict(self) -> dict[str, Any]:
        """Return the history: numbers, strings, lists and dicts, ready for JSON."""
        return plain_json({"epoch": self.epoch, "history": self.entries})

    @classmethod
    def of(cls, state: object) -> "History":
        """Read the result of `state_dict`."""
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
    """Read which heads are exchanged now: role -> {"since": epoch, "pairs": ...}."""
    if not isinstance(swapped, Mapping):
        raise ArgumentError(f"this is not the state of this rotation: swapped {swapped!r:.200}")
    exchanged = {}
    for role, stored in swapped.items():
        check_choice("role in swapped", role, ROLES)
        if not isinstance(stored, Mapping) or stored.keys() != {"since", "pairs"}:
            raise ArgumentError(f"swapped {role} must have 'since' and 'pairs', not {stored!r:.200}")
        check_epoch("since", stored["since"])
        pairs = slot_pairs(stored["pairs"])
        for slot in (slot for pair in pairs for slot in pair):
            if not (isinstance(slot.path, str) and is_index(slot.head, 1 << 62)):
                raise ArgumentError(f"swapped {role} has places that are none: {slot!r:.200}")
        exchanged[role] = Exchanged(stored["since"], pairs)
    return exchanged


def check_settings(settings: Mapping, state: Mapping) -> None:
    """Raise ArgumentError if a state comes from a rotation with other settings; both in JSON form."""
    if differing := [name for name in settings if state.get(name) != settings[name]]:
        names = "; ".join(f"{name} {state.get(name)!r:.200}, not {settings[name]!r:.200}" for name in differing)
        raise ArgumentError(f"this is not the state of this rotation: {names}")


def pairs_to_json(pairs: Sequence[tuple[Slot, Slot]]) -> list[list[list]]:
    """Return [[path, head], [path, head]] for every pair, the form that `slot_pairs` reads."""
    return [[[slot.path, slot.head] for slot in pair] for pair in pairs]


def plain_json(value: object) -> Any:
    """Return a copy as JSON gives it back: lists for tuples, keys that are strings."""
    return json.loads(json.dumps(value))
