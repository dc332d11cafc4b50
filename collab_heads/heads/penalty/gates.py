"""What training adds for gates: sparse ones, or an exact number of heads.

Two ways to close heads. `gate_weight` adds lambda * sum P(gate != 0) to the loss, as Voita et al. do: the number of
heads follows from lambda, after the fact. (Their code takes the mean over gated attention modules of these sums: its
`concrete_coef` is lambda times the number of modules, nine for three and three layers and all types.) `target_heads`
asks for a number. In every step the heads are then an exact subset of the size that the schedule gives: the highest
scores `log_alpha` plus Gumbel noise, 0/1 in the forward pass, straight through in the backward pass (differentiable
subset selection: Li, Cotterell, Sachan 2021, arXiv:2108.04657, with the number of heads annealed, and the noise with
it). Such a count cannot overshoot, which a Lagrangian on the expected count does when its multiplier is late, and what
is trained is what is kept: no gate is half open.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.checks import check_seed, is_number
from collab_heads.errors import ArgumentError, SwapError
from collab_heads.heads.gating import gated_sites, learn_as
from collab_heads.heads.penalty.parts import check_state, check_trainable
from collab_heads.heads.selection import (
    Target,
    check_scores,
    check_target,
    choose,
    members_of,
    on_the_way,
    roles_of_heads,
)
from collab_heads.layers.gates import Draw, threshold
from collab_heads.registry import AttentionAdapter

DECIDED = 10.0  # log_alpha of a head that is kept for good; minus that for one that is gone
SPREAD = 3.0  # a ranking starts at log_alpha from -SPREAD to SPREAD around its middle; Gumbel noise has deviation 1.3
GAP = 1e-3  # least distance of log_alpha from the threshold, so that ties count


class GatePenalty:
    """The part of a `HeadPenalty` that is about gates; its arguments are described there."""

    def __init__(
        self,
        model: PreTrainedModel,
        adapter: AttentionAdapter,
        *,
        gate_weight: float | None,
        target_heads: Target | None,
        steps: int | None,
        scores: Mapping[str, Tensor] | None,
        seed: int,
    ):
        found = gated_sites(model, adapter, learned=True)
        if not found:
            raise SwapError("the model has no learned gates: call swap_to_gated first")
        self.gates = [projection.gates for _, projection in found]
        self.roles = roles_of_heads([site for site, _ in found])
        check_trainable("gates", {site.path: projection.gates.log_alpha for site, projection in found})
        gate_weight = 0.0 if gate_weight is None else gate_weight
        if not is_number(gate_weight) or gate_weight < 0:
            raise ArgumentError(f"gate_weight {gate_weight!r} must be a number, 0 or more")
        check_seed(seed)
        if target_heads is not None:
            check_target(target_heads, self.roles)
            if gate_weight:
                raise ArgumentError(
                    "gate_weight and target_heads exclude each other: a target fixes the number of heads"
                )
            if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
                raise ArgumentError(
                    f"target_heads needs steps, a whole number from 1 in which to get there, not {steps!r}"
                )
        elif scores is not None:
            raise ArgumentError("scores are where target_heads starts from: they have no meaning without it")
        self.gate_weight, self.target, self.steps, self.seed = gate_weight, target_heads, steps, seed
        self.done = 0
        if scores is not None:
            scores = check_scores(scores, [site for site, _ in found])
        learn_as(model, adapter, "learned" if target_heads is None else "subset")
        if scores is not None:
            self.start_from([scores[site.path] for site, _ in found])
        self.draw()

    @torch.no_grad()
    def start_from(self, scores: Sequence[Tensor]) -> None:
        """Spread the gates evenly in the order of some scores: their scale does not matter."""
        ranks = torch.cat([score.float().cpu() for score in scores]).argsort().argsort()
        spread = SPREAD * (2 * ranks / max(1, len(ranks) - 1) - 1)
        for gates, part in zip(self.gates, self.split(spread), strict=True):
            # all heads are open at first; what counts is the order
            gates.log_alpha.copy_(part + SPREAD + GAP + threshold(gates.state))

    def parameters(self) -> list[torch.nn.Parameter]:
        """The gates' parameters."""
        return [gates.log_alpha for gates in self.gates]

    @property
    def finished(self) -> bool:
        """Whether the target is reached and the heads are fixed: prune now, or train on."""
        return self.target is None or self.done >= self.steps

    def group(self, lr: float) -> dict:
        """The parameter group of the gates: no weight decay and, where heads compete, one second moment for all."""
        return {"params": self.parameters(), "lr": lr, "weight_decay": 0.0, "shared": self.target is not None}

    def total(self, batch: Mapping | None = None, tokens: int | None = None) -> Tensor:
        """What to add to the mean loss: a scalar with a gradient; batch and tokens do not matter."""
        probabilities = [gates.open_probability().sum() for gates in self.gates]
        return self.gate_weight * torch.stack(probabilities).sum()

    def before_step(self) -> None:
        """Nothing to do."""

    @torch.no_grad()
    def step(self) -> None:
        """Go on after an optimizer step: move the scores around their threshold and draw the next subset."""
        self.done += 1
        if self.target is None:
            return
        scores, count = self.scores(), self.count(self.done)
        chosen = choose(scores, self.roles, count)
        if self.done >= self.steps:
            scores = torch.where(chosen, DECIDED, -DECIDED)
        else:
            border = cut(scores, chosen, self.groups(count))
            scores = scores - border.masked_fill(border.isinf(), 0.0)
            scores = torch.where(chosen, scores.clamp(min=GAP), scores.clamp(max=-GAP))
        for gates, part in zip(self.gates, self.split(scores), strict=True):
            gates.log_alpha.copy_(part + threshold(gates.state))
        self.draw()

    @torch.no_grad()
    def draw(self) -> None:
        """Draw the subset of the next optimizer step: a function of the seed and the step, so every process has it."""
        if self.target is None:
            return
        scores, count = self.scores(), self.count(self.done + 1)
        noise = torch.zeros(len(scores))
        if self.done < self.steps:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.done)
            noise = -torch.empty(len(scores)).exponential_(generator=generator).log()
            noise *= 1 - self.done / self.steps  # explore less as heads get few
        noise = noise.to(scores.device)
        chosen = choose(scores + noise, self.roles, count)
        border = cut(scores + noise, chosen, self.groups(count))
        parts = zip(self.gates, *map(self.split, (chosen.float(), noise, border)), strict=True)
        for gates, opened, own_noise, own_border in parts:
            gates.draw = Draw(opened, own_noise, own_border + threshold(gates.state))

    def count(self, step: int) -> Target:
        """How many heads are kept in an optimizer step, counted from 1."""
        return on_the_way(self.target, self.roles, step / self.steps)

    def groups(self, count: Target) -> list[Tensor]:
        """Which heads compete with each other: all, or those of a role."""
        device = self.gates[0].log_alpha.device
        if isinstance(count, int):
            return [torch.arange(len(self.roles), device=device)]
        return list(members_of(self.roles, device).values())

    def scores(self) -> Tensor:
        """The distance of every log_alpha from the rule's threshold: [N], float32."""
        return torch.cat([gates.log_alpha.detach().float() - threshold(gates.state) for gates in self.gates])

    def split(self, values: Tensor) -> tuple[Tensor, ...]:
        """[N] -> one piece per site."""
        return values.split([gates.num_heads for gates in self.gates])

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        """What to watch: open heads by the rule, expected open heads, decided gates, share of closed heads."""
        opened = sum(int(gates.is_open().sum()) for gates in self.gates)
        expected = sum(float(gates.open_probability().sum()) for gates in self.gates)
        return {
            "heads_open": opened,
            "heads_expected": expected if self.target is None else opened,
            "heads_decided": sum(int(gates.is_decided().sum()) for gates in self.gates),
            "heads_sparsity": 1 - opened / len(self.roles),
        }

    def state_dict(self) -> dict:
        """Where the schedule is, and the gates: numbers, lists and dicts, ready for JSON."""
        asked = {"target": self.target, "steps": self.steps, "seed": self.seed, "gate_weight": self.gate_weight}
        return asked | {"done": self.done, "log_alpha": [gates.log_alpha.tolist() for gates in self.gates]}

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        """Go on from there."""
        own = self.state_dict()
        check_state(state, own, {"done", "log_alpha"})
        sizes = [list(map(len, found["log_alpha"])) for found in (state, own)]
        if sizes[0] != sizes[1]:
            raise ArgumentError(f"this is not the state of this penalty: gates {sizes[0]}, not {sizes[1]}")
        for gates, values in zip(self.gates, state["log_alpha"], strict=True):
            gates.log_alpha.copy_(torch.tensor(values))
        self.done = state["done"]
        self.draw()


def cut(scores: Tensor, chosen: Tensor, groups: list[Tensor]) -> Tensor:
    """The score between the chosen heads and the others of their group: [N]; minus infinity where all are chosen.

    Heads that are chosen for their role's sake, below others that are not, do not count.
    """
    border = torch.empty_like(scores)
    for indices in groups:
        inside, own = chosen[indices], scores[indices]
        if inside.all():
            border[indices] = -torch.inf
        elif not inside.any():
            border[indices] = own.max() + 1.0
        else:
            best_outside = own[~inside].max()
            above = own[inside & (own >= best_outside)]
            border[indices] = (above.min() + best_outside) / 2 if len(above) else best_outside
    return border
