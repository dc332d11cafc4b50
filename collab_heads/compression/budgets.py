"""The budgets of a plan: shares of what its sites cost now, or sizes of the whole model."""

import math
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from collab_heads.base.checks import is_number, size_in_bytes
from collab_heads.base.option_values import Measure, ModelShape
from collab_heads.compression.choosing import Choosing
from collab_heads.compression.measures import counted, stored_bytes
from collab_heads.compression.model_shapes import allowed_choices
from collab_heads.compression.parts.shape import UNCHANGED
from collab_heads.errors import ArgumentError
from collab_heads.model.site_size import num_bytes

DEFAULT_BUDGET = 0.5  # the budget where no limit is given


@dataclass(frozen=True)
class Budgets:
    """The budgets that a plan can keep to.

    Attributes:
        of: their measure.
        whole: the present cost of the sites that may change, in its units.
        least: the smallest cost that these can have.
        rest: the bytes of the model's other weights.
        shape: the sizes that sites may have beside each other, for messages; None where none was asked for.
        has_bits: whether weights may lie on grids.

    Raises:
        ArgumentError: if the sites have nothing that the measure counts.
    """

    of: Measure
    whole: float
    least: float
    rest: float
    shape: ModelShape | None
    has_bits: bool

    def __post_init__(self) -> None:
        if not self.whole:
            raise ArgumentError(
                f"of={self.of!r}: the sites that may change have none of it: name others, or count another"
            )

    def share_of(self, budget: float | str, written: float = 1.0) -> float:
        """Return a budget as a share of `whole`; arguments and errors are those of `CompressionPlan.share_of`."""
        check_budget(budget, self.of)
        within = "" if self.shape is None else f" in the shape {self.shape!r}"
        if not isinstance(budget, str):
            if budget < (least := self.least / self.whole):
                raise ArgumentError(
                    f"budget {budget!r} of {self.of} is below {math.ceil(1000 * least) / 1000}, which the fewest heads "
                    f"and neurons and the smallest widths give{within}"
                )
            return budget
        size = round(size_in_bytes(budget) / written)
        least, most = self.rest + self.least, self.rest + self.whole
        if not least <= size <= most:
            raise ArgumentError(
                f"budget {budget!r}: the weights of the model take {written * most / 1e6:.6f} MB, and "
                f"{written * least / 1e6:.6f} MB at the least{within}"
                + ("" if self.has_bits else "; fewer with bits=(8, 4)")
            )
        return (size - self.rest) / self.whole


def budgets_of(choosing: Choosing) -> Budgets | None:
    """Return the budgets of a plan that is still to be made; None for those of time, which has to be measured.

    Blocks of "even" sizes may all be empty, so without a shape the least is that of "free", whichever the plan takes.
    """
    options, uses, choices = choosing.options, choosing.uses, choosing.choices
    if (cost := counted(options.of, options.shape)) is None:
        return None
    costs = {path: [cost(use, choice) for choice in choices[path]] for path, use in uses.items()}
    sets = allowed_choices(choosing, options.shape or "free", is_even=False)
    least = min(
        math.fsum(min(costs[path][i] for i in some) for path, some in zip(costs, each, strict=True)) for each in sets
    )
    whole = sum(each[-1] for each in costs.values())
    return Budgets(options.of, whole, least, rest_of(choosing), options.shape, options.has_bits)


def check_reach(choosing: Choosing, budget: float | str | None, written: float = 1.0) -> None:
    """Raise ArgumentError if a budget cannot be reached; one of time is not known yet, and passes."""
    if budget is not None and (budgets := budgets_of(choosing)) is not None:
        budgets.share_of(budget, written)


def rest_of(choosing: Choosing) -> float:
    """Return the bytes of the weights of a model that no plan changes."""
    return num_bytes(choosing.model, in_full=True) - sum(stored_bytes(use, UNCHANGED) for use in choosing.uses.values())


def check_budget(budget: Any, of: str = "bytes") -> None:
    """Raise ArgumentError if a budget is neither a share nor a size, or a size where no bytes count."""
    if isinstance(budget, str):
        size_in_bytes(budget)
        if of != "bytes":
            raise ArgumentError(f"budget {budget!r}: the plan is of {of}, a size needs one of bytes (of='bytes')")
    elif not is_number(budget) or not 0 < budget <= 1:
        raise ArgumentError(f"budget {budget!r} must be a share of what the layers have now: above 0, at most 1")


def check_size(model: PreTrainedModel, budget: Any, written: float = 1.0) -> None:
    """Raise ArgumentError if a budget is a size, and the model is no larger; see `CompressionPlan.share_of`."""
    if isinstance(budget, str) and size_in_bytes(budget) > (most := written * num_bytes(model, in_full=True)):
        raise ArgumentError(f"budget {budget!r}: the weights of the model take only {most / 1e6:.6f} MB")
