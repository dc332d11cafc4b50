"""Where a run starts: in an output folder that may be written to, at the beginning or at a checkpoint."""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from collab_heads.errors import OutputError
from collab_heads.training.flags.path_names import inputs
from collab_heads.training.storage.checkpoint import PROGRESS, RESUME, go_on_from
from collab_heads.training.storage.output import Output, same_place


def settle(args: Namespace, arguments: Mapping, processes: int) -> tuple[Path | None, dict]:
    """Put right what a killed run left in the output folder, and check that this one may write there.

    Args:
        args: the parsed flags.
        arguments: what a run and its continuation must share.
        processes: how many this run has.

    Returns:
        The checkpoint to go on from and what it says of itself; (None, {}) for a run from the beginning.

    Raises:
        OutputError: if there is no such checkpoint, or it is damaged; or the folder is not free.
    """
    if args.output_dir is None:
        return None, {}
    folder = Path(args.output_dir)
    Output(folder).recover()
    checkpoint, progress = go_on_from(args, arguments, processes)
    Output(folder).check(
        overwrite=args.overwrite_output_dir, resume=lies_below(checkpoint, folder), inputs=inputs(args)
    )
    return checkpoint, progress


def lies_below(checkpoint: Path | None, folder: Path) -> bool:
    """Whether a run goes on in the folder in which its checkpoint lies."""
    return checkpoint is not None and same_place(checkpoint.resolve().parent, folder)


def check_place(
    checkpoint: Path, progress: Mapping, plan: Sequence[tuple[bool, bool]], steps_of: Callable[[int], int]
) -> None:
    """Check that a run has the place that a checkpoint records.

    Args:
        checkpoint: for the message.
        progress: what it says of itself.
        plan: of each phase, whether it starts with the swap and whether it trains.
        steps_of: phase -> optimizer steps.

    Raises:
        OutputError: if it has not.
    """
    phase, step = progress["phase"], progress["step"]
    if phase >= len(plan) or not plan[phase][1] or step > steps_of(phase):
        raise OutputError(
            f"{RESUME}: {checkpoint} is of step {step} of phase {phase}, which this run does not have: "
            f"{PROGRESS} is damaged"
        )
