"""prune_heads: take heads out of a model for real: fewer parameters, less work, a smaller cache."""

from collections.abc import Iterable, Mapping, Sequence

from transformers import PreTrainedModel

from collab_heads.arguments import checking_arguments
from collab_heads.attention_adapter import AttentionAdapter
from collab_heads.errors import SwapError
from collab_heads.heads.choices import removal_choice
from collab_heads.heads.gating import gated_sites
from collab_heads.heads.reconstruction import regressions
from collab_heads.heads.report import PrunedSite, PruneReport
from collab_heads.model.apply_state import prune_site
from collab_heads.model.offloading import changing_attention
from collab_heads.model.open_site import OpenSite, open_sites
from collab_heads.model.refusals import check_forward, check_outputs, check_projection, check_unshared, check_wrapper
from collab_heads.model.site_size import site_size
from collab_heads.record import CollabConfig
from collab_heads.registry import get_adapter


@checking_arguments
@changing_attention
def prune_heads(
    model: PreTrainedModel,
    heads: Mapping | None = None,
    adapter: type[AttentionAdapter] | AttentionAdapter | None = None,
    *,
    calibration: Iterable[Mapping] | None = None,
) -> PruneReport:
    """Remove heads in place: rows of query, key and value (or of the mixing), columns of W_O, cache.

    The pruned model computes what the gated one computes in evaluation; with `calibration` it computes more nearly what
    the model computed with all heads. It saves and loads like any other. Alphas go into W_O first, and start again as
    an identity of the heads that are left, or end where one is left. On an error the model is left as it was. Prune
    before making the optimizer, and before DDP, FSDP, PEFT or `torch.compile`.

    Args:
        model: a supported transformers model, original or changed.
        heads: which to remove: role -> one list of head numbers per layer, or path -> one list. Heads keep the numbers
            that they had in the original model. None removes the closed heads of all gates, multiplies what is left of
            the gates into W_O and takes the gates away.
        adapter: the family's adapter, as class or instance; None looks it up by model type.
        calibration: input dicts as the model takes them, without labels (32 to 512 sentences are enough). W_O and its
            bias are then fitted by least squares, so that the heads that are left make up for those that went: for what
            the site added with them. Where gates choose: fixed ones count as open in that, learned ones as they are,
            since the model was trained with them.

    Returns:
        Heads, parameters and cached elements before and after, per site; `print` it.

    Raises:
        UnsupportedModelError: if there is no adapter for the model, or it is wrapped.
        ArgumentError: on a role, path or head that does not exist.
        SwapError: if `heads` is None and there are no gates, or a module cannot be changed safely.
        CalibrationError: if there are no calibration batches, or the model cannot take them.
        NonFiniteError: if a head puts out NaN or inf on them.
    """
    check_wrapper(model)
    adapter = get_adapter(model, adapter, "prune")
    config, available = CollabConfig.on(model), open_sites(model, adapter, adapter.sites(model))
    numbers, by_gates = {site.path: site.head_numbers for site in available}, heads is None
    if heads is None:
        removed = closed_heads(model, adapter, numbers)
    else:
        removed = removal_choice([site.site for site in available], heads, numbers)
    chosen = [site for site in available if removed.get(site.path) or (by_gates and site.path in removed)]
    check_prunable(model, adapter, chosen)
    kept = {
        site.path: [index for index, head in enumerate(site.head_numbers) if head not in removed[site.path]]
        for site in chosen
    }
    repaired = [site for site in chosen if 0 < len(kept[site.path]) < site.num_heads]
    fits = {} if calibration is None else regressions(model, repaired, calibration, folds_gates=by_gates)
    refitted = {path: fit.refit(kept[path]) for path, fit in fits.items()}
    parameters_before, sizes = model.num_parameters(), {site.path: site_size(site) for site in chosen}
    # Nothing has changed up to here; nothing can fail from here on.
    states, reports = {}, []
    for site in chosen:
        left = tuple(site.head_numbers[index] for index in kept[site.path])
        state = config.site(site.site)
        states[site.path] = prune_site(site, state, left, refitted.get(site.path), folds_gates=by_gates)
        before, after = sizes[site.path], site_size(site)
        reports.append(
            PrunedSite(
                site.path,
                site.role,
                heads_before=site.num_heads,
                heads_after=len(left),
                kept=left,
                parameters_before=before.parameters,
                parameters_after=after.parameters,
                cache_before=before.cache,
                cache_after=after.cache,
                share_lost=refitted[site.path].share_lost if site.path in refitted else None,
            )
        )
    config.with_sites(states).write(model)
    return PruneReport(tuple(reports), parameters_before, model.num_parameters())


def closed_heads(
    model: PreTrainedModel, adapter: AttentionAdapter, numbers: Mapping[str, Sequence[int]]
) -> dict[str, list[int]]:
    """Path -> original numbers of the heads that gates close, for all gated sites."""
    closed = {}
    for site, gates in gated_sites(model, adapter):
        is_open = gates.is_open().tolist()
        closed[site.path] = [head for head, opened in zip(numbers[site.path], is_open, strict=True) if not opened]
    if not closed:
        raise SwapError("the model has no gates: name the heads to remove, or call swap_to_gated and train first")
    return closed


def check_prunable(model: PreTrainedModel, adapter: AttentionAdapter, sites: Sequence[OpenSite]) -> None:
    """Raise SwapError unless every projection of the sites is a plain Linear, and every class one that we know."""
    named = [site.site for site in sites]
    check_outputs(model, adapter, named)
    check_unshared(model, adapter, named, ("query", "key", "value", "output"))
    for site in sites:
        check_forward(site.site, site.module)
        if adapter.stock_class(site.module) is None:
            raise SwapError(
                f"{site.path} is a {type(site.module).__name__}, not a class that {type(adapter).__name__} knows"
            )
        for projection in (*(() if site.is_swapped else site.projections), site.value):
            check_projection(site.site, projection)
