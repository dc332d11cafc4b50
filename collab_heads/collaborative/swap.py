"""swap_to_collaborative: plan every replacement, then put them all in place."""

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence

import torch
from transformers import PreTrainedModel

from collab_heads.base.arguments import checking_arguments
from collab_heads.base.checks import check_choice
from collab_heads.base.estimates import say, work
from collab_heads.base.numerics import few_threads
from collab_heads.base.option_values import ALLOCATIONS, REFINE_STEPS, Allocation
from collab_heads.base.progress import one_bar, progress_bar
from collab_heads.calibration.calibrate import CalibratedSites
from collab_heads.collaborative.estimate import estimate_swap
from collab_heads.collaborative.plan import SitePlan, ValuePlan, balance_widths, choose_sites, plan_site, plan_values
from collab_heads.collaborative.replacement import Replacement, make_replacement
from collab_heads.collaborative.report import SwapReport
from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.errors import ArgumentError, ModelStateError
from collab_heads.fitting.fit import FitOptions
from collab_heads.fitting.kinds import FITS, check_kind, kind_for
from collab_heads.fitting.solvers import Method
from collab_heads.fitting.widths import Width
from collab_heads.model.apply_state import SiteWeights, apply_state
from collab_heads.model.open_layers import OpenLayers
from collab_heads.model.opened import opened
from collab_heads.model.refusals import check_swappable, check_values
from collab_heads.running.batches import NoticingFew
from collab_heads.sites.state import QueryKeyKind

PHASES = ("calibrating", 2), ("measuring widths", 1), ("decomposing", 7)


@checking_arguments
@torch.inference_mode(False)  # new parameters are to be trained, in the refinement and after
@one_bar("swap_to_collaborative", PHASES)
def swap_to_collaborative(
    model: PreTrainedModel,
    adapter: type[AttentionAdapter] | AttentionAdapter | None = None,
    dim_shared_query_key: Width | Mapping[str, Width] = None,
    *,
    dim_value: Width | Mapping[str, Width] = None,
    tol: float = 1e-4,
    batches: Iterable[Mapping] | None = None,
    kind: QueryKeyKind = "shared",
    allocation: Allocation = "uniform",
    sites: str | Iterable[str] | None = None,
    method: Method = "als",
    refine_steps: int = REFINE_STEPS,
    seed: int = 0,
) -> SwapReport:
    """Replace the query/key projections of a model by collaborative ones, and its values by narrower ones, in place.

    The model keeps its class, training mode, dtype, device and hooks; `save_pretrained` and `from_pretrained` work as
    before. If an error is raised, the model is unchanged. Swap before making the optimizer, and before DDP, FSDP, PEFT
    or `torch.compile`.

    Examples:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4))
        >>> batches = [{"input_ids": torch.arange(200).view(8, 25)} for _ in range(4)]  # (batch, tokens) each
        >>> report = swap_to_collaborative(model, dim_shared_query_key=32, batches=batches, refine_steps=2)
        >>> query_key = model.encoder.layer[0].attention.self.query_key
        >>> query_key.shared_query.weight.shape, query_key.shared_key.weight.shape  # (R, D) each, of (H * d_k, D)
        (torch.Size([32, 64]), torch.Size([32, 64]))
        >>> query_key.mixing.shape  # (H, R)
        torch.Size([4, 32])

    Args:
        model: a supported transformers model, base or with a head.
        adapter: the family's adapter, as class or instance; None looks it up by model type. Everything else that is
            done with the model, loading included, uses the adapter that `register` made known.
        dim_shared_query_key: width R of the projection over all heads: an int for every site; a float in (0, 1] as a
            share of H * d_k; a dict of those by role or path (only the sites it names are swapped); None keeps the
            width, which is exact.
        dim_value: width of the values over all value heads, in the same forms, rounded up to a multiple of 4 per head;
            a float is a share of the present width of the site. None does not change values. If `dim_value` is given,
            `dim_shared_query_key=None` does not change queries and keys: only values change, even in sites that are
            collaborative or have narrower values already.
        tol: the alternating least squares stop when a sweep improves the relative error by less than this.
        batches: input dicts as the model takes them, to calibrate on (32 to 512 sentences are enough). The
            decomposition then preserves the scores on such inputs, which is far better than preserving the weights;
            likewise narrower values preserve the site's output.
        kind: the kind of query/key projection. "shared" is the paper's layer: every head mixes all R dimensions.
            "per_head" gives every head R / H dimensions (rounded up to a multiple of 4): larger, and faster. With
            rotary positions (Llama, ModernBERT, ...) these are the frequency pairs that carry the score of each key
            head, and no other kind is possible. If queries and keys are also normed per head (Qwen3, Gemma 3), they
            cannot be narrowed at all.
        allocation: "uniform" gives every site the requested width. "balanced" takes these widths as a budget of
            parameters and spreads it so that the worst site's output error is small; sites whose requested width is the
            full one keep it. It needs batches.
        sites: roles ("enc-self", "dec-self", "dec-enc") or paths; None for all.
        method: "als" or "parafac" (tensorly's, on the dense tensor; for comparison).
        refine_steps: with batches, Adam steps per site. They fit the new projection to the site's original output on
            the calibration inputs (or on a sample of them, if they are many), without labels and without training
            anything else. 0 skips this refinement.
        seed: seed of the initial random factors of "parafac", and of the order of the inputs in the refinement.

    Returns:
        A report with width, relative error, parameters and seconds per site; `print` it.

    Raises:
        UnsupportedModelError: if there is no adapter for the model, or it is wrapped.
        ArgumentError: on a width, role, path, method, kind or tolerance that cannot work.
        CalibrationError: if the batches are empty or the model cannot take them, or if a site that is to be
            refined or measured does not use transformers' attention interface.
        NonFiniteError: if weights or calibration inputs contain NaN or inf; the site is named.
        ModelStateError: if a site was swapped already, or cannot be changed safely.

    Source: Cordonnier, Loukas, Jaggi 2020, arXiv:2006.16362; the weighting is ours.
    """
    started = time.perf_counter()
    check_kind(kind, method=(method, FitOptions.method))
    check_choice("allocation", allocation, ALLOCATIONS)
    options = FitOptions(method, tol, refine_steps, seed)
    if allocation == "balanced" and batches is None:
        raise ArgumentError("allocation='balanced' measures output errors: pass batches")
    only_values = dim_value is not None and dim_shared_query_key is None
    capability = "values" if only_values else FITS[kind].capability
    with opened(model, adapter, capability, changes=True) as layers, work("swap"):
        before = model.num_parameters()
        plans, value_plans = plan_change(layers, sites, dim_shared_query_key, dim_value, kind)
        if isinstance(batches, Sequence):  # others may be read only once
            is_balanced = allocation == "balanced"
            say(lambda: estimate_swap(model, batches, plans, value_plans, refine_steps, is_balanced=is_balanced))
        replacements = fitted(layers, plans, value_plans, batches, allocation, options)
        put_in_place(layers, replacements)
    return SwapReport(
        sites=tuple(replacement.report for replacement in replacements),
        calibrated=batches is not None,
        seconds=time.perf_counter() - started,
        model_parameters_before=before,
        model_parameters_after=model.num_parameters(),
    )


def fitted(
    layers: OpenLayers,
    plans: list[SitePlan],
    value_plans: list[ValuePlan],
    batches: Iterable[Mapping] | None,
    allocation: Allocation,
    options: FitOptions,
) -> list[Replacement]:
    """Fit what is planned for the sites of a model, which is unchanged afterwards, in model order."""
    calibrated = None
    if batches is not None:
        needs_calls = options.refine_steps > 0 or allocation == "balanced"
        needs_calls |= any(FITS[plan.kind].needs_calls for plan in plans)
        recorded = [plan.site for plan in plans if needs_calls and not plan.is_exact]
        narrowed = [plan.site for plan in value_plans]
        seen = NoticingFew(batches)
        calibrated = CalibratedSites(layers.model, [plan.site for plan in plans], recorded, narrowed, seen)
    with few_threads(max([plan.dim for plan in plans] + [plan.site.dim_value for plan in value_plans])):
        if allocation == "balanced" and calibrated is not None:
            plans = balance_widths(plans, lambda path: calibrated.of(path).query_key[path])
        by_path = {plan.site.path: plan for plan in plans}
        values_by_path = {plan.site.path: plan for plan in value_plans}
        changing = [site for site in layers.attention if site.path in by_path or site.path in values_by_path]
        return [
            make_replacement(
                site,
                by_path.get(site.path),
                values_by_path.get(site.path),
                None if calibrated is None else calibrated.of(site.path),
                options,
            )
            for site in progress_bar(changing, desc="decomposing")
        ]


def plan_change(
    layers: OpenLayers,
    sites: str | Iterable[str] | None,
    asked: Width | Mapping[str, Width],
    asked_value: Width | Mapping[str, Width],
    kind: QueryKeyKind,
) -> tuple[list[SitePlan], list[ValuePlan]]:
    """Check that the named sites can be changed, and plan it; errors are those of `swap_to_collaborative`."""
    if not layers.with_heads:
        raise ModelStateError("the model has no heads left: there is nothing to swap")
    swapped, narrowed = choose_sites(layers, sites, asked, asked_value, kind_for(layers.adapter, kind))
    check_swappable(layers, [site for site, *_ in swapped])
    if narrowed:
        check_values(layers, [site for site, _ in narrowed])
    return [plan_site(*each) for each in swapped], [plan_values(*each) for each in narrowed]


def put_in_place(layers: OpenLayers, replacements: Sequence[Replacement]) -> None:
    """Install all replacements in the model, which is unchanged until here. Nothing can fail from here on."""
    states = {}
    for replacement in replacements:
        state = dataclasses.replace(replacement.site.state, query_key=replacement.query_key.state)
        if replacement.value_state is not None:
            state = dataclasses.replace(state, values=replacement.value_state)
        values = None if replacement.values is None else replacement.values.weights
        apply_state(replacement.site, state, SiteWeights(query_key=replacement.query_key, values=values))
        states[replacement.site.path] = state
    layers.write(states)
