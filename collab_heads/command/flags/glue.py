r"""Fine-tune a Transformer on a GLUE task, or on classification files of your own, with collaborative attention.

    collab-heads glue --model_name_or_path bert-base-uncased --task_name mrpc --collaborative \
        --dim_shared_query_key 256 --swap between --output_dir out
    collab-heads glue --demo

With several processes: `accelerate launch -m collab_heads glue ...`.
"""

import os
from argparse import ArgumentParser, Namespace

from collab_heads.base.checks import check_choice
from collab_heads.base.extras import check_extra
from collab_heads.command.flags import analyzing, arguments, collaborative, heads, rotating
from collab_heads.command.flags.checks import check_flags
from collab_heads.command.flags.parsing import AUTO, count_from_1, path
from collab_heads.command.flags.shared import TABLE, add_demo_argument, check_demo, check_files
from collab_heads.data.glue_tasks import TASKS
from collab_heads.errors import ArgumentError, DataError


def add_arguments(parser: ArgumentParser) -> None:
    add_demo_argument(parser, "a generated task")
    add_data_arguments(parser)
    arguments.add_model_arguments(parser)
    collaborative.add_collaborative_arguments(parser)
    collaborative.add_distill_arguments(parser)
    heads.add_head_arguments(parser)
    heads.add_alpha_arguments(parser)
    rotating.add_rotation_arguments(parser)
    analyzing.add_analysis_arguments(parser)
    arguments.add_training_arguments(parser, of_tasks=True)
    arguments.add_output_arguments(parser)


def add_data_arguments(parser: ArgumentParser) -> None:
    """Add the flags of the examples: where they come from, and how they are cut."""
    group = parser.add_argument_group("data")
    add = group.add_argument
    add("--task_name", metavar="TASK", help=f"GLUE task: {', '.join(TASKS)}")
    add("--data_dir", type=path, metavar="DIR", help="folder with GLUE's TSV files (default: download from the Hub)")
    add(
        "--train_file",
        type=path,
        metavar="FILE",
        help=f"your own training examples, instead of --task_name: {TABLE}, with a label and one or two columns of "
        "text",
    )
    add("--validation_file", type=path, metavar="FILE", help="your own validation examples")
    add("--test_file", type=path, metavar="FILE", help="your own test examples, for --do_predict; no labels needed")
    add("--label_column", default="label", metavar="NAME", help="column of the label in your own files")
    add(
        "--text_columns",
        nargs="+",
        metavar="NAME",
        help="one or two columns of text in your own files (default: sentence1 and sentence2, or those "
        "beside the label)",
    )
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
        check_files(args.train_file, args.validation_file, args.test_file)
        if args.data_dir is not None and not os.path.isdir(args.data_dir):
            raise DataError(f"--data_dir {args.data_dir} is no folder")


def check_together(args: Namespace) -> None:
    """Check the flags against each other; raises the errors of `check`."""
    if not check_demo(args):
        check_data(args)
        check_flags(args)


def check_data(args: Namespace) -> None:
    """Check the data flags against each other, and set the task's number of epochs; raises the errors of `check`."""
    files = [args.train_file, args.validation_file]
    if args.task_name is not None:
        args.task_name = args.task_name.lower()
        check_choice("--task_name", args.task_name, TASKS)
        if any(files) or args.test_file:
            raise ArgumentError("--task_name and files of your own exclude each other")
        if args.text_columns:
            raise ArgumentError("--text_columns is for files of your own: without --task_name")
    elif not all(files):
        raise ArgumentError("give --task_name, or --train_file and --validation_file")
    elif args.data_dir:
        raise ArgumentError("--data_dir needs --task_name")
    if args.text_columns and len(args.text_columns) > 2:
        raise ArgumentError(f"--text_columns names {len(args.text_columns)} columns: give one or two")
    if args.num_train_epochs == AUTO:
        if args.task_name is None:
            raise ArgumentError(f"--num_train_epochs {AUTO} is for GLUE's tasks: give files of your own a number")
        args.num_train_epochs = TASKS[args.task_name].epochs
    if args.do_predict and args.task_name is None and not args.test_file:
        raise ArgumentError("--do_predict needs --test_file")
    if args.do_predict and args.output_dir is None:
        raise ArgumentError("--do_predict needs --output_dir")
