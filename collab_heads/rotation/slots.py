"""Places of heads, and pairs of them: what users and files name, read and looked up."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from collab_heads.checks import did_you_mean, is_index
from collab_heads.errors import ArgumentError
from collab_heads.model.open_site import OpenSite
from collab_heads.record import CollabConfig
from collab_heads.sites import AttentionSite


@dataclass(frozen=True)
class Slot:
    """The place of a head in a model; not the head that is there now.

    Attributes:
        path: dotted path of the site, relative to the base model.
        head: its number in the original model.
    """

    path: str
    head: int

    def __str__(self):
        return f"head {self.head!r} of {self.path}"


Place = Slot | tuple[str, int]
Pairs = Iterable[tuple[Place, Place]]


def slot_pairs(pairs: object) -> list[tuple[Slot, Slot]]:
    """Pairs of slots from what a caller, or a JSON file, has.

    Raises:
        ArgumentError: if something is not a pair, or an end is neither a `Slot` nor (path, head).
    """
    read = []
    for pair in pairs if isinstance(pairs, Iterable) else [pairs]:
        ends = list(pair) if isinstance(pair, Sequence) and not isinstance(pair, str) else []
        if len(ends) != 2:
            raise ArgumentError(f"pairs must be pairs of places, such as (('path', 0), ('path', 3)), not {pair!r:.200}")
        for index, end in enumerate(ends):
            if not isinstance(end, Slot):
                if isinstance(end, str) or not isinstance(end, Sequence) or len(end) != 2:
                    raise ArgumentError(f"a place must be a Slot or (path, head), not {end!r:.200}")
                ends[index] = Slot(*end)
        read.append((ends[0], ends[1]))
    return read


def find_site(sites: dict[str, OpenSite], slot: Slot) -> OpenSite:
    """The site of a slot, or an ArgumentError that names a path that exists."""
    if not isinstance(slot.path, str) or slot.path not in sites:
        raise ArgumentError(
            f"{slot.path!r} is not the path of a site of this model{did_you_mean(slot.path, sites)}; paths are "
            f"relative to the base model, such as {next(iter(sites))!r}"
        )
    return sites[slot.path]


def index_of(record: CollabConfig, site: OpenSite, slot: Slot) -> int:
    """The index of a slot among the heads that its site has now."""
    numbers = site.head_numbers
    if not numbers:
        raise ArgumentError(f"{slot}: all heads of the site were removed; name another site")
    existed = is_index(slot.head, record.site(site.site).num_heads)
    if existed and slot.head in numbers:
        return numbers.index(slot.head)
    why = "was removed" if existed else "does not exist"
    raise ArgumentError(f"{slot} {why}; the site has {', '.join(map(str, numbers))}")


def moving(site: AttentionSite, numbers: Sequence[int]) -> dict[Slot, list[int]]:
    """What can change places of a site: a place -> the indices of the heads that move, itself among them.

    Args:
        site: with or without heads that share key heads, which move together; the first of them names them.
        numbers: those that its heads had before any was removed.
    """
    groups = site.groups if site.groups is not None else range(len(numbers))
    members: dict[int, list[int]] = {}
    for index, key_head in zip(range(len(numbers)), groups, strict=True):
        members.setdefault(key_head, []).append(index)
    return {Slot(site.path, numbers[indices[0]]): indices for indices in members.values()}
