"""Set up a run: Accelerate, output folder and checkpoint; and record what made its results."""

import hashlib
import json
import os
import platform
import re
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import DistributedType
from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers.utils import logging

from collab_heads.base.processes import agreed
from collab_heads.base.progress import is_shown
from collab_heads.data.glue import Data
from collab_heads.data.parallel import Corpus
from collab_heads.data.tokenizing import kept_in
from collab_heads.errors import ArgumentError
from collab_heads.training.options.run import fingerprint
from collab_heads.training.options.value_types import input_paths
from collab_heads.training.storage.checkpoint import checkpoint_to_resume
from collab_heads.training.storage.output import (
    LOGS,
    Output,
    check_output,
    files_in_use,
    in_use,
    reserved,
    same_path,
)
from collab_heads.training.storage.sharding import check_sharding

SECRET = re.compile(r"^(--hub_token=).*")
PACKAGES = ("torch", "transformers", "accelerate", "datasets", "collab-heads")


def provenance() -> dict:
    """Return the command line and the versions that made a result."""
    versions = {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}
    return {"command": " ".join(without_token(sys.argv)), "versions": versions}


def version(package: str) -> str | None:
    """Return the installed version of a package; None if it runs from a plain checkout."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def without_token(argv: Sequence[str]) -> list[str]:
    """Mask the value of --hub_token in a command line: results are published, logged and committed."""
    masked = [SECRET.sub(r"\1***", word) for word in argv]
    return ["***" if before == "--hub_token" else word for before, word in zip(["", *argv], masked, strict=False)]


def data_digest(splits: Mapping[str, Mapping[str, list]]) -> str:
    """Return a short hash of the examples: a resumed run must see the same ones."""
    return hashlib.sha256(json.dumps(dict(splits), sort_keys=True).encode()).hexdigest()[:16]


SUPPORTED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.FSDP)
NEEDS_WHOLE_WEIGHTS = ("rotate", "rotation_schedule", "distill_steps")  # flags of what FSDP cannot do


@contextmanager
def launched(args: Namespace) -> Iterator[Accelerator]:
    """Set up Accelerate, and lock the output folder while the context is open."""
    accelerator = make_accelerator(args)
    if accelerator.distributed_type not in SUPPORTED:
        raise ArgumentError(f"{accelerator.distributed_type} is not supported: use one process, DDP or FSDP 2")
    refused = {f"--{name}": vars(args).get(name) for name in NEEDS_WHOLE_WEIGHTS}
    refused["--objective minimum_risk"] = vars(args).get("objective") == "minimum_risk"  # runs the encoder by itself
    check_sharding(accelerator, refused)
    if not accelerator.is_main_process:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
    say_one_process(accelerator)
    with ExitStack() as stack:
        stack.enter_context(kept_in(args.cache_dir))
        stack.enter_context(datasets_bars())
        if args.output_dir is not None:
            agreed(accelerator, lambda: stack.enter_context(reserved(Path(args.output_dir))))
        yield accelerator


@contextmanager
def datasets_bars() -> Iterator[None]:
    """Hide the progress bars of datasets while the context is open, where ours are hidden."""
    hides = not is_shown() and not are_progress_bars_disabled()
    if hides:
        disable_progress_bars()
    try:
        yield
    finally:
        if hides:
            enable_progress_bars()


def say_one_process(accelerator: Accelerator) -> None:
    """Print a hint if `accelerate launch` has started one process on a CPU: there it ignores --num_processes."""
    launched_by_accelerate = "ACCELERATE_MIXED_PRECISION" in os.environ
    if launched_by_accelerate and accelerator.num_processes == 1 and accelerator.device.type == "cpu":
        print(
            "one process, on a CPU: for several, accelerate launch --multi_gpu --num_processes N, and --cpu after the "
            "script"
        )


def make_accelerator(args: Namespace) -> Accelerator:
    """Return an Accelerator with the settings that the training loop needs."""
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


@dataclass(frozen=True)
class Session:
    """The start of a run: flags, accelerator, output folder and checkpoint.

    Attributes:
        args: the parsed flags.
        accelerator: made with `step_scheduler_with_optimizer=False`.
        arguments: those that a resumed run must share with the run that it resumes.
        run: these arguments and the number of processes, as a checkpoint describes its run.
        output: the output folder; None if nothing is to be written.
        checkpoint: the folder to resume from; None for a run from the beginning.
        progress: what that checkpoint records; empty without one.
    """

    args: Namespace
    accelerator: Accelerator
    arguments: dict
    run: dict
    output: Output | None
    checkpoint: Path | None
    progress: dict

    @classmethod
    def begin(cls, args: Namespace, data: Data | Corpus, accelerator: Accelerator) -> "Session":
        """Find the checkpoint that the flags name, and check that the run may write to its output folder."""
        precision = accelerator.mixed_precision  # also from `accelerate launch` or its config
        arguments = {**fingerprint(args), "mixed_precision": precision, "data": data_digest(data.splits)}
        run = {**arguments, "processes": accelerator.num_processes}
        checkpoint, progress = agreed(accelerator, lambda: prepared_output(args, run))
        output = None if args.output_dir is None else Output(Path(args.output_dir))
        if checkpoint is not None:
            accelerator.print(f"resuming from {checkpoint}")
        return cls(args, accelerator, arguments, run, output, checkpoint, progress)

    @property
    def writes_to(self) -> Output | None:
        """The output folder on the process that writes there; None on all others."""
        return self.output if self.accelerator.is_main_process else None

    @property
    def resumes_in_place(self) -> bool:
        """True if the checkpoint lies in the output folder of this run."""
        return self.output is not None and lies_below(self.checkpoint, self.output.path)


def prepared_output(args: Namespace, run: Mapping) -> tuple[Path | None, dict]:
    """Finish or undo what a killed run left unfinished in the output folder, and check that this one may write there.

    Args:
        args: the parsed flags.
        run: the description of this run, which that of a resumed one must equal.

    Returns:
        The checkpoint to resume from and what it records; (None, {}) for a run from the beginning.
    """
    if args.output_dir is None:
        return None, {}
    folder = Path(args.output_dir)
    if files_in_use(folder) and not (args.overwrite_output_dir or args.resume_from_checkpoint):
        raise in_use(folder)  # before anything there is finished or undone
    Output(folder).recover()
    checkpoint, progress = checkpoint_to_resume(args, run)
    check_output(
        Output(folder),
        overwrite=args.overwrite_output_dir,
        resume=lies_below(checkpoint, folder),
        inputs=input_paths(args),
    )
    return checkpoint, progress


def lies_below(checkpoint: Path | None, folder: Path) -> bool:
    """Return True if a checkpoint lies in an output folder; False without a checkpoint."""
    return checkpoint is not None and same_path(checkpoint.resolve().parent, folder)
