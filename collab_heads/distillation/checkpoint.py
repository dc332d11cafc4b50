"""The report of a distillation, and the checkpoints of a run."""

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from collab_heads.base.processes import LaunchedProcesses, agreed
from collab_heads.base.report import SAME_TEXTS, Report, text_table
from collab_heads.errors import OutputError
from collab_heads.files.atomic import write_file, writing
from collab_heads.files.checkpoint import check_holds, check_same_run, check_undamaged, new_checkpoint, read_progress
from collab_heads.files.folders import MANIFEST, alone_in, recover, retire
from collab_heads.running.threads import stored_threads


@dataclass(frozen=True)
class HeldOutError:
    """The error of the changed model on the held-out part, relative to the original.

    Attributes:
        hidden: squared error of the hidden states as a share of their variance over tokens, mean over layers.
        output: for a head that returns numbers, their squared error as a share of their variance; without a head, that
            of the mean of the last hidden state over the tokens of an example; for a head that returns distributions p,
            2 KL(p, q), mean over rows.
    """

    hidden: float
    output: float

    def total(self, output_weight: float) -> float:
        """Return the total error, which the distillation minimises."""
        return self.hidden + output_weight * self.output


@dataclass(frozen=True)
class DistillReport(Report):
    """The report of `distill`.

    Attributes:
        before, after: errors on the held-out part, of the model before the call and as it is now.
        best_step: the step after which the model was best, to which it was restored; 0 if it is unchanged.
        steps: number of steps taken; less than requested if the distillation stopped without further improvement.
        steps_asked: requested number of steps, for which the learning rate was planned.
        history: (step, error) of every evaluation.
        trained_parameters: number of parameters that were trained.
        batches, held_out_batches: number of batches to train on, and held out.
        tokens: tokens seen in training, without padding; for an encoder-decoder those of both sides.
        seconds: total time, including that of interrupted runs up to their last checkpoint.
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

    def lines(self) -> list[str]:
        rows = [
            (name, *(f"{math.sqrt(getattr(error, part)):.4g}" for error in (self.before, self.after)))
            for name, part in (("hidden states", "hidden"), ("output", "output"))
        ]  # roots, as `compress` reports the error of the output
        stopped = f" of {self.steps_asked}: no better for a while" if self.steps < self.steps_asked else ""
        last = (
            f"best after step {self.best_step}; {self.steps} steps{stopped}; {self.trained_parameters:,} parameters, "
            f"{self.tokens:,} tokens, {self.seconds:.1f} s; {SAME_TEXTS}"
        )
        return [text_table(["held-out error", "before", "after"], rows, last)]


NAME, STATE = "distillation", "state.safetensors"
logger = logging.getLogger(__name__)


@dataclass
class Progress:
    """The progress of a run.

    Attributes:
        step: number of steps taken.
        tokens: tokens seen in training.
        seconds: time so far.
        history: (step, error) of every evaluation, the first before any step.
        best_step: the step after which the model was best.
        best: name -> weights after that step.
        threads: torch's threads, of which the last bits depend.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    history: list[tuple[int, HeldOutError]] = field(default_factory=list)
    best_step: int = 0
    best: dict[str, Tensor] = field(default_factory=dict)
    threads: int = field(default_factory=torch.get_num_threads)

    def to_dict(self) -> dict:
        """Return the content of `progress.json`: everything but the best weights."""
        return {k: v for k, v in dataclasses.asdict(dataclasses.replace(self, best={})).items() if k != "best"}

    @classmethod
    def from_dict(cls, record: Mapping, best: dict[str, Tensor]) -> "Progress":
        """Restore the progress from what `to_dict` returned, and the best weights."""
        history = [(step, HeldOutError(**error)) for step, error in record["history"]]
        threads = stored_threads(record["threads"])
        return cls(**{**record, "history": history, "best": best, "threads": threads})


class Checkpoint:
    """The checkpoint of a run in its output folder; each one replaces the one before.

    Args:
        output_dir: the output folder; the checkpoint is its subfolder `distillation`.
        run: the description of the run, ready for JSON; a checkpoint of another run is refused.
    """

    def __init__(self, output_dir: str | Path, run: Mapping[str, Any]):
        self.folder, self.run = Path(output_dir) / NAME, run

    def save(self, progress: Progress, state: Mapping[str, Tensor]) -> None:
        """Write the checkpoint in place of the one before."""
        best = {f"best/{name}": tensor.cpu().contiguous() for name, tensor in progress.best.items()}
        content = save({**state, **best}, metadata={"format": "pt"})
        with new_checkpoint(self.folder, {"run": self.run, **progress.to_dict()}, len(content)) as partial:
            write_file(partial / STATE, content)

    def load(self) -> tuple[Progress, dict[str, Tensor]] | None:
        """Read the checkpoint.

        Returns:
            The progress and all stored tensors; None if there is no checkpoint.
        """
        recover(self.folder)
        if not self.folder.exists():
            return None
        try:
            record = read_progress(self.folder)
            check_holds(self.folder, (STATE, MANIFEST))
            check_undamaged(self.folder)
            check_same_run(self.folder, record.pop("run"), self.run)
            tensors = {name: tensor.clone() for name, tensor in load_file(self.folder / STATE).items()}
            best = {name.removeprefix("best/"): t for name, t in tensors.items() if name.startswith("best/")}
            return Progress.from_dict(record, best), tensors
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            reason = error if isinstance(error, OutputError) else f"{self.folder} cannot be resumed ({error!r})"
            way_out = f"to begin again delete {self.folder}, or give another output_dir"
            raise OutputError(f"{reason}: {way_out}") from error

    def retire(self) -> None:
        """Delete the checkpoint of a complete run, except files of others; log a warning if it cannot be deleted."""
        try:
            if self.folder.exists():
                retire(self.folder)
        except OutputError as error:
            logger.warning("the distillation is complete, but its checkpoint stays: %s", error)


@contextmanager
def resumed(
    processes: LaunchedProcesses, checkpoint: Checkpoint | None
) -> Iterator[tuple[Progress, dict[str, Tensor]] | None]:
    """Read the checkpoint of a run, keep other runs from writing it meanwhile, and delete it when the run is complete.

    The output folder is made if it does not exist.
    """
    if checkpoint is None:
        yield None
        return
    with ExitStack() as stack:

        def begin() -> tuple[Progress, dict[str, Tensor]] | None:
            with writing(checkpoint.folder):
                checkpoint.folder.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(alone_in(checkpoint.folder))
            return checkpoint.load()

        yield agreed(processes, begin)
        agreed(processes, checkpoint.retire)
