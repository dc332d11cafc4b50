"""What every budget costs in quality, and what each site gets under it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from collab_heads.analysis.plots.budgets import budget_curve
from collab_heads.bars import progress_bar
from collab_heads.checks import is_number
from collab_heads.compression.choices import PARTS, Choice
from collab_heads.compression.evidence import Evidence
from collab_heads.compression.fitting import FittedSite, fit_site, put
from collab_heads.compression.measures import UNITS, Measure, SiteUse
from collab_heads.compression.spending import Option, Spending
from collab_heads.errors import ArgumentError
from collab_heads.model.device_hooks import is_offloaded
from collab_heads.model.offloading import attention_modules, in_memory
from collab_heads.model.undoing import undone
from collab_heads.numerics import few_threads
from collab_heads.record import CollabConfig
from collab_heads.text import text_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POINTS = 64  # of the curve
TABLE_BUDGETS = (0.9, 0.75, 0.66, 0.5, 0.4, 0.33, 0.25, 0.2, 0.15, 0.1)

Choices = Mapping[str, Choice]


class CompressionPlan:
    """What every budget would cost in quality. Nothing of the model is changed by it; `print` it, or draw it.

    Attributes:
        evidence: what was measured of the model.
        of: what budgets are of.
        whole: what the attention that may change costs now, in the units of `of`.
        seconds: that planning took, where `plan` made it.
    """

    def __init__(self, evidence: Evidence, of: Measure, cost: Callable[[SiteUse, Choice], float]):
        self.evidence, self.of, self.cost = evidence, of, cost
        self.seconds = 0.0
        self.seen, self.uses = condition_of(evidence.model), uses_of(evidence)
        self.choices = {path: list(use.shape.choices()) for path, use in self.uses.items()}
        self.spending = Spending(
            [[self.option(path, choice) for choice in choices] for path, choices in self.choices.items()]
        )
        self.whole = sum(cost(use, use.shape.unchanged) for use in self.uses.values())
        if not self.whole:
            raise ArgumentError(f"of={of!r}: the sites that may change have none of it: name others, or count another")

    def option(self, path: str, choice: Choice) -> Option:
        """What a choice costs, and what it adds to the squared error of the output."""
        errors, gains = self.evidence.curves[path].parts(choice), self.evidence.sensitivity[path]
        return Option(self.cost(self.uses[path], choice), sum(gains[part] * errors[part] for part in PARTS))

    @property
    def least(self) -> float:
        """The smallest budget there is, as a share."""
        return self.spending.least / self.whole

    @property
    def least_error(self) -> float:
        """The smallest error of the output that any change is expected to make."""
        changes = (
            self.option(path, choice).error
            for path, choices in self.choices.items()
            for choice in choices
            if choice != self.uses[path].shape.unchanged
        )
        return math.sqrt(min(changes, default=0.0))

    def choose(self, budget: float) -> dict[str, Choice]:
        """What each site gets under a budget: path -> choice.

        Raises:
            ArgumentError: if the budget is no share, or below what the smallest widths give.
        """
        if check_budget(budget) < self.least:
            raise ArgumentError(
                f"budget {budget!r} of {self.of} is below {math.ceil(1000 * self.least) / 1000}, which the fewest "
                "heads and the smallest widths give"
            )
        if budget == 1:  # not even what costs no quality
            return {path: use.shape.unchanged for path, use in self.uses.items()}
        return self.named(self.spending.choose(budget * self.whole))

    def within(self, error: float) -> dict[str, Choice]:
        """The cheapest that each site can get so that the error of the output is predicted to be no larger."""
        return self.named(self.spending.within(error * error))

    def named(self, indices: Sequence[int]) -> dict[str, Choice]:
        """Indices of options as choices of sites."""
        return {path: choices[i] for (path, choices), i in zip(self.choices.items(), indices, strict=True)}

    def share(self, choices: Choices) -> float:
        """What choices cost, as a share of what attention costs now."""
        return sum(self.cost(self.uses[path], choice) for path, choice in choices.items()) / self.whole

    def predicted(self, choices: Choices) -> float:
        """The error of the output that choices are expected to make, see `Probe.error`."""
        return math.sqrt(sum(self.option(path, choice).error for path, choice in choices.items()))

    def fit(self, choices: Choices) -> dict[str, FittedSite]:
        """Fit what sites are to have; the model stays as it is."""
        evidence, fitted = self.evidence, {}
        changing = [site for site in evidence.sites if choices[site.path] != self.uses[site.path].shape.unchanged]
        with few_threads(max((site.dim_value for site in changing), default=1)):
            for site in progress_bar(changing, desc="fitting sites", leave=False):
                choice, shape = choices[site.path], self.uses[site.path].shape
                fitted[site.path] = fit_site(site, shape, choice, evidence.fitted.of(site.path), evidence.options)
        return fitted

    def tried(self, fitted: Mapping[str, FittedSite]) -> float:
        """The error of the model's output with some fits in it, which are taken out again."""
        with undone(self.evidence.model, self.evidence.sites):
            put(self.evidence.model, self.evidence.adapter, fitted)
            return self.evidence.probe.error()

    def check_model(self, model: PreTrainedModel) -> None:
        """Raise ArgumentError unless the plan is one for this model as it is now."""
        if self.evidence.model is not model:
            raise ArgumentError("the plan was made for another model: pass that one, or batches")
        if condition_of(model) != self.seen:
            raise ArgumentError("the model was changed since the plan was made: make a new one")

    def measure(self, budgets: Iterable[float]) -> list[tuple[float, float]]:
        """Put plans into the model, measure the error of its output, and take them out again.

        Returns:
            (budget, error).
        """
        with in_memory(attention_modules(self.evidence.model, self.evidence.adapter)):
            return [(budget, self.tried(self.fit(self.choose(budget)))) for budget in budgets]

    def curve(self) -> list[tuple[float, float]]:
        """The predicted error by budget: (budget, error), from the smallest budget to 1."""
        budgets = torch.linspace(self.least, 1.0, POINTS, dtype=torch.float64).tolist()
        budgets = [math.ceil(budgets[0] * 1e9) / 1e9, *budgets[1:]]  # not a rounding error below the least
        return [(budget, self.predicted(self.choose(min(budget, 1.0)))) for budget in budgets]

    def picture(self, measured: Sequence[tuple[float, float]] = ()) -> Figure:
        """The curve of error against budget; with points that `measure` gave, if any."""
        return budget_curve(self.curve(), measured, of=self.of)

    def to_dict(self) -> dict:
        """All numbers of the curve, ready for JSON."""
        return {"of": self.of, "whole": self.whole, "least": self.least, "curve": self.curve()}

    def __str__(self) -> str:
        rows = []
        for budget in TABLE_BUDGETS:
            if budget >= self.least:
                choices = self.choose(budget)
                rows.append([f"{budget:.2f}", f"{self.predicted(choices):.4f}", *spread(self.uses, choices)])
        header = ["budget", "predicted error", "heads", "query/key width", "value width"]
        last = f"budgets are shares of {self.whole:,.6g} {UNITS[self.of]}; the smallest is {self.least:.3f}"
        return text_table(header, rows, last)


def condition_of(model: PreTrainedModel) -> tuple[CollabConfig, list]:
    """By which it shows that a model was changed: its record and shapes, and how often tensors were written to.

    Offloaded ones do not count that, nor do those of inference mode.
    """
    shapes = [parameter.shape for parameter in model.parameters()]
    tensors = (tensor for tensor in model.parameters() if not tensor.is_inference() and not is_offloaded(tensor))
    return CollabConfig.on(model), [shapes, [(id(tensor), tensor._version) for tensor in tensors]]


def uses_of(evidence: Evidence) -> dict[str, SiteUse]:
    """How the sites are used: path -> use. The encoder of an encoder-decoder runs once, and caches nothing."""
    probe, translates = evidence.probe, evidence.model.config.is_encoder_decoder
    return {
        site.path: SiteUse(
            evidence.curves[site.path].shape,
            site.role,
            probe.calls[site.path],
            probe.keys[site.path],
            caches=not (translates and site.role == "enc-self"),
        )
        for site in evidence.sites
    }


def check_budget(budget: float) -> float:
    """Return a budget, or raise ArgumentError if it is no share."""
    if not is_number(budget) or not 0 < budget <= 1:
        raise ArgumentError(f"budget {budget!r} must be a share of what attention has now: above 0, at most 1")
    return budget


def spread(uses: Mapping[str, SiteUse], choices: Choices) -> tuple[str, str, str]:
    """How many heads are left, and the smallest to largest widths of a head."""
    heads = sum(choice.heads for choice in choices.values())
    widths = [choice.query_key or uses[path].shape.whole_query_key for path, choice in choices.items()]
    values = [choice.value for choice in choices.values()]
    total = sum(use.shape.num_heads for use in uses.values())
    return f"{heads} of {total}", f"{min(widths)} to {max(widths)}", f"{min(values)} to {max(values)}"
