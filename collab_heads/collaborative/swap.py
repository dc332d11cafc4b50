"""swap_to_collaborative: plan every replacement, then put them all in place."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

from collab_heads.collaborative.attention import build_query_key, content_bias
from collab_heads.collaborative.calibrate import Moments, collect_moments
from collab_heads.collaborative.decompose import (
    METHODS,
    Decomposition,
    decompose_per_head,
    decompose_shared,
    float64,
    input_root,
)
from collab_heads.collaborative.report import SiteReport, SwapReport
from collab_heads.collaborative.widths import Width, per_head_width, plan_widths, resolve_width
from collab_heads.config import KINDS, CollabConfig, QueryKeyState, SiteState
from collab_heads.errors import ArgumentError, NonFiniteError
from collab_heads.refusals import check_swappable, check_wrapper
from collab_heads.registry import AttentionAdapter, get_adapter
from collab_heads.sites import AttentionSite, AttentionWeights, check_choice, select_sites

# Share of the mean input variance that is added to every direction, so that none the calibration missed is lost.
RIDGE = 1e-4


@dataclass(frozen=True)
class Replacement:
    """One planned change."""

    site: AttentionSite
    module: nn.Module
    query_key: nn.Module
    report: SiteReport


def swap_to_collaborative(
    model: PreTrainedModel,
    adapter: type[AttentionAdapter] | AttentionAdapter | None = None,
    dim_shared_query_key: Width | Mapping[str, Width] = None,
    *,
    tol: float = 1e-6,
    calibration: Iterable[Mapping] | None = None,
    mixing: str = "shared",
    sites: str | Iterable[str] | None = None,
    method: str = "als",
    seed: int = 0,
) -> SwapReport:
    """Replace the query/key projections of a model by collaborative ones, in place.

    The model keeps its class, training mode, dtype, device and hooks; `save_pretrained` and `from_pretrained` work as
    before. On an error it is left as it was. Swap before making the optimizer, and before DDP, FSDP, PEFT or
    `torch.compile`.

    Args:
        model: a supported transformers model, base or with a head.
        adapter: the family's adapter, as class or instance; None looks it up by model type.
        dim_shared_query_key: width R of the projection over all heads: an int for every site; a float in (0, 1] as a
            share of H * d_k; a dict of those by role or path (only the sites it names are swapped); None keeps the
            width, which is exact.
        tol: the alternating least squares stop when a sweep improves the relative error by less.
        calibration: an iterable of input dicts as the model takes them (32 to 512 sentences are enough). The
            decomposition then preserves the scores on such inputs, which is far better than preserving the weights.
        mixing: "shared", the paper's layer: every head mixes all R dimensions; smaller and slower than "per_head",
            where every head has R / H dimensions of its own (rounded up to a multiple of 4).
        sites: roles ("enc-self", "dec-self", "dec-enc") or paths; None for all.
        method: "als" or "parafac" (tensorly's, on the dense tensor; for comparison).
        seed: of random starts ("parafac"); "als" has none.

    Returns:
        A report with width, relative error, parameters and seconds per site; `print` it.

    Raises:
        UnsupportedModelError: if there is no adapter for the model, or it is wrapped.
        ArgumentError: on a width, role, path, method, mixing or tolerance that cannot work.
        CalibrationError: if the calibration batches are empty or the model cannot take them.
        NonFiniteError: if weights or calibration inputs contain NaN or inf; the site is named.
        SwapError: if a site was swapped already, or cannot be changed safely.

    Source: Cordonnier, Loukas, Jaggi 2020, arXiv:2006.16362; the weighting is ours.
    """
    started = time.perf_counter()
    check_choice("mixing", mixing, KINDS)
    check_choice("method", method, METHODS)
    if mixing == "per_head" and method != "als":
        raise ArgumentError(f"method={method!r} has no meaning for mixing='per_head', which is a plain SVD per head")
    if isinstance(tol, bool) or not isinstance(tol, int | float) or not 0 <= tol < 1:
        raise ArgumentError(f"tol {tol!r} must be a number from 0 to 1")
    check_wrapper(model)
    adapter = get_adapter(model, adapter)
    available = adapter.sites(model)
    widths = plan_widths(available, select_sites(available, sites), dim_shared_query_key)
    chosen = [site for site in available if site.path in widths]
    check_swappable(model, adapter, chosen)
    base = model.base_model
    weights = {site.path: read_finite(adapter, base, site) for site in chosen}
    plan = {site.path: plan_width(site, weights[site.path], widths[site.path], mixing) for site in chosen}
    moments = {} if calibration is None else collect_moments(model, adapter, chosen, calibration)
    before = model.num_parameters()
    replacements = [
        replace(
            site,
            base.get_submodule(site.path),
            adapter,
            weights[site.path],
            plan[site.path],
            moments.get(site.path),
            mixing,
            method,
            tol,
            seed,
        )
        for site in tqdm(chosen, desc="decomposing", leave=False)
    ]
    record = CollabConfig.of(model.config).with_sites(
        {r.site.path: SiteState(r.site.role, r.site.num_heads, r.query_key.state) for r in replacements}
    )
    # Nothing has changed up to here; nothing can fail from here on.
    for replacement in replacements:
        adapter.install(replacement.module, replacement.query_key)
    record.write(model)
    return SwapReport(
        sites=tuple(r.report for r in replacements),
        calibrated=calibration is not None,
        seconds=time.perf_counter() - started,
        model_parameters_before=before,
        model_parameters_after=model.num_parameters(),
    )


def read_finite(adapter: AttentionAdapter, base: nn.Module, site: AttentionSite) -> AttentionWeights:
    """Read a site's weights and check that they are finite."""
    weights = adapter.read(base.get_submodule(site.path))
    for name in ("query", "query_bias", "key", "value"):
        tensor = getattr(weights, name)
        if tensor is not None and not torch.isfinite(tensor).all():
            raise NonFiniteError(f"{site.path}: the {name} contains NaN or inf")
    return weights


def plan_width(site: AttentionSite, weights: AttentionWeights, asked: Width, mixing: str) -> tuple[int, int]:
    """Return (width asked for, width to use), both over all heads."""
    exact = weights.num_heads * weights.dim_head
    width = resolve_width(asked, site, exact)
    return width, width if mixing == "shared" else site.num_heads * per_head_width(width, site, exact)


@torch.no_grad()
def replace(site, module, adapter, weights, plan, moments, mixing, method, tol, seed) -> Replacement:
    """Decompose one site and build its new query/key projection."""
    started = time.perf_counter()
    asked, dim = plan
    found = decompose(weights, dim, moments, mixing, method, tol, seed)
    state = QueryKeyState(mixing, dim, weights.dim_head, weights.scale, weights.query_bias is not None)
    query_projection, key_projection = adapter.projections(module)
    with torch.device(weights.query.device):
        query_key = build_query_key(state, site.num_heads, weights.query.shape[-1], weights.key.shape[-1])
    fill(query_key, found, weights)
    query_key.to(weights.query.dtype)
    query_key.requires_grad_(query_projection.weight.requires_grad or key_projection.weight.requires_grad)
    query_key.train(module.training)
    value_width = weights.num_heads * weights.value.shape[1]
    report = SiteReport(
        path=site.path,
        role=site.role,
        mixing=mixing,
        dim=dim,
        dim_asked=asked,
        dim_exact=weights.num_heads * weights.dim_head,
        relative_error=found.relative_error,
        sweeps=found.sweeps,
        parameters_before=sum(p.numel() for p in (*query_projection.parameters(), *key_projection.parameters())),
        parameters_after=sum(p.numel() for p in query_key.parameters()),
        cache_before=weights.num_heads * weights.dim_head + value_width,
        cache_after=query_key.cache_width + value_width,
        seconds=time.perf_counter() - started,
    )
    return Replacement(site, module, query_key, report)


def decompose(weights, dim, moments: tuple[Moments, Moments] | None, mixing, method, tol, seed) -> Decomposition:
    """Decompose one site's weights; with moments, the error is that of the scores on the calibration inputs."""
    query, query_root, key_root = float64(weights.query), None, None
    augment = mixing == "per_head" and weights.query_bias is not None
    if augment:
        query = torch.cat([query, float64(weights.query_bias)[..., None]], dim=-1)
    if moments is not None:
        query_side, key_side = moments
        query_root = input_root(query_side.augmented() if augment else query_side.second(), RIDGE)
        key_root = input_root(key_side.centred(), RIDGE)
    if mixing == "per_head":
        return decompose_per_head(
            query, weights.key, dim // weights.num_heads, query_root=query_root, key_root=key_root
        )
    return decompose_shared(
        query, weights.key, dim, query_root=query_root, key_root=key_root, method=method, tol=tol, seed=seed
    )


def fill(query_key: nn.Module, found: Decomposition, weights: AttentionWeights) -> None:
    """Copy a decomposition into a query/key projection, in float64."""
    query_key.double()
    bias = query_key.state.bias
    if found.mixing is None:
        columns = query_key.shared_query.in_features
        query_key.shared_query.weight.copy_(found.query[:, :columns])
        if bias:
            query_key.shared_query.bias.copy_(found.query[:, columns])
    else:
        query_key.shared_query.weight.copy_(found.query)
        query_key.mixing.copy_(found.mixing)
        if bias:
            exact = content_bias(float64(weights.query_bias), float64(weights.key))
            query_key.content_bias.weight.copy_(exact)
    query_key.shared_key.weight.copy_(found.key)
