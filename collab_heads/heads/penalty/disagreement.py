"""A loss that makes the heads of a layer differ: the mean cosine similarity of their outputs.

Source: Li, Tu, Yang, Lyu, Zhang 2018, arXiv:1810.10183, "disagreement on outputs".
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.errors import ArgumentError
from collab_heads.heads.penalty.parts import PenaltyOptions, PenaltyPart, RoleWeights, role_weights
from collab_heads.running.batches import sides, token_masks
from collab_heads.sites.site import AttentionSite


class Disagreement(PenaltyPart):
    """The part of a `HeadPenalty` for the similarity of heads; `HeadPenalty` describes its arguments.

    It records the inputs of the output projections: the heads before gates and alphas.

    Attributes:
        weight: of every role.
        seen: every site and its heads [B, T, H, d_v], from the current forward pass.
        listening: False from the total to the next forward pass, because checkpointing runs layers again in the
            backward pass.
    """

    name: ClassVar[str] = "disagreement"

    def __init__(self, model: PreTrainedModel, adapter: AttentionAdapter, *, weight: RoleWeights):
        sites = [site for site in adapter.sites_with_heads(model) if site.num_heads > 1]
        self.model, self.weight = model, role_weights("disagreement", weight, sites)
        self.projections = [(site, adapter.output_projection(model, site)) for site in sites if self.weight[site.role]]
        self.seen: list[tuple[AttentionSite, Tensor]] = []
        self.listening = False
        self.handles: list[RemovableHandle] = []

    @classmethod
    def from_options(
        cls, model: PreTrainedModel, adapter: AttentionAdapter, options: PenaltyOptions
    ) -> "Disagreement | None":
        """Make the part if its weight is given, else return None."""
        return None if options.disagreement is None else cls(model, adapter, weight=options.disagreement)

    def attach(self) -> None:
        """Record every forward pass of the model from now on."""
        self.handles.append(self.model.register_forward_pre_hook(self.begin))
        for site, projection in self.projections:
            self.handles.append(projection.register_forward_pre_hook(partial(self.hear, site)))

    def begin(self, model: nn.Module, inputs: tuple) -> None:
        """Forget the last forward pass: a new one begins (a forward pre-hook)."""
        self.seen.clear()
        self.listening = True

    def end(self) -> None:
        """Stop recording until the next forward pass."""
        self.seen.clear()
        self.listening = False

    def hear(self, site: AttentionSite, projection: nn.Module, inputs: tuple) -> None:
        """Keep the heads of a site: [B, T, H, d_v] (a forward pre-hook)."""
        if self.listening and torch.is_grad_enabled():
            self.seen.append((site, inputs[0].unflatten(-1, (site.num_heads, -1))))

    def total(self, batch: Mapping | None = None, tokens: int | None = None) -> Tensor:
        """Return the term to add to the mean loss of the batch of the last forward pass: a scalar with a gradient.

        It is the mean cosine over tokens and pairs of heads, times the weight of the role, summed over layers. As in
        the paper, a head also makes a pair with itself.

        Args:
            batch: as the model was given it: its padding is then left out.
            tokens: not used.
        """
        listens = torch.is_grad_enabled() and len(self.handles) > 1  # to more than where a forward pass begins
        if listens and not any(heads.requires_grad for _, heads in self.seen):
            raise ArgumentError(
                "disagreement saw no heads with a gradient: call total() once after every forward pass, turn reentrant "
                "gradient checkpointing off (gradient_checkpointing_kwargs={'use_reentrant': False}), or train more "
                "than what comes after the heads"
            )
        masks = {} if batch is None else token_masks(self.model, batch)
        total = torch.zeros((), device=self.model.device)
        for site, heads in self.seen:
            heads = heads.flatten(1, -3)  # [B, T, H, d_v]
            mask = masks.get(sides(site)[0])
            counted = heads.flatten(0, 1) if mask is None else heads[mask.to(heads.device)]
            directions = unit(counted.float())
            cosine = directions.sum(-2).square().sum(-1).mean() / heads.shape[-2] ** 2  # all pairs at once
            total = total + self.weight[site.role] * cosine.to(total.device)
        self.end()
        return total

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight}

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()
        self.end()


def unit(outputs: Tensor) -> Tensor:
    """Scale vectors [..., d_v] to length 1.

    Dropout makes vectors of zeros: they stay zero and have a small gradient, unlike with `normalize`.
    """
    norms = outputs.norm(dim=-1, keepdim=True)
    return outputs / norms.masked_fill(norms == 0, 1.0)
