"""How much depends on each head: rankings that need no training, one of them no labels."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.arguments import checking_arguments
from collab_heads.attention_adapter import AttentionAdapter
from collab_heads.bars import progress_bar
from collab_heads.checks import check_choice
from collab_heads.errors import ArgumentError, CalibrationError, CollabHeadsError, NonFiniteError
from collab_heads.heads.reconstruction import reconstruction_costs
from collab_heads.heads.selection import Target, check_by_path, check_scores, check_target, choose, roles_of_heads
from collab_heads.model.backends import evaluating
from collab_heads.model.batches import check_batches
from collab_heads.model.examples import moved
from collab_heads.model.modalities import check_modalities
from collab_heads.model.offloading import changing_attention, input_device, opening_model
from collab_heads.model.open_site import open_sites
from collab_heads.model.refusals import check_wrapper
from collab_heads.registry import get_adapter
from collab_heads.sites import AttentionSite, check_name

Criterion = Literal["gradient", "reconstruction"]


@checking_arguments
def head_importance(
    model: PreTrainedModel,
    batches: Iterable[Mapping],
    adapter: type[AttentionAdapter] | AttentionAdapter | None = None,
    *,
    normalize: bool = True,
    criterion: Criterion = "gradient",
) -> dict[str, Tensor]:
    """Measure how much depends on each head.

    Args:
        model: a supported transformers model; it is left as it was.
        batches: input dicts as the model takes them; some hundred examples are enough.
        adapter: the family's adapter, as class or instance; None looks it up by model type.
        normalize: divide gradients by their Euclidean norm over the heads of a site, as the paper does: layers then
            count alike.
        criterion: "gradient" is the mean absolute gradient of each example's loss by a gate on each head; batches need
            labels, and where the loss is a mean over tokens an example counts by its share of the tokens of its batch.
            "reconstruction" needs no labels: the heads of a site go one after the other, always the one that the others
            can stand in for best, and a head's number is the share of what the site adds that is lost by then; keep the
            highest, and hand the same batches to `prune_heads` as `calibration`.

    Returns:
        path -> [H], float32, for every site that has heads.

    Raises:
        ArgumentError: on an unknown criterion, or if `normalize` is no bool, or False where nothing is normalized.
        CalibrationError: if there are no batches, or the model cannot take one or gives no loss for it (its index is
            named).
        NonFiniteError: if a loss, a gradient or what a head puts out is NaN or inf; the batch, or the site whose
            weights are to blame, is named.

    Source: of the gradients, Michel, Levy, Neubig 2019, arXiv:1905.10650.
    """
    check_wrapper(model)
    if not isinstance(normalize, bool):
        raise ArgumentError(f"normalize must be True or False, not {normalize!r:.80}")
    check_choice("criterion", criterion, CRITERIA)
    adapter = get_adapter(model, adapter)
    batches = check_batches(batches)
    return CRITERIA[criterion](model, batches, adapter, normalize) if adapter.sites_with_heads(model) else {}


@changing_attention
def reconstruction_importance(
    model: PreTrainedModel, batches: Sequence[Mapping], adapter: AttentionAdapter, normalize: bool
) -> dict[str, Tensor]:
    """The criterion "reconstruction"."""
    if not normalize:
        raise ArgumentError("normalize=False has no meaning for criterion='reconstruction', whose numbers are shares")
    return reconstruction_costs(model, batches, adapter)


@opening_model
def gradient_importance(
    model: PreTrainedModel, batches: Sequence[Mapping], adapter: AttentionAdapter, normalize: bool
) -> dict[str, Tensor]:
    """The criterion "gradient"."""
    sites = adapter.sites_with_heads(model)
    importance = {site.path: torch.zeros(site.num_heads, device=input_device(model)) for site in sites}
    gates: dict[str, Tensor] = {}
    num_examples = 0

    def gated(path: str, heads: int):
        def hook(module, inputs):
            split = inputs[0].unflatten(-1, (heads, -1))
            size = split.shape[0]
            if path not in gates:  # a module that serves several layers has one gate
                gates[path] = torch.ones(size, heads, device=split.device, requires_grad=True)
            shape = size, *[1] * (split.ndim - 3), heads, 1
            return ((split * gates[path].view(shape).to(split.dtype)).flatten(-2),)

        return hook

    handles = [
        adapter.output_projection(model, site).register_forward_pre_hook(gated(site.path, site.num_heads))
        for site in sites
    ]
    try:
        with evaluating(model), torch.enable_grad():
            for index, batch in enumerate(progress_bar(batches, desc="measuring heads", leave=False)):
                gates.clear()
                loss = loss_of(model, batch, index)
                if not torch.isfinite(loss) and broken_site(model, adapter, sites) is None:
                    raise NonFiniteError(not_finite(loss, index))
                paths = list(gates)
                num_examples += len(gates[paths[0]])
                # every example has gates of its own, and 1 / B of the mean loss
                for path, gradient in zip(paths, torch.autograd.grad(loss, [gates[p] for p in paths]), strict=True):
                    importance[path] += (gradient * len(gradient)).abs().sum(0)
    finally:
        for handle in handles:
            handle.remove()
    for path, values in importance.items():
        if not torch.isfinite(values).all():
            path = broken_site(model, adapter, sites) or path
            raise NonFiniteError(f"{path}: the gradient of the loss by a head is NaN or inf")
        scale = values.norm().clamp(min=torch.finfo(values.dtype).tiny) if normalize else num_examples
        importance[path] = values / scale
    return {path: values.cpu() for path, values in importance.items()}


CRITERIA: Mapping[
    Criterion, Callable[[PreTrainedModel, Sequence[Mapping], AttentionAdapter, bool], dict[str, Tensor]]
] = {"gradient": gradient_importance, "reconstruction": reconstruction_importance}


def broken_site(model: PreTrainedModel, adapter: AttentionAdapter, sites: list[AttentionSite]) -> str | None:
    """The first site with NaN or inf among its weights: its gradients, and those of all sites below, are too."""
    for site in open_sites(model, adapter, sites):
        if not all(torch.isfinite(p).all() for module in (site.module, site.output) for p in module.parameters()):
            return site.path
    return None


def loss_of(model: PreTrainedModel, batch: Mapping, index: int) -> Tensor:
    """The model's loss on a batch; a CalibrationError names the batch that it cannot take, by its index from 0."""
    inputs = moved(batch, input_device(model))
    try:
        check_modalities(model, inputs)
        loss = getattr(model(**inputs), "loss", None)
    except CollabHeadsError:
        raise
    except Exception as error:  # whatever the model raises about its inputs, with the batch named
        raise CalibrationError(
            f"{type(model).__name__} cannot take batch {index} with {sorted(map(str, inputs))}: {error}"
        ) from error
    if loss is None:
        raise CalibrationError(
            f"{type(model).__name__} gives no loss for batch {index}: it needs labels, the model a head"
        )
    return loss


def not_finite(loss: Tensor | float, index: int) -> str:
    """What to say of a batch whose loss is NaN or inf."""
    return f"the loss of batch {index} is {float(loss)}: does it have a label that counts (not -100)?"


@checking_arguments
def most_important(
    model: PreTrainedModel,
    scores: Mapping[str, Tensor],
    target_heads: Target,
    adapter: type[AttentionAdapter] | AttentionAdapter | None = None,
) -> dict[str, list[int]]:
    """The configuration that keeps the heads with the highest scores: what `swap_to_gated` takes as `alive_heads`.

    Args:
        model: the model that was measured.
        scores: path -> [H], from `head_importance`; the sites to choose from.
        target_heads: how many heads to keep: a total (every role keeps at least one), or role -> number.
        adapter: the family's adapter, as class or instance; None looks it up by model type.

    Raises:
        ArgumentError: on an impossible target, or scores of sites or heads that the model does not have.
        NonFiniteError: if a score is NaN or inf; the site is named.
    """
    check_by_path(scores)
    available = get_adapter(model, adapter).sites_with_heads(model)
    sites = [site for site in available if site.path in scores]
    for path in scores:
        check_name(available, path)
    scores = check_scores(scores, sites)
    roles = roles_of_heads(sites)
    check_target(target_heads, roles)
    chosen = choose(torch.cat([scores[site.path] for site in sites]), roles, target_heads)
    parts = chosen.split([site.num_heads for site in sites])
    return {site.path: part.int().tolist() for site, part in zip(sites, parts, strict=True)}
