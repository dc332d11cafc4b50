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
from collab_heads.training.data.glue import TASKS, Data, from_files, from_folder, from_hub
from collab_heads.training.flags import alphas, analyzing, arguments, pruning, rotating
from collab_heads.training.runs.glue_run import GlueRun
from collab_heads.training.runs.start import check_tracking, launch


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the flags and check what can be checked without data or model."""
    parser = arguments.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", action="store_true", help="a generated task and a small model; no other flag needed")
    data = parser.add_argument_group("data")
    data.add_argument("--task_name", metavar="TASK", help=", ".join(TASKS))
    data.add_argument("--data_dir", type=arguments.path, metavar="DIR", help="folder with GLUE's TSV files; the Hub")
    data.add_argument(
        "--train_file", type=arguments.path, metavar="FILE", help=".csv, .tsv, .json or .jsonl, instead of a task"
    )
    data.add_argument("--validation_file", type=arguments.path, metavar="FILE")
    data.add_argument("--test_file", type=arguments.path, metavar="FILE")
    data.add_argument("--label_column", default="label", metavar="NAME", help="in these files (label)")
    data.add_argument("--skip_bad_rows", action="store_true", help="leave out TSV rows with missing fields")
    data.add_argument("--max_length", type=arguments.count_from_1, default=128, metavar="N", help="tokens (128)")
    data.add_argument("--pad_to_max_length", action="store_true", help="pad to it; to the longest of the batch")
    data.add_argument("--max_train_samples", type=arguments.count_from_1, metavar="N", help="take the first N only")
    data.add_argument("--max_eval_samples", type=arguments.count_from_1, metavar="N", help="take the first N only")
    data.add_argument("--do_predict", action="store_true", help="write predictions for the test splits")
    arguments.add_model_arguments(parser)
    arguments.add_collaborative_arguments(parser)
    pruning.add_head_arguments(parser)
    alphas.add_mixing_arguments(parser)
    rotating.add_rotation_arguments(parser)
    analyzing.add_analysis_arguments(parser)
    arguments.add_training_arguments(parser)
    arguments.add_output_arguments(parser)
    args = parser.parse_args(argv)
    if not args.demo:
        check(args)
    return args


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
    check_tracking(args)
    arguments.check_shared(args)
    pruning.check_heads(args)
    alphas.check_mixing(args)
    rotating.check_rotation(args)
    analyzing.check_analysis(args)


def load_data(args: argparse.Namespace) -> Data:
    """Read the examples from wherever the flags say."""
    if args.task_name is None:
        files = args.train_file, args.validation_file, args.test_file if args.do_predict else None
        data = from_files(*files, args.label_column, args.skip_bad_rows)
    elif args.data_dir:
        data = from_folder(args.task_name, args.data_dir, test=args.do_predict, skip_bad_rows=args.skip_bad_rows)
    else:
        data = from_hub(args.task_name, test=args.do_predict)
    limits = {"train": args.max_train_samples, "validation": args.max_eval_samples}
    return data.first(limits)


def main(argv: Sequence[str] | None = None) -> dict:
    """Run; returns what `all_results.json` holds."""
    args = parse(argv)
    if args.demo:
        from collab_heads.training.demo import glue_demo

        return glue_demo.main(main)
    return launch(args, load_data, GlueRun)


if __name__ == "__main__":
    try:
        main()
    except CollabHeadsError as problem:
        sys.exit(f"run_glue.py: {problem}")
