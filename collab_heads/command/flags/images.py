r"""Train, fine-tune, compress and prune classifiers of images: ViT, DeiT, DINOv2.

    collab-heads images --model_name_or_path facebook/deit-small-patch16-224 --train_dir images/train \
        --validation_dir images/validation --ignore_mismatched_sizes --collaborative --dim_shared_query_key 192 \
        --swap between --output_dir out
    collab-heads images --model_type deit --image_size 32 --patch_size 4 --train_dir images/train \
        --validation_dir images/validation --collaborative --dim_shared_query_key 64
    collab-heads images --demo

With several processes: `accelerate launch -m collab_heads images ...`.
"""

import os
from argparse import ArgumentParser, Namespace

from collab_heads.base.extras import check_extra
from collab_heads.command.flags import analyzing, arguments, collaborative, heads, rotating
from collab_heads.command.flags.checks import check_flags
from collab_heads.command.flags.scratch import add_image_data, add_image_scratch_arguments, check_images
from collab_heads.command.flags.shared import add_demo_argument, check_demo
from collab_heads.errors import DataError


def add_arguments(parser: ArgumentParser) -> None:
    add_demo_argument(parser, "handwritten digits")
    add_image_data(parser)
    arguments.add_model_arguments(parser, of_images=True)
    add_image_scratch_arguments(parser)
    collaborative.add_collaborative_arguments(parser)
    collaborative.add_distill_arguments(parser)
    heads.add_head_arguments(parser)
    heads.add_alpha_arguments(parser)
    rotating.add_rotation_arguments(parser)
    analyzing.add_analysis_arguments(parser)
    arguments.add_training_arguments(parser)
    arguments.add_output_arguments(parser)


def check(args: Namespace) -> None:
    """Check that the packages for training are installed, that the flags fit together, and that the folders exist.

    Raises:
        MissingPackageError: if a package is missing.
        ArgumentError: if flags are wrong or contradict each other; the message names the flag and the way out.
        DataError: if a folder is missing, or a file that the flags name is broken.
    """
    check_extra("train", "training on images")
    check_together(args)
    if not args.demo:
        check_folders(args)


def check_folders(args: Namespace) -> None:
    """Raise DataError if a folder of images does not exist."""
    for flag in ("train_dir", "validation_dir", "test_dir"):
        folder = getattr(args, flag)
        if folder is not None and not os.path.isdir(folder):
            what = "not a folder" if os.path.exists(folder) else "missing"
            raise DataError(f"--{flag} {folder} is {what}: give a folder with a folder of images for every class")


def check_together(args: Namespace) -> None:
    """Check the flags against each other; raises the errors of `check`."""
    if not check_demo(args):
        check_images(args)
        check_flags(args)
