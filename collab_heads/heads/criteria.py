"""What heads can be ranked by: a criterion is one class, and an entry in `CRITERIA`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.base.checks import check_choice
from collab_heads.base.display import progress_bar
from collab_heads.errors import ArgumentError, CalibrationError, CollabHeadsError, NonFiniteError
from collab_heads.heads.reconstruction import regressions
from collab_heads.model.batches import check_modalities, evaluating, moved
from collab_heads.model.offloading import input_device
from collab_heads.model.open_site import OpenSite


class HeadCriterion(ABC):
    """What heads are ranked by. Subclass it, and hand an instance to `head_importance`.

    Attributes:
        name: by which it is asked for, in Python and on the command line.
        needs_batches: whether it looks at inputs.
        needs_labels: whether these need labels.
        needs_gradients: whether it goes backward through the model.
        refits: whether it assumes that W_O is fitted anew for the heads that stay (`prune_heads` with batches).
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
        """Score heads; the model is left as it was.

        Args:
            model: the model, with the weights of its attention in memory.
            sites: those whose heads are scored.
            batches: input dicts as the model takes them.

        Returns:
            path -> [H], float32 on the CPU. The heads with the highest scores are kept.
        """


class Gradient(HeadCriterion):
    """The mean absolute gradient of each example's loss by a gate on each head.

    Where the loss is a mean over tokens an example counts by its share of the tokens of its batch.

    Args:
        normalize: divide by the Euclidean norm over the heads of a site, as the paper does: layers then count alike.

    Source: Michel, Levy, Neubig 2019, arXiv:1905.10650.
    """

    name = "gradient"
    needs_labels = True
    needs_gradients = True

    def __init__(self, *, normalize: bool = True):
        if not isinstance(normalize, bool):
            raise ArgumentError(f"normalize must be True or False, not {normalize!r:.80}")
        self.normalize = normalize

    def scores(self, model, sites, batches):
        """Errors name the batch, or the site whose weights are to blame."""
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
                for index, batch in enumerate(progress_bar(batches, desc="measuring heads", leave=False)):
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
    """The share of what a site adds that is lost when a head goes, without labels.

    The heads of a site go one after the other, always the one that the others can stand in for best; a head's number is
    what is lost by then. Hand the same batches to `prune_heads`.
    """

    name = "reconstruction"
    refits = True

    def scores(self, model, sites, batches):
        """See `HeadRegression.removal_costs`."""
        fits = regressions(model, sites, batches)
        return {path: regression.removal_costs().float().cpu() for path, regression in fits.items()}


class Random(HeadCriterion):
    """Any heads, for comparison.

    Args:
        seed: of the choice.
    """

    name = "random"
    needs_batches = False

    def __init__(self, *, seed: int = 0):
        self.seed = seed

    def scores(self, model, sites, batches):
        """Uniform numbers."""
        generator = torch.Generator().manual_seed(self.seed)
        return {site.path: torch.rand(site.num_heads, generator=generator) for site in sites}


CRITERIA: dict[str, type[HeadCriterion]] = {each.name: each for each in (Gradient, Reconstruction, Random)}


def criterion_of(criterion: str | HeadCriterion, *, seed: int = 0) -> HeadCriterion:
    """Return a criterion, by its name as it is by default.

    Args:
        criterion: the name, or the criterion itself.
        seed: of one that draws random numbers.

    Raises:
        ArgumentError: on an unknown name.
    """
    if isinstance(criterion, HeadCriterion):
        return criterion
    check_choice("criterion", criterion, CRITERIA)
    return Random(seed=seed) if criterion == Random.name else CRITERIA[criterion]()


def broken_site(sites: Sequence[OpenSite]) -> str | None:
    """The first site with NaN or inf among its weights: its gradients, and those of all sites below, are too."""
    for site in sites:
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
