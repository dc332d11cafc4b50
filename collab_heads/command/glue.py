"""The work of `collab-heads glue` and of run_glue.py: fine-tune and evaluate classifiers."""

from argparse import Namespace
from collections.abc import Sequence

from collab_heads.command.flags import glue as flags
from collab_heads.command.flags.shared import demo_row
from collab_heads.command.training import check_all, read_flags, run_script, train
from collab_heads.data.glue import Data, from_files, from_folder, from_hub
from collab_heads.demo import glue_demo
from collab_heads.training.runs.classifier import Classifier


def main(argv: Sequence[str] | None = None) -> dict:
    """Parse the flags and run.

    Returns:
        The content of `all_results.json`; with `--demo` that of each of its runs, by name.
    """
    return run_script(parse(argv), work)


def parse(argv: Sequence[str] | None = None) -> Namespace:
    """Parse the flags and make all checks that need neither data nor model."""
    return read_flags(flags, argv)


def run(args: Namespace) -> dict:
    """Check parsed flags and run; returns the same as `main`."""
    check_all(flags, args)
    return work(args)


def work(args: Namespace) -> dict:
    """Run with checked flags; returns the same as `main`."""
    return glue_demo.main(main, demo_row(args)) if args.demo else train(args, Classifier.load, load_data)


def load_data(args: Namespace) -> Data:
    """Read the examples from files, from a folder in GLUE's format, or from the Hub, as the flags say."""
    if args.task_name is None:
        files = args.train_file, args.validation_file, args.test_file if args.do_predict else None
        data = from_files(*files, args.label_column, args.skip_bad_rows, args.text_columns)
    elif args.data_dir:
        data = from_folder(args.task_name, args.data_dir, test=args.do_predict, skip_bad_rows=args.skip_bad_rows)
    else:
        data = from_hub(args.task_name, test=args.do_predict)
    return data.first({"train": args.max_train_samples, "validation": args.max_eval_samples})
