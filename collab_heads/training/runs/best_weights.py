"""Load the weights that a training ends with: the best ones, which are kept, or the mean over its last checkpoints."""

import itertools
import logging
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from collab_heads.errors import ArgumentError, OutputError
from collab_heads.files.checkpoint import check_same_run
from collab_heads.files.folders import MANIFEST, digest
from collab_heads.training.loop.steps import TrainingSteps
from collab_heads.training.runs.session import Session
from collab_heads.training.storage.checkpoint import check_whole, load_progress, weight_bytes
from collab_heads.training.storage.output import BEST

logger = logging.getLogger(__name__)


class BestWeights:
    """The weights of the evaluation with the best BLEU, in a folder beside the checkpoints: --load_best_model_at_end.

    Each training has a folder of its own: a run that is resumed in the first one still needs its weights, which the
    second has trained on and perhaps made narrower.

    Args:
        session: of the run.

    Attributes:
        evaluation: the best one so far, a dict of "bleu", "stage" and "step"; None before the first.
        manifest: the SHA-256 of the manifest of its folder; None before the first.
    """

    def __init__(self, session: Session):
        self.session = session
        self.evaluation: dict | None = session.progress.get("best")
        self.manifest: str | None = session.progress.get("best_manifest")

    def folder(self, stage: str) -> Path:
        """Return the folder of the weights of a training; `--load_best_model_at_end` needs an output folder."""
        return Path(self.session.args.output_dir) / BEST[stage]

    def check(self) -> None:
        """Raise OutputError if a resumed run lacks the best weights, or they are damaged."""
        if self.evaluation is None:
            return
        if self.evaluation["stage"] not in BEST:
            raise OutputError(f"the checkpoint is damaged: {self.evaluation['stage']!r:.80} is no training of a run")
        folder = self.folder(self.evaluation["stage"])
        if not (folder / "config.json").is_file():
            raise OutputError(f"--load_best_model_at_end: {folder} is gone; {self.evaluation} was the best")
        check_whole(folder)

    def keep(
        self, stage: str, step: int, bleu: float, model: PreTrainedModel, save: Callable[[PreTrainedModel, Path], None]
    ) -> None:
        """Keep the weights of an evaluation if they are the best of their training; all processes must call it."""
        best = self.evaluation["bleu"] if self.evaluation and self.evaluation["stage"] == stage else -1.0
        if not (self.session.args.load_best_model_at_end and stage.startswith("fine_tuned") and bleu > best):
            return
        self.evaluation = {"bleu": bleu, "stage": stage, "step": step}
        if output := self.session.writes_to:
            output.write_folder(BEST[stage], lambda folder: save(model, folder), weight_bytes(model))
            self.manifest = str(digest(self.folder(stage) / MANIFEST)["sha256"])
        self.session.accelerator.wait_for_everyone()

    def load(self, stage: str, model: PreTrainedModel) -> bool:
        """Load the best weights of a training into the model, if the flags ask for it; return True if this was done."""
        if not (self.session.args.load_best_model_at_end and self.evaluation and self.evaluation["stage"] == stage):
            return False
        folder = self.folder(stage)
        self.warn_if_replaced(folder)
        load_weights(model, [folder])
        return True

    def warn_if_replaced(self, folder: Path) -> None:
        """Log a warning if a killed run replaced the best weights and this run did not reach them again."""
        if self.session.accelerator.is_main_process and self.manifest is not None:
            if digest(folder / MANIFEST)["sha256"] != self.manifest:
                logger.warning(
                    "%s is not of the evaluation %s: a run that was killed has replaced it, and this one, with other "
                    "rounding, did not come by these weights again",
                    folder,
                    self.evaluation,
                )


def check_enough_checkpoints(count: int, every: int | str, steps: TrainingSteps) -> None:
    """Raise ArgumentError if a training writes fewer checkpoints than are to be averaged.

    Args:
        count: number of checkpoints to average.
        every: optimizer steps between checkpoints, or "epoch".
        steps: of the training.
    """
    written = steps.epochs_begun if isinstance(every, str) else steps.total // every
    if written < count:
        raise ArgumentError(
            f"--average_checkpoints {count}: training for {steps.total} steps writes {written} checkpoints: lower "
            "--checkpointing_steps"
        )


def last_checkpoints(
    args: Namespace, phase: int, steps: TrainingSteps, run: Mapping, until: int | None = None
) -> list[Path]:
    """Return the checkpoints that --average_checkpoints asks for: the last ones that a training writes, oldest first.

    Args:
        args: the flags.
        phase: number of the training.
        steps: of the training.
        run: the description of the run.
        until: only those that are written after so many steps; None for all.

    Raises:
        OutputError: if one is missing, damaged, or of another run.
    """
    every, found = args.checkpointing_steps, []
    if isinstance(every, int):
        ends = {f"step_{phase}_{step}": step for step in range(every, steps.total + 1, every)}
    else:
        lengths = itertools.accumulate(len(steps.of_epoch(epoch)) for epoch in range(steps.epochs_begun))
        ends = {f"epoch_{phase}_{epoch}": min(step, steps.total) for epoch, step in enumerate(lengths, start=1)}
    for name in [*ends][-args.average_checkpoints :]:
        folder = Path(args.output_dir) / name
        if until is None or ends[name] <= until:
            try:
                check_same_run(folder, load_progress(folder)["run"], run)
                check_whole(folder)
            except OutputError as error:
                raise OutputError(f"--average_checkpoints {args.average_checkpoints}: {error}") from error
            found.append(folder)
    return found


@torch.no_grad()
def load_weights(model: PreTrainedModel, folders: Sequence[Path]) -> None:
    """Set a model's floating-point weights to the mean over stored models of the same shape, computed in float64."""
    for folder in folders:
        check_whole(folder)
    states = [type(model).from_pretrained(folder).state_dict() for folder in folders]
    own = model.state_dict()
    for folder, state in zip(folders, states, strict=True):
        for name, tensor in own.items():
            if name not in state or state[name].shape != tensor.shape:
                raise OutputError(f"{folder} holds another model: its {name} is missing, or has another shape")
    for name, tensor in own.items():
        if tensor.is_floating_point():
            tensor.copy_(sum(state[name].double() for state in states) / len(states))
