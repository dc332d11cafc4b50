"""Run the steps of a distillation, and keep the best weights."""

import time

from torch import Tensor

from collab_heads.base.progress import progress_bar
from collab_heads.distillation.checkpoint import Checkpoint, Progress
from collab_heads.distillation.gap import Gap
from collab_heads.distillation.optimizer import MasterWeights
from collab_heads.distillation.processes import DistillOptions
from collab_heads.model.batches import Part


class Training:
    """The training loop: steps on one part of the batches, evaluations on the other.

    Args:
        gap: the gap to minimise.
        weights: the trained parameters and their optimizer.
        options: the options of the distillation.
        in_turn: the batch of every step, with its number.
        held_out: the batches to evaluate on, with their numbers.
        checkpoint: where to save; None for no checkpoints.
    """

    def __init__(
        self,
        gap: Gap,
        weights: MasterWeights,
        options: DistillOptions,
        in_turn: Part,
        held_out: Part,
        checkpoint: Checkpoint | None,
    ):
        self.gap, self.weights, self.options = gap, weights, options
        self.in_turn, self.held_out, self.checkpoint = in_turn, held_out, checkpoint

    def run(self, saved: tuple[Progress, dict[str, Tensor]] | None, started: float) -> Progress:
        """Train to the end, from the beginning or from a checkpoint.

        Args:
            saved: the content of a checkpoint; None to start at the beginning.
            started: `time.perf_counter()` at the start of the call.
        """
        progress, state = saved if saved is not None else (Progress(), {})
        if state:
            self.weights.load(state)
        else:
            self.evaluate(progress)
        started -= progress.seconds
        with progress_bar(total=self.options.steps, initial=progress.step, desc="distilling") as bar:
            while progress.step < self.options.steps and not self.is_stale(progress):
                self.take_step(progress)
                bar.update()
                if self.is_due(progress, self.options.steps_between_evaluations):
                    self.evaluate(progress)
                    bar.show(f"held-out error {self.total(-1, progress):.3g}")
                progress.seconds = time.perf_counter() - started
                if self.checkpoint is not None and progress.step % self.options.steps_between_checkpoints == 0:
                    self.save(progress)
        progress.seconds = time.perf_counter() - started
        return progress

    def take_step(self, progress: Progress) -> None:
        _, tokens = self.gap.backward(*self.in_turn[progress.step])
        self.weights.take_step(progress.step, self.gap.processes)
        progress.step += 1
        progress.tokens += tokens

    def is_due(self, progress: Progress, every: int) -> bool:
        """Return True after `every` steps, and after the last step."""
        return progress.step % every == 0 or progress.step == self.options.steps

    def evaluate(self, progress: Progress) -> None:
        """Measure the held-out part, and keep the weights if they are the best so far."""
        progress.history.append((progress.step, self.gap.error(self.held_out)))
        totals = [self.total(index, progress) for index in range(len(progress.history))]
        if len(totals) == 1 or totals[-1] < min(totals[:-1]):
            progress.best_step = progress.step
            progress.best = {name: p.detach().clone() for name, p in self.weights.trained.items()}

    def total(self, index: int, progress: Progress) -> float:
        """Return the total held-out error of an evaluation, given by its index in the history."""
        return progress.history[index][1].total(self.options.output_weight)

    def is_stale(self, progress: Progress) -> bool:
        """Return True if the last `patience` evaluations brought no improvement.

        The error before training does not count: the first steps, whose learning rate is highest, often raise the error
        of a model that was fitted in closed form, and later ones bring it below where it began.
        """
        totals = [self.total(index, progress) for index in range(1, len(progress.history))]
        return bool(totals) and len(totals) - 1 - totals.index(min(totals)) >= self.options.patience

    def save(self, progress: Progress) -> None:
        """Write a checkpoint on the first process; an error is raised on all."""
        checkpoint, processes = self.checkpoint, self.gap.processes
        if checkpoint is not None:
            processes.first_says(lambda: checkpoint.save(progress, self.weights.state()))
