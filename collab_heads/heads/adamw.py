"""AdamW for weights, with a shared second moment for gates."""

import math
from collections.abc import Callable
from typing import Any

import torch


class HeadAdamW(torch.optim.AdamW):
    """AdamW in which a parameter group with `"shared": True` has one second moment for all its elements.

    AdamW divides every element's gradient by its own size: a head with a tiny but steady gradient rises as fast as one
    that the loss depends on, so that a ranking of heads is mostly noise. With one second moment for the group, steps
    are on average as large as AdamW's and keep the proportions of the gradient.

    Arguments, groups and state are those of AdamW; groups without the key are updated by it. Groups with the key use
    `lr`, `betas`, `eps` and `maximize`, and no weight decay.

    Args:
        params: parameters, or parameter groups: dicts with `params` and, for a group of gates, `"shared": True`.
        args: further arguments of AdamW, by position: `lr`, `betas`, `eps`, `weight_decay`.
        options: the same and all others, by name.
    """

    def __init__(self, params: Any, *args: Any, **options: Any):
        super().__init__(params, *args, **options)
        self._step_supports_amp_scaling = False  # a fused AdamW would unscale and skip on its own, and miss the gates

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make an optimizer step, as AdamW does.

        Args:
            closure: computes the loss again and returns it; None for no such call.

        Returns:
            The loss of the closure, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        shared = [group for group in self.param_groups if group.get("shared")]
        held = {p: p.grad for group in shared for p in group["params"]}
        for group in shared:
            self.shared_step(group)
        for parameter in held:
            parameter.grad = None  # AdamW passes over parameters without a gradient
        super().step()
        for parameter, gradient in held.items():
            parameter.grad = gradient
        return loss

    def shared_step(self, group: dict) -> None:
        """Update the parameters of a group; its second moment is stored in the state of its first parameter.

        Args:
            group: a parameter group with `"shared": True`.
        """
        with_gradient = [p for p in group["params"] if p.grad is not None]
        if not with_gradient:
            return
        (decay, slow), first = group["betas"], self.state[group["params"][0]]
        sign = -1 if group["maximize"] else 1
        mean = sum(p.grad.float().square().sum() for p in with_gradient) / sum(p.numel() for p in with_gradient)
        first["mean_square"] = slow * first.get("mean_square", torch.zeros_like(mean)) + (1 - slow) * mean
        for p in with_gradient:
            state = self.state[p]
            state["step"] = state.get("step", torch.zeros(())) + 1
            state["exp_avg"] = decay * state.get("exp_avg", torch.zeros_like(p)) + (1 - decay) * sign * p.grad
            step = float(state["step"])
            scale = (first["mean_square"] / (1 - slow**step)).sqrt() + group["eps"]
            p -= group["lr"] * (state["exp_avg"] / (1 - decay**step) / scale).to(p.dtype)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state, as torch does, and check that it is one of these parameters.

        torch does not check the shapes of moments, and reads beyond the end of those that are too small.

        Args:
            state_dict: what `state_dict()` returned.

        Raises:
            ValueError: if a moment has another shape than its parameter, or is missing; if a number is NaN or inf, or
                none; if a group is shared and was not, or the other way round.
        """
        before = [group.get("shared") for group in self.param_groups]
        super().load_state_dict(state_dict)
        after = [group.get("shared") for group in self.param_groups]
        for index, (group, was, now) in enumerate(zip(self.param_groups, before, after, strict=True)):
            if now != was:
                raise ValueError(f"'shared' of group {index} is {now!r}, not {was!r}")
            for name in ("lr", "eps", "weight_decay"):
                check_number(f"{name} of group {index}", group.get(name))
            for number, p in enumerate(group["params"]):
                self.check_state(f"of parameter {number} in group {index}", p, bool(was))

    def check_state(self, place: str, parameter: torch.Tensor, shared: bool) -> None:
        """Raise ValueError unless the state of a parameter, if there is one, fits it.

        Args:
            place: which parameter it is, for messages.
            parameter: the parameter.
            shared: whether its group shares a second moment.
        """
        state = self.state.get(parameter, {})
        needed = {"exp_avg"} if shared else {"exp_avg", "exp_avg_sq"}
        if missing := needed - state.keys() if "step" in state else ():
            raise ValueError(f"the state {place} lacks {', '.join(sorted(missing))}")
        for name, value in state.items():
            if name in ("step", "mean_square"):
                check_number(f"{name} {place}", value)
            elif not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
                shape = list(getattr(value, "shape", ())) or type(value).__name__
                raise ValueError(f"{name} {place} is {shape}, and the parameter {list(parameter.shape)}")
            elif not torch.isfinite(value).all():
                raise ValueError(f"{name} {place} holds NaN or inf")

    def complete_state(self) -> None:
        """Give parameters that have never had a gradient the state that they have before their first step: zeros.

        Alphas that wait for their start have no state. States of optimizers on FSDP 2 are stored and loaded for all
        parameters at once.
        """
        for group in self.param_groups:
            moments = ["exp_avg"] if group.get("shared") else ["exp_avg", "exp_avg_sq"]
            if group["amsgrad"] and not group.get("shared"):
                moments.append("max_exp_avg_sq")
            on_device = (group["fused"] or group["capturable"]) and not group.get("shared")
            for p in group["params"]:
                has_state = "step" in self.state.get(p, {})  # the first of a shared group may hold `mean_square` alone
                if p.requires_grad and not has_state:
                    step = torch.zeros((), device=p.device if on_device else "cpu")
                    self.state[p].update({"step": step} | {name: torch.zeros_like(p) for name in moments})


def check_number(what: str, value: object) -> None:
    """Raise ValueError unless a value is a finite number that is not negative."""
    is_one = (isinstance(value, torch.Tensor) and value.ndim == 0) or isinstance(value, int | float)
    if not is_one or isinstance(value, bool) or not 0 <= float(value) < math.inf:  # type: ignore[arg-type]
        raise ValueError(f"{what} is {value!r:.80}, and no number from 0")
