"""The arguments of a distillation, checked once."""

from dataclasses import dataclass
from typing import Literal, get_args

from collab_heads.checks import check_choice, check_count, check_seed, is_number
from collab_heads.errors import ArgumentError

Precision = Literal["no", "bf16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
EVALUATIONS = 10  # of the held-out part in a run, where `evaluate_every` is not given


@dataclass(frozen=True)
class DistillOptions:
    """How a model is distilled; the arguments of `distill`.

    Raises:
        ArgumentError: on a value that cannot work.
    """

    steps: int = 300
    learning_rate: float = 0.01
    output_weight: float = 1.0
    evaluate_every: int | None = None
    checkpoint_every: int | None = None
    patience: int = 4
    seed: int = 0

    def __post_init__(self):
        check_count("steps", self.steps, 1)
        for name in ("learning_rate", "output_weight"):
            value, least = getattr(self, name), "0 or more" if name == "output_weight" else "above 0"
            if not is_number(value) or value < 0 or (value == 0 and name == "learning_rate"):
                raise ArgumentError(f"{name} {value!r} must be a number, {least}")
        for name in ("evaluate_every", "checkpoint_every"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), 1)
        check_count("patience", self.patience, 1)
        check_seed(self.seed)

    @property
    def steps_between_evaluations(self) -> int:
        """As asked for, or a tenth of the run."""
        return self.evaluate_every or max(1, self.steps // EVALUATIONS)

    @property
    def steps_between_checkpoints(self) -> int:
        """As asked for, or as the evaluations."""
        return self.checkpoint_every or self.steps_between_evaluations


def check_precision(precision: object) -> None:
    """Raise ArgumentError unless a precision is one that a distillation can have; None leaves it to Accelerate."""
    if precision == "fp16":
        raise ArgumentError("mixed_precision 'fp16': small gradients become 0 in it; use 'bf16' or 'no'")
    if precision is not None:
        check_choice("mixed_precision", precision, PRECISIONS)
