"""Load the weights that a training ends with: the best ones, which are kept, or the mean over its last checkpoints."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from collab_heads.errors import ArgumentError, OutputError
from collab_heads.files.checkpoint import check_undamaged
from collab_heads.files.folders import MANIFEST, digest
from collab_heads.training.loop.steps import TrainingSteps
from collab_heads.training.runs.session import Session
from collab_heads.training.storage.checkpoint import checkpoints, load_progress, weight_bytes
from collab_heads.training.storage.output import BEST

logger = logging.getLogger(__name__)


class BestWeights:
    """The weights of the evaluation with the best BLEU, in a folder beside the checkpoints: --load_best_model_at_end.

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

    @property
    def folder(self) -> Path:
        """The folder of the weights; `--load_best_model_at_end` needs an output folder."""
        return Path(self.session.args.output_dir) / BEST

    def check(self) -> None:
        """Raise OutputError if a resumed run lacks the best weights, or they are damaged."""
        if self.evaluation is None:
            return
        if not (self.folder / "config.json").is_file():
            raise OutputError(f"--load_best_model_at_end: {self.folder} is gone; {self.evaluation} was the best")
        check_undamaged(self.folder)

    def keep(
        self, stage: str, step: int, bleu: float, model: PreTrainedModel, save: Callable[[PreTrainedModel, Path], None]
    ) -> None:
        """Keep the weights of an evaluation if they are the best of their training; all processes must call it."""
        best = self.evaluation["bleu"] if self.evaluation and self.evaluation["stage"] == stage else -1.0
        if not (self.session.args.load_best_model_at_end and stage.startswith("fine_tuned") and bleu > best):
            return
        self.evaluation = {"bleu": bleu, "stage": stage, "step": step}
        if output := self.session.writes_to:
            output.write_folder(BEST, lambda folder: save(model, folder), weight_bytes(model))
            self.manifest = str(digest(self.folder / MANIFEST)["sha256"])
        self.session.accelerator.wait_for_everyone()

    def load(self, stage: str, model: PreTrainedModel) -> bool:
        """Load the best weights of a training into the model, if the flags ask for it; return True if this was done."""
        if not (self.session.args.load_best_model_at_end and self.evaluation and self.evaluation["stage"] == stage):
            return False
        self.warn_if_replaced()
        load_weights(model, [self.folder])
        return True

    def warn_if_replaced(self) -> None:
        """Log a warning if a killed run replaced the best weights and this run did not reach them again."""
        if self.session.accelerator.is_main_process and self.manifest is not None:
            if digest(self.folder / MANIFEST)["sha256"] != self.manifest:
                logger.warning(
                    "%s is not of the evaluation %s: a run that was killed has replaced it, and this one, with other "
                    "rounding, did not come by these weights again",
                    self.folder,
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


def last_checkpoints(output_dir: Path, phase: int, count: int) -> list[Path]:
    """Return the newest `count` checkpoints of a phase, oldest first."""
    newest = [folder for folder in checkpoints(output_dir) if load_progress(folder)["phase"] == phase][-count:]
    if len(newest) < count:
        raise OutputError(
            f"--average_checkpoints {count}: {output_dir} holds {len(newest)} of this phase: lower "
            "--checkpointing_steps"
        )
    return newest


@torch.no_grad()
def load_weights(model: PreTrainedModel, folders: Sequence[Path]) -> None:
    """Set a model's floating-point weights to the mean over stored models of the same shape, computed in float64."""
    for folder in folders:
        check_undamaged(folder)
    states = [type(model).from_pretrained(folder).state_dict() for folder in folders]
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(sum(state[name].double() for state in states) / len(states))
