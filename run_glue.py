#!/usr/bin/env python
r"""Fine-tune a Transformer on a GLUE task, or on classification files of your own, with collaborative attention.

    python run_glue.py --model_name_or_path bert-base-uncased --task_name mrpc --collaborative \
        --dim_shared_query_key 256 --swap between --output_dir out
    python run_glue.py --demo

With several processes: `accelerate launch run_glue.py ...`.
"""

import argparse
import sys
from collections.abc import Sequence

from collab_heads.extras import exit_without

if __name__ == "__main__":
    exit_without("train", "run_glue.py")  # said before the imports below fail

from collab_heads.checks import check_choice
from collab_heads.errors import ArgumentError, CollabHeadsError
from collab_heads.training.data.glue import Data, from_files, from_folder, from_hub
from collab_heads.training.data.glue_tasks import TASKS
from collab_heads.training.flags import alphas, analyzing, arguments, collaborative, distilling, pruning, rotating
from collab_heads.training.flags.parsing import Parser, count_from_1, path
from collab_heads.training.runs.classifier import Classifier
from collab_heads.training.runs.run import Run
from collab_heads.training.runs.session import Session, launched


def main(argv: Sequence[str] | None = None) -> dict:
    """Run; returns what `all_results.json` holds."""
    args = parse(argv)
    if args.demo:
        from collab_heads.training.demo import glue_demo

        return glue_demo.main(main)
    with launched(args) as accelerator:  # the output folder is reserved from here on
        data = load_data(args)
        session = Session.begin(args, data, accelerator)  # from the beginning, or from a checkpoint
        run = Run(Classifier.load(session, data))
        run.begin()  # a trained model is evaluated as it is
        for phase in run.phases:  # one, or with --swap after and between two
            run.prepare(phase)  # swap, choose heads
            run.train(phase)
            run.conclude(phase)  # remove heads
        return run.finish()  # model, predictions, results


def load_data(args: argparse.Namespace) -> Data:
    """Read the examples from wherever the flags say."""
    if args.task_name is None:
        files = args.train_file, args.validation_file, args.test_file if args.do_predict else None
        data = from_files(*files, args.label_column, args.skip_bad_rows)
    elif args.data_dir:
        data = from_folder(args.task_name, args.data_dir, test=args.do_predict, skip_bad_rows=args.skip_bad_rows)
    else:
        data = from_hub(args.task_name, test=args.do_predict)
    return data.first({"train": args.max_train_samples, "validation": args.max_eval_samples})


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the flags and check what can be checked without data or model."""
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--demo", action="store_true", help="try everything on a generated task with a small model; ignores other flags"
    )
    add_data_arguments(parser)
    arguments.add_model_arguments(parser)
    collaborative.add_collaborative_arguments(parser)
    distilling.add_distill_arguments(parser)
    pruning.add_head_arguments(parser)
    alphas.add_alpha_arguments(parser)
    rotating.add_rotation_arguments(parser)
    analyzing.add_analysis_arguments(parser)
    arguments.add_training_arguments(parser)
    arguments.add_output_arguments(parser)
    args = parser.parse_args(argv)
    if not args.demo:
        check(args)
    return args


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the examples are from, and how they are cut."""
    group = parser.add_argument_group("data")
    add = group.add_argument
    add("--task_name", metavar="TASK", help=f"GLUE task: {', '.join(TASKS)}")
    add("--data_dir", type=path, metavar="DIR", help="folder with GLUE's TSV files (default: download from the Hub)")
    add(
        "--train_file",
        type=path,
        metavar="FILE",
        help="your own training examples, instead of --task_name: a .csv, .tsv, .json or .jsonl file with a label and "
        "one or two columns of text",
    )
    add("--validation_file", type=path, metavar="FILE", help="your own validation examples")
    add("--test_file", type=path, metavar="FILE", help="your own test examples, for --do_predict; no labels needed")
    add("--label_column", default="label", metavar="NAME", help="column of the label in your own files")
    add(
        "--skip_bad_rows",
        action="store_true",
        help="leave out TSV rows with a wrong number of fields, instead of refusing the file",
    )
    add("--max_length", type=count_from_1, default=128, metavar="N", help="cut texts to this many tokens")
    add(
        "--pad_to_max_length",
        action="store_true",
        help="pad every text to --max_length (default: to the longest of its batch)",
    )
    add("--max_train_samples", type=count_from_1, metavar="N", help="use only the first N training examples")
    add("--max_eval_samples", type=count_from_1, metavar="N", help="use only the first N validation examples")
    add("--do_predict", action="store_true", help="write predictions for the test examples to predictions/")


def check(args: argparse.Namespace) -> None:
    """Check what a single flag cannot know."""
    files = [args.train_file, args.validation_file]
    if args.task_name is not None:
        args.task_name = args.task_name.lower()
        check_choice("--task_name", args.task_name, TASKS)
        if any(files) or args.test_file:
            raise ArgumentError("--task_name and files of your own exclude each other")
    elif not all(files):
        raise ArgumentError("give --task_name, or --train_file and --validation_file")
    elif args.data_dir:
        raise ArgumentError("--data_dir needs --task_name")
    if args.do_predict and args.task_name is None and not args.test_file:
        raise ArgumentError("--do_predict needs --test_file")
    if args.do_predict and args.output_dir is None:
        raise ArgumentError("--do_predict needs --output_dir")
    arguments.check_shared(args)
    pruning.check_heads(args)
    alphas.check_alpha_flags(args)
    rotating.check_rotation(args)
    analyzing.check_analysis(args)


if __name__ == "__main__":
    try:
        main()
    except CollabHeadsError as problem:
        sys.exit(f"run_glue.py: {problem}")
