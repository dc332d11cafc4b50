"""What training adds for alphas: a late start, and growth of their nuclear norms.

The growth loss is gamma * sum over sites of (||alpha_{t-1}||_* + radius - ||alpha_t||_*), where alpha_{t-1} are the
parameters of the optimizer step before. It pushes a norm up while its growth in the last step is below the radius, and
not at all from there on: the radius limits the rate of growth.

What gamma means depends on the loss that it stands beside. The source adds it to a loss that is summed over the target
tokens of a batch, and divides the gradient of that sum by their number: beside the mean loss of this package its gamma
is gamma / (target tokens of the optimizer step). `growth_beside="sum"` takes the source's number and divides it so.
(There a step of several batches, from `--update-freq` or several GPUs, adds gamma once for each batch: multiply gamma
by their number.)

With weights per role, one that is given 0 never trains its alphas, as in the source, whose ratios also say what learns
(there a role that is left out has 0, too). Roles that are left out here, and all where one number 0 is for all, train
without a push.

Source: Azov and Landau 2020 (MHR-NLP-Transformers), "growth loss".
"""

from collections.abc import Mapping
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_heads.base.checks import check_choice, is_count, is_number
from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.errors import ArgumentError, SwapError
from collab_heads.heads.alpha import mixed_sites
from collab_heads.heads.penalty.parts import (
    LearningRates,
    LossKind,
    PenaltyOptions,
    PenaltyPart,
    check_state,
    check_trainable,
    role_weights,
)
from collab_heads.layers.alphas import HeadAlphas
from collab_heads.sites.site import AttentionSite

BESIDE = get_args(LossKind)
DEFAULT_RADIUS = 1e-4  # of nuclear norms, per optimizer step


class AlphaPenalty(PenaltyPart):
    """The part of a `HeadPenalty` that is about alphas; its arguments are described there.

    Attributes:
        weights: gamma of every site.
        alphas: the alphas of every site.
        done: optimizer steps so far.
        norms_before, norms_now: the nuclear norms before the last optimizer step and after it: [sites].
    """

    name: ClassVar[str] = "alphas"
    skips_with_optimizer: ClassVar[bool] = True

    def __init__(self, mixed: list[tuple[AttentionSite, HeadAlphas]], options: PenaltyOptions):
        sites = [site for site, _ in mixed]
        self.paths, self.alphas = [site.path for site in sites], [alphas for _, alphas in mixed]
        check_trainable("alphas", {site.path: alphas.alpha for site, alphas in mixed})
        growth, radius, start = options.growth, options.growth_radius, options.alpha_start
        self.growth = role_weights("growth", growth, sites)
        self.weights = [self.growth[site.role] for site in sites]
        self.frozen = [role for role in self.growth if isinstance(growth, Mapping) and growth.get(role) == 0]
        self.never_trained = [alphas for site, alphas in mixed if site.role in self.frozen]
        self.radius = DEFAULT_RADIUS if radius is None else radius
        if not is_number(self.radius) or self.radius <= 0:
            raise ArgumentError(f"growth_radius {radius!r} must be a number above 0")
        self.start = 0 if start is None else start
        if isinstance(self.start, bool) or not isinstance(self.start, int) or self.start < 0:
            raise ArgumentError(f"alpha_start {start!r} must be a number of optimizer steps, 0 or more")
        self.beside: LossKind = "mean" if options.growth_beside is None else options.growth_beside
        check_choice("growth_beside", self.beside, BESIDE)
        self.done = 0
        self.norms_before = self.norms_now = self.norms().detach()

    @classmethod
    def from_options(
        cls, model: PreTrainedModel, adapter: AttentionAdapter, options: PenaltyOptions
    ) -> "AlphaPenalty | None":
        """A model with alphas has the part, whatever the options are."""
        mixed = mixed_sites(model, adapter)
        if options.growth is None:
            for name in ("growth_beside", "growth_radius"):
                options.check_unused(name, "without growth")
            if not mixed:
                options.check_unused("alpha_start", "without alphas: call swap_to_alpha first")
                return None
        if not mixed:
            raise SwapError("the model has no alphas: call swap_to_alpha first")
        return cls(mixed, options)

    def parameters(self) -> list[nn.Parameter]:
        """The alphas."""
        return [alphas.alpha for alphas in self.alphas]

    def group(self, rates: LearningRates) -> dict[str, Any]:
        """The parameter group of the alphas: no weight decay, and a learning rate if they have one of their own."""
        group: dict[str, Any] = {"params": self.parameters(), "weight_decay": 0.0}
        return group if rates.alphas is None else group | {"lr": rates.alphas}

    @property
    def device(self) -> torch.device:
        """Where the first alphas are."""
        return self.alphas[0].alpha.device

    @property
    def started(self) -> bool:
        """Whether alphas are trained in this step."""
        return self.done >= self.start

    def norms(self) -> Tensor:
        """The nuclear norm of every alpha: [sites], in float32 at least, differentiable."""
        with torch.autocast(self.device.type, enabled=False):
            matrices = [alpha.to(torch.promote_types(alpha.dtype, torch.float32)) for alpha in self.parameters()]
            return torch.stack([torch.linalg.svdvals(matrix).sum().to(self.device) for matrix in matrices])

    def total(self, batch: Mapping | None = None, tokens: int | None = None) -> Tensor:
        """What to add to the mean loss: a scalar, with a gradient once there is a push.

        Args:
            batch: it does not matter.
            tokens: how many target tokens the mean loss of the optimizer step is over; needed beside a sum only.

        Raises:
            ArgumentError: if it is needed and no whole number from 1.
        """
        pushes, tokens_per_loss = any(self.weights), 1
        if self.beside == "sum" and pushes:
            if tokens is None or not is_count(tokens):
                raise ArgumentError(
                    "growth beside a sum is divided by the number of target tokens of the optimizer step: call "
                    f"total(batch, tokens=their number), a whole number from 1, not {tokens!r}"
                )
            tokens_per_loss = tokens
        if not self.started or not pushes:
            return torch.zeros((), device=self.device)
        norms = self.norms()
        missing_growth = (self.norms_before.to(norms.device) + self.radius - norms).relu()
        return (norms.new_tensor(self.weights) * missing_growth).sum() / tokens_per_loss

    def before_step(self) -> None:
        """Take the gradients of the alphas that do not learn, or not yet: no optimizer then touches them."""
        for alphas in self.never_trained if self.started else self.alphas:
            alphas.alpha.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Go on after an optimizer step."""
        self.done += 1
        if any(self.weights):
            self.norms_before, self.norms_now = self.norms_now, self.norms()

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        """Mean nuclear norm, its mean growth in the last step where it is pushed, and the norm of every alpha."""
        norms = self.norms()
        means = {"alpha_nuclear_norm": float(norms.mean())}
        if any(self.weights):
            means["alpha_growth"] = float((norms - self.norms_before.to(norms.device)).mean())
        by_site = zip(self.paths, norms.tolist(), strict=True)
        return means | {f"alpha_nuclear_norm/{path}": norm for path, norm in by_site}

    def state_dict(self) -> dict[str, Any]:
        """Settings and progress: numbers, lists and dicts, ready for JSON."""
        return {
            "growth": self.growth,
            "beside": self.beside,
            "radius": self.radius,
            "start": self.start,
            "sites": len(self.alphas),
            "frozen": self.frozen,
            "done": self.done,
            "before": self.norms_before.tolist(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; the alphas themselves are in the model."""
        state = {"beside": "mean", "frozen": []} | dict(state)  # the first states had neither
        check_state(state, self.state_dict(), {"done", "before"})
        if len(state["before"]) != len(self.alphas):
            raise ArgumentError(f"this is not the state of this penalty: {len(state['before'])} norms of alphas")
        self.done, self.norms_now = state["done"], self.norms()
        self.norms_before = self.norms_now.new_tensor(state["before"])
