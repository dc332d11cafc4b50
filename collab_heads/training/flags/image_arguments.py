"""The flags of `collab-heads images` that the other commands do not have."""

import argparse

from collab_heads.checks import check_choice
from collab_heads.errors import ArgumentError
from collab_heads.state import MIXING_INITS
from collab_heads.training.flags.parsing import count_from_1, not_negative, path
from collab_heads.training.flags.scratch import add_sizes, check_born, check_sizes_fit

# of a model from scratch: those of ViT for images of 32 x 32
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
TEXTUAL = ("group_by_length", "analyze_treebank")  # shared flags that say nothing of images


def add_image_data(parser: argparse.ArgumentParser) -> None:
    """Where the images are from."""
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
    """A model from scratch."""
    add_sizes(parser, "vit, deit or dinov2", SIZES, DEFAULT_SIZES)


def check_images(args: argparse.Namespace) -> None:
    """Check what a single flag cannot know.

    Raises:
        ArgumentError: naming the flag and the way out.
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
    """Name of a size -> that of a model from scratch: what the flags say, or what is usual."""
    return {name: usual if (given := getattr(args, name)) is None else given for name, usual in DEFAULT_SIZES.items()}
