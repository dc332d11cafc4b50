"""What a distillation did: for people (`str`) and for machines (`to_dict`)."""

import dataclasses
from dataclasses import dataclass

from collab_heads.text import text_table


@dataclass(frozen=True)
class HeldOutError:
    """How far the changed model is from the original on the part that is held out.

    Attributes:
        hidden: squared error of the hidden states as a share of their variance over tokens, mean over layers.
        output: the same of the numbers that a head gives, or, without one, of the mean of the last hidden state over
            the tokens of an example; for a head that gives distributions p, 2 KL(p, q), mean over rows.
    """

    hidden: float
    output: float

    def total(self, output_weight: float) -> float:
        """What the distillation makes small."""
        return self.hidden + output_weight * self.output


@dataclass(frozen=True)
class DistillReport:
    """What `distill` did.

    Attributes:
        before, after: errors on the part that is held out, of the model as it came and as it is now.
        best_step: after which the model was best, and to which it was put back; 0 if it is as it came.
        steps: taken; fewer than asked for if it stopped because nothing improved any more.
        steps_asked: for how many steps the learning rate was planned.
        history: (step, error) of every evaluation.
        trained_parameters: how many numbers were trained.
        batches, held_out_batches: to train on, and held out.
        tokens: seen in training, without padding; of an encoder-decoder those of both sides.
        seconds: in all, also those of runs that were interrupted.
    """

    before: HeldOutError
    after: HeldOutError
    best_step: int
    steps: int
    steps_asked: int
    history: tuple[tuple[int, HeldOutError], ...]
    trained_parameters: int
    batches: int
    held_out_batches: int
    tokens: int
    seconds: float

    def to_dict(self) -> dict:
        """All numbers, ready for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        rows = [
            (name, f"{getattr(self.before, part):.4g}", f"{getattr(self.after, part):.4g}")
            for name, part in (("hidden states", "hidden"), ("output", "output"))
        ]
        stopped = f" of {self.steps_asked}: no better for a while" if self.steps < self.steps_asked else ""
        last = (
            f"best after step {self.best_step}; {self.steps} steps{stopped}; {self.trained_parameters:,} parameters, "
            f"{self.tokens:,} tokens, {self.seconds:.1f} s"
        )
        return text_table(["held-out error", "before", "after"], rows, last)
