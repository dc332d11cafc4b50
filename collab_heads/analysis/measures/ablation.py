"""Measure a model without some of its heads: each head alone, or many in the order of a measure."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_heads.analysis.measures.sentences import rows
from collab_heads.base.arguments import checking_arguments
from collab_heads.base.progress import progress_bar
from collab_heads.base.report import Cell, Report
from collab_heads.base.wrappers import check_passed, model_inside
from collab_heads.contract.registry import get_adapter, head_numbers, is_lone_decoder
from collab_heads.errors import ArgumentError, NonFiniteError
from collab_heads.heads.criteria import most_important
from collab_heads.heads.selection import removal_choice
from collab_heads.model.refusals import check_wrapper
from collab_heads.running.batches import each_batch, evaluating
from collab_heads.running.losses import loss_of, not_finite
from collab_heads.sites.site import AttentionSite, select_sites

Evaluate = Callable[[PreTrainedModel], float]
IGNORED = -100  # labels that do not count


@dataclass(frozen=True, eq=False)
class Ablation(Report):
    """The result of `leave_one_out`.

    Attributes:
        sites: the sites that were measured, in model order.
        heads: path -> the original numbers of their heads.
        metric: the name of the metric.
        original: the metric of the whole model.
        without: path -> [H], the metric without each head.
        higher_is_better: whether a higher metric is better; False for a loss.
    """

    sites: tuple[AttentionSite, ...]
    heads: Mapping[str, tuple[int, ...]]
    metric: str
    original: float
    without: Mapping[str, Tensor]
    higher_is_better: bool = False

    def harm(self) -> dict[str, Tensor]:
        """Return path -> [H], how much worse the metric is without each head."""
        sign = -1.0 if self.higher_is_better else 1.0
        return {path: sign * (values - self.original) for path, values in self.without.items()}

    def columns(self) -> dict[str, Cell]:
        def edge(of: Callable[[Tensor], Tensor]) -> Callable[[AttentionSite], str]:
            return lambda site: f"{float(of(self.without[site.path] - self.original)):+.4f}"

        return {"site": "{.path}", "role": "{.role}", "lowest": edge(torch.min), "highest": edge(torch.max)}

    def closing(self) -> str:
        return f"change of {self.metric} without one head; {self.original:.4f} with all"


@checking_arguments
@contextmanager
def without_heads(model: PreTrainedModel, heads: Mapping) -> Iterator[None]:
    """Make the model compute as if `prune_heads` had removed some heads, while the context is open.

    Args:
        model: a supported transformers model, original or changed; its weights stay as they are.
        heads: as `prune_heads` takes them: role -> one list of head numbers per layer, or path -> one list.

    Raises:
        ArgumentError: on a role, path or head that does not exist.
    """
    check_wrapper(model)
    adapter = get_adapter(model)
    available, numbers = adapter.sites(model), head_numbers(model, adapter)
    chosen = removal_choice(available, heads, numbers)
    handles = []
    try:
        for site in available:
            if chosen.get(site.path):
                alive = torch.tensor([head not in chosen[site.path] for head in numbers[site.path]])
                projection = adapter.output_projection(model, site)
                handles.append(projection.register_forward_pre_hook(silencer(alive)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def silencer(alive: Tensor) -> Callable[[nn.Module, tuple], tuple]:
    def hook(module: nn.Module, inputs: tuple) -> tuple:
        heads = inputs[0].unflatten(-1, (len(alive), -1))
        return (heads.masked_fill(~alive.to(heads.device)[:, None], 0.0).flatten(-2), *inputs[1:])

    return hook


@checking_arguments
def mean_loss(model: PreTrainedModel, batches: Iterable[Mapping]) -> float:
    """Return the mean loss over a data set; every label of a sequence, or every example, counts the same.

    Args:
        model: a model with a loss; it runs in evaluation mode without gradients.
        batches: input dicts with labels.

    Raises:
        CalibrationError: if there are no batches, or the model cannot take a batch or gives no loss for it (the message
            holds its index).
        NonFiniteError: if the loss of a batch is NaN or inf.
        UnsupportedModelError: if the model takes no such batches, but a model inside it does.
    """
    check_passed(model)
    model_inside(model)
    total, count = 0.0, 0
    skipped = int(model.can_generate() and is_lone_decoder(model.config))  # labels that nothing predicts: the first
    with evaluating(model):
        for index, batch in enumerate(each_batch(batches)):
            loss = float(loss_of(model, batch, index))
            labels = batch.get("labels")
            if labels is not None and labels.ndim == 2 and not labels.is_floating_point():
                number = int(labels[:, skipped:].ne(IGNORED).sum())
            else:
                number = rows(batch)
            if not math.isfinite(loss):
                raise NonFiniteError(not_finite(loss, index))
            total, count = total + number * loss, count + number
    return total / max(1, count)


@checking_arguments
def leave_one_out(
    model: PreTrainedModel,
    evaluate: Evaluate,
    *,
    sites: str | Iterable[str] | None = None,
    metric: str = "loss",
    higher_is_better: bool = False,
) -> Ablation:
    """Measure the model without each of its heads in turn.

    This takes one evaluation per head, and one of the whole model.

    Examples:
        >>> import torch
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> model = BertForSequenceClassification(config)
        >>> batches = [{"input_ids": torch.arange(200).view(8, 25), "labels": torch.arange(8) % 2}]
        >>> ablation = leave_one_out(model, lambda model: mean_loss(model, batches))
        >>> ablation.harm()["encoder.layer.0.attention.self"].shape  # (H,): how much the loss rises without each head
        torch.Size([4])

    Args:
        model: a supported transformers model, original or changed; it is left as it was.
        evaluate: model -> the metric, such as `lambda model: mean_loss(model, batches)`, or an accuracy.
        sites: roles or paths; None for all.
        metric: the name of the metric.
        higher_is_better: whether a higher metric is better; False for a loss.

    Raises:
        ArgumentError: on a role or path that the model does not have, or if `evaluate` returns no number.
        NonFiniteError: if the metric is NaN or inf; the message names the head.

    Source: Michel, Levy, Neubig 2019, arXiv:1905.10650, section 3.2.
    """
    check_wrapper(model)
    adapter = get_adapter(model)
    chosen = select_sites(adapter.sites_with_heads(model), sites)
    numbers = head_numbers(model, adapter)
    original = checked(evaluate(model), metric, "of the whole model")
    without = {site.path: torch.zeros(site.num_heads, dtype=torch.float64) for site in chosen}
    heads_in_turn = [(site, index, head) for site in chosen for index, head in enumerate(numbers[site.path])]
    for site, index, head in progress_bar(heads_in_turn, desc="leaving heads out"):
        with without_heads(model, {site.path: [head]}):
            without[site.path][index] = checked(evaluate(model), metric, f"without head {head} of {site.path}")
    heads = {site.path: numbers[site.path] for site in chosen}
    return Ablation(tuple(chosen), heads, metric, original, without, higher_is_better)


@checking_arguments
def ablation_curve(
    model: PreTrainedModel,
    evaluate: Evaluate,
    scores: Mapping[str, Tensor],
    *,
    counts: Sequence[int] | None = None,
    metric: str = "loss",
) -> list[tuple[int, float]]:
    """Measure the model with only its most important heads: quality against heads kept.

    Args:
        model: a supported transformers model, original or changed; it is left as it was.
        evaluate: model -> the metric.
        scores: path -> [H], for every site that has heads; heads with the lowest scores are removed first. Every role
            keeps at least one head.
        counts: numbers of heads to keep, one per point; None for all heads, seven eighths of them, and so on.
        metric: the name of the metric.

    Returns:
        (heads kept, metric), fewest heads last.

    Raises:
        ArgumentError: on an impossible number of heads, or scores of sites or heads that the model does not have.
        NonFiniteError: if a score or the metric is NaN or inf.
    """
    check_wrapper(model)
    adapter = get_adapter(model)
    sites, numbers = adapter.sites_with_heads(model), head_numbers(model, adapter)
    missing = [site.path for site in sites if site.path not in scores]
    if missing:
        raise ArgumentError(f"scores lack {missing[0]}: a curve ranks all heads of the model against each other")
    total = sum(site.num_heads for site in sites)
    least = len({site.role for site in sites})
    counts = [max(least, math.ceil(total * eighths / 8)) for eighths in range(8, 0, -1)] if counts is None else counts
    plans = [(count, most_important(model, scores, count)) for count in sorted(set(counts), reverse=True)]
    points = []
    for count, alive in progress_bar(plans, desc="removing heads"):
        removed = {
            path: [h for h, on in zip(numbers[path], bits, strict=True) if not on] for path, bits in alive.items()
        }
        with without_heads(model, removed):
            points.append((count, checked(evaluate(model), metric, f"with {count} heads")))
    return points


def checked(value: Any, metric: str, of: str) -> float:
    """Return the value as a float; raise ArgumentError if it is not a number, NonFiniteError if it is NaN or inf."""
    try:
        value = float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"evaluate must give a number, and the {metric} {of} is {value!r:.80}") from error
    if not math.isfinite(value):
        raise NonFiniteError(f"the {metric} {of} is {value}")
    return value
