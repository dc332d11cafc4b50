"""prune_heads: take heads out of a model for real: fewer parameters, less work, a smaller cache."""

from collections.abc import Mapping
from dataclasses import replace

from torch import nn
from transformers import PreTrainedModel

from collab_heads.errors import SwapError
from collab_heads.heads.choices import removal_choice
from collab_heads.heads.gating import gated_sites
from collab_heads.heads.report import PrunedSite, PruneReport
from collab_heads.layers.output import PARTS, alphas_of, keep_output_heads, remove_gates
from collab_heads.layers.query_key import is_swapped
from collab_heads.layers.removed import is_empty
from collab_heads.model.refusals import check_forward, check_outputs, check_projection, check_unshared, check_wrapper
from collab_heads.registry import AttentionAdapter, get_adapter
from collab_heads.sites import AttentionSite
from collab_heads.state import CollabConfig, kept_heads


def prune_heads(
    model: PreTrainedModel,
    heads: Mapping | None = None,
    adapter: type[AttentionAdapter] | AttentionAdapter | None = None,
) -> PruneReport:
    """Remove heads in place: rows of query, key and value (or of the mixing), columns of W_O, cache.

    The pruned model computes what the gated one computes in evaluation. It saves and loads like any other. Alphas go
    into W_O first, and start again as an identity of the heads that are left, or end where one is left. On an error the
    model is left as it was. Prune before making the optimizer, and before DDP, FSDP, PEFT or `torch.compile`.

    Args:
        model: a supported transformers model, original or changed.
        heads: which to remove: role -> one list of head numbers per layer, or path -> one list. Heads keep the numbers
            that they had in the original model. None removes the closed heads of all gates, multiplies what is left of
            the gates into W_O and takes the gates away.
        adapter: the family's adapter, as class or instance; None looks it up by model type.

    Returns:
        Heads, parameters and cached elements before and after, per site; `print` it.

    Raises:
        UnsupportedModelError: if there is no adapter for the model, or it is wrapped.
        ArgumentError: on a role, path or head that does not exist.
        SwapError: if `heads` is None and there are no gates, or a module cannot be changed safely.
    """
    check_wrapper(model)
    adapter = get_adapter(model, adapter, "prune")
    config, available = CollabConfig.of(model.config), adapter.sites(model)
    present = {site.path: list(kept_heads(config.sites, site)) for site in available}
    by_gates = heads is None
    removed = closed_heads(model, adapter, present) if by_gates else removal_choice(available, heads, present)
    chosen = [site for site in available if removed.get(site.path) or (by_gates and site.path in removed)]
    check_prunable(model, adapter, chosen)
    before, plans = model.num_parameters(), []
    for site in chosen:
        plans.append((site, [i for i, head in enumerate(present[site.path]) if head not in removed[site.path]]))
    # Nothing has changed up to here; nothing can fail from here on.
    states, sizes = {}, {site.path: size(model, adapter, site) for site in chosen}
    for site, kept in plans:
        module, output = model.base_model.get_submodule(site.path), adapter.output_projection(model, site)
        state, numbers = config.site(site), tuple(present[site.path][i] for i in kept)
        if by_gates:
            remove_gates(output)
        if len(kept) < site.num_heads:
            adapter.shrink(module, kept)
            keep_output_heads(output, kept, site.num_heads)
        states[site.path] = replace(
            state,
            kept=numbers if len(numbers) < state.num_heads else None,
            query_key=module.query_key.state if is_swapped(module) else None,
            values=state.values if kept else None,
            gates=state.gates if kept and not by_gates else None,
            alphas=alphas_of(output) is not None,
        )
    config.with_sites(states).write(model)
    sites = [
        PrunedSite(
            site.path,
            site.role,
            heads_before=site.num_heads,
            heads_after=len(kept),
            kept=tuple(present[site.path][i] for i in kept),
            **dict(zip(("parameters_before", "cache_before"), sizes[site.path], strict=True)),
            **dict(zip(("parameters_after", "cache_after"), size(model, adapter, site), strict=True)),
        )
        for site, kept in plans
    ]
    return PruneReport(tuple(sites), before, model.num_parameters())


def closed_heads(model, adapter, present: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """Path -> numbers of the heads that gates close, for all gated sites."""
    found = {}
    for site, projection in gated_sites(model, adapter):
        is_open = projection.gates.is_open().tolist()
        found[site.path] = [head for head, opened in zip(present[site.path], is_open, strict=True) if not opened]
    if not found:
        raise SwapError("the model has no gates: name the heads to remove, or call swap_to_gated and train first")
    return found


def check_prunable(model: PreTrainedModel, adapter: AttentionAdapter, sites: list[AttentionSite]) -> None:
    """Raise SwapError unless every projection of the sites is a plain Linear, and every class one that we know."""
    check_outputs(model, adapter, sites)
    check_unshared(model, adapter, sites, ("query", "key", "value", "output"))
    for site in sites:
        module = model.base_model.get_submodule(site.path)
        check_forward(site, module)
        if adapter.stock_class(module) is None:
            raise SwapError(
                f"{site.path} is a {type(module).__name__}, not a class that {type(adapter).__name__} knows"
            )
        projections = () if is_swapped(module) else adapter.projections(module)
        for projection in (*projections, adapter.value_projection(module)):
            check_projection(site, projection)


def size(model: PreTrainedModel, adapter: AttentionAdapter, site: AttentionSite) -> tuple[int, int]:
    """Parameters of the four projections of a site, and elements that it caches per token."""
    module, output = model.base_model.get_submodule(site.path), adapter.output_projection(model, site)
    value = adapter.value_projection(module)
    changed = is_swapped(module) or is_empty(module)
    parts: list[nn.Module] = [value, output, *([module.query_key] if changed else adapter.projections(module))]
    key_width = module.query_key.cache_width if changed else adapter.projections(module)[1].out_features
    own = sum(p.numel() for name, p in output.named_parameters() if name.split(".")[0] in PARTS)
    return sum(p.numel() for part in parts for p in part.parameters()) - own, key_width + value.out_features
