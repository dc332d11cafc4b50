"""Load image classifiers, or make them from a few sizes; feed and evaluate them."""

import inspect
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from accelerate.utils import set_seed
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    BaseImageProcessor,
    PretrainedConfig,
    PreTrainedModel,
)

from collab_heads.base.checks import check_choice
from collab_heads.collaborative.scratch import collaborative_config
from collab_heads.command.flags.arguments import trains
from collab_heads.command.flags.collaborative import wants_swap
from collab_heads.command.flags.scratch import from_scratch, sizes_of
from collab_heads.contract.registry import image_blueprints
from collab_heads.data.classification import Labels, check_head, configure, is_trained
from collab_heads.data.glue import Data
from collab_heads.data.glue_tasks import Task
from collab_heads.data.images import FILE, CollateImages, Mirrored, encode_images
from collab_heads.data.metrics import classification_metric
from collab_heads.errors import ArgumentError
from collab_heads.model.loading import backend_options, load_or_explain
from collab_heads.training.loop.optimizer import Loss, model_loss
from collab_heads.training.runs.classifier import Classifier
from collab_heads.training.runs.learner import check_flags_fit
from collab_heads.training.runs.machine import check_memory
from collab_heads.training.runs.session import Session
from collab_heads.training.runs.swap import phases
from collab_heads.training.storage.output import PREDICTIONS


def untrained(args: Namespace, task: Task) -> tuple[PreTrainedModel, BaseImageProcessor, Labels]:
    """Make the model that the flags describe.

    Args:
        args: from `add_image_scratch_arguments`, and the collaborative ones.
        task: gives the classes.

    Returns:
        The model, its image processor (which scales pixels to -1 … 1), and its numbering of the classes.

    Raises:
        CollabHeadsError: on sizes that do not fit each other.
    """
    config = load_or_explain(AutoConfig, args.config_name) if args.config_name else new_config(args)
    check_choice(f"model type (of {args.config_name})", config.model_type, image_blueprints())
    config.architectures = []  # a named config may be of a trained model, whose classes are not these
    labels = configure(task, config)
    if args.collaborative:
        config = collaborative_config(
            config,
            dim_shared_query_key=args.dim_shared_query_key,
            dim_value=args.dim_value,
            kind=args.kind,
            mixing_init=args.mixing_init,
            sites=args.sites,
        )
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
    wanted = sizes_of(args)
    width, inner, layers = wanted["d_model"], wanted["d_ff"], wanted["num_layers"]
    names = image_blueprints()[args.model_type].sizes
    if "d_ff_ratio" in names:
        if inner % width:
            raise ArgumentError(f"--d_ff {inner} is not a multiple of --d_model {width}, as {args.model_type} needs it")
        wanted["d_ff_ratio"] = inner // width
    patches = (wanted["image_size"] // wanted["patch_size"]) ** 2
    parameters = layers * width * (4 * width + 2 * inner) + width * (patches + 3 * wanted["patch_size"] ** 2)
    shown = ", ".join(f"{name} {value}" for name, value in wanted.items() if name != "dropout")
    check_memory(int(parameters), shown, args.cpu)
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
        """Load or make the model, and check that it takes the images.

        Raises:
            CollabHeadsError: if it cannot be loaded or made, or does not fit the images, their classes or the flags.
        """
        args, scratch = session.args, from_scratch(session.args)
        set_seed(args.seed)  # a new model, or a new head, is random
        if session.checkpoint is None and scratch:
            model, processor, labels = untrained(args, data.task)
            has_head = False
        else:
            model, processor, labels, has_head = load_trained(args, data.task, session.checkpoint)
        swaps = wants_swap(args) and not (args.collaborative and scratch)  # else collaborative from the start
        if session.checkpoint is None:
            check_flags_fit(args, model, swaps=swaps)
        if not (wants_swap(args) or has_head or trains(args)):
            raise ArgumentError("--num_train_epochs 0 measures a trained model, and this one has no head for classes")
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
        """Run one training image through the model, before anything is written.

        Raises:
            ArgumentError: if the model cannot take it, for example if the image processor makes another size.
        """
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


def load_trained(
    args: Namespace, task: Task, checkpoint: Path | None
) -> tuple[PreTrainedModel, BaseImageProcessor, Labels, bool]:
    """Load model and image processor from a checkpoint, or from where the flags say.

    Returns:
        The model, its image processor, its numbering of the classes, and whether it came with a head for them.
    """
    source, remote = str(checkpoint or args.model_name_or_path), {"trust_remote_code": args.trust_remote_code}
    config = load_or_explain(AutoConfig, source, **remote)
    check_head(task, config, args.ignore_mismatched_sizes)
    has_head = is_trained(config) and config.num_labels == task.num_labels
    labels = configure(task, config)
    model = load_or_explain(
        AutoModelForImageClassification,
        source,
        config=config,
        dtype=torch.float32,  # a checkpoint in half precision would train in it, and lose small updates
        ignore_mismatched_sizes=args.ignore_mismatched_sizes,
        **backend_options(args),
        **remote,
    )
    if "labels" not in inspect.signature(type(model).forward).parameters:
        raise ArgumentError(
            f"{source} is a {type(model).__name__}, which only predicts: take a checkpoint without a teacher's head, "
            "such as facebook/deit-small-patch16-224"
        )
    name = str(checkpoint or args.image_processor_name or source)
    processor = load_or_explain(AutoImageProcessor, name, backend="pil", **remote)  # the same with torchvision or not
    return model, processor, labels, has_head
