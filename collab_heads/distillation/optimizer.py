"""The optimizer of a distillation: AdamW on what is trained, in float32 at least, with a rate that the step tells."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from collab_heads.distillation.processes import Processes
from collab_heads.distillation.trained import put_back

WARM_UP = 20  # the rate rises over one of so many steps
SMALLEST = 0.1  # a tensor counts as no smaller than this share of the mean size of all, so that one of zeros can learn
LARGEST_NORM = 1.0  # of the gradient
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # what AdamW keeps of a parameter


class MasterWeights:
    """The trained parameters, with float32 copies of those in half precision, and their AdamW without weight decay.

    A step of 1 % of a weight is lost in bfloat16, which has eight bits: it adds up in the copy.

    Every tensor's rate is relative to its root mean square. The factors of a decomposition have sizes of their own, a
    mixing of about 1 and a key of about 0.1: one rate for all harms the one, or does not move the other.

    Args:
        trained: name -> parameter.
        learning_rate: at its highest, relative to the root mean square of a tensor.
        steps: of the whole run.
    """

    def __init__(self, trained: Mapping[str, nn.Parameter], learning_rate: float, steps: int):
        self.trained = trained
        self.masters: dict[str, Tensor] = {
            name: p.detach().float() if p.dtype.itemsize < 4 else p for name, p in trained.items()
        }
        self.learning_rate, self.steps = learning_rate, steps
        fused = all(p.device.type in ("cpu", "cuda") for p in trained.values())
        sizes = [float(master.detach().square().mean().sqrt()) for master in self.masters.values()]
        least = SMALLEST * sum(sizes) / len(sizes) or 1.0
        groups = [
            {"params": [master], "size": max(size, least)}
            for master, size in zip(self.masters.values(), sizes, strict=True)
        ]
        self.adamw = torch.optim.AdamW(groups, lr=learning_rate, weight_decay=0.0, fused=fused or None)

    def rate(self, step: int) -> float:
        """The learning rate of a step, from 0: a short rise, then half a cosine to 0."""
        rise = max(1, self.steps // WARM_UP)
        if step < rise:
            return self.learning_rate * (step + 1) / rise
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, self.steps - rise)))

    @torch.no_grad()
    def take_step(self, step: int, processes: Processes) -> None:
        """One step down the gradient, summed over processes; the gradients are gone after it."""
        for name, master in self.masters.items():
            gradient = self.trained[name].grad
            given = torch.zeros_like(master) if gradient is None else gradient.to(master.dtype)
            self.trained[name].grad = None
            master.grad = processes.sum(given)
        torch.nn.utils.clip_grad_norm_(self.masters.values(), LARGEST_NORM)
        for group in self.adamw.param_groups:
            group["lr"] = self.rate(step) * group["size"]
        self.adamw.step()
        self.adamw.zero_grad()
        self.show()

    def show(self) -> None:
        """Put the float32 copies into the parameters."""
        put_back(self.trained, self.masters)

    def state(self) -> dict[str, Tensor]:
        """Weights and moments, named, to be stored."""
        found = {f"weight/{name}": master for name, master in self.masters.items()}
        for name, master in self.masters.items():
            found |= {f"{part}/{name}": self.adamw.state[master][part] for part in MOMENTS}
        return {name: tensor.detach().cpu().contiguous() for name, tensor in found.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave."""
        for name, master in self.masters.items():
            master.copy_(state[f"weight/{name}"])
            moments = {part: state[f"{part}/{name}"].clone() for part in MOMENTS}
            self.adamw.state[master] = {
                part: moment if part == "step" and not self.adamw.defaults["fused"] else moment.to(master.device)
                for part, moment in moments.items()
            }
        self.show()
