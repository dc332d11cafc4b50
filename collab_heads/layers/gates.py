"""Hard Concrete gates: one number per head, learned or fixed; in evaluation a closed head passes exactly 0.

One rule holds everywhere: a head is closed if P(gate = 1) <= P(gate = 0). Evaluation, reports, folding and removal
all use it. H is the number of heads of a site.

Source: Louizos, Welling, Kingma 2018, arXiv:1712.01312; Voita et al. 2019, arXiv:1905.09418, section 5.1.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from collab_heads.sites.state import GateState

INIT_LOG_ALPHA = 2.5  # of open gates, where that is enough, see `open_log_alpha`
ABOVE = 0.1  # how far at least an open gate is from the value at which it is exactly 1
UNDECIDED = 0.05  # a gate is decided if it is non-zero with a probability closer to 0 or 1 than this
MARGIN = 1e-6  # uniform samples stay this far from 0 and 1


class Draw(NamedTuple):
    """The heads of one site that are open in a training step, as `HeadPenalty` draws them for gates of kind "subset".

    Attributes:
        open: [H], 1.0 for the heads that are in the subset of this step.
        noise: [H], Gumbel noise on their scores.
        threshold: [H], the perturbed score from which a head is in the subset.
    """

    open: Tensor
    noise: Tensor
    threshold: Tensor


class HeadGates(nn.Module):
    """The gates of one site.

    A learned gate is s = sigmoid((log u - log(1 - u) + log_alpha) / temperature), u uniform, stretched to (gamma,
    zeta) and clipped to [0, 1]: one sample per forward pass, shared by all positions of the batch. In evaluation there
    is no noise and no temperature, and a closed head passes exactly 0. Fixed gates are a buffer of zeros and ones.

    While an exact number of heads is learned (kind "subset"), gates are exactly 0 or 1: in evaluation by the rule
    above, in training as given by the `draw` of the step. Gradients reach `log_alpha` by a straight-through sigmoid
    around the border of the subset.

    Parameters: `log_alpha` [H] if learned. Buffers: `alive` [H] if fixed.
    """

    alive: Tensor

    def __init__(self, state: GateState, num_heads: int):
        super().__init__()
        self.state = state
        self.draw: Draw | None = None
        if state.is_learned:
            self.log_alpha = nn.Parameter(torch.full((num_heads,), open_log_alpha(state)))
        else:
            self.register_buffer("alive", torch.ones(num_heads))

    @property
    def num_heads(self) -> int:
        return len(self.log_alpha if self.state.is_learned else self.alive)

    def forward(self) -> Tensor:
        """Return the gates of this pass: [H], float32. Learned gates are sampled in training mode."""
        return self.sample() if self.training and self.state.is_learned else self.values()

    def sample(self) -> Tensor:
        """Draw gates, differentiable with respect to `log_alpha`: [H].

        Gates of kind "subset" without a draw have their values of evaluation.
        """
        log_alpha = self.log_alpha.float()  # in bfloat16 the largest u would be 1
        if self.draw is not None:
            opened, noise, border = (part.to(log_alpha.device) for part in self.draw)
            soft = torch.sigmoid(log_alpha + noise - border)
            return opened + (soft - soft.detach())
        if self.state.kind == "subset":
            return self.values()
        u = torch.rand_like(log_alpha).clamp(MARGIN, 1 - MARGIN)
        return self.stretched(torch.sigmoid((u.log() - (-u).log1p() + log_alpha) / self.state.temperature))

    def values(self) -> Tensor:
        """Return the gates of evaluation: [H], exactly 0 for closed heads."""
        if self.state.kind == "fixed":
            return self.alive.float()
        if self.state.kind == "subset":
            return self.is_open().float()
        return self.stretched(torch.sigmoid(self.log_alpha.float())) * self.is_open()

    def stretched(self, gate: Tensor) -> Tensor:
        """Stretch gates from (0, 1) to (gamma, zeta) and clip them to [0, 1]."""
        low, high = self.state.stretch
        return (gate * (high - low) + low).clamp(0, 1)

    def is_open(self) -> Tensor:
        """Return which heads are open, that is P(1) > P(0): [H], bool."""
        if self.state.kind == "fixed":
            return self.alive > 0
        return self.log_alpha.float() > threshold(self.state)

    def open_probability(self) -> Tensor:
        """Return P(gate != 0): [H], differentiable."""
        if self.state.kind == "fixed":
            return self.alive.float()
        low, high = self.state.stretch
        return torch.sigmoid(self.log_alpha.float() - self.state.temperature * math.log(-low / high))

    def is_decided(self) -> Tensor:
        """Return which gates are almost surely zero or almost surely non-zero: [H], bool."""
        probability = self.open_probability()
        return (probability < UNDECIDED) | (probability > 1 - UNDECIDED)

    @torch.no_grad()
    def keep_heads(self, kept: list[int]) -> None:
        """Keep the gates of these heads (indices), in place; also drop the current draw."""
        self.draw = None
        if self.state.is_learned:
            self.log_alpha = nn.Parameter(self.log_alpha[kept].clone(), self.log_alpha.requires_grad)
        else:
            self.alive = self.alive[kept].clone()

    @torch.no_grad()
    def reset(self) -> None:
        """Open all gates: the initial value, also of gates that are missing from a checkpoint."""
        if self.state.is_learned:
            self.log_alpha.fill_(open_log_alpha(self.state))
        else:
            self.alive.fill_(1.0)


def open_log_alpha(state: GateState) -> float:
    """Return a log_alpha at which a gate is open, and exactly 1 in evaluation: a gated model starts as it was.

    With the usual stretch, a gate of evaluation is 1 from ln 11 = 2.398.
    """
    low, high = state.stretch
    return max(INIT_LOG_ALPHA, max(math.log((1 - low) / (high - 1)), threshold(state)) + ABOVE)


def threshold(state: GateState) -> float:
    """Return the log_alpha up to which a head is closed; 0 for a symmetric stretch (zeta = 1 - gamma).

    P(gate = 0) = sigmoid(t ln(-gamma / zeta) - log_alpha) and P(gate = 1) = sigmoid(log_alpha - t ln((1 - gamma) /
    (zeta - 1))), t the temperature; they are equal at this value.
    """
    low, high = state.stretch
    if math.isclose(-low, high - 1):
        return 0.0  # not a rounding error
    return state.temperature / 2 * (math.log(-low / high) + math.log((1 - low) / (high - 1)))
