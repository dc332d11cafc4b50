"""From flags to a run: set Accelerate up, read the data, go."""

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from accelerate.utils import DistributedType
from transformers.utils import logging

from collab_heads.checks import check_choice
from collab_heads.errors import ArgumentError
from collab_heads.training.runs.run import Run
from collab_heads.training.storage.output import LOGS
from collab_heads.training.storage.reservation import agreed, reserved

SUPPORTED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def launch(args: argparse.Namespace, load_data: Callable, run: type[Run]) -> dict:
    """Make a run and go through it.

    Args:
        args: the checked flags.
        load_data: reads what they name.
        run: the script's run.

    Returns:
        What `all_results.json` holds.
    """
    accelerator = make_accelerator(args)
    if accelerator.distributed_type not in SUPPORTED:
        raise ArgumentError(f"{accelerator.distributed_type} is not supported: use one process or DDP")
    if not accelerator.is_main_process:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
    with ExitStack() as stack:
        if args.output_dir is not None:
            agreed(accelerator, lambda: stack.enter_context(reserved(Path(args.output_dir))) and None)
        return run(args, load_data(args), accelerator).run()


def check_tracking(args: argparse.Namespace) -> None:
    """Check the tracker's name."""
    if args.with_tracking and args.report_to != "all":
        check_choice("--report_to", args.report_to, [str(name) for name in LOGGER_TYPE_TO_CLASS])


def make_accelerator(args: argparse.Namespace) -> Accelerator:
    """Accelerate, set up as the training loop wants it."""
    logs = f"{args.output_dir}/{LOGS}" if args.with_tracking else None
    try:
        accelerator = Accelerator(
            cpu=args.cpu,
            mixed_precision=args.mixed_precision,
            log_with=args.report_to if args.with_tracking else None,
            project_dir=logs,
            step_scheduler_with_optimizer=False,
        )
    except (ValueError, ImportError) as error:
        raise ArgumentError(f"Accelerate: {error}") from error
    if args.with_tracking and not accelerator.log_with:
        raise ArgumentError(f"--report_to {args.report_to}: the package of this tracker is not installed")
    return accelerator
