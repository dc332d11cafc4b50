"""Places of heads, and pairs of them: read them, look them up, and collect the tensors that move with a head."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from collab_heads.base.checks import did_you_mean, is_index
from collab_heads.errors import ArgumentError, ShapeError, SwapError
from collab_heads.layers.fused import part_of, whole_of
from collab_heads.layers.gates import HeadGates
from collab_heads.layers.layout import is_dtensor, is_transposed, widths
from collab_heads.layers.output import alphas_of, gates_of
from collab_heads.model.open_layers import OpenSite
from collab_heads.model.refusals import check_projection
from collab_heads.rotation.optimizer_state import elementwise_state
from collab_heads.sites.record import CollabConfig
from collab_heads.sites.site import AttentionSite


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
    """Read pairs of slots from arguments or JSON.

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
    """Return the site of a slot.

    Raises:
        ArgumentError: if there is none; the message names a path that exists.
    """
    if not isinstance(slot.path, str) or slot.path not in sites:
        raise ArgumentError(
            f"{slot.path!r} is not the path of a site of this model{did_you_mean(slot.path, sites)}; paths are "
            f"relative to the base model, such as {next(iter(sites))!r}"
        )
    return sites[slot.path]


def index_of(record: CollabConfig, site: OpenSite, slot: Slot) -> int:
    """Return the index of a slot among the heads that its site has now.

    Raises:
        ArgumentError: if the head was removed or never existed.
    """
    numbers = site.head_numbers
    if not numbers:
        raise ArgumentError(f"{slot}: all heads of the site were removed; name another site")
    existed = is_index(slot.head, record.site(site.site).num_heads)
    if existed and slot.head in numbers:
        return numbers.index(slot.head)
    why = "was removed" if existed else "does not exist"
    raise ArgumentError(f"{slot} {why}; the site has {', '.join(map(str, numbers))}")


def moving(site: AttentionSite, numbers: Sequence[int]) -> dict[Slot, list[int]]:
    """Return the heads of a site that can move: place -> the indices of the heads that move together.

    Args:
        site: with or without heads that share key heads. Such heads move together, under the place of the first.
        numbers: the original numbers of its heads.
    """
    groups = site.groups if site.groups is not None else range(len(numbers))
    members: dict[int, list[int]] = {}
    for index, key_head in zip(range(len(numbers)), groups, strict=True):
        members.setdefault(key_head, []).append(index)
    return {Slot(site.path, numbers[indices[0]]): indices for indices in members.values()}


HeadTensors = dict[str, Tensor]  # name -> the rows of one head


def members_of(site: OpenSite, index: int) -> list[int]:
    """Return the heads that move with a head: those that share its key head, including itself, in order."""
    return [head for head, key in enumerate(site.groups) if key == site.groups[index]]


def check_members(pair: tuple[Slot, Slot], ends: Sequence[tuple[list[int], int]]) -> None:
    """Check that the groups of two heads can change places.

    Args:
        pair: the two places.
        ends: for each, the heads of its group, and the head that is named.

    Raises:
        ShapeError: if the groups have different numbers of heads.
        ArgumentError: if the two heads are not at the same place in their groups.
    """
    counts = [len(members) for members, _ in ends]
    if counts[0] != counts[1]:
        raise ShapeError(
            f"{pair[0]} and {pair[1]} cannot change places: {counts[0]} and {counts[1]} heads share their key heads "
            "and would move with them; pair heads of groups of one size"
        )
    places = [members.index(index) for members, index in ends]
    if places[0] != places[1]:
        raise ArgumentError(
            f"{pair[0]} and {pair[1]} cannot change places: heads that share a key head move together, in their order, "
            f"and these have the places {places[0]} and {places[1]} in theirs; pair heads of the same place"
        )


def head_rows(site: OpenSite, index: int, optimizer: torch.optim.Optimizer | None) -> HeadTensors:
    """Return the tensors that belong to a head and move with it: name -> its rows, views [d, ...] or [1].

    Where heads share its key head, these are the rows of all of them, and of the key head.

    Raises:
        SwapError: if the site is collaborative, has gates and alphas, or its projections are sharded or not plain.
    """
    if site.is_swapped:
        raise SwapError(
            f"{site.path} is collaborative: its query/key projection is one for all heads; swap heads before "
            "swap_to_collaborative (and before heads are removed that share key heads), or leave the site out"
        )
    gates = gates_of(site.output)
    if gates is not None and alphas_of(site.output) is not None:
        raise SwapError(
            f"{site.path} has gates and alphas: gates would leave and alphas stay; rotate with one of the two, or "
            "fold_heads first"
        )
    members, key_head = members_of(site, index), [site.groups[index]]
    projections = {"query": (site.projections[0], site.num_heads, members)}
    projections |= {
        name: (projection, site.site.num_key_heads, key_head)
        for name, projection in (("key", site.projections[1]), ("value", site.value))
    }
    rows: HeadTensors = {}
    for name, (projection, count, chosen) in projections.items():
        check_projection(site.site, projection)
        for part, parameter in whole_of(projection).named_parameters():
            what = f"{site.path}: {name}.{part}"
            check_whole(what, parameter, whole_of(projection))
            states = elementwise_state(optimizer, parameter, what)
            own = {f"{name}.{part}": parameter} | {f"{state} of {name}.{part}": each for state, each in states.items()}
            rows |= rows_by_head({key: part_of(projection, tensor) for key, tensor in own.items()}, count, chosen)
    if gates is not None:
        drawn = {} if gates.draw is None else gates.draw._asdict()
        for part, tensor in (*gates.named_parameters(), *gates.named_buffers(), *drawn.items()):
            states = elementwise_state(optimizer, tensor, f"{site.path}: gates.{part}")
            own = {f"gates.{part}": tensor} | {f"{state} of gates.{part}": each for state, each in states.items()}
            rows |= rows_by_head(own, site.num_heads, members)
    return rows


def rows_by_head(tensors: HeadTensors, count: int, chosen: Sequence[int]) -> HeadTensors:
    """Return the rows of some of `count` heads, one view for each.

    The key is "name" for a single head, else "name of head 0", ...
    """
    found = {}
    for name, tensor in tensors.items():
        by_head = tensor.detach().unflatten(0, (count, -1))
        for place, head in enumerate(chosen):
            found[name if len(chosen) == 1 else f"{name} of head {place}"] = by_head[head]
    return found


def check_whole(what: str, parameter: Tensor, projection: nn.Module) -> None:
    """Raise SwapError if this process does not hold a whole parameter of a projection: [out, in] or [out]."""
    sharded = is_dtensor(parameter) or hasattr(parameter, "ds_id")
    dim_in, dim_out = widths(projection)
    matrix = (dim_in, dim_out) if is_transposed(projection) else (dim_out, dim_in)
    if sharded or tuple(parameter.shape) not in (matrix, (dim_out,)):
        raise SwapError(
            f"{what} is sharded (a {type(parameter).__name__} of shape {tuple(parameter.shape)}): no process has all "
            "of its rows; train with DDP, or swap heads before FSDP, tensor parallelism or DeepSpeed ZeRO-3"
        )


def check_gates(pair: tuple[Slot, Slot], gates: Sequence[HeadGates | None]) -> None:
    """Raise SwapError if the heads of a pair have gates of different kinds."""
    first, second = gates
    if first is not None and second is not None and first.state != second.state:
        raise SwapError(
            f"{pair[0]} and {pair[1]} have gates of different kinds, {first.state} and {second.state}: gate both "
            "sites in one call of swap_to_gated"
        )


def check_same_tensors(pair: tuple[Slot, Slot], first: HeadTensors, second: HeadTensors) -> None:
    """Raise SwapError or ShapeError unless two heads have tensors of the same names, shapes and dtypes."""
    for one, other, slot in ((first, second, pair[0]), (second, first, pair[1])):
        if lone := [name for name in one if name not in other]:
            raise SwapError(
                f"{pair[0]} and {pair[1]} cannot change places: only {slot} has {', '.join(lone)}; gate both sites or "
                "none, and train both or none"
            )
    for name, rows in first.items():
        if rows.shape != second[name].shape:
            raise ShapeError(
                f"{pair[0]} and {pair[1]} cannot change places: their {name} are {tuple(rows.shape)} and "
                f"{tuple(second[name].shape)}; pair heads of one width"
            )
        if rows.dtype != second[name].dtype:
            raise SwapError(
                f"{pair[0]} and {pair[1]} cannot change places: their {name} are {rows.dtype} and "
                f"{second[name].dtype}, and a swap would round; cast the model to one dtype"
            )
