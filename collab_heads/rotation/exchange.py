"""swap_heads: exchange the parameters of heads.

H heads of a site, d the width of a head, D the width of the model.
"""

import torch
from transformers import PreTrainedModel

from collab_heads.base.arguments import checking_arguments
from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.contract.registry import get_adapter
from collab_heads.errors import ArgumentError, UnsupportedModelError
from collab_heads.layers.output import gates_of
from collab_heads.model.open_layers import OpenLayers
from collab_heads.model.opened import opened
from collab_heads.model.refusals import check_unshared, check_wrapper
from collab_heads.rotation.head_rows import (
    HeadTensors,
    Pairs,
    Slot,
    check_gates,
    check_members,
    check_same_tensors,
    find_site,
    head_rows,
    index_of,
    members_of,
    slot_pairs,
)
from collab_heads.rotation.optimizer_state import inner_optimizer

# Wrappers that do not change the parameters of the model inside -> the attribute that holds the model.
_INSIDE = {"DistributedDataParallel": "module", "DataParallel": "module", "OptimizedModule": "_orig_mod"}


@checking_arguments
def swap_heads(
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
        >>> swap_heads(model, [((first, 0), (last, 3))])  # (path, head) of each

    Args:
        model: a supported transformers model, original, gated or alpha-mixed, whole or pruned; in training the model
            inside the wrapper, with the same pairs on every rank.
        pairs: pairs of places, swapped one after the other; a place is a `Slot` or (path, head). Where heads were
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
        SwapError: if a site is collaborative, has gates and alphas, or projections that are sharded or not plain
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

    The arguments and errors are those of `swap_heads`.
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
    """Return the adapter of a model.

    Raises:
        UnsupportedModelError: if the model is a wrapper; the message says how to pass the model inside, where possible.
    """
    for base in type(model).__mro__:
        if inside := _INSIDE.get(base.__name__):
            raise UnsupportedModelError(f"heads change places in the model inside a {base.__name__}: pass .{inside}")
    check_wrapper(model)
    return get_adapter(model)
