"""Load, feed and evaluate classifiers: of texts (and regressions), and of images, which can also be made from sizes."""

import inspect
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import evaluate
import numpy as np
import torch
import transformers
from accelerate.utils import set_seed
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BaseImageProcessor,
    DataCollatorWithPadding,
    PretrainedConfig,
    PreTrainedModel,
)

from collab_heads.base.checks import check_choice
from collab_heads.collaborative.scratch import collaborative_config
from collab_heads.contract.registry import image_blueprints
from collab_heads.data.batches import padding_multiple, padding_of, with_padding
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
from collab_heads.data.glue_tasks import Task
from collab_heads.data.images import FILE, CollateImages, Mirrored, encode_images
from collab_heads.data.metrics import (
    classification_metric,
    glue_metric,
    higher_is_better,
    primary,
    regression_metric,
)
from collab_heads.errors import ArgumentError, NonFiniteError
from collab_heads.running.batches import longest_input
from collab_heads.saving.loading import backend_options, load_or_explain
from collab_heads.training.loop.steps import Loss, model_loss
from collab_heads.training.options.changes import wants_swap
from collab_heads.training.options.heads import trains
from collab_heads.training.options.tasks import COLLABORATIVE_FROM_SCRATCH, IMAGE_SIZES, from_scratch, sizes_of
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
        """Load config, tokenizer and model from the checkpoint or the flags, and encode the data."""
        args, task = session.args, data.task
        source = str(session.checkpoint or args.model_name_or_path)
        model, labels, has_head = load_trained(AutoModelForSequenceClassification, args, task, source)
        tokenizer_source = str(session.checkpoint or args.tokenizer_name or source)
        options = {"use_fast": not args.use_slow_tokenizer, "trust_remote_code": args.trust_remote_code}
        tokenizer = load_or_explain(AutoTokenizer, tokenizer_source, **options)
        if session.checkpoint is None:
            check_flags_fit(args, model)
        tokenizer = with_padding(tokenizer, model.config)
        if padding_of(model.config) is None:  # by which decoders find the last token of a text
            model.config.get_text_config(decoder=True).pad_token_id = tokenizer.pad_token_id
        if not (wants_swap(args) or has_head or trains(args)):
            raise ArgumentError(
                "a run of 0 epochs or steps measures a trained model, and this one has no classification head"
            )
        limit = longest_input(model, tokenizer)
        length = min(args.max_length, limit or args.max_length)
        multiple = padding_multiple(session.accelerator.mixed_precision, length, limit)
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


def untrained(args: Namespace, task: Task) -> tuple[PreTrainedModel, BaseImageProcessor, Labels]:
    """Make the model that the flags describe.

    Args:
        args: the flags of a model from scratch, and the collaborative ones.
        task: gives the classes.

    Returns:
        The model, its image processor (which scales pixels to -1 … 1), and its numbering of the classes.
    """
    config = load_or_explain(AutoConfig, args.config_name) if args.config_name else new_config(args)
    check_choice(f"model type (of {args.config_name})", config.model_type, image_blueprints())
    config.architectures = []  # a named config may be of a trained model, whose classes are not these
    labels = configure(task, config)
    if args.collaborative:
        config = collaborative_config(config, **{name: getattr(args, name) for name in COLLABORATIVE_FROM_SCRATCH})
    try:
        model = AutoModelForImageClassification.from_config(config, dtype=torch.float32, **backend_options(args))
    except (ValueError, ImportError) as error:  # such as a width that is not a multiple of the heads
        raise ArgumentError(f"no {config.model_type} of these sizes that classifies images: {error}") from error
    sides = config.image_size
    height, width = (sides, sides) if isinstance(sides, int) else sides
    middle = [0.5] * config.num_channels
    make_processor = getattr(transformers, image_blueprints()[config.model_type].processor)
    size = {"height": height, "width": width}
    return model, make_processor(size=size, image_mean=middle, image_std=middle), labels


def new_config(args: Namespace) -> PretrainedConfig:
    """Return a config with the sizes that the flags give, under the names that the model type uses."""
    wanted = sizes_of(args, IMAGE_SIZES)
    width, inner = wanted["d_model"], wanted["d_ff"]
    names = image_blueprints()[args.model_type].sizes
    if "d_ff_ratio" in names:
        if inner % width:
            raise ArgumentError(f"--d_ff {inner} is not a multiple of --d_model {width}, as {args.model_type} needs it")
        wanted["d_ff_ratio"] = inner // width
    return AutoConfig.for_model(
        args.model_type, **{in_config: wanted[name] for name, its in names.items() for in_config in its}
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageClassifier(Classifier):
    """A `Learner` of image classification: a classifier whose examples are files of images."""

    project = "images"

    tokenizer: None = None
    collate: CollateImages

    @classmethod
    def load(cls, session: Session, data: Data) -> "ImageClassifier":
        """Load or make the model, and check that it takes the images."""
        args, scratch = session.args, from_scratch(session.args)
        set_seed(args.seed)  # a new model, or a new head, is random
        if session.checkpoint is None and scratch:
            model, processor, labels = untrained(args, data.task)
            has_head = False
        else:
            source = str(session.checkpoint or args.model_name_or_path)
            model, labels, has_head = load_trained(AutoModelForImageClassification, args, data.task, source)
            processor = load_processor(args, model, session.checkpoint, source)
        swaps = wants_swap(args) and not (args.collaborative and scratch)  # else collaborative from the start
        if session.checkpoint is None:
            check_flags_fit(args, model, swaps=swaps)
        if not (wants_swap(args) or has_head or trains(args)):
            raise ArgumentError(
                "a run of 0 epochs or steps measures a trained model, and this one has no head for classes"
            )
        classifier = cls(
            session=session,
            task=data.task.name,
            model=model,
            encoded=encode_images(data, labels),
            collate=CollateImages(processor),
            phases=phases(args.swap if swaps else None),
            is_trained=has_head,
            data=data,
            labels=labels,
            metric=classification_metric(),
        )
        classifier.check_takes_images()
        return classifier

    @property
    def preparer(self) -> BaseImageProcessor:
        """The image processor, which makes the inputs of the model and is stored beside it."""
        return self.collate.processor

    @property
    def loss(self) -> Loss:
        """The model's own loss, on images that are mirrored at random if the flags ask for it."""
        probability = self.session.args.horizontal_flip
        return Mirrored(probability) if probability else model_loss

    def check_takes_images(self) -> None:
        """Run one training image through the model, before anything is written."""
        example = self.encoded["train"][0]
        batch = self.collate([example])
        try:
            with torch.no_grad():
                self.model.eval()(**batch)
        except (ValueError, RuntimeError) as error:
            shape = " x ".join(map(str, batch["pixel_values"].shape[1:]))
            raise ArgumentError(
                f"the model cannot take {example[FILE]}, which its image processor makes {shape}: {error}"
            ) from error

    def predict(self) -> dict[str, dict[str, float]]:
        """Predict the classes of the test images, write them, and return the metrics."""
        scores = {}
        for split in self.data.named("test"):
            chosen = self.outputs(split, self.model).argmax(-1)
            columns, names = self.data.splits[split], self.data.task.labels
            found = self.metric.compute(predictions=chosen, references=columns["label"])
            scores[split] = {name: float(value) for name, value in found.items()}
            if output := self.session.writes_to:
                lines = [f"{file}\t{names[number]}" for file, number in zip(columns[FILE], chosen, strict=True)]
                output.write(f"{PREDICTIONS}/{split}.tsv", "\n".join(["file\tclass", *lines, ""]).encode("utf-8"))
        return scores


def load_trained(kind: Any, args: Namespace, task: Task, source: str) -> tuple[PreTrainedModel, Labels, bool]:
    """Load a classifier from a checkpoint, or from where the flags say.

    Returns:
        The model, its numbering of the classes, and whether it came with a head for them.
    """
    remote = {"trust_remote_code": args.trust_remote_code}
    config = load_or_explain(AutoConfig, source, **remote)
    check_head(task, config, args.ignore_mismatched_sizes)
    has_head = is_trained(config) and config.num_labels == task.num_labels
    labels = configure(task, config)
    set_seed(args.seed)  # a new head is random
    model = load_or_explain(
        kind,
        source,
        config=config,
        dtype=torch.float32,  # a checkpoint in half precision would train in it, and lose small updates
        ignore_mismatched_sizes=args.ignore_mismatched_sizes,
        **backend_options(args),
        **remote,
    )
    return model, labels, has_head


def load_processor(args: Namespace, model: PreTrainedModel, checkpoint: Path | None, source: str) -> BaseImageProcessor:
    if "labels" not in inspect.signature(type(model).forward).parameters:
        raise ArgumentError(
            f"{source} is a {type(model).__name__}, which only predicts: take a checkpoint without a teacher's head, "
            "such as facebook/deit-small-patch16-224"
        )
    name = str(checkpoint or args.image_processor_name or source)
    remote = {"trust_remote_code": args.trust_remote_code}
    return load_or_explain(AutoImageProcessor, name, backend="pil", **remote)  # the same with torchvision or not
