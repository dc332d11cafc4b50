"""What training adds for gates: sparse ones, or an exact number of heads.

Two ways to close heads. `gate_weight` adds lambda * sum P(gate != 0) to the loss, as Voita et al. do: the number of
heads follows from lambda, after the fact. (Their code takes the mean over gated attention modules of these sums: its
`concrete_coef` is lambda times the number of modules, nine for three and three layers and all types.) `target_heads`
asks for a number, see `subsets`: such a count cannot overshoot, which a Lagrangian on the expected count does when its
multiplier is late, and what is trained is what is kept: no gate is half open.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.attention_adapter import AttentionAdapter
from collab_heads.checks import check_seed, is_count, is_number
from collab_heads.errors import ArgumentError, SwapError
from collab_heads.heads.gating import gated_sites, learn_as
from collab_heads.heads.penalty.parts import LearningRates, PenaltyOptions, PenaltyPart, check_state, check_trainable
from collab_heads.heads.penalty.subsets import SubsetSelection
from collab_heads.heads.selection import check_scores, check_target, roles_of_heads


class GatePenalty(PenaltyPart):
    """The part of a `HeadPenalty` that is about gates; its arguments are described there.

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
            raise SwapError("the model has no learned gates: call swap_to_gated first")
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
        """Asked for by a weight or a target."""
        if options.target_heads is None:
            options.check_unused("steps", "without target_heads: they are how it is approached")
            options.check_unused("scores", "without target_heads: they rank the heads that it chooses from")
            if options.gate_weight is None:
                return None
        return cls(model, adapter, options)

    def attach(self) -> None:
        """Let the gates be of the kind that is trained, rank them, and draw the first subset."""
        learn_as(self.model, self.adapter, "learned" if self.subsets is None else "subset")
        if self.subsets is not None:
            if self.scores is not None:
                self.subsets.rank(list(self.scores.values()))
            self.subsets.draw(self.done)

    def parameters(self) -> list[torch.nn.Parameter]:
        """The gates' parameters."""
        return [gates.log_alpha for gates in self.gates]

    @property
    def finished(self) -> bool:
        """Whether the target is reached and the heads are fixed: prune now, or train on."""
        return self.subsets is None or self.done >= self.subsets.steps

    def group(self, rates: LearningRates) -> dict[str, Any]:
        """The parameter group of the gates: no weight decay and, where heads compete, one second moment for all."""
        shared = self.subsets is not None
        return {"params": self.parameters(), "lr": rates.gates, "weight_decay": 0.0, "shared": shared}

    def total(self, batch: Mapping | None = None, tokens: int | None = None) -> Tensor:
        """What to add to the mean loss: a scalar with a gradient; batch and tokens do not matter."""
        probabilities = [gates.open_probability().sum() for gates in self.gates]
        return self.gate_weight * torch.stack(probabilities).sum()

    def step(self) -> None:
        """Go on after an optimizer step."""
        self.done += 1
        if self.subsets is not None:
            self.subsets.step(self.done)

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        """What to watch: open heads by the rule, expected open heads, decided gates, share of closed heads."""
        num_open = sum(int(gates.is_open().sum()) for gates in self.gates)
        expected = sum(float(gates.open_probability().sum()) for gates in self.gates)
        return {
            "heads_open": num_open,
            "heads_expected": expected if self.subsets is None else num_open,
            "heads_decided": sum(int(gates.is_decided().sum()) for gates in self.gates),
            "heads_sparsity": 1 - num_open / len(self.roles),
        }

    def state_dict(self) -> dict[str, Any]:
        """Settings, progress and the gates: numbers, lists and dicts, ready for JSON."""
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
        """Go on from a state."""
        current = self.state_dict()
        check_state(state, current, {"done", "log_alpha"})
        stored_sizes, sizes = ([len(values) for values in each["log_alpha"]] for each in (state, current))
        if stored_sizes != sizes:
            raise ArgumentError(f"this is not the state of this penalty: gates {stored_sizes}, not {sizes}")
        for gates, values in zip(self.gates, state["log_alpha"], strict=True):
            gates.log_alpha.copy_(torch.tensor(values))
        self.done = state["done"]
        if self.subsets is not None:
            self.subsets.draw(self.done)
