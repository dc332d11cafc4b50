"""rotate_heads: exchange the parameters of heads; places of heads, and the tensors that move with a head.

H heads of a site, d the width of a head, D the width of the model.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_heads.base.arguments import checking_arguments
from collab_heads.base.checks import did_you_mean, is_index
from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.contract.registry import get_adapter
from collab_heads.errors import ArgumentError, ModelStateError, ShapeError, UnsupportedModelError
from collab_heads.layers.fused import part_of, whole_of
from collab_heads.layers.gates import HeadGates
from collab_heads.layers.layout import is_dtensor, is_transposed, widths
from collab_heads.layers.output import alphas_of, gates_of
from collab_heads.model.open_layers import OpenLayers, OpenSite
from collab_heads.model.opened import opened
from collab_heads.model.refusals import check_projection, check_unshared, check_wrapper
from collab_heads.rotation.optimizer_state import elementwise_state, inner_optimizer
from collab_heads.sites.record import CollabConfig
from collab_heads.sites.site import AttentionSite

# Wrappers that do not change the parameters of the model inside -> the attribute that holds the model.
_INSIDE = {"DistributedDataParallel": "module", "DataParallel": "module", "OptimizedModule": "_orig_mod"}


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
HeadTensors = dict[str, Tensor]  # name -> the rows of one head


def slot_pairs(pairs: object) -> list[tuple[Slot, Slot]]:
    """Read pairs of slots from arguments or JSON."""
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
    if not isinstance(slot.path, str) or slot.path not in sites:
        raise ArgumentError(
            f"{slot.path!r} is not the path of a site of this model{did_you_mean(slot.path, sites)}; paths are "
            f"relative to the base model, such as {next(iter(sites))!r}"
        )
    return sites[slot.path]


def index_of(record: CollabConfig, site: OpenSite, slot: Slot) -> int:
    """Return the index of a slot among the heads that its site has now."""
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


@checking_arguments
def rotate_heads(
    model: PreTrainedModel,
    pairs: Pairs,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Exchange pairs of heads in place: rows of W_Q, W_K, W_V and their biases.

    The columns of W_O stay, else the outputs would not change. Alphas, norms of queries and keys, and T5's position
    bias stay, too: they belong to the place of a head. Gates move with their heads, and so does the optimizer's state
    for these rows (Adam's moments, SGD's momentum); counts of steps, and second moments that a group shares, stay.
    Parameters stay the same objects, with their dtype, device and `requires_grad`. The same pairs in reversed order
    restore every bit. Swap between optimizer steps: gradients do not move. On an error everything is left unchanged.

    Heads that share a key head move together with it, in their order: name one head for the whole group.

    Examples:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4))
        >>> first, last = "encoder.layer.0.attention.self", "encoder.layer.1.attention.self"
        >>> rotate_heads(model, [((first, 0), (last, 3))])  # (path, head) of each

    Args:
        model: a supported transformers model, original, gated or alpha-mixed, whole or pruned; in training the model
            inside the wrapper, with the same pairs on every rank.
        pairs: pairs of places, exchanged one after the other; a place is a `Slot` or (path, head). Where heads were
            removed, places keep the numbers that they had in the original model.
        optimizer: the optimizer that trains the model, or accelerate's wrapper around it; None leaves its state
            unchanged.

    Raises:
        UnsupportedModelError: if there is no adapter for the model, or it is wrapped.
        ArgumentError: on a path or head that does not exist or was removed, a pair of one place, or of places of
            different roles or stacks; where heads share key heads, on a pair of one key head or of heads that are not
            at the same place in their groups, and on pairs that name the same key heads; on an optimizer that is
            sharded or not this model's.
        ShapeError: if the heads of a pair have different widths, or different numbers of heads share their key heads.
        ModelStateError: if a site is collaborative, has gates and alphas, or projections that are sharded or not plain
            Linears; if only one place of a pair has gates, biases or moments, or theirs are of another kind.

    Source: Azov and Landau 2020 (MHR-NLP-Transformers), "parameter swapping".
    """
    with opened(model, unwrapped_adapter(model)) as layers, torch.no_grad():
        # Nothing changes before all pairs are checked; nothing can fail after it.
        for first, second in exchanges_in(layers, pairs, optimizer):
            for name, rows in first.items():
                kept = rows.clone()
                rows.copy_(second[name])
                second[name].copy_(kept)


def plan_exchanges(
    model: PreTrainedModel, pairs: Pairs, optimizer: torch.optim.Optimizer | None = None
) -> list[tuple[HeadTensors, HeadTensors]]:
    """Check all pairs and return, for each, the tensors to exchange, by name; nothing is changed.

    The arguments and errors are those of `rotate_heads`.
    """
    return exchanges_in(OpenLayers.of(model, unwrapped_adapter(model)), pairs, optimizer)


def exchanges_in(
    layers: OpenLayers, pairs: Pairs, optimizer: torch.optim.Optimizer | None
) -> list[tuple[HeadTensors, HeadTensors]]:
    """As `plan_exchanges`, in an opened model."""
    optimizer = inner_optimizer(optimizer, layers.model)
    sites = {site.path: site for site in layers.attention}
    planned = []
    named: dict[tuple[str, int], Slot] = {}  # path and key head -> the place that names it
    for pair in slot_pairs(pairs):
        ends = [(find_site(sites, slot), slot) for slot in pair]
        if pair[0] == pair[1]:
            raise ArgumentError(f"{pair[0]} cannot change places with itself: name two places")
        if len({site.role for site, _ in ends}) > 1:
            raise ArgumentError(
                " and ".join(f"{slot} ({site.role})" for site, slot in ends) + " cannot change places across roles or "
                "stacks: pair heads of one role"
            )
        indices = [index_of(layers.record, site, slot) for site, slot in ends]
        for (site, slot), index in zip(ends, indices, strict=True):
            first_named = named.setdefault((site.path, site.groups[index]), slot)
            if first_named != slot:
                raise ArgumentError(f"{first_named} and {slot} share a key head and move together: name one of them")
        check_members(pair, [(members_of(site, index), index) for (site, _), index in zip(ends, indices, strict=True)])
        check_unshared(layers, [site for site, _ in ends], ("query", "key", "value"))
        check_gates(pair, [gates_of(site.output) for site, _ in ends])
        first, second = (head_rows(site, index, optimizer) for (site, _), index in zip(ends, indices, strict=True))
        check_same_tensors(pair, first, second)
        planned.append((first, second))
    return planned


def unwrapped_adapter(model: PreTrainedModel) -> AttentionAdapter:
    for base in type(model).__mro__:
        if inside := _INSIDE.get(base.__name__):
            raise UnsupportedModelError(f"heads change places in the model inside a {base.__name__}: pass .{inside}")
    check_wrapper(model)
    return get_adapter(model)


def members_of(site: OpenSite, index: int) -> list[int]:
    """Return the heads that move with a head: those that share its key head, including itself, in order."""
    return [head for head, key in enumerate(site.groups) if key == site.groups[index]]


def check_members(pair: tuple[Slot, Slot], ends: Sequence[tuple[list[int], int]]) -> None:
    """Check that the groups of two heads can change places.

    Args:
        pair: the two places.
        ends: for each, the heads of its group, and the head that is named.
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
    """
    if site.is_swapped:
        raise ModelStateError(
            f"{site.path} is collaborative, or has queries, keys or values of other widths: its heads stay in their "
            "places; rotate heads before swap_to_collaborative (and before heads are removed that share key heads), or "
            "leave the site out"
        )
    gates = gates_of(site.output)
    if gates is not None and alphas_of(site.output) is not None:
        raise ModelStateError(
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
    """Raise ModelStateError if this process does not hold a whole parameter of a projection: [out, in] or [out]."""
    sharded = is_dtensor(parameter) or hasattr(parameter, "ds_id")
    dim_in, dim_out = widths(projection)
    matrix = (dim_in, dim_out) if is_transposed(projection) else (dim_out, dim_in)
    if sharded or tuple(parameter.shape) not in (matrix, (dim_out,)):
        raise ModelStateError(
            f"{what} is sharded (a {type(parameter).__name__} of shape {tuple(parameter.shape)}): no process has all "
            "of its rows; train with DDP, or rotate heads before FSDP, tensor parallelism or DeepSpeed ZeRO-3"
        )


def check_gates(pair: tuple[Slot, Slot], gates: Sequence[HeadGates | None]) -> None:
    """Raise ModelStateError if the heads of a pair have gates of different kinds."""
    first, second = gates
    if first is not None and second is not None and first.state != second.state:
        raise ModelStateError(
            f"{pair[0]} and {pair[1]} have gates of different kinds, {first.state} and {second.state}: gate both "
            "sites in one call of swap_to_gated"
        )


def check_same_tensors(pair: tuple[Slot, Slot], first: HeadTensors, second: HeadTensors) -> None:
    """Raise ModelStateError or ShapeError unless two heads have tensors of the same names, shapes and dtypes."""
    for one, other, slot in ((first, second, pair[0]), (second, first, pair[1])):
        if lone := [name for name in one if name not in other]:
            raise ModelStateError(
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
            raise ModelStateError(
                f"{pair[0]} and {pair[1]} cannot change places: their {name} are {rows.dtype} and "
                f"{second[name].dtype}, and an exchange would round; cast the model to one dtype"
            )
