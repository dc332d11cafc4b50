"""fold_heads: turn a gated, mixed or pruned model back into a stock checkpoint, which loads without this package."""

import copy

import torch
from torch import nn
from transformers import PreTrainedModel

from collab_heads.arguments import checking_arguments
from collab_heads.attention_adapter import AttentionAdapter
from collab_heads.errors import SwapError
from collab_heads.heads.fold_narrow import narrow_as_stock, stock_width
from collab_heads.heads.prune import check_prunable, release
from collab_heads.heads.report import FoldReport
from collab_heads.layers.layout import become, set_weight, weight_of
from collab_heads.layers.output import HeadOutputProjection, fold_output
from collab_heads.model.offloading import changing_attention, input_device
from collab_heads.model.open_site import OpenSite, open_sites
from collab_heads.model.refusals import check_forward, check_outputs, check_projection, check_wrapper
from collab_heads.record import FIELD, CollabConfig
from collab_heads.registry import get_adapter
from collab_heads.state import SiteState


@checking_arguments
@changing_attention
def fold_heads(model: PreTrainedModel, adapter: type[AttentionAdapter] | AttentionAdapter | None = None) -> FoldReport:
    """Multiply gates and alphas into W_O and give removed heads back as zeros, in place: a model of stock shape.

    The folded model computes what the model computed in evaluation, saves nothing any more, and is saved as a
    checkpoint that plain transformers loads. On an error the model is left as it was.

    Narrower heads stay narrow where the config of the family can say it (T5's `d_kv`), and queries, keys and values of
    all sites have the same width, as after `swap_to_collaborative(model, dim_shared_query_key=0.5, dim_value=0.5,
    mixing="per_head")`. Then something is saved, in plain transformers too.

    Args:
        model: a supported transformers model with gates, alphas or removed heads, or such narrower ones.
        adapter: the family's adapter, as class or instance; None looks it up by model type.

    Returns:
        What was folded and restored; `print` it.

    Raises:
        UnsupportedModelError: if there is no adapter for the model, or it is wrapped.
        SwapError: if a site is collaborative in a way that no stock model is, or there is nothing to fold.
    """
    check_wrapper(model)
    adapter = get_adapter(model, adapter)
    config = CollabConfig.on(model)
    sites = {site.path: site for site in open_sites(model, adapter, adapter.sites(model))}
    changed = {path: state for path, state in config.sites.items() if path in sites}
    if not changed:
        raise SwapError("the model has no gates, alphas or removed heads: there is nothing to fold")
    held = [path for path, state in changed.items() if is_held(adapter, state)]
    narrow = None
    if any(state.query_key is not None for path, state in changed.items() if path not in held):
        narrow = stock_width(adapter, list(sites.values()), changed)
    check_outputs(model, adapter, [sites[path].site for path in changed if sites[path].num_heads])
    for path in changed:
        for module in (sites[path].module, sites[path].output):
            check_forward(sites[path].site, module)
        if sites[path].num_heads:  # beside quantised weights a checkpoint with a folded one would not load again
            check_projection(sites[path].site, sites[path].value)
    check_prunable(model, adapter, [sites[path] for path, state in changed.items() if state.kept])
    before = model.num_parameters()
    kept = {path: state.kept for path, state in changed.items() if state.kept is not None}
    stock = stock_twin(model) if kept else model
    # Nothing has changed up to here; nothing can fail from here on.
    for path in changed:
        if isinstance(output := sites[path].output, HeadOutputProjection):
            fold_output(output)
    for path in held:
        release(sites[path])
    if narrow is not None:
        narrow_as_stock(model, list(sites.values()), narrow)
    for path, heads in kept.items():
        site, whole = sites[path], stock.base_model.get_submodule(path)
        like = like_those_of(site)
        whole.to(like.dtype).to_empty(device=like.device).requires_grad_(like.requires_grad)
        restore_output(site.output, changed[path], adapter.output_projection(stock, site.site), like)
        adapter.restore(site.module, whole, heads)
    CollabConfig().write(model)
    removed = {path: tuple(sorted({*range(changed[path].num_heads)} - {*heads})) for path, heads in kept.items()}
    gated = tuple(path for path, state in changed.items() if state.gates is not None)
    mixed = tuple(path for path, state in changed.items() if state.alphas)
    return FoldReport(gated, mixed, removed, before, model.num_parameters(), narrow)


def is_held(adapter: AttentionAdapter, state: SiteState) -> bool:
    """Whether a site has a projection of ours only to run the heads that it has left: it holds the stock weights."""
    if state.query_key is None or state.query_key.groups is None or state.values is not None:
        return False
    return state.query_key.holds(adapter.exact_kind, state.heads)


def stock_twin(model: PreTrainedModel) -> PreTrainedModel:
    """The model as its config without our record describes it, on the meta device."""
    config = copy.deepcopy(model.config)
    for part in (config, *(value for value in vars(config).values() if hasattr(value, FIELD))):
        if hasattr(part, FIELD):
            delattr(part, FIELD)
    with torch.device("meta"):
        return type(model)(config)


def like_those_of(site: OpenSite) -> torch.Tensor:
    """An empty tensor that is like the parameters of a site, or like the nearest ones where it has none left.

    All others may be away; those of an offloaded site come in where the model takes its inputs.
    """
    parts, base = site.path.split("."), site.model.base_model
    around = [base.get_submodule(".".join(parts[:count])) for count in range(len(parts), 0, -1)]
    near = next(parameter for module in (site.output, *around, site.model) for parameter in module.parameters())
    device = input_device(site.model) if near.is_meta else near.device
    return torch.empty(0, dtype=near.dtype, device=device, requires_grad=near.requires_grad)


@torch.no_grad()
def restore_output(output: nn.Module, state: SiteState, stock: nn.Module, like: torch.Tensor) -> None:
    """Give an output projection the columns of all heads again, zeros for the removed, in place."""
    weight = torch.zeros(weight_of(stock).shape, dtype=like.dtype, device=like.device)
    if state.kept:
        columns = weight.unflatten(-1, (state.num_heads, -1))
        columns[:, list(state.kept)] = weight_of(output).unflatten(-1, (state.heads, -1))
    become(output, type(stock))
    set_weight(output, weight, requires_grad=like.requires_grad)
