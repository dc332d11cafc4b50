"""fold_heads: turn a gated, mixed or pruned model into a stock checkpoint, which loads without this package."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from collab_heads.base.arguments import checking_arguments
from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.errors import ModelStateError
from collab_heads.heads.fold_layout import (
    fold_counts,
    fold_neurons,
    narrow_as_stock,
    stock_twin,
    stock_width,
    write_entries,
)
from collab_heads.heads.prune import check_prunable
from collab_heads.heads.report import FoldReport
from collab_heads.layers.layout import become, set_weight, weight_of
from collab_heads.layers.output import HeadOutputProjection, fold_output
from collab_heads.layers.removed import kept_parameter
from collab_heads.layers.weight_grid import bits_of, leave_grids
from collab_heads.model.apply_state import apply_state, restore_neurons
from collab_heads.model.open_layers import OpenLayers, OpenSite
from collab_heads.model.opened import input_device, opened
from collab_heads.model.refusals import (
    check_feed_forwards,
    check_forward,
    check_outputs,
    check_projection,
)
from collab_heads.sites.record import CollabConfig
from collab_heads.sites.state import SiteState

logger = logging.get_logger("transformers.collab_heads")  # below transformers' own: its verbosity counts


@checking_arguments
def fold_heads(model: PreTrainedModel) -> FoldReport:
    """Multiply gates and alphas into W_O and make a stock model again, in place.

    The outputs of the folded model are those of the model in evaluation. It is saved as a checkpoint that plain
    transformers loads; weights of few bits leave their grids, with a warning. On an error the model is left unchanged.

    A stock config has one number of heads for all layers. If it also gives the width of a head (T5, Llama and its
    siblings, Gemma 3, ViT and its siblings), every layer has as many heads as the layer that has most left; otherwise
    as many as in the original. Heads that a layer lacks are restored as zeros. Layers of a T5 stack share one position
    bias, so each of them has all heads that any of them has left.

    Narrower heads stay narrow if the config of the family can say it (T5's `d_kv`, ViT's `head_dim`) and if queries,
    keys and values of all sites have the same width, as after `swap_to_collaborative(model, dim_shared_query_key=0.5,
    dim_value=0.5, kind="per_head")`.

    Examples:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4))
        >>> report = swap_to_gated(model, alive_heads={"enc-self": [[1, 1, 0, 1], [1, 1, 1, 1]]})
        >>> report = fold_heads(model)
        >>> type(model.encoder.layer[0].attention.output.dense)  # stock again: loads without this package
        <class 'torch.nn.modules.linear.Linear'>

    A stock config has one number of neurons, too: every feed-forward block has as many as the block that has most left,
    and the neurons that others lack are restored as zeros. A DINOv2, whose config gives no number, gets all of them.

    Args:
        model: a supported transformers model with gates, alphas, removed heads or neurons, or such narrower heads.

    Returns:
        The folded and restored parts; `print` it.

    Raises:
        UnsupportedModelError: if there is no adapter for the model, or it is wrapped.
        ModelStateError: if a site is collaborative in a way that has no stock form, its weights are quantised, or there
            is nothing to fold.
    """
    with opened(model, changes=True, of="layers") as layers:
        report = folded(layers)
    if any(bits_of(module) is not None for module in model.modules()):
        logger.warning(
            "weights of few bits are stored in full from now on, since plain transformers reads no others: to keep "
            "them packed, save or export the model as it was before"
        )
        leave_grids(model)
    return report


def folded(layers: OpenLayers) -> FoldReport:
    """Fold an opened model as `fold_heads` does."""
    model, adapter, config, blocks = layers.model, layers.adapter, layers.record, layers.feed_forwards
    sites = {site.path: site for site in layers.attention}
    changed = {path: state for path, state in config.sites.items() if path in sites}
    narrower = [block for block in blocks if block.path in config.feed_forwards]
    if not changed and not narrower:
        raise ModelStateError("the model has no gates, alphas, removed heads or neurons: there is nothing to fold")
    held = [path for path, state in changed.items() if is_held(adapter, state)]
    narrow = None
    if any(state.query_key is not None for path, state in changed.items() if path not in held):
        narrow = stock_width(adapter, list(sites.values()), changed)
    check_outputs(layers, [sites[path] for path in changed if sites[path].num_heads])
    for path in changed:
        for module in (sites[path].module, sites[path].output):
            check_forward(sites[path].site, module)
        if sites[path].num_heads:  # beside quantised weights a checkpoint with a folded one would not load again
            check_projection(sites[path].site, sites[path].value)
    check_prunable(layers, [sites[path] for path, state in changed.items() if state.kept])
    check_feed_forwards(model, [block for block in narrower if block.num_neurons])
    before = model.num_parameters()
    kept = {path: state.kept for path, state in changed.items() if state.kept is not None}
    counts = fold_counts(adapter, model.config, list(sites.values()), changed)
    entries = dict(counts.entries if narrow is None else {cast(tuple[str, str], adapter.head_width)[0]: narrow})
    neurons = fold_neurons(model, blocks, config.feed_forwards) if narrower else []
    stock = stock_twin(model, [(model.config, entries)]) if kept or narrow is not None else model
    # Nothing has changed up to here; nothing can fail from here on.
    for path in changed:
        if isinstance(output := sites[path].output, HeadOutputProjection):
            fold_output(output)
    for path in held:
        apply_state(sites[path], replace(changed[path], query_key=None, gates=None, alphas=False))
    if narrow is not None:
        narrow_as_stock(sites, stock, narrow)
    for path, heads in kept.items():
        site, whole, has = sites[path], stock.base_model.get_submodule(path), counts.heads[path]
        like, places = like_those_of(site), [has.index(head) for head in heads]
        whole.to(like.dtype).to_empty(device=like.device).requires_grad_(like.requires_grad)
        restore_output(site.output, places, len(has), adapter.output_projection(stock, site.site), like)
        adapter.restore(site.module, whole, places)
        keep_positions(adapter, site.module, has)
    zeros, left = {}, {}
    for counted in neurons:
        for block in counted.blocks:
            if counted.count > block.num_neurons:
                zeros[block.path] = counted.count - block.num_neurons
                restore_neurons(block, counted.count)
            if block.path in config.feed_forwards and counted.count < config.feed_forwards[block.path].num_neurons:
                left[block.path] = counted.count
    write_entries(model, [(model.config, entries), *((each.config, each.entries) for each in neurons)])
    CollabConfig().write(model, before=config)
    removed = {path: tuple(sorted({*counts.heads[path]} - {*heads})) for path, heads in kept.items()}
    gated = tuple(path for path, state in changed.items() if state.gates is not None)
    mixed = tuple(path for path, state in changed.items() if state.alphas)
    count = counts.entries[adapter.head_counts[0]] if counts.entries and adapter.head_counts else None
    return FoldReport(gated, mixed, removed, before, model.num_parameters(), narrow, count, zeros, left)


def is_held(adapter: AttentionAdapter, state: SiteState) -> bool:
    """Return True if a site has a projection of ours, with the stock weights, only to run the heads that are left."""
    if state.query_key is None or state.query_key.groups is None or state.values is not None:
        return False
    return state.query_key.holds(adapter.exact_kind, state.heads)


def like_those_of(site: OpenSite) -> torch.Tensor:
    """Return an empty tensor with the dtype, device and `requires_grad` of a site's parameters.

    Without parameters of its own, the site takes those of the nearest module that has some. If these are offloaded, the
    device is that of the model's inputs.
    """
    parts, base = site.path.split("."), site.model.base_model
    around = [base.get_submodule(".".join(parts[:count])) for count in range(len(parts), 0, -1)]
    near = next(parameter for module in (site.output, *around, site.model) for parameter in module.parameters())
    device = input_device(site.model) if near.is_meta else near.device
    return torch.empty(0, dtype=near.dtype, device=device, requires_grad=near.requires_grad)


@torch.no_grad()
def keep_positions(adapter: AttentionAdapter, module: nn.Module, heads: Sequence[int]) -> None:
    """Keep the columns of some heads (original numbers) in the table of positions, if a module has one."""
    table = None if adapter.position_table is None else getattr(module, adapter.position_table, None)
    if table is not None and len(heads) < table.embedding_dim:
        table.weight = kept_parameter(table.weight, table.weight[:, list(heads)])
        table.embedding_dim = len(heads)


@torch.no_grad()
def restore_output(output: nn.Module, places: Sequence[int], heads: int, stock: nn.Module, like: torch.Tensor) -> None:
    """Give an output projection the columns of more heads, in place; new columns are zeros.

    Args:
        output: the projection.
        places: the places of its heads among the new ones.
        heads: the new number of heads.
        stock: a projection of that many heads, for its class and shape.
        like: for dtype, device and `requires_grad`.
    """
    weight = torch.zeros(weight_of(stock).shape, dtype=like.dtype, device=like.device)
    if places:
        weight.unflatten(-1, (heads, -1))[:, list(places)] = weight_of(output).unflatten(-1, (len(places), -1))
    become(output, type(stock))
    set_weight(output, weight, requires_grad=like.requires_grad)
