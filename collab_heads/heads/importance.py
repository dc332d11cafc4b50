"""Measure how much depends on each head: rankings that need no training."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.base.arguments import checking_arguments
from collab_heads.contract.registry import get_adapter
from collab_heads.errors import ArgumentError
from collab_heads.heads.criteria import HeadCriterion, criterion_of
from collab_heads.heads.selection import Target, check_by_path, check_scores, check_target, choose, roles_of_heads
from collab_heads.model.batches import NoticingFew
from collab_heads.model.open_layers import OpenLayers
from collab_heads.model.opened import opened
from collab_heads.sites.site import AttentionSite, check_name


@checking_arguments
def head_importance(
    model: PreTrainedModel,
    batches: Iterable[Mapping] | None = None,
    *,
    criterion: str | HeadCriterion = "gradient",
) -> dict[str, Tensor]:
    """Measure how much depends on each head.

    Examples:
        >>> import torch
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> model = BertForSequenceClassification(config)
        >>> batches = [{"input_ids": torch.arange(200).view(8, 25), "labels": torch.arange(8) % 2}]
        >>> scores = head_importance(model, batches)
        >>> scores["encoder.layer.0.attention.self"].shape  # (H,)
        torch.Size([4])

    Args:
        model: a supported transformers model; it is not changed.
        batches: input dicts as the model takes them; some hundred examples are enough. The criterion "random" needs
            none.
        criterion: "gradient", the sensitivity of the loss to a gate on each head, which needs labels; "reconstruction",
            how well the other heads reconstruct the output without each head, which needs none; "random"; or a
            `HeadCriterion`, such as `criteria.Gradient(normalize=False)` or one of your own.

    Returns:
        path -> [H], float32, for every site that has heads.

    Raises:
        ArgumentError: on an unknown criterion, or one that needs batches, without them.
        CalibrationError: if there are no batches, or the model cannot take one or gives no loss for it (its index is
            named).
        NonFiniteError: if a loss, a gradient or the output of a head is NaN or inf; the batch, or the site whose
            weights caused it, is named.
    """
    criterion = criterion_of(criterion)
    with opened(model, changes=True, of="model" if criterion.needs_gradients else "attention") as layers:
        return importance(layers, None if batches is None else NoticingFew(batches), criterion)


def importance(layers: OpenLayers, batches: Iterable[Mapping] | None, criterion: HeadCriterion) -> dict[str, Tensor]:
    """Measure how much depends on each head of an opened model, as `head_importance` does."""
    if not criterion.needs_batches:
        batches = ()
    elif batches is None:
        raise ArgumentError(f"criterion {criterion.name!r} ranks heads by what they do: pass batches")
    else:
        batches = list(batches)
    if not layers.with_heads:
        return {}
    found = criterion.scores(layers.model, layers.with_heads, batches)
    if missing := [site.path for site in layers.with_heads if site.path not in found]:
        raise ArgumentError(f"criterion {criterion.name!r} gives no scores for {missing[0]}")
    return found


@checking_arguments
def most_important(
    model: PreTrainedModel,
    scores: Mapping[str, Tensor],
    target_heads: Target,
) -> dict[str, list[int]]:
    """Return the configuration that keeps the heads with the highest scores, as `alive_heads` of `swap_to_gated`.

    Examples:
        >>> import torch
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> model = BertForSequenceClassification(config)
        >>> batches = [{"input_ids": torch.arange(200).view(8, 25), "labels": torch.arange(8) % 2}]
        >>> alive = most_important(model, head_importance(model, batches), 5)
        >>> sum(map(sum, alive.values()))  # path -> a 1 for every head to keep
        5

    Args:
        model: the model that was measured.
        scores: path -> [H], from `head_importance`; the sites to choose from.
        target_heads: how many heads to keep: a total (every role keeps at least one), or role -> number.

    Returns:
        path -> [H], a 0 or a 1 per head.

    Raises:
        ArgumentError: on an impossible target, or scores of sites or heads that the model does not have.
        NonFiniteError: if a score is NaN or inf; the site is named.
    """
    check_by_path(scores)
    available = get_adapter(model).sites_with_heads(model)
    for path in scores:
        check_name(available, path)
    return chosen_heads([site for site in available if site.path in scores], scores, target_heads)


def chosen_heads(
    sites: Sequence[AttentionSite], scores: Mapping[str, Tensor], target_heads: Target
) -> dict[str, list[int]]:
    """Choose heads of some sites as `most_important` does."""
    scores = check_scores(scores, sites)
    roles = roles_of_heads(sites)
    check_target(target_heads, roles)
    chosen = choose(torch.cat([scores[site.path] for site in sites]), roles, target_heads)
    parts = chosen.split([site.num_heads for site in sites])
    return {site.path: part.int().tolist() for site, part in zip(sites, parts, strict=True)}
