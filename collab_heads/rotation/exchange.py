"""swap_heads: let the parameters of heads change places.

H heads of a site, d the width of a head, D the width of the model.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_heads.attention_adapter import AttentionAdapter
from collab_heads.checks import did_you_mean, is_index
from collab_heads.errors import ArgumentError, ShapeError, SwapError, UnsupportedModelError
from collab_heads.layers.fused import part_of, whole_of
from collab_heads.layers.gates import HeadGates
from collab_heads.layers.layout import is_transposed, widths
from collab_heads.layers.output import alphas_of, gates_of
from collab_heads.model.offloading import opening_attention
from collab_heads.model.open_site import OpenSite, open_sites
from collab_heads.model.refusals import check_projection, check_unshared, check_wrapper
from collab_heads.record import CollabConfig
from collab_heads.registry import get_adapter
from collab_heads.rotation.optimizer_state import elementwise_state, inner_optimizer

# Wrappers that leave the parameters of the model inside as they are -> where it is.
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


@opening_attention
def swap_heads(
    model: PreTrainedModel,
    pairs: Pairs,
    optimizer: torch.optim.Optimizer | None = None,
    adapter: type[AttentionAdapter] | AttentionAdapter | None = None,
) -> None:
    """Let pairs of heads change places, in place: rows of W_Q, W_K, W_V and their biases.

    The columns of W_O stay, else nothing would change; so do alphas, and T5's position bias, which belongs to the
    place of a head. Gates travel with their heads. So does what the optimizer keeps about these rows (Adam's moments,
    SGD's momentum); counts of steps, and second moments that a group shares, stay. Parameters stay the same objects,
    with their dtype, device and `requires_grad`. The same pairs in reversed order restore every bit. Swap between
    optimizer steps: gradients stay where they are. On an error everything is left as it was.

    Args:
        model: a supported transformers model, original, gated or alpha-mixed, whole or pruned; in training the one
            inside the wrapper, on every rank alike.
        pairs: pairs of places, swapped one after the other; a place is a `Slot` or (path, head). Where heads were
            removed, places keep the numbers that they had in the original model.
        optimizer: the one that trains the model, or accelerate's around it; None leaves its state where it is.
        adapter: the family's adapter, as class or instance; None looks it up by model type.

    Raises:
        UnsupportedModelError: if there is no adapter for the model, or it is wrapped.
        ArgumentError: on a path or head that does not exist or was removed, a pair of one place, or of places of
            different roles or stacks; on an optimizer that is sharded or not this model's.
        ShapeError: if the heads of a pair have different widths.
        SwapError: if a site is collaborative, has gates and alphas, or projections that are sharded or not plain
            Linears; if only one place of a pair has gates, biases or moments, or theirs are of another kind.

    Source: Azov and Landau 2020 (MHR-NLP-Transformers), "parameter swapping".
    """
    planned = plan_exchanges(model, pairs, optimizer, adapter)
    # Nothing has changed up to here; nothing can fail from here on.
    with torch.no_grad():
        for first, second in planned:
            for name, rows in first.items():
                kept = rows.clone()
                rows.copy_(second[name])
                second[name].copy_(kept)


def plan_exchanges(
    model: PreTrainedModel,
    pairs: Pairs,
    optimizer: torch.optim.Optimizer | None = None,
    adapter: type[AttentionAdapter] | AttentionAdapter | None = None,
) -> list[tuple[HeadTensors, HeadTensors]]:
    """Check everything, change nothing: for each pair, the tensors that change places, by name. See `swap_heads`."""
    adapter = unwrapped_adapter(model, adapter)
    optimizer = inner_optimizer(optimizer, model)
    sites = {site.path: site for site in open_sites(model, adapter, adapter.sites(model))}
    record, planned = CollabConfig.on(model), []
    for pair in slot_pairs(pairs):
        ends = [(find_site(sites, slot), slot) for slot in pair]
        if pair[0] == pair[1]:
            raise ArgumentError(f"{pair[0]} cannot change places with itself: name two places")
        if len({site.role for site, _ in ends}) > 1:
            raise ArgumentError(
                " and ".join(f"{slot} ({site.role})" for site, slot in ends) + " cannot change places across roles or "
                "stacks: pair heads of one role"
            )
        indices = [index_of(record, site, slot) for site, slot in ends]
        check_unshared(model, adapter, [site.site for site, _ in ends], ("query", "key", "value"))
        check_gates(pair, [gates_of(site.output) for site, _ in ends])
        first, second = (head_rows(site, index, optimizer) for (site, _), index in zip(ends, indices, strict=True))
        check_same_tensors(pair, first, second)
        planned.append((first, second))
    return planned


def unwrapped_adapter(
    model: PreTrainedModel, adapter: type[AttentionAdapter] | AttentionAdapter | None = None
) -> AttentionAdapter:
    """The adapter of a model; UnsupportedModelError if it is a wrapper: where one leaves the model whole, pass that."""
    for base in type(model).__mro__:
        if inside := _INSIDE.get(base.__name__):
            raise UnsupportedModelError(f"heads change places in the model inside a {base.__name__}: pass .{inside}")
    check_wrapper(model)
    return get_adapter(model, adapter)


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


def head_rows(site: OpenSite, index: int, optimizer: torch.optim.Optimizer | None) -> HeadTensors:
    """What belongs to a head and travels with it: name -> its rows, views [d, ...] or [1]."""
    if site.site.num_key_heads < site.num_heads:
        raise SwapError(
            f"{site.path} has {site.num_heads} heads that share {site.site.num_key_heads} key heads: none of them can "
            "move without the others; leave the site out"
        )
    if site.is_swapped:
        raise SwapError(
            f"{site.path} is collaborative: its query/key projection is one for all heads; swap heads before "
            "swap_to_collaborative, or leave the site out"
        )
    gates = gates_of(site.output)
    if gates is not None and alphas_of(site.output) is not None:
        raise SwapError(
            f"{site.path} has gates and alphas: gates would leave and alphas stay; rotate with one of the two, or "
            "fold_heads first"
        )
    tensors: dict[str, Tensor] = {}
    for name, projection in zip(("query", "key", "value"), (*site.projections, site.value), strict=True):
        check_projection(site.site, projection)
        for part, parameter in whole_of(projection).named_parameters():
            what = f"{site.path}: {name}.{part}"
            check_whole(what, parameter, whole_of(projection))
            states = elementwise_state(optimizer, parameter, what)
            own = {f"{name}.{part}": parameter} | {f"{state} of {name}.{part}": each for state, each in states.items()}
            tensors |= {key: part_of(projection, tensor) for key, tensor in own.items()}
    if gates is not None:
        drawn = {} if gates.draw is None else gates.draw._asdict()
        for part, tensor in (*gates.named_parameters(), *gates.named_buffers(), *drawn.items()):
            states = elementwise_state(optimizer, tensor, f"{site.path}: gates.{part}")
            tensors |= {f"gates.{part}": tensor} | {f"{state} of gates.{part}": each for state, each in states.items()}
    return {name: tensor.detach().unflatten(0, (site.num_heads, -1))[index] for name, tensor in tensors.items()}


def check_whole(what: str, parameter: Tensor, projection: nn.Module) -> None:
    """Raise SwapError if this process does not have a whole parameter of a projection: [out, in] or [out]."""
    sharded = any(base.__name__ == "DTensor" for base in type(parameter).__mro__) or hasattr(parameter, "ds_id")
    dim_in, dim_out = widths(projection)
    matrix = (dim_in, dim_out) if is_transposed(projection) else (dim_out, dim_in)
    if sharded or tuple(parameter.shape) not in (matrix, (dim_out,)):
        raise SwapError(
            f"{what} is sharded (a {type(parameter).__name__} of shape {tuple(parameter.shape)}): no process has all "
            "of its rows; train with DDP, or swap heads before FSDP, tensor parallelism or DeepSpeed ZeRO-3"
        )


def check_gates(pair: tuple[Slot, Slot], gates: Sequence[HeadGates | None]) -> None:
    """Raise SwapError if the heads of a pair have gates that work in different ways."""
    first, second = gates
    if first is not None and second is not None and first.state != second.state:
        raise SwapError(
            f"{pair[0]} and {pair[1]} have gates of different kinds, {first.state} and {second.state}: gate both "
            "sites in one call of swap_to_gated"
        )


def check_same_tensors(pair: tuple[Slot, Slot], first: HeadTensors, second: HeadTensors) -> None:
    """Raise SwapError or ShapeError unless two heads consist of tensors of the same names, shapes and dtypes."""
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
