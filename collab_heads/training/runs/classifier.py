"""Load, feed and evaluate the classifiers and regressions of `run_glue.py`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import evaluate
import numpy as np
import torch
from accelerate.utils import set_seed
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedModel,
)

from collab_heads.command.flags.arguments import trains
from collab_heads.command.flags.collaborative import wants_swap
from collab_heads.data.classification import (
    Labels,
    calibration_batches,
    check_head,
    configure,
    draw,
    encode,
    is_trained,
    predict,
    submission_name,
    submission_text,
)
from collab_heads.data.glue import Data
from collab_heads.data.metrics import (
    classification_metric,
    glue_metric,
    higher_is_better,
    primary,
    regression_metric,
)
from collab_heads.errors import ArgumentError, NonFiniteError
from collab_heads.model.loading import backend_options, load_or_explain
from collab_heads.training.runs.learner import Learner, check_flags_fit
from collab_heads.training.runs.session import Session
from collab_heads.training.runs.swap import phases
from collab_heads.training.storage.output import PREDICTIONS


@dataclass(frozen=True, eq=False, kw_only=True)
class Classifier(Learner):
    """A `Learner` of sequence classification or regression.

    Attributes:
        data: task and examples.
        labels: how the model numbers the task's classes.
        metric: of the task.
    """

    project = "glue"

    data: Data
    labels: Labels
    metric: evaluate.Metric

    @classmethod
    def load(cls, session: Session, data: Data) -> "Classifier":
        """Load config, tokenizer and model from the checkpoint or the flags, and encode the data.

        Raises:
            CollabHeadsError: if they cannot be loaded, or do not fit the task or the flags.
        """
        args, task = session.args, data.task
        source = str(session.checkpoint or args.model_name_or_path)
        remote = {"trust_remote_code": args.trust_remote_code}
        config = load_or_explain(AutoConfig, source, **remote)
        check_head(task, config, args.ignore_mismatched_sizes)
        has_head = is_trained(config) and config.num_labels == task.num_labels
        labels = configure(task, config)
        tokenizer_source = str(session.checkpoint or args.tokenizer_name or source)
        tokenizer = load_or_explain(AutoTokenizer, tokenizer_source, use_fast=not args.use_slow_tokenizer, **remote)
        set_seed(args.seed)  # a new head is random
        model = load_or_explain(
            AutoModelForSequenceClassification,
            source,
            config=config,
            dtype=torch.float32,  # a checkpoint in half precision would train in it, and lose small updates
            ignore_mismatched_sizes=args.ignore_mismatched_sizes,
            **backend_options(args),
            **remote,
        )
        if session.checkpoint is None:
            check_flags_fit(args, model)
        if tokenizer.pad_token is None:
            raise ArgumentError(
                f"the tokenizer of {tokenizer_source!r} has no padding token, so batches cannot be made"
            )
        if not (wants_swap(args) or has_head or trains(args)):
            raise ArgumentError(
                "--num_train_epochs 0 measures a trained model, and this one has no classification head"
            )
        length = min(args.max_length, tokenizer.model_max_length)
        multiple = 8 if session.accelerator.mixed_precision != "no" else None
        metrics = {"classification": classification_metric, "regression": regression_metric}
        return cls(
            session=session,
            task=task.name,
            model=model,
            tokenizer=tokenizer,
            encoded=encode(data, tokenizer, labels, length, args.pad_to_max_length),
            collate=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=multiple),
            phases=phases(args.swap if wants_swap(args) else None),
            is_trained=has_head,
            data=data,
            labels=labels,
            metric=metrics[task.metric]() if task.metric in metrics else glue_metric(task.metric),
        )

    @property
    def primary(self) -> str:
        """The metric that is quoted alone for the task."""
        return primary(self.data.task.metric)

    def weight(self, batch: Mapping[str, Tensor]) -> int:
        """Return the number of examples over which the loss of a batch is the mean."""
        return len(batch["labels"])

    def samples(self, count: int, *, labels: bool) -> Sequence[Mapping[str, Tensor]]:
        """Return batches of training examples of similar length, drawn with the run's seed."""
        drawn = draw(self.encoded["train"], count, self.session.args.seed)
        return calibration_batches(drawn, self.collate, labels=labels)

    def validation(self, *, generated: bool = False) -> Iterator[Mapping[str, Tensor]]:
        """Yield batches of the first validation split; `generated` changes nothing, since nothing is generated."""
        examples = self.encoded[self.data.named("validation")[0]]
        size = self.session.args.per_device_eval_batch_size
        for first in range(0, len(examples), size):
            yield self.collate([examples[i] for i in range(first, min(first + size, len(examples)))])

    def measure(self, model: PreTrainedModel) -> dict[str, float]:
        """Return the task's metrics on every validation split."""
        metrics: dict[str, float] = {}
        for split in self.data.named("validation"):
            outputs = self.outputs(split, model)
            predictions = outputs.argmax(-1) if self.data.task.labels else outputs
            references = self.data.splits[split]["label"]
            suffix = "_mm" if split.endswith("mismatched") else ""
            values = self.metric.compute(predictions=predictions, references=references)
            metrics |= {name + suffix: float(value) for name, value in values.items()}
        return metrics

    @property
    def metrics(self) -> Sequence[str]:
        """The metrics of the task for which a larger value is better."""
        return higher_is_better(self.data.task.metric)

    def evaluated(self, stage: str, step: int, metrics: Mapping[str, float], model: PreTrainedModel) -> None:
        """Do nothing: only the metrics of an evaluation are kept."""

    def outputs(self, split: str, model: PreTrainedModel) -> np.ndarray:
        """Return [N, C] logits or [N] scores of a split, with classes in the task's order."""
        size = self.session.args.per_device_eval_batch_size
        logits = predict(self.session.accelerator, model, self.encoded[split], self.collate, size)
        if not np.isfinite(logits).all():  # an argmax would hide it
            bad = int((~np.isfinite(logits)).any(axis=1).sum())
            raise NonFiniteError(f"{split}: the model's outputs for {bad} of {len(logits)} examples are NaN or inf")
        return self.labels.to_task(logits)

    def predict(self) -> dict[str, dict[str, float]]:
        """Write predictions of the test splits for the GLUE server; return {}, since there are no references."""
        outputs = {split: self.outputs(split, self.model) for split in self.data.named("test")}
        if outputs and (output := self.session.writes_to):
            texts = {submission_name(self.data.task, split): rows for split, rows in outputs.items()}
            for name, rows in texts.items():
                output.write(f"{PREDICTIONS}/{name}", submission_text(self.data.task, rows).encode("utf-8"))
            self.session.accelerator.print(f"predictions: {output.path / PREDICTIONS} ({', '.join(texts)})")
        return {}
