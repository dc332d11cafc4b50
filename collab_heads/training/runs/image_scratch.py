"""Image classifiers from scratch: a config from a few sizes, and what scales images to them."""

from argparse import Namespace

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    BaseImageProcessor,
    PretrainedConfig,
    PreTrainedModel,
)

from collab_heads.checks import check_choice
from collab_heads.collaborative.scratch import collaborative_config
from collab_heads.errors import ArgumentError
from collab_heads.model.loading import backend_options, load_or_explain
from collab_heads.registry import image_blueprints
from collab_heads.training.data.classification import Labels, configure
from collab_heads.training.data.glue_tasks import Task
from collab_heads.training.flags.image_arguments import sizes_of
from collab_heads.training.runs.machine import check_memory


def untrained(args: Namespace, task: Task) -> tuple[PreTrainedModel, BaseImageProcessor, Labels]:
    """Make the model that the flags describe.

    Args:
        args: from `add_image_scratch_arguments`, and the collaborative ones.
        task: its classes.

    Returns:
        The model, what scales images to its size and pixels to -1 … 1, and how it numbers the classes.

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
    """A config of the sizes that the flags give, under the names that the model type has for them."""
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
