"""The flags of a model from scratch, of any kind, and their checks."""

import argparse
from collections.abc import Collection, Mapping

from collab_heads.base.checks import check_choice
from collab_heads.command.flags.parsing import count_from_1, not_negative, path
from collab_heads.errors import ArgumentError
from collab_heads.sites.state import MIXING_INITS


def add_sizes(
    parser: argparse.ArgumentParser, example: str, sizes: Mapping[str, str], defaults: Mapping[str, float]
) -> argparse._ArgumentGroup:
    """Add the flags of a model from scratch.

    Args:
        parser: takes the flags.
        example: model types to name in the help.
        sizes: name of a whole number -> its description.
        defaults: the default of each size, and of the dropout.

    Returns:
        The group of these flags, so that others can be added.
    """
    group = parser.add_argument_group("a model from scratch, instead of --model_name_or_path")
    add = group.add_argument
    add("--config_name", type=path, metavar="NAME", help="folder, or name on the Hub, of a configuration")
    add("--model_type", metavar="TYPE", help=f"or a type, such as {example}, with the sizes below")
    for name, text in sizes.items():
        add(f"--{name}", type=count_from_1, metavar="N", help=f"{text} (default: {defaults[name]})")
    add(
        "--dropout",
        type=not_negative,
        metavar="X",
        help=f"share of the activations that is dropped in training (default: {defaults['dropout']})",
    )
    add(
        "--mixing_init",
        default=MIXING_INITS[0],
        metavar="HOW",
        help=f"with --collaborative, how mixing begins: {', '.join(MIXING_INITS)}",
    )
    return group


def from_scratch(args: argparse.Namespace) -> bool:
    """Return True if the model starts from scratch."""
    return args.model_name_or_path is None and bool(args.config_name or args.model_type)


def check_sizes_fit(args: argparse.Namespace, names: Collection[str]) -> None:
    """Check that a model is either loaded, built from a config, or built from a type with sizes.

    Args:
        args: the flags.
        names: the flags that set a size.

    Raises:
        ArgumentError: if flags contradict each other; the message names the flag and the way out.
    """
    given = [f"--{name}" for name in ("config_name", "model_type", *names) if getattr(args, name) is not None]
    if args.model_name_or_path is not None and given:
        raise ArgumentError(f"{', '.join(given)} describe a model from scratch: leave them or --model_name_or_path out")
    sizes = [flag for flag in given if flag not in ("--config_name", "--model_type")]
    if sizes and args.model_type is None:
        raise ArgumentError(f"{', '.join(sizes)} need --model_type")
    if args.config_name and args.model_type:
        raise ArgumentError("--config_name and --model_type exclude each other")


def check_born(args: argparse.Namespace) -> None:
    """Check the flags that do not go with a model that starts from scratch, or starts collaborative.

    Raises:
        ArgumentError: if flags contradict each other; the message names the flag and the way out.
    """
    if args.mixing_init != "concatenate" and not (from_scratch(args) and args.collaborative):
        raise ArgumentError("--mixing_init has no effect without --collaborative and a model from scratch")
    if args.dropout is not None and args.dropout >= 1:
        raise ArgumentError(f"--dropout {args.dropout} must be below 1: it is a share of the activations")
    if from_scratch(args) and args.allocation != "uniform":
        raise ArgumentError(f"--allocation {args.allocation} has no meaning from scratch: there is nothing to weigh")
    if from_scratch(args) and args.compress_budget is not None and args.swap == "before":
        raise ArgumentError(
            "--compress_budget has nothing to go by before a model from scratch is trained: --swap after"
        )
    if from_scratch(args) and args.collaborative and args.distill_steps is not None:
        raise ArgumentError("--distill_steps has no original to learn from: the model is collaborative from the start")
    if from_scratch(args) and args.collaborative and args.swap != "before":
        raise ArgumentError("--swap has no meaning from scratch: the model is collaborative from the start")


# of a model from scratch: a small ViT for images of 32 x 32
DEFAULT_SIZES = {
    "d_model": 192,
    "num_layers": 6,
    "num_heads": 6,
    "d_ff": 768,
    "dropout": 0.0,
    "image_size": 32,
    "patch_size": 4,
}
SIZES = {
    "d_model": "width of the model",
    "num_layers": "layers",
    "num_heads": "heads per layer",
    "d_ff": "width of the feed-forward layers",
    "image_size": "pixels on each side, to which images are scaled",
    "patch_size": "pixels on each side of a patch, which is a token",
}
TEXTUAL = ("group_by_length", "analyze_treebank")  # shared flags that do not apply to images


def add_image_data(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the image folders."""
    group = parser.add_argument_group("data")
    add = group.add_argument
    for split, text in (("train", "training"), ("validation", "validation"), ("test", "test")):
        add(
            f"--{split}_dir",
            type=path,
            metavar="DIR",
            help=f"folder of the {text} images, in it a folder for every class: DIR/CLASS/*.png"
            + (", measured at the end; predictions go to predictions/" if split == "test" else ""),
        )
    add("--max_train_samples", type=count_from_1, metavar="N", help="use only N training images, as many of each class")
    add("--max_eval_samples", type=count_from_1, metavar="N", help="use only N validation images, likewise")
    add(
        "--horizontal_flip",
        type=not_negative,
        default=0.0,
        metavar="X",
        help="probability that an image is mirrored, left and right, in training; not for digits and letters",
    )


def add_image_scratch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of an image model from scratch."""
    add_sizes(parser, "vit, deit or dinov2", SIZES, DEFAULT_SIZES)


def check_images(args: argparse.Namespace) -> None:
    """Check the flags of an image classifier against each other.

    Raises:
        ArgumentError: if flags are wrong or contradict each other; the message names the flag and the way out.
    """
    if not (args.train_dir and args.validation_dir):
        raise ArgumentError(
            "give --train_dir and --validation_dir, with a folder of images for every class (or run --demo)"
        )
    if args.test_dir and args.output_dir is None:
        raise ArgumentError("--test_dir needs --output_dir, where predictions are written")
    if args.horizontal_flip > 1:
        raise ArgumentError(f"--horizontal_flip {args.horizontal_flip} is a probability: 1 at most")
    for flag in TEXTUAL:
        if getattr(args, flag):
            raise ArgumentError(f"--{flag} has no meaning for images: leave it out")
    check_sizes_fit(args, DEFAULT_SIZES)
    check_choice("--mixing_init", args.mixing_init, MIXING_INITS)
    check_born(args)
    if args.model_type is not None:
        wanted = sizes_of(args)
        for name, part in (("d_model", "num_heads"), ("image_size", "patch_size")):
            if wanted[name] % wanted[part]:
                raise ArgumentError(f"--{name} {wanted[name]} is not a multiple of --{part} {wanted[part]}")


def sizes_of(args: argparse.Namespace) -> dict[str, float]:
    """Return the sizes of a model from scratch by name: the flag if it is given, otherwise the default."""
    return {name: usual if (given := getattr(args, name)) is None else given for name, usual in DEFAULT_SIZES.items()}
