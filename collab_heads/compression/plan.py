"""plan: predict the error at every budget, and what each site gets under it, before the model is changed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from collab_heads.base.arguments import checking_arguments
from collab_heads.base.checks import MAX_SIZE, check_choice, check_count, is_number
from collab_heads.base.display import text_table
from collab_heads.base.numerics import few_threads
from collab_heads.base.option_values import MODEL_SHAPES, SITE_PARTS, ModelShape, SitePart
from collab_heads.base.progress import one_bar, progress_bar
from collab_heads.collaborative.fit import FitOptions
from collab_heads.collaborative.kinds import check_kind
from collab_heads.compression.latency import Latencies
from collab_heads.compression.measurements import Measurements, measure_model
from collab_heads.compression.measures import COUNTED, MEASURES, UNITS, Measure, SiteUse, uses_of
from collab_heads.compression.model_shapes import Choosing, allowed_choices
from collab_heads.compression.parts.part import Fit
from collab_heads.compression.parts.shape import UNCHANGED, AttentionShape, Choice, Shape
from collab_heads.compression.parts.table import PARTS, choices_of, fit_site, install
from collab_heads.compression.sequential_refit import refitted_in_order
from collab_heads.compression.spending import AnySpending, Option
from collab_heads.contract.registry import get_adapter
from collab_heads.errors import ArgumentError
from collab_heads.layers.layout import widths
from collab_heads.model.apply_state import undone
from collab_heads.model.batches import NoticingFew, without_unread_labels
from collab_heads.model.device_hooks import is_offloaded
from collab_heads.model.offloading import changing_layers, in_memory, layer_modules
from collab_heads.model.refusals import check_not_inference, check_wrapper
from collab_heads.model.translations import with_translations
from collab_heads.plots.curves import budget_curve
from collab_heads.sites.record import CollabConfig
from collab_heads.sites.state import QueryKeyKind

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.get_logger("transformers.collab_heads")  # below transformers' own: its verbosity counts
POINTS = 64  # of a curve
NAMED = 3  # sites in a message
PHASES = (
    ("translating", 2),
    ("calibrating", 2),
    ("measuring sites", 4),
    ("measuring sensitivities", 4),
    ("timing sites", 3),  # of budgets of time
)
TABLE_BUDGETS = (0.9, 0.75, 0.66, 0.5, 0.4, 0.33, 0.25, 0.2, 0.15, 0.1)

Choices = Mapping[str, Choice]


@checking_arguments
@torch.inference_mode(False)  # what is seen now is learned from in `compress`
@changing_layers
def plan(
    model: PreTrainedModel,
    batches: Iterable[Mapping],
    *,
    of: Measure = "parameters",
    sites: str | Iterable[str] | None = None,
    parts: SitePart | Iterable[SitePart] = SITE_PARTS,
    kind: QueryKeyKind = "per_head",
    shape: ModelShape | None = None,
    multiple_of: int = 1,
    refine_steps: int = 120,
    seed: int = 0,
) -> CompressionPlan:
    """Predict the error of the model's output at every budget; the model is not changed.

    For each site, `plan` measures how its error rises with fewer heads, narrower queries, keys and values, or fewer
    neurons, and how much this error moves the model's output. The smaller sizes are fitted in closed form to seven
    eighths of the examples, and measured on the others. A budget is then spent where it reduces the error most.

    Examples:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256)
        >>> model = BertModel(config)
        >>> batches = [{"input_ids": torch.arange(200).view(8, 25)} for _ in range(4)]  # (batch, tokens) each
        >>> planned = plan(model, batches, refine_steps=0)
        >>> planned.predicted(planned.choose(0.5)) < planned.predicted(planned.choose(0.25))  # predicted errors
        True
        >>> report = compress(model, planned, 0.5)

    Args:
        model: a supported transformers model: an original one, or one with heads removed, with collaborative or with
            narrower sites, which is compressed further.
        batches: input dicts as the model takes them, without labels (256 to 2,048 sentences: neurons need most). The
            text that a decoder reads may be given, as decoder inputs or labels; if not, the model translates its
            inputs, greedily.
        of: the measure of budgets: "parameters" of attention's four projections and of feed-forward blocks,
            "operations" (multiplications of their matrix products on the batches, as torch computes them: with padding,
            and in a decoder for all target tokens at once), "cache" (elements that are cached after the batches, of
            sources and targets; a window that slides keeps its last tokens), or "time" (seconds on this machine,
            measured for the first batch as it is).
        sites: roles or paths of the sites that may change, feed-forward blocks ("enc-ffn", "dec-ffn") included; None
            for all.
        parts: the parts that may become smaller: some of "heads" (their number), "query_key" and "values" (their
            widths), and "neurons" (of feed-forward blocks). Only sites that have one of them count in budgets; a budget
            of cache is of attention alone.
        kind: the kind of narrower query/key projections, see `swap_to_collaborative`. "shared" saves most parameters
            and cache, and is slow.
        shape: the sizes that sites may have beside each other: "even" gives all feed-forward blocks of a stack the same
            number of neurons, or none; "free" lets every site have its own; "ctranslate2" is what this engine runs, and
            "uniform" what the stock config of the family can say (see `export`). None: "even" for a model without a
            head, whose hidden states are compared, else "free".
        multiple_of: what the widths of smaller layers are multiples of: of queries, of keys and of values over all
            heads, and the number of neurons. 64 suits GPUs and four bits (see the guide to quantisation). Widths that
            do not change stay as they are.
        refine_steps: Adam steps that finally fit each narrower query/key projection to the original output of its site.
        seed: seed of the order of the inputs in the refinement.

    Raises:
        UnsupportedModelError: if there is no adapter for the model, it is wrapped, its output cannot be compared, or
            `parts` names nothing that can become smaller in its family, or its weights were made in inference mode.
        ArgumentError: on an unknown role, path, measure, part, kind or shape, an impossible number, or a measure that
            is zero for the sites.
        CalibrationError: if the batches are empty or too few, or the model cannot take them.
        NonFiniteError: if weights, inputs or outputs contain NaN or inf.
        SwapError: if a site has gates or alphas, or cannot be changed safely.
    """
    started = time.perf_counter()
    check_choice("measure", of, MEASURES)
    parts = (parts,) if isinstance(parts, str) else tuple(parts)
    for name in parts:
        check_choice("part", name, PARTS)
    if not parts:
        raise ArgumentError(f"parts is empty: name some of {', '.join(PARTS)}")
    if of == "cache":  # feed-forward blocks have none
        parts = tuple(name for name in parts if PARTS[name].shape is AttentionShape) or parts
    check_kind(kind)
    check_count("multiple_of", multiple_of, 1, MAX_SIZE)
    if shape is not None:
        check_choice("shape", shape, MODEL_SHAPES)
    check_wrapper(model)
    check_not_inference(model)
    adapter = get_adapter(model)
    for part in PARTS.values():
        if not part.may_stay or set(parts) == {part.name}:
            get_adapter(model, capability=part.capability(kind))
    options = FitOptions(refine_steps=refine_steps, seed=seed)
    listed = enumerate(without_unread_labels(model, batch) for batch in NoticingFew(batches))
    with one_bar("plan", PHASES if of not in COUNTED else PHASES[:-1]):
        batches = [batch for _, batch in with_translations(model, list(listed))]
        measured = measure_model(model, adapter, batches, sites, kind, parts, multiple_of, options)
        shapes = {path: errors.shape for path, errors in measured.errors.items()}
        warn_of_other_widths(shapes, multiple_of)
        cost = COUNTED[of] if of in COUNTED else Latencies(model, measured.sites, shapes, batches[0])
    made = CompressionPlan(measured, of, cost, shape or ("even" if has_states(measured) else "free"))
    made.seconds = time.perf_counter() - started
    return made


def warn_of_other_widths(shapes: Mapping[str, Shape], multiple_of: int) -> None:
    """Warn of sites that have widths now which are no multiples: what stays of them keeps its width."""
    others = {path: [n for n in shape.geometry.inner_widths if n % multiple_of] for path, shape in shapes.items()}
    if found := [f"{path} ({', '.join(map(str, dict.fromkeys(n)))})" for path, n in others.items() if n]:
        logger.warning(
            "multiple_of=%d: %s of the %d sites have other widths now, and keep them unless they become smaller: %s%s",
            *(multiple_of, len(found), len(shapes), ", ".join(found[:NAMED]), ", …" if len(found) > NAMED else ""),
        )


def has_states(measured: Measurements) -> bool:
    """Return True if the output that is compared is the hidden states of a model without a head."""
    return measured.probe.kept[0].are_states


class CompressionPlan:
    """The plan of a compression: the predicted error at every budget, and what each site gets under it.

    It does not change the model. `print` it for a table, or draw it with `picture`.

    Args:
        cost: the cost of a choice for a site, in the units of `of`: (use of the site, choice) -> cost.

    Attributes:
        measured: the measurements of the model.
        of: the measure of budgets.
        shape: which sizes sites may have beside each other.
        whole: the present cost of the sites that may change, in the units of `of`.
        seconds: the time that `plan` took to make it.
    """

    def __init__(
        self, measured: Measurements, of: Measure, cost: Callable[[SiteUse, Choice], float], shape: ModelShape
    ):
        self.measured, self.of, self.cost, self.shape = measured, of, cost, shape
        self.seconds = 0.0
        self.seen, self.uses = condition_of(measured.model), uses_of(measured)
        self.choices = {path: list(choices_of(use.shape)) for path, use in self.uses.items()}
        shapes = {path: use.shape for path, use in self.uses.items()}
        choosing = Choosing(measured.model, measured.adapter, measured.sites, shapes, self.choices)
        self.spending = AnySpending(
            [[self.option(path, choice) for choice in choices] for path, choices in self.choices.items()],
            allowed_choices(choosing, shape, is_even=has_states(measured)),
        )
        self.whole = sum(cost(use, UNCHANGED) for use in self.uses.values())
        if not self.whole:
            raise ArgumentError(f"of={of!r}: the sites that may change have none of it: name others, or count another")

    def option(self, path: str, choice: Choice) -> Option:
        """Return the cost of a choice, and what it adds to the squared error of the output.

        Args:
            path: the path of a site that may change.
            choice: the sizes of its parts.
        """
        errors, gains = self.measured.errors[path].of(choice), self.measured.sensitivity[path]
        return Option(self.cost(self.uses[path], choice), sum(gains[part] * error for part, error in errors.items()))

    @property
    def least(self) -> float:
        """Return the smallest possible budget, as a share."""
        return self.spending.least / self.whole

    @property
    def least_error(self) -> float:
        """Return the smallest predicted error of the output among all changes."""
        changes = (
            self.option(path, choice).error
            for path, choices in self.choices.items()
            for choice in choices
            if choice != UNCHANGED
        )
        return math.sqrt(min(changes, default=0.0))

    def choose(self, budget: float) -> dict[str, Choice]:
        """Choose what each site gets under a budget: path -> choice.

        Args:
            budget: a share of `whole`.

        Raises:
            ArgumentError: if the budget is no share, or below that of the fewest heads and the smallest widths.
        """
        if check_budget(budget) < self.least:
            raise ArgumentError(
                f"budget {budget!r} of {self.of} is below {math.ceil(1000 * self.least) / 1000}, which the fewest "
                f"heads and neurons and the smallest widths give in the shape {self.shape!r}"
            )
        return self.cheapest(budget)

    def cheapest(self, budget: float) -> dict[str, Choice]:
        """Choose what each site gets under a budget that can be reached, 0 included where nothing need be left.

        Args:
            budget: a share of `whole`, not below `least`.
        """
        if budget == 1:  # changes nothing, not even where this would cost no error
            return dict.fromkeys(self.uses, UNCHANGED)
        return self.named(self.spending.choose(largest(budget * self.whole, lambda cost: cost / self.whole <= budget)))

    def within(self, error: float) -> dict[str, Choice]:
        """Choose the cheapest sites whose predicted error of the output is at most `error`: path -> choice.

        Args:
            error: an error of the output, as `compress` measures it.
        """
        return self.named(self.spending.within(largest(error * error, lambda square: math.sqrt(square) <= error)))

    def named(self, indices: Sequence[int]) -> dict[str, Choice]:
        """Turn indices of options into choices: path -> choice.

        Args:
            indices: one per site: the index among the choices of the site.
        """
        return {path: choices[i] for (path, choices), i in zip(self.choices.items(), indices, strict=True)}

    def share(self, choices: Choices) -> float:
        """Return the cost of choices, as a share of the present cost.

        Args:
            choices: path -> choice.
        """
        return math.fsum(self.cost(self.uses[path], choice) for path, choice in choices.items()) / self.whole

    def predicted(self, choices: Choices) -> float:
        """Return the predicted error of the output with some choices, in the units of `Probe.error`.

        Args:
            choices: path -> choice.
        """
        return math.sqrt(math.fsum(self.option(path, choice).error for path, choice in choices.items()))

    def fit(self, choices: Choices) -> dict[str, list[Fit]]:
        """Fit choices for sites: path -> fits of every site that changes; the model stays as it is.

        The last projections are then refitted in the order of the sites (see `sequential_refit`). This is kept if it
        reduces the error of the output on the examples that are held out.

        Args:
            choices: path -> choice, for all sites that may change.
        """
        measured, fitted = self.measured, {}
        changing = [site for site in measured.sites if choices[site.path] != UNCHANGED]
        for site in progress_bar(changing, desc="fitting sites"):
            choice, shape = choices[site.path], self.uses[site.path].shape
            with few_threads(widths(site.output)[0]):  # a name for the calibration would keep it in memory
                fitted[site.path] = fit_site(site, shape, choice, measured.fitted.of(site.path), measured.options)
        refitted = refitted_in_order(measured, fitted)
        return refitted if refitted and self.measured_error(refitted) < self.measured_error(fitted) else fitted

    def measured_error(self, fitted: Mapping[str, Sequence[Fit]]) -> float:
        """Install some fits, measure the error of the model's output, and remove them again.

        Args:
            fitted: path -> fits, as `fit` returns them.
        """
        with undone(self.measured.model, self.measured.sites):
            install(self.measured.model, self.measured.adapter, fitted)
            return self.measured.probe.error()

    def check_model(self, model: PreTrainedModel) -> None:
        """Raise ArgumentError unless the plan was made for this model as it is now.

        Args:
            model: the model that is to be compressed.
        """
        if self.measured.model is not model:
            raise ArgumentError("the plan was made for another model: pass that one, or batches")
        if condition_of(model) != self.seen:
            raise ArgumentError("the model was changed since the plan was made: make a new one")

    def measure(self, budgets: Iterable[float]) -> list[tuple[float, float]]:
        """Measure the error of the output at some budgets: install the choices of each budget, and remove them again.

        Args:
            budgets: shares of `whole`, each at least `least`.

        Returns:
            (budget, error) for every budget.
        """
        with in_memory(layer_modules(self.measured.model, self.measured.adapter)):
            with progress_bar(list(budgets), desc="measuring budgets") as listed:
                return [(budget, self.measured_error(self.fit(self.choose(budget)))) for budget in listed]

    def curve(self) -> list[tuple[float, float]]:
        """Return the predicted error by budget: (budget, error), from the smallest budget to 1."""
        budgets = torch.linspace(self.least, 1.0, POINTS, dtype=torch.float64).tolist()
        return [(budget, self.predicted(self.cheapest(min(budget, 1.0)))) for budget in budgets]

    def picture(self, measured: Sequence[tuple[float, float]] = ()) -> Figure:
        """Draw the curve of error against budget, with the points that `measure` returned, if any.

        Args:
            measured: (budget, error) of every point to draw beside the curve.
        """
        return budget_curve(self.curve(), measured, of=self.of)

    def to_dict(self) -> dict:
        """Return all numbers of the curve, ready for JSON."""
        return {"of": self.of, "shape": self.shape, "whole": self.whole, "least": self.least, "curve": self.curve()}

    def __str__(self) -> str:
        rows = []
        for budget in TABLE_BUDGETS:
            if budget >= self.least:
                choices = self.choose(budget)
                rows.append([f"{budget:.2f}", f"{self.predicted(choices):.4f}", *spread(self.uses, choices)])
        header = ["budget", "predicted error", *(part.heading for part in PARTS.values())]
        last = f"budgets are shares of {self.whole:,.6g} {UNITS[self.of]}; the smallest is {self.least:.3f}"
        return text_table(header, rows, last)


def condition_of(model: PreTrainedModel) -> tuple[CollabConfig, list]:
    """Return what differs once a model is changed: its record, its shapes, and the number of writes to its tensors.

    Offloaded tensors, and those made in inference mode, do not count writes and are left out.
    """
    shapes = [parameter.shape for parameter in model.parameters()]
    tensors = (tensor for tensor in model.parameters() if not tensor.is_inference() and not is_offloaded(tensor))
    return CollabConfig.on(model), [shapes, [(id(tensor), tensor._version) for tensor in tensors]]


def largest(near: float, fits: Callable[[float], bool]) -> float:
    """Return the largest number that fits, given a number that is off by rounding errors at most."""
    while fits(above := math.nextafter(near, math.inf)):
        near = above
    while not fits(near):
        near = math.nextafter(near, -math.inf)
    return near


def check_budget(budget: float) -> float:
    """Return a budget, or raise ArgumentError if it is no share."""
    if not is_number(budget) or not 0 < budget <= 1:
        raise ArgumentError(f"budget {budget!r} must be a share of what the layers have now: above 0, at most 1")
    return budget


def spread(uses: Mapping[str, SiteUse], choices: Choices) -> list[str]:
    """Summarise what is left of each part, over all sites."""
    shapes = {path: uses[path].shape for path in choices}
    found = []
    for part in PARTS.values():
        of_part = [(shape, choices[path]) for path, shape in shapes.items() if isinstance(shape, part.shape)]
        found.append(part.summary(of_part) if of_part else "")
    return found
