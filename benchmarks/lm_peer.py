"""The usual way to a smaller cache: fewer key/value heads, each the mean of the heads of its group.

The models are then trained as ours are, on hidden states and output of the original.

Source: Ainslie et al. 2023, "GQA", arXiv:2305.13245, section 2.1.
"""

import copy
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_heads.distillation.distill import Distillation
from collab_heads.distillation.examples import in_order, list_batches, split
from collab_heads.distillation.gap import Gap
from collab_heads.distillation.optimizer import MasterWeights, put_back, trained_alone
from collab_heads.distillation.processes import DistillOptions, Processes
from collab_heads.running.batches import evaluating

LEARNING_RATE = 0.01  # as `distill` has it


def pooled(tensor: Tensor, heads: int, groups: int) -> Tensor:
    """Average the heads of each group: [heads * d, ...] -> [groups * d, ...]."""
    return tensor.unflatten(0, (groups, heads // groups, -1)).mean(1).flatten(0, 1)


class GroupedProjection(nn.Module):
    """A replacement for GPT-2's fused projection with one key/value head per group, repeated for the group's heads."""

    def __init__(self, fused: nn.Module, heads: int, groups: int):
        super().__init__()
        parts = [
            torch.cat([fused.weight.T, fused.bias[:, None]], dim=1)[rows] for rows in thirds(fused.weight.shape[1])
        ]
        self.heads, self.groups = heads, groups
        self.query, self.key, self.value = (
            linear(part if number == 0 else pooled(part, heads, groups)) for number, part in enumerate(parts)
        )

    def forward(self, states: Tensor) -> Tensor:
        """Project: [B, T, D] -> [B, T, 3 * D]."""
        given = [self.query(states)]
        for projection in (self.key, self.value):
            each = projection(states).unflatten(-1, (self.groups, -1))  # (B, T, G, d)
            given.append(each.repeat_interleave(self.heads // self.groups, dim=-2).flatten(-2))
        return torch.cat(given, dim=-1)


def thirds(width: int) -> list[slice]:
    """Return the rows of queries, keys and values in a fused projection."""
    return [slice(start, start + width // 3) for start in range(0, width, width // 3)]


@torch.no_grad()
def linear(augmented: Tensor) -> nn.Linear:
    """Build a projection from its weight with the bias as last column."""
    made = nn.Linear(augmented.shape[1] - 1, len(augmented))
    made.weight.copy_(augmented[:, :-1])
    made.bias.copy_(augmented[:, -1])
    return made


@torch.no_grad()
def mean_pooled(original: PreTrainedModel, groups: int) -> PreTrainedModel:
    """Return a copy of a GPT-2, or of a model with grouped keys like Qwen3, with fewer key/value heads."""
    config = copy.deepcopy(original.config)
    if config.model_type == "gpt2":  # its code has no groups: the smaller cache is computed, not measured
        model = copy.deepcopy(original)
        for layer in model.base_model.h:
            layer.attn.c_attn = GroupedProjection(layer.attn.c_attn, config.n_head, groups)
        return model.eval()
    heads, config.num_key_value_heads = config.num_key_value_heads, groups
    state = {
        name: pooled(tensor, heads, groups) if ".k_proj." in name or ".v_proj." in name else tensor
        for name, tensor in original.state_dict().items()
    }
    model = type(original)(config)
    model.load_state_dict(state)
    model.tie_weights()
    return model.eval()


def distil(
    model: PreTrainedModel, original: PreTrainedModel, batches: Sequence[Mapping], steps: int, seed: int
) -> None:
    """Train the attention of a model that `distill` does not know, in place and in the way of `distill`."""
    trained = {name: p for name, p in model.named_parameters() if ".attn." in name or ".self_attn." in name}
    reproduce(model, original, batches, trained, steps, seed)


def reproduce(
    model: PreTrainedModel,
    original: PreTrainedModel,
    batches: Sequence[Mapping],
    trained: Mapping[str, nn.Parameter],
    steps: int,
    seed: int,
    rate: float = LEARNING_RATE,
    kind: type[Gap] = Gap,
) -> float:
    """Train some parameters of a model, in place, as `distill` does; return the held-out error."""
    started, options = time.perf_counter(), DistillOptions(steps, rate, 1.0, None, None, 4, seed)
    with evaluating(original), evaluating(model), trained_alone(model, trained):
        train, held_out = split(list_batches(model, batches), steps)
        in_turn = [train[place] for place in in_order(len(train), seed, steps)]
        gap = kind.measured(model, original, Processes.found(None, None, True), held_out, 1.0)
        weights = MasterWeights(trained, rate, steps)
        progress = Distillation(gap, weights, options, in_turn, held_out, None).run(None, started)
        put_back(trained, progress.best)
    return dict(progress.history)[progress.best_step].total(1.0)
