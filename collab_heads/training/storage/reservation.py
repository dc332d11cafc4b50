"""Reserve the output folder of a run: only one run at a time writes to it, and it can be written to."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from collab_heads.errors import CollabHeadsError, OutputError
from collab_heads.files.atomic import sync, why_not_written
from collab_heads.files.locks import locked, made

TRIAL = ".collab_heads." + "trial" * 20  # as long as the longest name that a run writes


@contextmanager
def reserved(folder: Path) -> Iterator[None]:
    """Lock a folder while the context is open, and check that it can be written to.

    A folder that does not exist is made, and removed at the end if it is still empty.

    Raises:
        OutputError: if it cannot be made or written to, or another run has locked it.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(Path(os.path.realpath(folder))))
            stack.enter_context(made(folder))
            if not folder.is_dir():
                raise OutputError(f"--output_dir {folder} is a file")
            try_writing(folder)
        except CollabHeadsError:
            raise
        except (OSError, ValueError) as error:  # ValueError: a null byte
            reason = why_not_written(error) or str(error)
            raise OutputError(f"--output_dir {str(folder)!r} cannot be written to: {reason}: choose another") from error
        yield


def try_writing(folder: Path) -> None:
    """Write a small file with a long name, and delete it."""
    trial = folder / TRIAL
    try:
        trial.write_bytes(bytes(4096))
        sync(trial)
    finally:
        trial.unlink(missing_ok=True)
