"""HeadPenalty: everything that training adds for the heads of a model."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.contract.registry import get_adapter
from collab_heads.errors import ArgumentError
from collab_heads.heads.penalty.alphas import AlphaPenalty
from collab_heads.heads.penalty.disagreement import Disagreement
from collab_heads.heads.penalty.gates import GatePenalty
from collab_heads.heads.penalty.parts import LearningRates, LossKind, PenaltyOptions, PenaltyPart, RoleWeights
from collab_heads.heads.selection import Target
from collab_heads.model.offloading import check_trainable

PARTS: tuple[type[PenaltyPart], ...] = (AlphaPenalty, GatePenalty, Disagreement)


class HeadPenalty:
    """What training adds for the heads of a model: with gates, with alphas, or to keep heads apart.

        penalty = HeadPenalty(model, target_heads=18, steps=200)
        optimizer = HeadAdamW([{"params": penalty.others(model)}, *penalty.groups()], lr=2e-5)
        for batch in batches:
            (model(**batch).loss + penalty.total(batch)).backward()
            penalty.before_step(); optimizer.step(); optimizer.zero_grad()
            penalty.step()

    Args:
        model: a model after `swap_to_gated` or `swap_to_alpha`, or any for disagreement; wrap it (DDP) afterwards.
        gate_weight: lambda, per head; 0 trains gates without a push. To push as hard as a `concrete_coef` of Voita et
            al.'s code does: that number divided by the number of gated attention modules (not layers).
        target_heads: how many heads to keep: a total (every role keeps at least one), or role -> number.
        steps: optimizer steps in which the number falls evenly to the target; from then on the heads are fixed.
        scores: path -> [H], from `head_importance`: the first ranking of the heads; without it all are alike at first.
        seed: of the noise; the same on all processes, which then close the same heads.
        growth: gamma, the push on the nuclear norm of every alpha: a number, or role -> number. A role that is given 0
            never trains its alphas; one that is left out trains them without a push, as 0 for all does.
        growth_beside: which loss gamma was chosen for. "mean", or None: a mean loss, like everything here. "sum": a
            loss summed over target tokens, as the source's 40 is; it is then divided by the number of target tokens
            of the optimizer step, which `total` must be told.
        growth_radius: how much a nuclear norm may grow in an optimizer step before the push ends; None: 1e-4.
        alpha_start: how many optimizer steps pass before alphas are trained; None for none.
        disagreement: weight of the mean cosine between the outputs of a layer's heads: a number, or role -> number.

    Attributes:
        parts: name -> part, of those that are asked for.

    Raises:
        UnsupportedModelError: if weights of the model are offloaded.
        SwapError: if the model has no learned gates, or no alphas, for what is asked.
        ArgumentError: on a target, weight or scores that cannot work, or if there is nothing to do.
        NonFiniteError: if scores contain NaN or inf.

    Sources: see the modules `gates`, `subsets`, `alphas` and `disagreement` beside this one.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        gate_weight: float | None = None,
        target_heads: Target | None = None,
        steps: int | None = None,
        scores: Mapping[str, Tensor] | None = None,
        seed: int = 0,
        growth: RoleWeights | None = None,
        growth_beside: LossKind | None = None,
        growth_radius: float | None = None,
        alpha_start: int | None = None,
        disagreement: RoleWeights | None = None,
    ):
        adapter = get_adapter(model)
        check_trainable(model, "a HeadPenalty")
        options = PenaltyOptions(
            gate_weight=gate_weight,
            target_heads=target_heads,
            steps=steps,
            scores=scores,
            seed=seed,
            growth=growth,
            growth_beside=growth_beside,
            growth_radius=growth_radius,
            alpha_start=alpha_start,
            disagreement=disagreement,
        )
        made = [part.from_options(model, adapter, options) for part in PARTS]
        self.parts: dict[str, PenaltyPart] = {part.name: part for part in made if part is not None}
        if not self.parts:
            raise ArgumentError(
                "a HeadPenalty needs gate_weight or target_heads (gates), a model with alphas, or disagreement"
            )
        for part in self.parts.values():
            part.attach()

    @property
    def finished(self) -> bool:
        """Whether a target of heads is reached and they are fixed: prune now, or train on."""
        return all(part.finished for part in self.parts.values())

    def parameters(self) -> list[torch.nn.Parameter]:
        """The gates and alphas."""
        return [parameter for part in self.parts.values() for parameter in part.parameters()]

    def groups(self, gate_lr: float = 0.1, alpha_lr: float | None = None) -> list[dict[str, Any]]:
        """The parameter groups of gates and alphas, without weight decay; None for the optimizer's learning rate."""
        rates = LearningRates(gate_lr, alpha_lr)
        # gates come before alphas in the optimizer states that are stored
        groups = [part.group(rates) for part in reversed(self.parts.values())]
        return [group for group in groups if group is not None]

    def others(self, model: torch.nn.Module) -> list[torch.nn.Parameter]:
        """The trainable parameters of a model that are neither gates nor alphas."""
        listed = {id(parameter) for parameter in self.parameters()}
        return [p for p in model.parameters() if p.requires_grad and id(p) not in listed]

    def total(self, batch: Mapping | None = None, tokens: int | None = None) -> Tensor:
        """What to add to the mean loss of a micro-batch: a scalar with a gradient.

        Args:
            batch: as the model was given it; disagreement then leaves padding out.
            tokens: how many target tokens (of a classifier: examples) the mean loss of the whole optimizer step is
                over, all micro-batches and processes together; needed for growth beside a sum only.

        Raises:
            ArgumentError: if a part needs what is not given.
        """
        totals = [part.total(batch, tokens) for part in self.parts.values()]
        return torch.stack([total.to(totals[0].device) for total in totals]).sum()

    def before_step(self) -> None:
        """Call it between the backward pass and the optimizer step: alphas wait until `alpha_start`."""
        for part in self.parts.values():
            part.before_step()

    def step(self, *, skipped: bool = False) -> None:
        """Go on after an optimizer step.

        Args:
            skipped: whether a gradient scaler (fp16) skipped it: alphas then wait, schedules of gates go on.
        """
        for part in self.parts.values():
            if not (skipped and part.skips_with_optimizer):
                part.step()

    def metrics(self) -> dict[str, float]:
        """What to watch: open, expected and decided heads and sparsity of gates; norm and growth of alphas."""
        return {name: value for part in self.parts.values() for name, value in part.metrics().items()}

    def state_dict(self) -> dict[str, Any]:
        """How far the schedules are, and the gates: numbers, lists and dicts, ready for JSON."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state.

        Raises:
            ArgumentError: if the state is that of other parts, settings or another model; the message says.
        """
        if state.keys() != self.parts.keys():
            raise ArgumentError(
                f"this is not the state of this penalty: it is for {', '.join(state)}, not {', '.join(self.parts)}"
            )
        for name, part in self.parts.items():
            part.load_state_dict(state[name])

    def close(self) -> None:
        """Stop listening to the model (disagreement does)."""
        for part in self.parts.values():
            part.close()
