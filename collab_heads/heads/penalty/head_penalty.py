"""HeadPenalty: all terms that training adds for the heads of a model."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.base.arguments import checking_arguments
from collab_heads.contract.registry import get_adapter
from collab_heads.errors import ArgumentError
from collab_heads.heads.penalty.alphas import AlphaPenalty
from collab_heads.heads.penalty.disagreement import Disagreement
from collab_heads.heads.penalty.gates import GatePenalty
from collab_heads.heads.penalty.parts import LearningRates, LossKind, PenaltyOptions, PenaltyPart, RoleWeights
from collab_heads.heads.selection import Target
from collab_heads.model.opened import check_trainable

PARTS: tuple[type[PenaltyPart], ...] = (AlphaPenalty, GatePenalty, Disagreement)


class HeadPenalty:
    """The terms that training adds for the heads of a model: for gates, for alphas, or to make heads differ.

        penalty = HeadPenalty(model, target_heads=18, steps=200)
        optimizer = HeadAdamW([{"params": penalty.others(model)}, *penalty.groups()], lr=2e-5)
        for batch in batches:
            (model(**batch).loss + penalty.total(batch)).backward()
            penalty.before_step(); optimizer.step(); optimizer.zero_grad()
            penalty.step()

    Args:
        model: a model after `swap_to_gated` or `swap_to_alpha`, or any for disagreement; wrap it (DDP) afterwards.
        gate_weight: lambda, per head; 0 trains gates without a penalty. For the effect of a `concrete_coef` of Voita et
            al.'s code, divide that number by the number of gated attention modules (not layers).
        target_heads: how many heads to keep: a total (every role keeps at least one), or role -> number.
        steps: optimizer steps in which the number falls evenly to the target; from then on the heads are fixed.
        scores: path -> [H], from `head_importance`: the first ranking of the heads; without it all are equal at first.
        seed: of the noise; give all processes the same, so that they close the same heads.
        growth: gamma, the weight of the growth of the nuclear norm of every alpha: a number, or role -> number. A role
            with weight 0 never trains its alphas; a role that is left out trains them without a growth loss, and so do
            all roles if 0 is given for all.
        growth_beside: the loss for which gamma was chosen. "mean", or None: a mean loss, as in this package. "sum": a
            loss summed over target tokens, as the source's 40; gamma is then divided by the number of target tokens of
            the optimizer step, which `total` needs.
        growth_radius: the growth of a nuclear norm in one optimizer step from which the growth loss is zero; None:
            1e-4.
        alpha_start: how many optimizer steps pass before alphas are trained; None for none.
        disagreement: weight of the mean cosine between the outputs of a layer's heads: a number, or role -> number.

    Attributes:
        parts: name -> part, for those that are in use.

    Raises:
        UnsupportedModelError: if weights of the model are offloaded.
        ModelStateError: if the arguments need learned gates or alphas that the model does not have.
        ArgumentError: on an invalid target, weight or scores, or if there is nothing to do.
        NonFiniteError: if scores contain NaN or inf.

    Sources: see the modules `gates`, `alphas` and `disagreement` beside this one.
    """

    @checking_arguments
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
        for parameter in self.parameters():  # also where the model was cast after they were put in
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
        for part in self.parts.values():
            part.attach()

    @property
    def finished(self) -> bool:
        """True if all parts have reached their targets and the heads are fixed: prune now, or train on."""
        return all(part.finished for part in self.parts.values())

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters of the gates and alphas."""
        return [parameter for part in self.parts.values() for parameter in part.parameters()]

    def groups(self, gate_lr: float = 0.1, alpha_lr: float | None = None) -> list[dict[str, Any]]:
        """Return the parameter groups of gates and alphas, without weight decay.

        Args:
            gate_lr: the learning rate of the gates.
            alpha_lr: the learning rate of the alphas; None for the optimizer's.
        """
        rates = LearningRates(gate_lr, alpha_lr)
        # gates come before alphas in the optimizer states that are stored
        groups = [part.group(rates) for part in reversed(self.parts.values())]
        return [group for group in groups if group is not None]

    def others(self, model: torch.nn.Module) -> list[torch.nn.Parameter]:
        """Return the trainable parameters of a model that are neither gates nor alphas.

        Args:
            model: the model that trains; it may be wrapped.
        """
        listed = {id(parameter) for parameter in self.parameters()}
        return [p for p in model.parameters() if p.requires_grad and id(p) not in listed]

    def total(self, batch: Mapping | None = None, tokens: int | None = None) -> Tensor:
        """Return the term to add to the mean loss of a micro-batch: a scalar with a gradient.

        Args:
            batch: as the model was given it; disagreement then leaves padding out.
            tokens: how many target tokens (of a classifier: examples) the mean loss of the whole optimizer step is
                over, all micro-batches and processes together; needed for growth beside a sum only.

        Raises:
            ArgumentError: if a part needs an argument that is not given.
        """
        totals = [part.total(batch, tokens) for part in self.parts.values()]
        return torch.stack([total.to(totals[0].device) for total in totals]).sum()

    def before_step(self) -> None:
        """Hold back alphas until `alpha_start`; call it between the backward pass and the optimizer step."""
        for part in self.parts.values():
            part.before_step()

    def step(self, *, skipped: bool = False) -> None:
        """Advance the schedules after an optimizer step.

        Args:
            skipped: whether a gradient scaler (fp16) skipped the step: the schedule of alphas then waits, that of gates
                does not.
        """
        for part in self.parts.values():
            if not (skipped and part.skips_with_optimizer):
                part.step()

    def metrics(self) -> dict[str, float]:
        """Return numbers to log: open, expected and decided heads and sparsity of gates; norm and growth of alphas."""
        return {name: value for part in self.parts.values() for name, value in part.metrics().items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of the schedules, and the gates: numbers, lists and dicts, ready for JSON."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state.

        Args:
            state: what `state_dict` returned, also after JSON.

        Raises:
            ArgumentError: if the state belongs to other parts, other settings or another model; the message says which.
        """
        if state.keys() != self.parts.keys():
            raise ArgumentError(
                f"this is not the state of this penalty: it is for {', '.join(state)}, not {', '.join(self.parts)}"
            )
        for name, part in self.parts.items():
            part.load_state_dict(state[name])

    def close(self) -> None:
        """Remove the hooks from the model (disagreement has some)."""
        for part in self.parts.values():
            part.close()
