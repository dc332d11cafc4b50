"""Functions shared by the commands that train: read and check the flags, and start a run."""

from argparse import Namespace
from collections.abc import Callable, Collection, Sequence
from types import ModuleType
from typing import Any

from collab_heads.base.checks import check_choice
from collab_heads.base.progress import showing_bars
from collab_heads.command.flags.arguments import check_tables
from collab_heads.command.flags.parsing import Parser
from collab_heads.training.runs.learner import Learner
from collab_heads.training.runs.run import Run
from collab_heads.training.runs.session import Session, launched


def read_flags(flags: ModuleType, argv: Sequence[str] | None, model_types: Collection[str] = ()) -> Namespace:
    """Parse the flags of a command and make all checks that need neither data nor model.

    Args:
        flags: the command's module in command/flags.
        argv: the command line.
        model_types: the types that a model from scratch can have.
    """
    parser = Parser(description=flags.__doc__)
    flags.add_arguments(parser)
    parser.add_quiet()
    args = parser.parse_args(argv)
    check_all(flags, args, model_types)
    return args


def run_script(args: Namespace, work: Callable[[Namespace], dict]) -> dict:
    """Run the work of a script with checked flags; `--quiet` is none of the work's own."""
    quiet = vars(args).pop("quiet")
    with showing_bars(not quiet):
        return work(args)


def check_all(flags: ModuleType, args: Namespace, model_types: Collection[str] = ()) -> None:
    """Check the flags against each other, and against tables that take long to import."""
    if getattr(args, "model_type", None) is not None and not args.demo:
        check_choice("--model_type", args.model_type, model_types)
    flags.check_together(args)
    if not args.demo:
        check_tables(args)


def train(args: Namespace, load: Callable[[Session, Any], Learner], load_data: Callable[[Namespace], Any]) -> dict:
    """Run a training with checked flags; returns the content of `all_results.json`.

    Args:
        args: the flags.
        load: builds the learner from a session and its data.
        load_data: reads the examples that the flags name.
    """
    with launched(args) as accelerator:  # the output folder is reserved from here on
        data = load_data(args)
        session = Session.begin(args, data, accelerator)  # from the beginning, or from a checkpoint
        return Run(load(session, data)).complete()
