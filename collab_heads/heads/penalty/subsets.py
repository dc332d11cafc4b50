"""An exact number of heads: in every optimizer step a subset is drawn, and the number falls to the target.

The subset holds the highest scores `log_alpha` plus Gumbel noise; gates are 0 or 1 in the forward pass and straight
through in the backward pass. The noise falls with the number of heads, and is gone at the target.

Source: differentiable subset selection, Li, Cotterell, Sachan 2021, arXiv:2108.04657, with the number annealed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from collab_heads.heads.selection import Target, choose, members_of, on_the_way
from collab_heads.layers.gates import Draw, HeadGates, threshold

DECIDED = 10.0  # log_alpha of a head that is kept for good; minus that for one that is gone
SPREAD = 3.0  # the first ranking has log_alpha from -SPREAD to SPREAD around its middle; Gumbel noise has deviation 1.3
GAP = 1e-3  # least distance of log_alpha from the threshold, so that ties count


@dataclass(frozen=True)
class SubsetSelection:
    """Draws subsets of heads whose size falls to a target. N heads in all.

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
        """Spread the gates evenly in the order of some scores, [H] per site: their scale does not matter."""
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
        """Draw the subset of the next optimizer step: the seed and the step decide, so every process has the same."""
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
        """How many heads are kept in an optimizer step, counted from 1."""
        return on_the_way(self.target, self.roles, step / self.steps)

    def rivals(self, count: Target) -> list[Tensor]:
        """The indices of heads that compete with each other: all heads, or those of each role."""
        device = self.gates[0].log_alpha.device
        if isinstance(count, int):
            return [torch.arange(len(self.roles), device=device)]
        return list(members_of(self.roles, device).values())

    def scores(self) -> Tensor:
        """The distance of every log_alpha from the threshold of the rule: [N], float32."""
        return torch.cat([gates.log_alpha.detach().float() - threshold(gates.state) for gates in self.gates])

    def write(self, scores: Tensor) -> None:
        """Give the gates these scores: [N], distances from the threshold."""
        for gates, site_scores in zip(self.gates, self.split(scores), strict=True):
            gates.log_alpha.copy_(site_scores + threshold(gates.state))

    def split(self, values: Tensor) -> tuple[Tensor, ...]:
        """[N] -> one piece per site."""
        return values.split([gates.num_heads for gates in self.gates])


def border_scores(scores: Tensor, chosen: Tensor, groups: Sequence[Tensor]) -> Tensor:
    """The score between the chosen heads and the others of their group: [N]; minus infinity where all are chosen.

    Heads that are chosen for their role's sake, below others that are not, do not count.
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
