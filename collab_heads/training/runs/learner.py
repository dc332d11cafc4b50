"""The interface to what a run trains: a loaded model, its encoded examples, and how it is fed and evaluated."""

from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from datasets import Dataset
from torch import Tensor
from transformers import BaseImageProcessor, PreTrainedModel, PreTrainedTokenizerBase

from collab_heads.collaborative.score_terms import check_terms
from collab_heads.contract.registry import get_adapter
from collab_heads.errors import ArgumentError, CollabHeadsError
from collab_heads.model.open_layers import OpenLayers
from collab_heads.training.loop.steps import Loss, TrainingSteps, model_loss
from collab_heads.training.options.heads import trains
from collab_heads.training.runs.head_changes import check_gateable, check_mixable
from collab_heads.training.runs.session import Session
from collab_heads.training.runs.swap import Phase, check_compress_flags, check_swap_flags


@dataclass(frozen=True, eq=False, kw_only=True)
class Learner(ABC):
    """A model with all that it takes to train and to evaluate it; each script has a subclass of its own.

    Attributes:
        project: the name of the script's runs for experiment trackers.
        session: the flags, accelerator, output folder and checkpoint of the run.
        task: name of the task, for the results; None for the user's own files.
        model: on the CPU, in float32.
        tokenizer: of the model; None for a model that reads no texts.
        encoded: split -> encoded examples.
        collate: a list of encoded examples -> a batch, as the model takes it.
        phases: those of the run.
        is_trained: whether the model can be measured before training.
    """

    project: ClassVar[str]

    session: Session
    task: str | None
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    encoded: Mapping[str, Dataset]
    collate: Callable[[list], Mapping[str, Tensor]]
    phases: tuple[Phase, ...]
    is_trained: bool

    @abstractmethod
    def weight(self, batch: Mapping[str, Tensor]) -> int:
        """Return the number of examples (or tokens) over which the loss of a batch is the mean."""

    @abstractmethod
    def samples(self, count: int, *, labels: bool) -> Sequence[Mapping[str, Tensor]]:
        """Return batches of `count` training examples, each of similar length, drawn with the run's seed."""

    @abstractmethod
    def validation(self, *, generated: bool = False) -> Iterable[Mapping[str, Tensor]]:
        """Return batches of the validation examples with their labels, or with the model's last outputs as labels.

        Classifiers generate nothing, and return the same batches if `generated` is set.
        """

    @abstractmethod
    def measure(self, model: PreTrainedModel) -> dict[str, float]:
        """Return the metrics of a model on the validation splits."""

    @property
    @abstractmethod
    def metrics(self) -> Sequence[str]:
        """The names of the metrics of `measure` for which a larger value is better."""

    @abstractmethod
    def evaluated(self, stage: str, step: int, metrics: Mapping[str, float], model: PreTrainedModel) -> None:
        """Keep what an evaluation gave beside its metrics; called after `measure`, when these are recorded."""

    @abstractmethod
    def predict(self) -> Mapping[str, Mapping[str, float]]:
        """Write predictions of the test splits; return split -> metrics for those that have references."""

    @property
    @abstractmethod
    def primary(self) -> str:
        """The metric of `measure` that can end a training early; a larger value is better."""

    @property
    def preparer(self) -> PreTrainedTokenizerBase | BaseImageProcessor:
        """The tokenizer, which makes the inputs of the model and is stored beside it."""
        assert self.tokenizer is not None  # learners without a tokenizer override this
        return self.tokenizer

    @property
    def loss(self) -> Loss:
        """The training loss; by default the model's own."""
        return model_loss

    def steps(self, phase: int) -> TrainingSteps:
        """Return the optimizer steps of a phase, shuffled by seed and phase."""
        args = self.session.args
        return TrainingSteps.shuffled(args, self.encoded["train"], self.batches_per_step, args.seed + phase)

    @property
    def batches_per_step(self) -> int:
        """Micro-batches per optimizer step, over all processes."""
        return self.session.accelerator.num_processes * self.session.args.gradient_accumulation_steps

    def final_weights(self, phase: Phase) -> Iterator[str]:
        """Load other weights at the end of a training and yield a name for each, to evaluate it; by default none."""
        return iter(())

    def state(self) -> dict:
        """Return what a checkpoint needs to resume, beside the record of the run."""
        return {}

    def results(self) -> dict:
        """Return what the results hold beside the report of the run."""
        return {}

    def save_model(self, model: PreTrainedModel, folder: Path) -> None:
        """Save the model, and its tokenizer or image processor, for `from_pretrained`."""
        model.save_pretrained(folder)
        if (fast := getattr(self.preparer, "backend_tokenizer", None)) is not None:
            fast.no_truncation()  # calls leave their limits there, which a save would keep
            fast.no_padding()
        self.preparer.save_pretrained(folder)

    @property
    def end_tokens(self) -> list[int]:
        """The ids of the tokens that end sentences, which do not count when heads are measured."""
        ids = () if self.tokenizer is None else (self.tokenizer.eos_token_id, self.tokenizer.sep_token_id)
        return sorted({token for token in ids if token is not None})


def check_flags_fit(args: Namespace, model: PreTrainedModel, *, swaps: bool = True) -> None:
    """Check a loaded model against the flags, before hours of training.

    Args:
        args: the flags.
        model: not yet changed.
        swaps: whether `--collaborative` means a swap; a model from scratch is collaborative from the start.
    """
    if args.score_terms != "both":
        check_terms(OpenLayers.of(model, get_adapter(model)), args.score_terms)
    if args.compress_budget is not None:
        check_compress_flags(args, model)
    elif args.collaborative and swaps:
        check_swap_flags(args, model)
    check_gateable(args, model)
    check_mixable(args, model)


EVERYWHERE = (None, "sdpa", "eager")  # attention backends that need no check


def check_backend(learner: Learner) -> None:
    """Try a special attention backend: run one training example, with a backward pass if the run trains."""
    args, accelerator = learner.session.args, learner.session.accelerator
    name = args.attn_implementation
    if name in EVERYWHERE:
        return
    training = trains(args)
    model = learner.model.to(accelerator.device)
    batch = {key: tensor.to(model.device) for key, tensor in learner.collate([learner.encoded["train"][0]]).items()}
    model.train(training)
    try:
        with torch.set_grad_enabled(training), accelerator.autocast():
            loss = model(**batch).loss
        if training:
            loss.backward()
    except CollabHeadsError:
        raise
    except Exception as error:  # whatever torch and the backend raise
        reason = str(error).strip().split("\n")[0]
        raise ArgumentError(
            f"--attn_implementation {name} does not work for this run ({type(error).__name__}: {reason}): leave it "
            "out, or use sdpa or eager"
        ) from error
    finally:
        model.zero_grad()
        model.eval()
