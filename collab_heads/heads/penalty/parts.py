"""The interface of a part of a `HeadPenalty`, and shared options and checks of arguments and states.

A new part is one class, listed in the table `PARTS` of `head_penalty`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_heads.base.checks import MAX_SIZE, check_choice, is_index, is_number
from collab_heads.base.option_values import LossKind as LossKind
from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.errors import ArgumentError
from collab_heads.heads.selection import Target
from collab_heads.sites.site import ROLES, AttentionSite

RoleWeights = float | Mapping[str, float]


@dataclass(frozen=True)
class PenaltyOptions:
    """The options of a `HeadPenalty`, which describes them."""

    gate_weight: float | None = None
    target_heads: Target | None = None
    steps: int | None = None
    scores: Mapping[str, Tensor] | None = None
    seed: int = 0
    growth: RoleWeights | None = None
    growth_beside: LossKind | None = None
    growth_radius: float | None = None
    alpha_start: int | None = None
    disagreement: RoleWeights | None = None

    def check_unused(self, name: str, why: str) -> None:
        """Raise ArgumentError, with the reason, if an option is given that nothing would use."""
        if (value := getattr(self, name)) is not None:
            raise ArgumentError(f"{name} {value!r:.80} has no meaning {why}")


@dataclass(frozen=True)
class LearningRates:
    """The learning rates of gates and of alphas; None for that of the optimizer."""

    gates: float
    alphas: float | None


class PenaltyPart(Protocol):
    """One term that a `HeadPenalty` adds to training; most methods do nothing unless a part overrides them.

    Attributes:
        name: the name under which its state is stored.
        skips_with_optimizer: whether `step` is left out where the optimizer skipped its step.
    """

    name: ClassVar[str]
    skips_with_optimizer: ClassVar[bool] = False

    @classmethod
    def from_options(
        cls, model: PreTrainedModel, adapter: AttentionAdapter, options: PenaltyOptions
    ) -> "PenaltyPart | None":
        """Make the part, or return None if neither the options nor the model ask for it; the model is not changed."""
        ...

    def attach(self) -> None:
        """Prepare the model, once all parts are made: nothing can fail from here on."""

    @property
    def finished(self) -> bool:
        """True if the part has reached its target."""
        return True

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the model that exist for this part only."""
        return []

    def group(self, rates: LearningRates) -> dict[str, Any] | None:
        """Return the optimizer's parameter group for `parameters()`; None if there are none."""
        return None

    def total(self, batch: Mapping | None = None, tokens: int | None = None) -> Tensor:
        """Return the term to add to the mean loss of a micro-batch: a scalar; see `HeadPenalty.total`."""
        ...

    def before_step(self) -> None:
        """Act between the backward pass and the optimizer step."""

    def step(self) -> None:
        """Advance the schedules after an optimizer step."""

    def metrics(self) -> dict[str, float]:
        """Return numbers to log in training."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return settings and progress: numbers, lists and dicts, ready for JSON."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_state(state, self.state_dict(), set())

    def close(self) -> None:
        """Release the model, for example by removing hooks."""


def check_trainable(what: str, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise ArgumentError if a parameter is frozen; `parameters` maps the paths of sites to theirs."""
    if frozen := [path for path, parameter in parameters.items() if not parameter.requires_grad]:
        raise ArgumentError(
            f"the {what} of {', '.join(frozen)} are frozen (PEFT freezes what is not its own): set requires_grad before"
        )


def role_weights(name: str, weights: RoleWeights | None, sites: Iterable[AttentionSite]) -> dict[str, float]:
    """Return one weight per role of the sites, from one for all or role -> weight; 0 for roles that are not named."""
    available = {site.role for site in sites}
    roles = [role for role in ROLES if role in available]
    weights = 0.0 if weights is None else weights
    by_role: Mapping[str, float] = weights if isinstance(weights, Mapping) else {role: weights for role in roles}
    for role, weight in by_role.items():
        check_choice(f"role in {name}", role, roles)
        if not is_number(weight) or weight < 0:
            where = f" of {role}" if isinstance(weights, Mapping) else ""
            raise ArgumentError(f"{name} {weight!r}{where} must be a number, 0 or more")
    return {**{role: 0.0 for role in roles}, **by_role}


def check_state(stored: Mapping, current: Mapping, progress: set[str]) -> None:
    """Raise ArgumentError unless a stored state has the settings of the current one; `progress` may differ."""
    if missing := sorted(current.keys() - stored.keys()):
        raise ArgumentError(f"this is not the state of this penalty: it has no {', '.join(missing)}")
    if differing := sorted(name for name in current.keys() - progress if stored.get(name) != current[name]):
        names = ", ".join(f"{name} {stored.get(name)!r}, not {current[name]!r}" for name in differing)
        raise ArgumentError(f"this is not the state of this penalty: {names}")
    if "done" in progress and not is_index(stored["done"], MAX_SIZE):
        raise ArgumentError(f"this is not the state of this penalty: {stored['done']!r:.80} steps are done")


def finite(values: Iterable[Any], what: str) -> Tensor:
    """Return a list of numbers as a tensor; raise ArgumentError, naming what they are, unless all are finite."""
    found = torch.tensor(list(values), dtype=torch.float64)
    if not torch.isfinite(found).all():
        raise ArgumentError(f"this is not the state of this penalty: its {what} hold NaN or inf")
    return found
