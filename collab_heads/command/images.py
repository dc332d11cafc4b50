"""The work of `collab-heads images` and of examples/run_image_classification.py: train classifiers of images."""

from argparse import Namespace
from collections.abc import Sequence

from accelerate.state import PartialState

from collab_heads.command.flags import images as flags
from collab_heads.command.flags.shared import demo_row
from collab_heads.command.training import check_all, read_flags, run_script, train
from collab_heads.contract.registry import image_blueprints
from collab_heads.data.glue import Data
from collab_heads.data.images import from_folders
from collab_heads.demo import image_demo
from collab_heads.training.runs.image_classifier import ImageClassifier


def main(argv: Sequence[str] | None = None) -> dict:
    """Parse the flags and run.

    Returns:
        The content of `all_results.json`; with `--demo` that of each of its runs, by name.
    """
    return run_script(parse(argv), work)


def parse(argv: Sequence[str] | None = None) -> Namespace:
    """Parse the flags and make all checks that need neither data nor model."""
    return read_flags(flags, argv, image_blueprints())


def run(args: Namespace) -> dict:
    """Check parsed flags and run; returns the same as `main`."""
    check_all(flags, args, image_blueprints())
    return work(args)


def work(args: Namespace) -> dict:
    """Run with checked flags; returns the same as `main`."""
    return image_demo.main(main, demo_row(args)) if args.demo else train(args, ImageClassifier.load, load_data)


def load_data(args: Namespace) -> Data:
    """Read the folders of images; every image is opened once, so that a broken one is reported before training."""
    folders = {split: getattr(args, f"{split}_dir") for split in ("train", "validation", "test")}
    first = PartialState().is_main_process  # only one of several processes shows a bar
    data = from_folders({split: path for split, path in folders.items() if path}, show_progress=first)
    return data.first({"train": args.max_train_samples, "validation": args.max_eval_samples})
