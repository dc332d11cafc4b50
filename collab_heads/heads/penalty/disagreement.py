"""A loss that keeps the heads of a layer apart: the mean cosine similarity of their outputs.

Source: Li, Tu, Yang, Lyu, Zhang 2018, arXiv:1810.10183, "disagreement on outputs".
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from collab_heads.errors import ArgumentError
from collab_heads.heads.penalty.parts import RoleWeights, check_state, role_weights
from collab_heads.model.masks import MASKS, token_masks
from collab_heads.registry import AttentionAdapter


class Disagreement:
    """The part of a `HeadPenalty` that is about the likeness of heads; its arguments are described there.

    It listens to what the output projections receive: the heads before gates and alphas.
    """

    def __init__(self, model: PreTrainedModel, adapter: AttentionAdapter, *, weight: RoleWeights):
        sites = [site for site in adapter.sites_with_heads(model) if site.num_heads > 1]
        self.model, self.weight = model, role_weights("disagreement", weight, sites)
        self.projections = [(site, adapter.output_projection(model, site)) for site in sites if self.weight[site.role]]
        self.seen: list[tuple[str, Tensor]] = []  # of the forward pass under way
        self.listening = False  # checkpointing runs layers once more in the backward pass, after the total
        self.handles: list[RemovableHandle] = []

    def listen(self) -> "Disagreement":
        """Hear every forward pass of the model from now on."""
        self.handles.append(self.model.register_forward_pre_hook(self.begin))
        for site, projection in self.projections:
            hook = partial(self.hear, site.role, site.num_heads)
            self.handles.append(projection.register_forward_pre_hook(hook))
        return self

    def begin(self, model: nn.Module, inputs: tuple) -> None:
        """A new forward pass starts."""
        self.seen.clear()
        self.listening = True

    def end(self) -> None:
        """Hear nothing until the next one."""
        self.seen.clear()
        self.listening = False

    def hear(self, role: str, num_heads: int, projection: nn.Module, inputs: tuple) -> None:
        """Keep the heads of a site: [B, T, H, d_v]."""
        if self.listening and torch.is_grad_enabled():
            self.seen.append((role, inputs[0].unflatten(-1, (num_heads, -1))))

    def parameters(self) -> list[nn.Parameter]:
        """None of its own."""
        return []

    def total(self, batch: Mapping | None = None, tokens: int | None = None) -> Tensor:
        """What to add to the mean loss of the batch that the model has just seen: a scalar with a gradient.

        The mean over tokens and pairs of heads of their cosine, times the weight of the role, summed over layers. As
        in the paper a head makes a pair with itself, too.

        Args:
            batch: as the model was given it: padding then does not count.
            tokens: it does not matter.

        Raises:
            ArgumentError: if there is nothing to add though there should be: the model has not run with gradients, or
                nothing below its heads is trained.
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
        for role, heads in self.seen:
            heads = heads.flatten(1, -3)  # [B, T, H, d_v]
            mask = masks.get(MASKS[role][0])
            counted = heads.flatten(0, 1) if mask is None else heads[mask.to(heads.device)]
            directions = unit(counted.float())
            cosine = directions.sum(-2).square().sum(-1).mean() / heads.shape[-2] ** 2  # all pairs at once
            total = total + self.weight[role] * cosine.to(total.device)
        self.end()
        return total

    def before_step(self) -> None:
        """Nothing to do."""

    def step(self) -> None:
        """Nothing to do."""

    def metrics(self) -> dict[str, float]:
        """Nothing to watch."""
        return {}

    def state_dict(self) -> dict:
        """The weights."""
        return {"weight": self.weight}

    def load_state_dict(self, state: dict) -> None:
        """Check that the weights are the same."""
        check_state(state, self.state_dict(), set())

    def close(self) -> None:
        """Stop listening."""
        for handle in self.handles:
            handle.remove()
        self.end()


def unit(outputs: Tensor) -> Tensor:
    """Directions, [..., d_v]; zero for a zero, which dropout makes: its gradient stays small, unlike normalize's."""
    norms = outputs.norm(dim=-1, keepdim=True)
    return outputs / norms.masked_fill(norms == 0, 1.0)
