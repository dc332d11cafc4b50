"""Find the smallest model whose error, or whose loss on a task, stays within a limit: a few attempts are fitted."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from collab_heads.base.progress import one_bar, progress_bar
from collab_heads.compression.compression_plan import Choices, CompressionPlan
from collab_heads.compression.fitting import fit_choices, fitted_error
from collab_heads.compression.measurements import Measurements
from collab_heads.compression.parts.part import Fit, install
from collab_heads.compression.probe import Probe
from collab_heads.errors import ArgumentError
from collab_heads.model.apply_state import undone
from collab_heads.running.batches import evaluating

ATTEMPTS = 5  # to come close to an error
NEAR = 0.95  # of the error that was asked for
HALVINGS = 6  # of the budgets that are left, to come close to a loss: 1/64 of them is left


class FittedChoice(NamedTuple):
    """The choices for all sites, path -> choice, the fits of those that change, and the errors of the output."""

    choices: Choices
    fitted: Mapping[str, Sequence[Fit]]
    error: float
    elsewhere: float | None  # the error on examples of another kind

    @classmethod
    def of(cls, measured: Measurements, choices: Choices, other: Probe | None) -> "FittedChoice":
        """Fit choices, and measure the error of the output with them; the model stays as it is."""
        with one_bar("fitting", (("fitting sites", 8), ("refitting in order", 16), ("measuring", 1))):
            fitted = fit_choices(measured, choices, other)
            elsewhere = None if other is None else fitted_error(measured, fitted, other)
            return cls(choices, fitted, fitted_error(measured, fitted), elsewhere)


def smallest_by_error(
    made: CompressionPlan, measured: Measurements, max_error: float, other: Probe | None = None
) -> FittedChoice:
    """Return the choices of the smallest model within an error, among a few attempts.

    The error of each attempt sets the limit of the next one.

    Raises:
        ArgumentError: if no attempt is within the error.
    """
    limit, best, least, errors = max_error, None, 1.0, []
    for _ in progress_bar(range(ATTEMPTS), desc="fitting"):
        chosen = FittedChoice.of(measured, made.within(limit), other)
        if not chosen.fitted:  # the model as it is
            break
        errors.append(error := chosen.error)
        if error <= max_error and made.share(chosen.choices) < least:
            best, least = chosen, made.share(chosen.choices)
        if NEAR * max_error <= error <= max_error:
            break
        limit *= NEAR**0.5 * max_error / max(error, max_error / 2)
    if best is None:
        tried = f"those that were tried moved the output by {', '.join(f'{error:.4g}' for error in errors)}"
        untried = f"the least that any is expected to move the output by is {made.least_error:.4g}"
        raise ArgumentError(f"max_error {max_error!r}: no smaller model keeps below it; {tried if errors else untried}")
    return best


def scored(model: PreTrainedModel, evaluate: Callable[[PreTrainedModel], float]) -> float:
    """Return the score of a model, in evaluation mode.

    Raises:
        ArgumentError: if it is no number.
    """
    with evaluating(model):
        found: Any = evaluate(model)
    number = found.item() if getattr(found, "size", None) == 1 or getattr(found, "ndim", None) == 0 else found
    if not isinstance(number, int | float) or isinstance(number, bool):
        raise ArgumentError(f"evaluate returned {found!r:.80}: a number was expected, the score of the model")
    return float(number)


def smallest_by_score(
    made: CompressionPlan,
    measured: Measurements,
    max_loss: float,
    evaluate: Callable[[PreTrainedModel], float],
    before: float,
    other: Probe | None = None,
) -> tuple[FittedChoice, tuple[float, float]]:
    """Return the choices of the smallest model that loses so much of a score at most, and the scores before and after.

    A few budgets are tried, each half way between the smallest that lost less and the largest that lost more.

    Raises:
        ArgumentError: if none loses so little, or a score is no number.
    """
    best, tried, low, high = None, list[str](), made.least, 1.0
    for _ in progress_bar(range(HALVINGS), desc="fitting"):
        budget = (low + high) / 2
        chosen = FittedChoice.of(measured, made.choose(budget), other)
        with undone(measured.layers, measured.changing) as layers:
            install(layers, chosen.fitted)
            after = scored(measured.model, evaluate)
        tried.append(f"{budget:.3f} of {made.of} scores {after:.6g}")
        if before - after <= max_loss:  # not, where it is no number at all
            best, high = (chosen, (before, after)), budget
        else:
            low = budget
    if best is None:
        raise ArgumentError(f"max_loss {max_loss!r}: the model scores {before:.6g}, and {'; '.join(tried)}: allow more")
    return best
