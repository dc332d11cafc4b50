"""What a run trains: a loaded model, its encoded examples, and how it is fed and measured."""

from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from datasets import Dataset
from torch import Tensor
from transformers import BaseImageProcessor, PreTrainedModel, PreTrainedTokenizerBase

from collab_heads.collaborative.score_terms import check_terms
from collab_heads.training.loop.optimizer import Loss, model_loss
from collab_heads.training.loop.steps import TrainingSteps
from collab_heads.training.runs.head_changes import check_gateable, check_mixable
from collab_heads.training.runs.session import Session
from collab_heads.training.runs.swap import Phase, check_compress_flags, check_swap_flags


@dataclass(frozen=True, eq=False, kw_only=True)
class Learner(ABC):
    """A model with all that it takes to train and to measure it; each script has one of its own.

    Attributes:
        project: the name of the script's runs for experiment trackers.
        session: what the run begins with.
        task: what is learned, for the results; None for files of one's own.
        model: on the CPU, in float32.
        tokenizer: of the model; None for one that reads no texts.
        encoded: split -> encoded examples.
        collate: a list of encoded examples -> a batch, as the model takes it.
        phases: what the run goes through.
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
        """How many examples (or tokens) the mean loss of a batch is over."""

    @abstractmethod
    def samples(self, count: int, *, labels: bool) -> Sequence[Mapping[str, Tensor]]:
        """Batches of training examples of like length, drawn by the seed."""

    @abstractmethod
    def validation(self, *, generated: bool = False) -> Iterable[Mapping[str, Tensor]]:
        """Batches of the validation examples with their labels; `generated`: with the model's last output as labels.

        Classifiers generate nothing: they have the same batches either way.
        """

    @abstractmethod
    def measure(self, model: PreTrainedModel) -> dict[str, float]:
        """The metrics of a model on the validation splits."""

    @property
    @abstractmethod
    def metrics(self) -> Sequence[str]:
        """The names of what `measure` gives; a higher one is a better one."""

    @abstractmethod
    def evaluated(self, stage: str, step: int, metrics: Mapping[str, float], model: PreTrainedModel) -> None:
        """Keep what else there is to keep of an evaluation; called after `measure`, when its metrics are recorded."""

    @abstractmethod
    def predict(self) -> Mapping[str, Mapping[str, float]]:
        """Write predictions of the test splits, if there are any: split -> metrics, where there are references."""

    @property
    @abstractmethod
    def primary(self) -> str:
        """The metric, of those that `measure` gives, that ends a training early; more is better."""

    @property
    def preparer(self) -> PreTrainedTokenizerBase | BaseImageProcessor:
        """What makes the inputs of the model, and is stored beside it: the tokenizer."""
        assert self.tokenizer is not None  # a learner without one says what it has instead
        return self.tokenizer

    @property
    def loss(self) -> Loss:
        """The training loss: the model's own."""
        return model_loss

    def steps(self, phase: int) -> TrainingSteps:
        """The optimizer steps of a phase."""
        args = self.session.args
        return TrainingSteps.shuffled(args, self.encoded["train"], self.batches_per_step, args.seed + phase)

    @property
    def batches_per_step(self) -> int:
        """Micro-batches per optimizer step, over all processes."""
        return self.session.accelerator.num_processes * self.session.args.gradient_accumulation_steps

    def final_weights(self, phase: Phase) -> Iterator[str]:
        """Put other weights into the model at the end of a training, and name them; each is evaluated: none."""
        return iter(())

    def state(self) -> dict:
        """What a checkpoint must know to resume, beside what the run itself records."""
        return {}

    def results(self) -> dict:
        """What the results hold, beside what the run itself reports."""
        return {}

    def save_model(self, model: PreTrainedModel, folder: Path) -> None:
        """Write what `from_pretrained` loads."""
        model.save_pretrained(folder)
        self.preparer.save_pretrained(folder)

    @property
    def end_tokens(self) -> list[int]:
        """The tokens that end sentences, which do not count where heads are measured."""
        ids = () if self.tokenizer is None else (self.tokenizer.eos_token_id, self.tokenizer.sep_token_id)
        return sorted({token for token in ids if token is not None})


def check_flags_fit(args: Namespace, model: PreTrainedModel, *, swaps: bool = True) -> None:
    """Check a loaded model against the flags, before hours of training.

    Args:
        args: the flags.
        model: not yet changed.
        swaps: whether `--collaborative` means a swap; a model from scratch is collaborative from the start.

    Raises:
        CollabHeadsError: if it lacks the sites or heads that they name, or cannot be changed as they say.
    """
    if args.score_terms != "both":
        check_terms(model, args.score_terms)
    if args.compress_budget is not None:
        check_compress_flags(args, model)
    elif args.collaborative and swaps:
        check_swap_flags(args, model)
    check_gateable(args, model)
    check_mixable(args, model)
