"""The work of `collab-heads images` and of examples/run_image_classification.py: train classifiers of images."""

from argparse import Namespace
from collections.abc import Sequence

from accelerate.state import PartialState

from collab_heads.command.flags import images as flags
from collab_heads.command.training import check_all, read_flags, train
from collab_heads.contract.registry import image_blueprints
from collab_heads.data.glue import Data
from collab_heads.data.images import from_folders
from collab_heads.demo import image_demo
from collab_heads.training.runs.image_classifier import ImageClassifier


def main(argv: Sequence[str] | None = None) -> dict:
    """Run; returns what `all_results.json` holds."""
    return work(parse(argv))


def parse(argv: Sequence[str] | None = None) -> Namespace:
    """Read the flags and check what can be checked without data or model."""
    return read_flags(flags, argv, image_blueprints())


def run(args: Namespace) -> dict:
    """Check the flags and run; returns what `all_results.json` holds."""
    check_all(flags, args, image_blueprints())
    return work(args)


def work(args: Namespace) -> dict:
    """Run what checked flags ask for."""
    return image_demo.main(main) if args.demo else train(args, ImageClassifier.load, load_data)


def load_data(args: Namespace) -> Data:
    """Open every image once: a broken one is named before training."""
    folders = {split: getattr(args, f"{split}_dir") for split in ("train", "validation", "test")}
    first = PartialState().is_main_process  # of several processes one shows how far it is
    data = from_folders({split: path for split, path in folders.items() if path}, show_progress=first)
    return data.first({"train": args.max_train_samples, "validation": args.max_eval_samples})
