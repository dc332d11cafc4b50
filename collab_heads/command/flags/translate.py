r"""Train, compress and prune translation models: Marian, BART, mBART, M2M100, T5.

    collab-heads translate --model_name_or_path Helsinki-NLP/opus-mt-de-en --train_file train.de train.en \
        --validation_file dev.de dev.en --target_heads enc-self=12,dec-self=12,dec-enc=12 --output_dir out
    collab-heads translate --demo

With several processes: `accelerate launch -m collab_heads translate ...`.
"""

from argparse import ArgumentParser, Namespace

from collab_heads.base.extras import check_extra
from collab_heads.command.flags import analyzing, arguments, collaborative, heads, rotating, translation_arguments
from collab_heads.command.flags.checks import check_flags
from collab_heads.command.flags.shared import add_demo_argument, check_demo, check_files
from collab_heads.command.flags.translation_arguments import (
    add_scratch_arguments,
    add_translation_data,
    add_translation_training,
    check_translation,
)


def add_arguments(parser: ArgumentParser) -> None:
    add_demo_argument(parser, "a generated language")
    add_translation_data(parser)
    arguments.add_model_arguments(parser)
    add_scratch_arguments(parser)
    collaborative.add_collaborative_arguments(parser)
    collaborative.add_distill_arguments(parser)
    heads.add_head_arguments(parser)
    heads.add_alpha_arguments(parser)
    rotating.add_rotation_arguments(parser)
    analyzing.add_analysis_arguments(parser)
    analyzing.add_prefix_argument(parser)
    arguments.add_training_arguments(parser)
    add_translation_training(parser)
    translation_arguments.add_risk_arguments(parser)
    arguments.add_output_arguments(parser)


def check(args: Namespace) -> None:
    """Check that the packages for training are installed, that the flags fit together, and that the files exist.

    Raises:
        MissingPackageError: if a package is missing.
        ArgumentError: if flags are wrong or contradict each other; the message names the flag and the way out.
        DataError: if a file is missing, or one that the flags name is broken.
    """
    check_extra("train", "fine-tuning and translation")
    check_together(args)
    if not args.demo:
        check_files(
            *(name for split in (args.train_file, args.validation_file, args.test_file) for name in split or ())
        )


def check_together(args: Namespace) -> None:
    """Check the flags against each other; raises the errors of `check`."""
    if not check_demo(args):
        check_translation(args)
        translation_arguments.check_risk(args)
        check_flags(args)
