"""Rank heads by how much depends on each; a criterion is one class, with an entry in `CRITERIA`."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.base.arguments import checking_arguments
from collab_heads.base.checks import check_choice, check_seed
from collab_heads.base.progress import progress_bar
from collab_heads.contract.registry import get_adapter
from collab_heads.errors import ArgumentError, NonFiniteError
from collab_heads.fitting.head_regression import regressions
from collab_heads.heads.selection import Target, check_by_path, check_scores, check_target, choose, roles_of_heads
from collab_heads.model.open_layers import OpenLayers, OpenSite
from collab_heads.model.opened import input_device, opened
from collab_heads.running.batches import NoticingFew, evaluating
from collab_heads.running.losses import loss_of, not_finite
from collab_heads.running.residual_readers import stream_weights
from collab_heads.sites.site import AttentionSite, check_name


class HeadCriterion(ABC):
    """A criterion by which heads are ranked. Subclass it, and pass an instance to `head_importance`.

    Attributes:
        name: its name in Python and on the command line.
        needs_batches: whether it needs inputs.
        needs_labels: whether these need labels.
        needs_gradients: whether it runs backward through the model.
        refits: whether it assumes that W_O is refitted for the heads that stay (`prune_heads` with batches).
    """

    name: ClassVar[str]
    needs_batches: ClassVar[bool] = True
    needs_labels: ClassVar[bool] = False
    needs_gradients: ClassVar[bool] = False
    refits: ClassVar[bool] = False

    @abstractmethod
    def scores(
        self, model: PreTrainedModel, sites: Sequence[OpenSite], batches: Sequence[Mapping]
    ) -> dict[str, Tensor]:
        """Score heads; the model is not changed.

        Args:
            model: the model, with the weights of its attention in memory.
            sites: the sites whose heads are scored.
            batches: input dicts as the model takes them.

        Returns:
            path -> [H], float32 on the CPU. The heads with the highest scores are kept.
        """


class Gradient(HeadCriterion):
    """The mean absolute gradient of each example's loss with respect to a gate on each head.

    Where the loss is a mean over tokens, an example is weighted by its share of the tokens of its batch.

    Args:
        normalize: divide by the Euclidean norm over the heads of a site, as the paper does: all layers then weigh the
            same.

    Source: Michel, Levy, Neubig 2019, arXiv:1905.10650.
    """

    name = "gradient"
    needs_labels = True
    needs_gradients = True

    @checking_arguments
    def __init__(self, *, normalize: bool = True):
        self.normalize = normalize

    def scores(self, model, sites, batches):
        """Score heads; errors name the batch, or the site whose weights caused them."""
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

        handles = [site.output.register_forward_pre_hook(gated(site.path, site.num_heads)) for site in sites]
        try:
            with evaluating(model), torch.enable_grad():
                for index, batch in enumerate(progress_bar(batches, desc="measuring heads")):
                    gates.clear()
                    loss = loss_of(model, batch, index)
                    if not torch.isfinite(loss) and broken_site(sites) is None:
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
                path = broken_site(sites) or path
                raise NonFiniteError(f"{path}: the gradient of the loss by a head is NaN or inf")
            scale = values.norm().clamp(min=torch.finfo(values.dtype).tiny) if self.normalize else num_examples
            importance[path] = values / scale
        return {path: values.cpu() for path, values in importance.items()}


class Reconstruction(HeadCriterion):
    """The squared error that is left when a head is removed and W_O refitted for the others; needs no labels.

    The heads of a site are removed one after the other, each time the one that the others reconstruct best. The score
    of a head is the error of the site's output at that point, as a share of the variance of the stream that the output
    is added to: the next module normalizes it. Pass the same batches to `prune_heads`.

    Args:
        normalize: divide by the mean square of the site's output instead: all layers then weigh the same. Sites whose
            output is read at no single place (ALBERT's, which serve several layers) leave no other choice; then it is
            done for all.

    Attributes:
        are_of_stream: whether the last scores are shares of the variance of the stream.
    """

    name = "reconstruction"
    refits = True

    @checking_arguments
    def __init__(self, *, normalize: bool = False):
        self.normalize, self.are_of_stream = normalize, not normalize

    def scores(self, model, sites, batches):
        """Score heads by `HeadRegression.removal_costs`."""
        fits = regressions(model, sites, batches, what="measuring heads")
        costs = {path: regression.removal_costs() for path, regression in fits.items()}
        weights = {} if self.normalize else stream_weights(model, sites, batches)
        self.are_of_stream = weights.keys() == costs.keys()
        if self.are_of_stream:
            costs = {path: each * fits[path].whole * weights[path] for path, each in costs.items()}
        return {path: each.float().cpu() for path, each in costs.items()}


class Random(HeadCriterion):
    """Random scores, for comparison.

    Args:
        seed: of the random numbers.
    """

    name = "random"
    needs_batches = False

    @checking_arguments
    def __init__(self, *, seed: int = 0):
        check_seed(seed)
        self.seed = seed

    def scores(self, model, sites, batches):
        """Score heads by uniform random numbers."""
        generator = torch.Generator().manual_seed(self.seed)
        return {site.path: torch.rand(site.num_heads, generator=generator) for site in sites}


CRITERIA: dict[str, type[HeadCriterion]] = {each.name: each for each in (Gradient, Reconstruction, Random)}


def criterion_of(criterion: str | HeadCriterion, *, seed: int = 0) -> HeadCriterion:
    """Return a criterion; by its name it has its default arguments.

    Args:
        criterion: the name, or the criterion itself.
        seed: of a criterion that draws random numbers.

    Raises:
        ArgumentError: on an unknown name.
    """
    if isinstance(criterion, HeadCriterion):
        return criterion
    check_choice("criterion", criterion, CRITERIA)
    return Random(seed=seed) if criterion == Random.name else CRITERIA[criterion]()


def broken_site(sites: Sequence[OpenSite]) -> str | None:
    """Return the path of the first site with NaN or inf in its weights, or None.

    Its gradients, and those of all sites below it, are NaN or inf, too.
    """
    for site in sites:
        if not all(torch.isfinite(p).all() for module in (site.module, site.output) for p in module.parameters()):
            return site.path
    return None


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
