#!/usr/bin/env python
r"""Train, fine-tune, compress and prune classifiers of images: ViT, DeiT, DINOv2.

    python examples/run_image_classification.py --model_name_or_path facebook/deit-small-patch16-224 \
        --train_dir images/train --validation_dir images/validation --ignore_mismatched_sizes \
        --collaborative --dim_shared_query_key 192 --swap between --output_dir out
    python examples/run_image_classification.py --model_type deit --image_size 32 --patch_size 4 \
        --train_dir images/train --validation_dir images/validation --collaborative --dim_shared_query_key 64

With several processes: `accelerate launch examples/run_image_classification.py ...`.
"""

import argparse
import sys
from collections.abc import Sequence

from collab_heads.extras import exit_without

if __name__ == "__main__":
    exit_without("train", "run_image_classification.py")  # said before the imports below fail

from collab_heads.errors import CollabHeadsError
from collab_heads.training.data.glue import Data
from collab_heads.training.data.images import from_folders
from collab_heads.training.flags import alphas, analyzing, arguments, collaborative, distilling, pruning, rotating
from collab_heads.training.flags.checks import check_run
from collab_heads.training.flags.image_arguments import add_image_data, add_image_scratch_arguments, check_images
from collab_heads.training.flags.parsing import Parser
from collab_heads.training.runs.image_classifier import ImageClassifier
from collab_heads.training.runs.run import Run
from collab_heads.training.runs.session import Session, launched


def main(argv: Sequence[str] | None = None) -> dict:
    """Run; returns what `all_results.json` holds."""
    args = parse(argv)
    with launched(args) as accelerator:  # the output folder is reserved from here on
        data = load_data(args, show_progress=accelerator.is_main_process)
        session = Session.begin(args, data, accelerator)  # from the beginning, or from a checkpoint
        return Run(ImageClassifier.load(session, data)).complete()


def load_data(args: argparse.Namespace, *, show_progress: bool = True) -> Data:
    """Read every image once: a broken one is found before training."""
    folders = {split: getattr(args, f"{split}_dir") for split in ("train", "validation", "test")}
    data = from_folders({split: path for split, path in folders.items() if path}, show_progress=show_progress)
    return data.first({"train": args.max_train_samples, "validation": args.max_eval_samples})


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the flags and check what can be checked without data or model."""
    parser = Parser(description=__doc__)
    add_image_data(parser)
    arguments.add_model_arguments(parser, of_images=True)
    add_image_scratch_arguments(parser)
    collaborative.add_collaborative_arguments(parser)
    distilling.add_distill_arguments(parser)
    pruning.add_head_arguments(parser)
    alphas.add_alpha_arguments(parser)
    rotating.add_rotation_arguments(parser)
    analyzing.add_analysis_arguments(parser)
    arguments.add_training_arguments(parser)
    arguments.add_output_arguments(parser)
    args = parser.parse_args(argv)
    check_images(args)
    check_run(args)
    return args


if __name__ == "__main__":
    try:
        main()
    except CollabHeadsError as problem:
        sys.exit(f"run_image_classification.py: {problem}")
