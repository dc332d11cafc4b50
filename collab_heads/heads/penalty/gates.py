"""Train gates, with a penalty on open heads or to an exact number of heads.

For an exact number, every optimizer step draws a subset of the heads, whose size falls to the target. The subset holds
the heads with the highest scores, `log_alpha` plus Gumbel noise. Gates are 0 or 1 in the forward pass and
straight-through in the backward pass. The noise falls with the number of heads, and is zero at the target.

Source: differentiable subset selection, Li, Cotterell, Sachan 2021, arXiv:2108.04657, with the number annealed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.base.checks import check_seed, is_count, is_number
from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.errors import ArgumentError, ModelStateError
from collab_heads.heads.gating import gated_sites, learn_as
from collab_heads.heads.penalty.parts import (
    LearningRates,
    PenaltyOptions,
    PenaltyPart,
    check_state,
    check_trainable,
    finite,
)
from collab_heads.heads.selection import (
    Target,
    check_scores,
    check_target,
    choose,
    members_of,
    on_the_way,
    roles_of_heads,
)
from collab_heads.layers.gates import Draw, HeadGates, threshold

DECIDED = 10.0  # log_alpha of a head that is finally kept; the negative for one that is finally closed
SPREAD = 3.0  # log_alpha of the first ranking spans -SPREAD to SPREAD around its middle; Gumbel noise deviates by 1.3
GAP = 1e-3  # least distance of log_alpha from the threshold, so that ties are decided


@dataclass(frozen=True)
class SubsetSelection:
    """The selection of subsets of heads whose size falls to a target. N heads in all.

    Attributes:
        gates: of every site.
        roles: the role of every head, [N].
        target: how many heads are kept in the end: a total, or role -> number.
        steps: optimizer steps until then.
        seed: of the noise.
    """

    gates: Sequence[HeadGates]
    roles: Sequence[str]
    target: Target
    steps: int
    seed: int

    @torch.no_grad()
    def rank(self, scores: Sequence[Tensor]) -> None:
        """Spread the gates evenly in the order of some scores, [H] per site; only the order of scores matters."""
        ranks = torch.cat([score.float().cpu() for score in scores]).argsort().argsort()
        spread = SPREAD * (2 * ranks / max(1, len(ranks) - 1) - 1)
        # all heads are open at first; what counts is the order
        self.write(spread + SPREAD + GAP)

    @torch.no_grad()
    def step(self, done: int) -> None:
        """Move the scores around their threshold after `done` optimizer steps, and draw the next subset."""
        scores, count = self.scores(), self.count(done)
        chosen = choose(scores, self.roles, count)
        if done >= self.steps:
            scores = torch.where(chosen, DECIDED, -DECIDED)
        else:
            border = border_scores(scores, chosen, self.rivals(count))
            scores = scores - border.masked_fill(border.isinf(), 0.0)
            scores = torch.where(chosen, scores.clamp(min=GAP), scores.clamp(max=-GAP))
        self.write(scores)
        self.draw(done)

    @torch.no_grad()
    def draw(self, done: int) -> None:
        """Draw the subset of the next optimizer step from the seed and the step: every process draws the same."""
        scores, count = self.scores(), self.count(done + 1)
        noise = torch.zeros(len(scores))
        if done < self.steps:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + done)
            noise = -torch.empty(len(scores)).exponential_(generator=generator).log()
            noise *= 1 - done / self.steps  # explore less as heads get few
        noise = noise.to(scores.device)
        chosen = choose(scores + noise, self.roles, count)
        border = border_scores(scores + noise, chosen, self.rivals(count))
        by_site = zip(self.gates, *map(self.split, (chosen.float(), noise, border)), strict=True)
        for gates, site_open, site_noise, site_border in by_site:
            gates.draw = Draw(site_open, site_noise, site_border + threshold(gates.state))

    def count(self, step: int) -> Target:
        """Return how many heads are kept in an optimizer step, counted from 1."""
        return on_the_way(self.target, self.roles, step / self.steps)

    def rivals(self, count: Target) -> list[Tensor]:
        """Return the indices of heads that compete with each other: all heads, or those of each role."""
        device = self.gates[0].log_alpha.device
        if isinstance(count, int):
            return [torch.arange(len(self.roles), device=device)]
        return list(members_of(self.roles, device).values())

    def scores(self) -> Tensor:
        """Return the distance of every log_alpha from the threshold of the rule: [N], float32."""
        return torch.cat([gates.log_alpha.detach().float() - threshold(gates.state) for gates in self.gates])

    def write(self, scores: Tensor) -> None:
        """Set the gates to these scores: [N], distances from the threshold."""
        for gates, site_scores in zip(self.gates, self.split(scores), strict=True):
            gates.log_alpha.copy_(site_scores + threshold(gates.state))

    def split(self, values: Tensor) -> tuple[Tensor, ...]:
        """Split values into one piece per site: [N] -> [H] each."""
        return values.split([gates.num_heads for gates in self.gates])


def border_scores(scores: Tensor, chosen: Tensor, groups: Sequence[Tensor]) -> Tensor:
    """Return the score between the chosen heads and the others of their group: [N]; -inf where all are chosen.

    Heads that are chosen only so that their role is not empty, below heads that are not chosen, are ignored.
    """
    border = torch.empty_like(scores)
    for indices in groups:
        inside, group_scores = chosen[indices], scores[indices]
        if inside.all():
            border[indices] = -torch.inf
        elif not inside.any():
            border[indices] = group_scores.max() + 1.0
        else:
            best_outside = group_scores[~inside].max()
            above = group_scores[inside & (group_scores >= best_outside)]
            border[indices] = (above.min() + best_outside) / 2 if len(above) else best_outside
    return border


class GatePenalty(PenaltyPart):
    """The part of a `HeadPenalty` for gates; `HeadPenalty` describes its arguments.

    Attributes:
        gates: of every site with learned gates.
        roles: the role of every head, [N].
        target, steps: how many heads are kept in the end, and optimizer steps until then; None for no target.
        subsets: draws subsets of heads on the way to the target; None without.
        scores: path -> [H], for the first ranking; None without.
        done: optimizer steps so far.
    """

    name: ClassVar[str] = "gates"

    def __init__(self, model: PreTrainedModel, adapter: AttentionAdapter, options: PenaltyOptions):
        self.model, self.adapter = model, adapter
        gated = gated_sites(model, adapter, learned=True)
        if not gated:
            raise ModelStateError("the model has no learned gates: call swap_to_gated first")
        sites, self.gates = [site for site, _ in gated], [gates for _, gates in gated]
        self.roles = roles_of_heads(sites)
        check_trainable("gates", {site.path: gates.log_alpha for site, gates in gated})
        self.gate_weight = 0.0 if options.gate_weight is None else options.gate_weight
        if not is_number(self.gate_weight) or self.gate_weight < 0:
            raise ArgumentError(f"gate_weight {self.gate_weight!r} must be a number, 0 or more")
        self.target, self.steps, self.seed, self.done = options.target_heads, options.steps, options.seed, 0
        check_seed(self.seed)
        self.subsets: SubsetSelection | None = None
        if self.target is not None:
            check_target(self.target, self.roles)
            if self.gate_weight:
                raise ArgumentError(
                    "gate_weight and target_heads exclude each other: a target fixes the number of heads"
                )
            if self.steps is None or not is_count(self.steps):
                raise ArgumentError(
                    f"target_heads needs steps, a whole number from 1 in which to get there, not {self.steps!r}"
                )
            self.subsets = SubsetSelection(self.gates, self.roles, self.target, self.steps, self.seed)
        self.scores = None if options.scores is None else check_scores(options.scores, sites)

    @classmethod
    def from_options(
        cls, model: PreTrainedModel, adapter: AttentionAdapter, options: PenaltyOptions
    ) -> "GatePenalty | None":
        """Make the part if a weight or a target is given, else return None."""
        if options.target_heads is None:
            options.check_unused("steps", "without target_heads: they are how it is approached")
            options.check_unused("scores", "without target_heads: they rank the heads that it chooses from")
            if options.gate_weight is None:
                return None
        return cls(model, adapter, options)

    def attach(self) -> None:
        """Set the kind of the gates, rank them, and draw the first subset."""
        learn_as(self.model, self.adapter, "learned" if self.subsets is None else "subset")
        if self.subsets is not None:
            if self.scores is not None:
                self.subsets.rank(list(self.scores.values()))
            self.subsets.draw(self.done)

    def parameters(self) -> list[torch.nn.Parameter]:
        return [gates.log_alpha for gates in self.gates]

    @property
    def finished(self) -> bool:
        """True if the target is reached and the heads are fixed: prune now, or train on."""
        return self.subsets is None or self.done >= self.subsets.steps

    def group(self, rates: LearningRates) -> dict[str, Any]:
        """Return the parameter group of the gates, without weight decay.

        Where heads compete, all of them have one second moment (`HeadAdamW`).
        """
        shared = self.subsets is not None
        return {"params": self.parameters(), "lr": rates.gates, "weight_decay": 0.0, "shared": shared}

    def total(self, batch: Mapping | None = None, tokens: int | None = None) -> Tensor:
        """Return the term to add to the mean loss: a scalar with a gradient; batch and tokens are not used."""
        probabilities = [gates.open_probability().sum() for gates in self.gates]
        return self.gate_weight * torch.stack(probabilities).sum()

    def step(self) -> None:
        self.done += 1
        if self.subsets is not None:
            self.subsets.step(self.done)

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        """Return the open heads by the rule, expected open heads, decided gates and the share of closed heads."""
        num_open = sum(int(gates.is_open().sum()) for gates in self.gates)
        expected = sum(float(gates.open_probability().sum()) for gates in self.gates)
        return {
            "heads_open": num_open,
            "heads_expected": expected if self.subsets is None else num_open,
            "heads_decided": sum(int(gates.is_decided().sum()) for gates in self.gates),
            "heads_sparsity": 1 - num_open / len(self.roles),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return settings, progress and the gates: numbers, lists and dicts, ready for JSON."""
        return {
            "target": self.target,
            "steps": self.steps,
            "seed": self.seed,
            "gate_weight": self.gate_weight,
            "done": self.done,
            "log_alpha": [gates.log_alpha.tolist() for gates in self.gates],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        current = self.state_dict()
        check_state(state, current, {"done", "log_alpha"})
        stored_sizes, sizes = ([len(values) for values in each["log_alpha"]] for each in (state, current))
        if stored_sizes != sizes:
            raise ArgumentError(f"this is not the state of this penalty: gates {stored_sizes}, not {sizes}")
        for gates, values in zip(self.gates, state["log_alpha"], strict=True):
            gates.log_alpha.copy_(finite(values, "gates"))
        self.done = state["done"]
        if self.subsets is not None:
            self.subsets.draw(self.done)
