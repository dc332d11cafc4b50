"""What training adds for alphas: a late start, and growth of their nuclear norms.

The growth loss is gamma * sum over sites of (||alpha_{t-1}||_* + radius - ||alpha_t||_*), where alpha_{t-1} are the
parameters of the optimizer step before. It pushes a norm up while its growth in the last step is below the radius, and
not at all from there on: the radius limits the rate of growth.

What gamma means depends on the loss that it stands beside. The source adds it to a loss that is summed over the target
tokens of a batch, and divides the gradient of that sum by their number: beside the mean loss of this package its gamma
is gamma / (target tokens of the optimizer step). `beside="sum"` takes the source's number and divides it so. (There a
step of several batches, from `--update-freq` or several GPUs, adds gamma once for each: give so many times gamma.)

With weights per role, one that is given 0 never trains its alphas, as in the source, whose ratios also say what learns
(there a role that is left out has 0, too). Roles that are left out here, and all where one number 0 is for all, train
without a push.

Source: Azov and Landau 2020 (MHR-NLP-Transformers), "growth loss".
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_heads.checks import check_choice, is_count, is_number
from collab_heads.errors import ArgumentError, SwapError
from collab_heads.heads.alpha import mixed_sites
from collab_heads.heads.penalty.parts import RoleWeights, check_state, check_trainable, role_weights
from collab_heads.registry import AttentionAdapter

BESIDE = ("mean", "sum")  # the loss that gamma stands beside


class AlphaPenalty:
    """The part of a `HeadPenalty` that is about alphas; its arguments are described there."""

    def __init__(
        self,
        model: PreTrainedModel,
        adapter: AttentionAdapter,
        *,
        growth: RoleWeights | None,
        radius: float,
        start: int,
        beside: str = "mean",
    ):
        found = mixed_sites(model, adapter)
        if not found:
            raise SwapError("the model has no alphas: call swap_to_alpha first")
        self.paths, self.mixings = [site.path for site, _ in found], [mixing for _, mixing in found]
        check_trainable("alphas", {site.path: mixing.alpha for site, mixing in found})
        self.growth = role_weights("growth", growth, [site for site, _ in found])
        self.weights = [self.growth[site.role] for site, _ in found]
        self.frozen = [role for role in self.growth if isinstance(growth, Mapping) and growth.get(role) == 0]
        self.never = [mixing for site, mixing in found if site.role in self.frozen]
        if not is_number(radius) or radius <= 0:
            raise ArgumentError(f"growth_radius {radius!r} must be a number above 0")
        if isinstance(start, bool) or not isinstance(start, int) or start < 0:
            raise ArgumentError(f"alpha_start {start!r} must be a number of optimizer steps, 0 or more")
        check_choice("growth_beside", beside, BESIDE)
        self.radius, self.start, self.beside, self.done = radius, start, beside, 0
        self.before = self.now = self.norms().detach()  # of the last step, and of this one

    def parameters(self) -> list[nn.Parameter]:
        """The alphas."""
        return [mixing.alpha for mixing in self.mixings]

    def group(self, lr: float | None) -> dict:
        """The parameter group of the alphas: no weight decay; None for the optimizer's learning rate."""
        return {"params": self.parameters(), "weight_decay": 0.0} | ({} if lr is None else {"lr": lr})

    @property
    def started(self) -> bool:
        """Whether alphas are trained in this step."""
        return self.done >= self.start

    def norms(self) -> Tensor:
        """The nuclear norm of every alpha: [sites], in float32 at least, differentiable."""
        with torch.autocast(self.mixings[0].alpha.device.type, enabled=False):
            alphas = [
                mixing.alpha.to(torch.promote_types(mixing.alpha.dtype, torch.float32)) for mixing in self.mixings
            ]
            first = alphas[0].device
            return torch.stack([torch.linalg.svdvals(alpha).sum().to(first) for alpha in alphas])

    def total(self, batch: Mapping | None = None, tokens: int | None = None) -> Tensor:
        """What to add to the mean loss: a scalar, with a gradient once there is a push.

        Args:
            batch: it does not matter.
            tokens: how many target tokens the mean loss of the optimizer step is over; needed beside a sum only.

        Raises:
            ArgumentError: if it is needed and no whole number from 1.
        """
        if self.beside == "sum" and any(self.weights) and not is_count(tokens):
            raise ArgumentError(
                "growth beside a sum is divided by the number of target tokens of the optimizer step: call "
                f"total(batch, tokens=their number), a whole number from 1, not {tokens!r}"
            )
        if not self.started or not any(self.weights):
            return torch.zeros((), device=self.mixings[0].alpha.device)
        norms = self.norms()
        growth = (norms.new_tensor(self.weights) * (self.before.to(norms.device) + self.radius - norms).relu()).sum()
        return growth / tokens if self.beside == "sum" else growth

    def before_step(self) -> None:
        """Take the gradients of the alphas that do not learn, or not yet: no optimizer then touches them."""
        for mixing in self.never if self.started else self.mixings:
            mixing.alpha.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Go on after an optimizer step."""
        self.done += 1
        if any(self.weights):
            self.before, self.now = self.now, self.norms()

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        """Mean nuclear norm, its mean growth in the last step where it is pushed, and the norm of every alpha."""
        norms = self.norms()
        means = {"alpha_nuclear_norm": float(norms.mean())}
        if any(self.weights):
            means["alpha_growth"] = float((norms - self.before.to(norms.device)).mean())
        own = zip(self.paths, norms.tolist(), strict=True)
        return means | {f"alpha_nuclear_norm/{path}": norm for path, norm in own}

    def state_dict(self) -> dict:
        """Where it is: numbers, lists and dicts, ready for JSON."""
        asked = {"growth": self.growth, "beside": self.beside, "radius": self.radius, "start": self.start}
        asked |= {"sites": len(self.mixings), "frozen": self.frozen}
        return asked | {"done": self.done, "before": self.before.tolist()}

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        """Go on from there; the alphas themselves are in the model."""
        state = {"beside": "mean", "frozen": []} | dict(state)  # there was nothing else once
        check_state(state, self.state_dict(), {"done", "before"})
        if len(state["before"]) != len(self.mixings):
            raise ArgumentError(f"this is not the state of this penalty: {len(state['before'])} norms of alphas")
        self.done, self.now = state["done"], self.norms()
        self.before = self.now.new_tensor(state["before"])
