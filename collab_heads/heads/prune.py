"""prune_heads: remove heads from the weights of a model, for fewer parameters, less work and a smaller cache."""

from collections.abc import Iterable, Mapping, Sequence

from transformers import PreTrainedModel

from collab_heads.base.arguments import checking_arguments
from collab_heads.base.progress import one_bar
from collab_heads.errors import ArgumentError, ModelStateError
from collab_heads.fitting.head_regression import regressions
from collab_heads.heads.criteria import HeadCriterion, chosen_heads, criterion_of, importance
from collab_heads.heads.gating import gates_in
from collab_heads.heads.report import PrunedSite, PruneReport
from collab_heads.heads.selection import Target, check_target, removal_choice, roles_of_heads
from collab_heads.model.apply_state import prune_site
from collab_heads.model.open_layers import OpenLayers
from collab_heads.model.opened import opened
from collab_heads.model.refusals import (
    check_prunable,
)
from collab_heads.model.site_size import site_size
from collab_heads.running.batches import NoticingFew

PHASES = (
    ("measuring heads", 1),
    ("finding readers", 0.1),
    ("measuring the stream", 1),
    ("refitting outputs", 1),
)


@checking_arguments
@one_bar("prune_heads", PHASES)
def prune_heads(
    model: PreTrainedModel,
    batches: Iterable[Mapping] | None = None,
    *,
    heads: Mapping | None = None,
    keep: Target | None = None,
    criterion: str | HeadCriterion = "reconstruction",
) -> PruneReport:
    """Remove heads in place: rows of query, key and value (or of the mixing), columns of W_O, and their cache.

    Name the heads (`heads`), or say how many stay (`keep`); without both, the closed heads of all gates go. Pruning
    by gates does not change the outputs of the gated model in evaluation. With `batches`, W_O is refitted so that the
    outputs come closer to those with all heads. The pruned model saves and loads like any other. Alphas are multiplied
    into W_O first; they start again as an identity of the heads that are left, or are removed where one head is left.
    On an error the model is left unchanged. Prune before making the optimizer, and before DDP, FSDP, PEFT or
    `torch.compile`.

    Examples:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4))
        >>> batches = [{"input_ids": torch.arange(200).view(8, 25)} for _ in range(4)]  # (batch, tokens) each
        >>> report = prune_heads(model, batches, keep=5)
        >>> sum(len(site.kept) for site in report.sites)
        5
        >>> model.encoder.layer[0].attention.self.value.weight.shape[1]  # (H * d_v, D): fewer rows, as many columns
        64

    Args:
        model: a supported transformers model, original or changed.
        batches: input dicts as the model takes them (32 to 512 sentences are enough). W_O and its bias are fitted on
            them by least squares, so that the remaining heads reconstruct the output of the site with all heads. If
            gates choose the heads, fixed gates count as open in that output; learned gates count with their values,
            since the model was trained with them. Labels are needed by `criterion="gradient"` only.
        heads: the heads to remove: role -> one list of head numbers per layer, or path -> one list. Heads keep the
            numbers that they had in the original model. None, without `keep`, removes the closed heads of all gates,
            multiplies the remaining gates into W_O and removes the gates.
        keep: how many heads stay: a total (every role keeps at least one), or role -> number; the heads that rank
            highest by `criterion` stay.
        criterion: the ranking of heads for `keep`, see `head_importance`.

    Returns:
        Heads, parameters and cached elements before and after, per site; `print` it.

    Raises:
        UnsupportedModelError: if there is no adapter for the model, or it is wrapped.
        ArgumentError: on a role, path or head that does not exist, an impossible `keep`, an unknown criterion, a
            criterion without the batches that it needs, or both `heads` and `keep`.
        ModelStateError: if nothing names the heads to remove and there are no gates, or a module cannot be changed
            safely.
        CalibrationError: if there are no batches in `batches`, or the model cannot take them.
        NonFiniteError: if the output of a head on them contains NaN or inf.
    """
    criterion = criterion_of(criterion)
    if heads is not None and keep is not None:
        raise ArgumentError("heads and keep exclude each other: one of them says which heads stay")
    if isinstance(batches, Mapping):
        raise ArgumentError("batches is a dict: name the heads to remove with heads={...}, or pass a list of batches")
    with opened(model, capability="prune", changes=True) as layers:
        if keep is not None:
            batches = None if batches is None else list(NoticingFew(batches))  # read twice
            heads = heads_to_remove(layers, keep, criterion, batches)
        return pruned(layers, heads, batches)


def pruned(layers: OpenLayers, heads: Mapping | None, batches: Iterable[Mapping] | None) -> PruneReport:
    """Remove heads as `prune_heads` does: those that are named, or those that gates close."""
    model, by_gates = layers.model, heads is None
    if heads is None:
        removed = closed_heads(layers)
    else:
        numbers = {site.path: site.head_numbers for site in layers.attention}
        removed = removal_choice([site.site for site in layers.attention], heads, numbers)
    chosen = [site for site in layers.attention if removed.get(site.path) or (by_gates and site.path in removed)]
    check_prunable(layers, chosen)
    kept = {
        site.path: [index for index, head in enumerate(site.head_numbers) if head not in removed[site.path]]
        for site in chosen
    }
    repaired = [site for site in chosen if 0 < len(kept[site.path]) < site.num_heads]
    fits = {} if batches is None else regressions(model, repaired, NoticingFew(batches), folds_gates=by_gates)
    refitted = {path: fit.refit(kept[path]) for path, fit in fits.items()}
    parameters_before, sizes = model.num_parameters(), {site.path: site_size(site) for site in chosen}
    # Nothing has changed up to here; nothing can fail from here on.
    states, reports = {}, []
    for site in chosen:
        left = tuple(site.head_numbers[index] for index in kept[site.path])
        states[site.path] = prune_site(site, site.state, left, refitted.get(site.path), folds_gates=by_gates)
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
                cache_before=before.cache * site.site.is_cached,
                cache_after=after.cache * site.site.is_cached,
                share_lost=refitted[site.path].share_lost if site.path in refitted else None,
            )
        )
    layers.write(states)
    return PruneReport(tuple(reports), parameters_before, model.num_parameters())


def heads_to_remove(
    layers: OpenLayers, keep: Target, criterion: HeadCriterion, batches: Sequence[Mapping] | None
) -> dict[str, list[int]]:
    """Return the original numbers of the heads that a criterion ranks below those that stay, by path."""
    available = [site.site for site in layers.with_heads]
    sites = [site for site in available if not isinstance(keep, Mapping) or site.role in keep]
    check_target(keep, roles_of_heads(sites or available), "keep")
    scores = importance(layers, batches, criterion)
    alive = chosen_heads(sites, {site.path: scores[site.path] for site in sites}, keep)
    return {
        path: [number for number, stays in zip(layers.at(path).head_numbers, of_site, strict=True) if not stays]
        for path, of_site in alive.items()
    }


def closed_heads(layers: OpenLayers) -> dict[str, list[int]]:
    """Return the original numbers of the heads that gates close, by path, for all gated sites."""
    closed = {}
    for site, gates in gates_in(layers):
        is_open = gates.is_open().tolist()
        closed[site.path] = [head for head, is_kept in zip(site.head_numbers, is_open, strict=True) if not is_kept]
    if not closed:
        raise ModelStateError(
            "the model has no gates: say how many heads stay (keep=), name the heads to remove (heads=), or call "
            "swap_to_gated and train first"
        )
    return closed
