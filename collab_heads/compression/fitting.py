"""Fit what sites are to have to what calibration saw of them, and put it into the model."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.attention_adapter import AttentionAdapter
from collab_heads.collaborative.calibrate import Calibrations
from collab_heads.collaborative.fit import FitOptions
from collab_heads.collaborative.input_moments import InputMoments
from collab_heads.collaborative.plan import plan_site, plan_values
from collab_heads.collaborative.replacement import Replacement, make_replacement
from collab_heads.collaborative.swap import put_in_place
from collab_heads.compression.choices import Choice, SiteShape
from collab_heads.heads.reconstruction import HeadRegression, Refit, regressed_weight
from collab_heads.model.apply_state import prune_site
from collab_heads.model.open_site import OpenSite, open_sites
from collab_heads.model.undoing import undone
from collab_heads.record import CollabConfig


@dataclass(frozen=True)
class FittedSite:
    """What a site gets.

    Attributes:
        kept: indices of the heads that stay.
        refit: W_O for them; None if all stay.
        replacement: its query/key projection and values; None if both stay as they are.
    """

    kept: tuple[int, ...]
    refit: Refit | None
    replacement: Replacement | None


def head_regression(site: OpenSite, moments: InputMoments) -> HeadRegression:
    """The regression of what a site adds on what its heads put out; heads that share a key head count as one."""
    weight, _ = regressed_weight(site, folds_gates=False)
    has_bias = getattr(site.output, "bias", None) is not None
    return HeadRegression.of(weight, moments, site.site.num_key_heads, has_bias=has_bias)


def most_costly(costs: Tensor, count: int) -> tuple[int, ...]:
    """The heads that stay when so many do: indices, ascending; see `HeadRegression.removal_costs`."""
    return tuple(sorted(costs.topk(count).indices.tolist()))


def fit_site(
    site: OpenSite,
    shape: SiteShape,
    choice: Choice,
    calibrations: Calibrations,
    options: FitOptions,
) -> FittedSite:
    """Fit what a site is to have; the model is as it was afterwards.

    Args:
        site: the site, without gates and alphas.
        shape: of it.
        choice: what it is to have.
        calibrations: what calibration saw of the unchanged model.
        options: how query and key are fitted.
    """
    calibrations = Calibrations(dict(calibrations.query_key), dict(calibrations.heads))  # a fit takes out what it uses
    if choice.heads == shape.num_heads:
        whole = tuple(range(site.num_heads))
        return FittedSite(whole, None, replacement_of(site, shape, choice, calibrations, options))
    regression = head_regression(site, calibrations.heads[site.path])
    kept_keys = most_costly(regression.removal_costs(), shape.key_heads(choice))
    kept = tuple(head for head, key in enumerate(site.groups) if key in kept_keys)
    refit = regression.refit(kept_keys)
    calibrations.heads[site.path] = calibrations.heads[site.path].part(regression.columns(kept_keys))
    if site.path in calibrations.query_key:
        seen = calibrations.query_key[site.path]
        calls = [call.of_heads(kept, site.num_heads) for call in seen.calls]
        calibrations.query_key[site.path] = dataclasses.replace(seen, calls=calls)
    with undone(site.model, [site]):
        put(site.model, site.adapter, {site.path: FittedSite(kept, refit, None)})
        return FittedSite(kept, refit, replacement_of(reopened(site), shape, choice, calibrations, options))


def reopened(site: OpenSite) -> OpenSite:
    """The same site as it is now."""
    (now,) = [each for each in open_sites(site.model, site.adapter) if each.path == site.path]
    return now


def replacement_of(
    site: OpenSite, shape: SiteShape, choice: Choice, calibrations: Calibrations, options: FitOptions
) -> Replacement | None:
    """The query/key projection and the values of a choice, for a site that has the chosen heads already."""
    dim, plan, values = shape.dim_query_key(choice), None, None
    if choice.value < shape.dim_value:
        values = plan_values(site, choice.value * shape.key_heads(choice))
    if dim is not None:
        plan = plan_site(site, dim, shape.kind)
    elif values is not None and not site.is_swapped:
        plan = plan_site(site, None, shape.exact_kind)
    if plan is None and values is None:
        return None
    return make_replacement(site, plan, values, calibrations, options)


def put(model: PreTrainedModel, adapter: AttentionAdapter, fitted: Mapping[str, FittedSite]) -> None:
    """Change the model: path -> what a site gets. Nothing can fail from here on."""
    config, states = CollabConfig.on(model), {}
    for site in open_sites(model, adapter):
        fit = fitted.get(site.path)
        if fit is not None and len(fit.kept) < site.num_heads:
            numbers = [site.head_numbers[index] for index in fit.kept]
            states[site.path] = prune_site(site, config.site(site.site), numbers, fit.refit)
    config.with_sites(states).write(model)
    replacements = []
    for site in open_sites(model, adapter):  # again: they have the heads now that they are to have
        replacement = fitted[site.path].replacement if site.path in fitted else None
        if replacement is not None:
            replacements.append(dataclasses.replace(replacement, site=site))
    put_in_place(model, replacements)
