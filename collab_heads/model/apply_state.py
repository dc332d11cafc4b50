"""Bring a site to a state, in place: remove heads or neurons, and install projections, gates and alphas.

Loading, catching up with another process, timing, swapping, pruning and trying a plan all call this module. The caller
writes the record of the model (`CollabConfig.write`).
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_heads.base.numerics import float64
from collab_heads.layers.alphas import HeadAlphas
from collab_heads.layers.gates import HeadGates
from collab_heads.layers.layout import set_weight, weight_of, write_weight
from collab_heads.layers.output import (
    HeadOutputProjection,
    alphas_of,
    gates_of,
    install_alphas,
    install_gates,
    keep_output_heads,
    remove_gates,
)
from collab_heads.layers.query_key import QueryKey
from collab_heads.layers.query_key_kinds import build_query_key, exact_query_key
from collab_heads.layers.removed import EmptyProjection, empty_projection, filled_projection, keep_rows
from collab_heads.layers.values import ValueWeights, keep_value_rows, write_values
from collab_heads.model.open_layers import OpenFeedForward, OpenLayers, OpenPart, OpenSite
from collab_heads.model.record_sync import sync_record
from collab_heads.sites.record import FIELD, STATE
from collab_heads.sites.state import FeedForwardState, SiteState


@dataclass(frozen=True)
class OutputWeights:
    """The last projection of a site as a regression fits it to the heads or neurons that are left.

    Attributes:
        weight: [D, width of what is left].
        bias: [D], the correction that is added to its bias; not used where it has none.
    """

    weight: Tensor
    bias: Tensor

    def rounded(self, output: nn.Module) -> "OutputWeights":
        """Return them with the weight as the projection that will store it does: less to keep until then."""
        if not self.weight.numel():  # a site without heads stores none
            return self
        return replace(self, weight=self.weight.to(weight_of(output).dtype).contiguous())


@dataclass(frozen=True)
class SiteWeights:
    """Fitted weights for a site in a new state; where one is None, the site keeps part of its own weights.

    Attributes:
        query_key: the query/key projection. Without it, a newly installed projection stays uninitialised.
        values: narrower values, and the columns of W_O that read them. Without them the leading rows stay.
    """

    query_key: QueryKey | None = None
    values: ValueWeights | None = None


def apply_state(site: OpenSite, state: SiteState, weights: SiteWeights | None = None) -> None:
    """Bring a site to a state: remove heads, install or uninstall projections, narrow values, add gates and alphas.

    A second call changes nothing. A state without a query/key projection restores the stock projections. Nothing is
    checked, and nothing is recorded.

    Args:
        site: in any state that has all the heads of the new one.
        state: the new state.
        weights: fitted weights for it.
    """
    weights = weights or SiteWeights()
    remove_heads(site, state.head_numbers)
    set_query_key(site, state, weights.query_key)
    set_values(site, state, weights.values)
    if state.gates is not None and gates_of(site.output) is None:
        install_gates(site.output, state.gates, state.heads)
    if state.alphas and alphas_of(site.output) is None:
        install_alphas(site.output, state.heads)


def remove_heads(site: OpenSite, numbers: Sequence[int]) -> None:
    """Keep only the heads with these numbers (those that they had before any head was removed)."""
    heads = site.adapter.num_heads(site.module)
    if heads > len(numbers):
        kept = [index for index, number in enumerate(site.head_numbers) if number in numbers]
        site.adapter.shrink(site.module, kept)
        keep_output_heads(site.output, kept, heads)


@torch.no_grad()
def refit_output(output: nn.Module, weights: OutputWeights) -> None:
    """Replace the weight of an output projection, and correct its bias, in new memory; parameters and shape stay."""
    bias = cast(Tensor | None, output.bias)
    if weights.weight.numel():  # else nothing is left that it could read
        write_weight(output, weights.weight)
    if bias is not None:
        bias.data = (float64(bias) + weights.bias.to(bias.device)).to(bias)


def set_query_key(site: OpenSite, state: SiteState, query_key: QueryKey | None) -> None:
    """Install a query/key projection, or restore the stock projections, which it holds unchanged."""
    if query_key is not None:
        if query_key is not site.query_key:
            site.adapter.install(site.module, query_key)
    elif state.query_key is None:
        if site.query_key is not None:
            site.adapter.uninstall(site.module, site.query_key.shared_query, site.query_key.shared_key)
    elif not site.is_swapped:
        query, key = site.projections
        dims, like = (query.in_features, key.in_features), query.weight
        query_key = build_query_key(state.query_key, state.heads, *dims, device=like.device, dtype=like.dtype)
        site.adapter.install(site.module, as_trained(site, query_key))


def set_values(site: OpenSite, state: SiteState, values: ValueWeights | None) -> None:
    """Narrow the values and the columns of W_O that read them."""
    if values is not None:
        write_values(site.value, site.output, values)
    elif state.values is not None and site.value_width > state.values.dim:
        keep_value_rows(site.value, site.output, site.value_width, state.values.dim)
    else:
        return
    site.adapter.note_width(site.module)


def prune_site(
    site: OpenSite,
    state: SiteState,
    numbers: Sequence[int],
    output: OutputWeights | None = None,
    *,
    folds_gates: bool = False,
) -> SiteState:
    """Remove heads of a site and make sure that its forward can run the heads that are left.

    Stock forwards need the same number of heads for each key head. One of our query/key projections that holds the
    stock weights unchanged runs any heads. Where a stock forward can run the heads again, the stock projections are
    restored.

    Args:
        site: the site, as it was opened.
        state: the recorded state of the site.
        numbers: the original numbers of the heads that stay, ascending.
        output: W_O for them.
        folds_gates: whether the gates, learned or fixed, go into W_O.

    Returns:
        The state to record.
    """
    if folds_gates and isinstance(site.output, HeadOutputProjection):
        remove_gates(site.output)
    remove_heads(site, numbers)
    if output is not None:
        refit_output(site.output, output)
    state = replace(
        state,
        kept=tuple(numbers) if len(numbers) < state.num_heads else None,
        query_key=None if site.query_key is None else site.query_key.state,
        values=state.values if numbers else None,
        gates=state.gates if numbers and not folds_gates else None,
        alphas=alphas_of(site.output) is not None,
    )
    adapter, groups = site.adapter, site.adapter.groups(site.module)
    if not groups or len(numbers) == site.num_heads:  # each head has its own key head; none is left; all are
        return state
    if state.query_key is None and not adapter.runs_groups(groups):
        held = exact_query_key(site.read(), adapter.exact_kind).to(site.projections[0].weight.dtype)
        state = replace(state, query_key=held.state)
        apply_state(site, state, SiteWeights(query_key=as_trained(site, held)))
    elif state.query_key is not None and state.values is None and adapter.runs_groups(groups):
        if state.query_key.holds(adapter.exact_kind, len(groups)):
            state = replace(state, query_key=None)
            apply_state(site, state)
    return state


def keep_neurons(
    block: OpenFeedForward, state: FeedForwardState, kept: Sequence[int], output: OutputWeights | None = None
) -> FeedForwardState:
    """Keep only some neurons of a feed-forward block, in place.

    Args:
        block: the block.
        state: its recorded state.
        kept: indices among the neurons that it has now, ascending.
        output: the last projection for them; None for its present columns.

    Returns:
        The state to record.
    """
    neurons = block.num_neurons
    if len(kept) < neurons:
        rows = [part * neurons + index for part in range(block.parts) for index in kept]
        for first in block.first:
            keep_rows(first, rows, block.parts * neurons)
        weight = weight_of(block.output)
        set_weight(block.output, weight.detach()[:, list(kept)], requires_grad=weight.requires_grad)
        for module in () if kept else block.modules:
            empty_projection(module)
    if output is not None:
        refit_output(block.output, output)
    return replace(state, neurons=len(kept))


@torch.no_grad()
def restore_neurons(block: OpenFeedForward, count: int) -> None:
    """Undo `keep_neurons`, in place: removed neurons come back as zeros, behind those that are left."""
    missing = count - block.num_neurons
    for module in block.modules:
        if isinstance(module, EmptyProjection):
            filled_projection(module)
    for first in block.first:
        weight, bias = weight_of(first), cast(Tensor | None, first.bias)
        set_weight(first, padded(weight.detach(), block.parts, missing), requires_grad=weight.requires_grad)
        if bias is not None:
            first.bias = nn.Parameter(padded(bias.detach(), block.parts, missing), bias.requires_grad)
    columns = weight_of(block.output)
    whole = torch.cat([columns.detach(), columns.new_zeros(len(columns), missing)], dim=1)
    set_weight(block.output, whole, requires_grad=columns.requires_grad)


def padded(rows: Tensor, parts: int, missing: int) -> Tensor:
    """Add rows of zeros to each part: [parts * n, ...] -> [parts * (n + missing), ...]."""
    each = rows.reshape(parts, len(rows) // parts, *rows.shape[1:])
    return torch.cat([each, each.new_zeros(parts, missing, *rows.shape[1:])], dim=1).flatten(0, 1)


def apply_feed_forward(block: OpenFeedForward, state: FeedForwardState) -> None:
    """Bring a feed-forward block to a state with fewer neurons: the first ones stay, for weights to be loaded."""
    keep_neurons(block, state, range(min(state.neurons, block.num_neurons)))


def as_trained(site: OpenSite, query_key: QueryKey) -> QueryKey:
    """Give a new query/key projection the mode of a site, and make it trainable if the stock projections are."""
    query_key.requires_grad_(any(projection.weight.requires_grad for projection in site.projections))
    return query_key.train(site.module.training)


@contextmanager
def undone(layers: OpenLayers, sites: Sequence[OpenPart]) -> Iterator[OpenLayers]:
    """Undo all changes of some sites and tables, and of the record, when the context ends, also on an error.

    While the context is open, copies replace the modules of these sites, so that the modules themselves stay as they
    are. The copies share the memory of the weights, which are most of a model: do not write to it (see `write_weight`).

    Args:
        layers: the layers of the model.
        sites: those of them that may change.

    Yields:
        The layers, bound to the copies.
    """
    model = layers.model
    sync_record(model, layers.record)
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent.named_children():
            places.setdefault(child, []).append((parent, name))
    originals = list(dict.fromkeys(module for site in sites for module in site.modules))
    stacks = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    records = [(stack.config, getattr(stack.config, FIELD, None)) for stack in stacks]
    shared = [stack.config for stack in stacks] + [hook for module in originals for hook in hooks_of(module)]
    memo = {id(each): each for each in shared}  # configs of the model and hooks of the user: the copies share them
    memo |= {id(each): nn.Parameter(each.detach(), each.requires_grad) for each in weights_in(originals)}
    copies = {module: copy.deepcopy(module, memo) for module in originals}
    blocks = [(site.block, vars(site.block).get(STATE)) for site in sites if isinstance(site, OpenFeedForward)]
    try:
        for module, replacement in copies.items():
            for parent, name in places[module]:  # an output projection may be inside its attention module
                setattr(parent, name, replacement)
        yield layers.with_copies(copies)
    finally:
        for module in originals:
            for parent, name in places[module]:
                setattr(parent, name, module)
        for block, state in blocks:
            if state is not None:
                setattr(block, STATE, state)
            elif STATE in vars(block):
                delattr(block, STATE)
        for config, record in records:
            if record is not None:
                setattr(config, FIELD, record)
            elif hasattr(config, FIELD):
                delattr(config, FIELD)


def weights_in(modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    """Return the parameters of modules but for gates and alphas, which are small and written to in place."""
    each = (part for module in modules for part in module.modules() if not isinstance(part, HeadGates | HeadAlphas))
    return {parameter for part in each for parameter in part.parameters(recurse=False)}


def hooks_of(module: nn.Module) -> list[object]:
    """Return the hooks of a module and its submodules, which may belong to objects that cannot be copied."""
    tables = [table for each in module.modules() for name, table in vars(each).items() if name.endswith("_hooks")]
    return [hook for table in tables for hook in table.values()]
