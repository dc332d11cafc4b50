"""The work of `collab-heads glue` and of run_glue.py: fine-tune and evaluate classifiers."""

from argparse import Namespace
from collections.abc import Sequence

from collab_heads.command.flags import glue as flags
from collab_heads.training.data.glue import Data, from_files, from_folder, from_hub
from collab_heads.training.demo import glue_demo
from collab_heads.training.flags.checks import check_run
from collab_heads.training.flags.parsing import Parser
from collab_heads.training.runs.classifier import Classifier
from collab_heads.training.runs.run import Run
from collab_heads.training.runs.session import Session, launched


def main(argv: Sequence[str] | None = None) -> dict:
    """Run; returns what `all_results.json` holds."""
    return work(parse(argv))


def parse(argv: Sequence[str] | None = None) -> Namespace:
    """Read the flags and check what can be checked without data or model."""
    parser = Parser(description=flags.__doc__)
    flags.add_arguments(parser)
    args = parser.parse_args(argv)
    check(args)
    return args


def check(args: Namespace) -> None:
    """Check what a single flag cannot know."""
    if args.demo:
        return
    flags.check_data(args)
    check_run(args)


def run(args: Namespace) -> dict:
    """Check the flags and run; returns what `all_results.json` holds."""
    check(args)
    return work(args)


def work(args: Namespace) -> dict:
    """Run what checked flags ask for."""
    if args.demo:
        return glue_demo.main(main)
    with launched(args) as accelerator:  # the output folder is reserved from here on
        data = load_data(args)
        session = Session.begin(args, data, accelerator)  # from the beginning, or from a checkpoint
        return Run(Classifier.load(session, data)).complete()


def load_data(args: Namespace) -> Data:
    """Read the examples from wherever the flags say."""
    if args.task_name is None:
        files = args.train_file, args.validation_file, args.test_file if args.do_predict else None
        data = from_files(*files, args.label_column, args.skip_bad_rows)
    elif args.data_dir:
        data = from_folder(args.task_name, args.data_dir, test=args.do_predict, skip_bad_rows=args.skip_bad_rows)
    else:
        data = from_hub(args.task_name, test=args.do_predict)
    return data.first({"train": args.max_train_samples, "validation": args.max_eval_samples})
