"""The terms that training adds for alphas: a delayed start, and growth of their nuclear norms.

The growth loss is gamma * sum over sites of (||alpha_{t-1}||_* + radius - ||alpha_t||_*), where alpha_{t-1} are the
parameters of the optimizer step before. It increases a norm while its growth in the last step is below the radius, and
has no effect above: the radius limits the rate of growth.

The meaning of gamma depends on the loss to which it is added. The source adds it to a loss that is summed over the
target tokens of a batch, and divides the gradient of that sum by their number. Added to the mean loss of this package,
its gamma is gamma / (target tokens of the optimizer step). `growth_beside="sum"` takes the source's number and divides
it like this. (In the source, a step of several batches, from `--update-freq` or several GPUs, adds gamma once for each
batch: multiply gamma by their number.)

With weights per role, a role with weight 0 never trains its alphas, as in the source, whose ratios also say what is
trained (there a role that is left out has 0, too). Roles that are left out here, and all roles if one number 0 is given
for all, train without the growth loss.

Source: Azov and Landau 2020 (MHR-NLP-Transformers), "growth loss".
"""

from collections.abc import Mapping
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_heads.base.checks import check_choice, is_count, is_number
from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.errors import ArgumentError, ModelStateError
from collab_heads.heads.alpha import mixed_sites
from collab_heads.heads.penalty.parts import (
    LearningRates,
    LossKind,
    PenaltyOptions,
    PenaltyPart,
    check_state,
    check_trainable,
    finite,
    role_weights,
)
from collab_heads.layers.alphas import HeadAlphas
from collab_heads.sites.site import AttentionSite

BESIDE = get_args(LossKind)
DEFAULT_RADIUS = 1e-4  # of nuclear norms, per optimizer step


class AlphaPenalty(PenaltyPart):
    """The part of a `HeadPenalty` for alphas; `HeadPenalty` describes its arguments.

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
        """Make the part if the model has alphas, whatever the options are; else return None."""
        mixed = mixed_sites(model, adapter)
        if options.growth is None:
            for name in ("growth_beside", "growth_radius"):
                options.check_unused(name, "without growth")
            if not mixed:
                options.check_unused("alpha_start", "without alphas: call swap_to_alpha first")
                return None
        if not mixed:
            raise ModelStateError("the model has no alphas: call swap_to_alpha first")
        return cls(mixed, options)

    def parameters(self) -> list[nn.Parameter]:
        return [alphas.alpha for alphas in self.alphas]

    def group(self, rates: LearningRates) -> dict[str, Any]:
        """Return the parameter group of the alphas: no weight decay, and their own learning rate if one is given."""
        group: dict[str, Any] = {"params": self.parameters(), "weight_decay": 0.0}
        return group if rates.alphas is None else group | {"lr": rates.alphas}

    @property
    def device(self) -> torch.device:
        return self.alphas[0].alpha.device

    @property
    def started(self) -> bool:
        """True if alphas are trained in this step."""
        return self.done >= self.start

    def norms(self) -> Tensor:
        """Return the nuclear norm of every alpha: [sites], at least in float32, differentiable."""
        with torch.autocast(self.device.type, enabled=False):
            matrices = [alpha.to(torch.promote_types(alpha.dtype, torch.float32)) for alpha in self.parameters()]
            return torch.stack([torch.linalg.svdvals(matrix).sum().to(self.device) for matrix in matrices])

    def total(self, batch: Mapping | None = None, tokens: int | None = None) -> Tensor:
        """Return the term to add to the mean loss: a scalar, with a gradient once the growth loss applies.

        Args:
            batch: not used.
            tokens: how many target tokens the mean loss of the optimizer step is over; needed beside a sum only.
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
        """Drop the gradients of alphas that are never trained, or not yet: no optimizer then changes them."""
        for alphas in self.never_trained if self.started else self.alphas:
            alphas.alpha.grad = None

    @torch.no_grad()
    def step(self) -> None:
        self.done += 1
        if any(self.weights):
            self.norms_before, self.norms_now = self.norms_now, self.norms()

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        """Return the mean nuclear norm, its mean growth in the last step with a growth loss, and every norm."""
        norms = self.norms()
        means = {"alpha_nuclear_norm": float(norms.mean())}
        if any(self.weights):
            means["alpha_growth"] = float((norms - self.norms_before.to(norms.device)).mean())
        by_site = zip(self.paths, norms.tolist(), strict=True)
        return means | {f"alpha_nuclear_norm/{path}": norm for path, norm in by_site}

    def state_dict(self) -> dict[str, Any]:
        """Return settings and progress: numbers, lists and dicts, ready for JSON."""
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
        """Resume from a state; the alphas themselves are in the model."""
        state = {"beside": "mean", "frozen": []} | dict(state)  # the first states had neither
        check_state(state, self.state_dict(), {"done", "before"})
        if len(state["before"]) != len(self.alphas):
            raise ArgumentError(f"this is not the state of this penalty: {len(state['before'])} norms of alphas")
        before = finite(state["before"], "norms of alphas")
        self.done, self.norms_now = state["done"], self.norms()
        self.norms_before = before.to(self.norms_now)
