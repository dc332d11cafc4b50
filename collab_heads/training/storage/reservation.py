"""Lock an output folder, so that only one run at a time writes to it; the lock ends with its process."""

import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from collab_heads.errors import CollabHeadsError, OutputError
from collab_heads.files.atomic import why_not_written

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

LOCK = ".collab_heads.lock"
TRIAL = ".collab_heads." + "trial" * 20  # as long as the longest name that a run writes
logger = logging.getLogger(__name__)
Result = TypeVar("Result")
held: set[int] = set()  # descriptors of the locks of this process


def drop_inherited() -> None:
    """Close the locks that a forked process inherited: a worker that outlives the run must not keep them."""
    while held:
        os.close(held.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=drop_inherited)


@contextmanager
def reserved(folder: Path) -> Iterator[None]:
    """Lock a folder while the context is open, and check that it can be written to.

    A folder that does not exist is made, and removed at the end if it is still empty.

    Raises:
        OutputError: if it cannot be made or written to, or another run has locked it.
    """
    made: list[Path] = []  # the innermost last
    try:
        attempt(folder, lambda: make(folder, made))
        descriptor = lock(folder)
        try:
            attempt(folder, lambda: try_writing(folder, descriptor))
            yield
        finally:
            (folder / LOCK).unlink(missing_ok=True)  # while it is locked: no one else can have taken it
            held.discard(descriptor)
            os.close(descriptor)
    finally:
        for path in reversed(made):
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()


def make(folder: Path, made: list[Path]) -> None:
    """Make a folder and its parents; append those that did not exist to `made`."""
    for path in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        path.mkdir(exist_ok=True)
        made.append(path)
    if not folder.is_dir():
        raise OutputError(f"--output_dir {folder} is a file")


def attempt(folder: Path, action: Callable[[], Result]) -> Result:
    """Call an action on an output folder; an error of the file system becomes an OutputError."""
    try:
        return action()
    except CollabHeadsError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a null byte
        reason = why_not_written(error) or str(error)
        raise OutputError(f"--output_dir {str(folder)!r} cannot be written to: {reason}: choose another") from error


def lock(folder: Path) -> int:
    """Lock a folder and return the descriptor of its lock file; only warn where locks are not supported.

    Raises:
        OutputError: if another run has the lock.
    """
    path = folder / LOCK
    while True:
        descriptor = attempt(folder, lambda: os.open(path, os.O_RDWR | os.O_CREAT, 0o644))
        try:
            take(descriptor)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                held.add(descriptor)
                return descriptor  # else another run has just ended and removed the file: try again
        except BlockingIOError as error:
            owner = os.read(descriptor, 1000).decode(errors="replace").strip() if sys.platform != "win32" else ""
            os.close(descriptor)
            raise OutputError(
                f"--output_dir {folder} is in use by a run that is still going on{owner and f' ({owner})'}: "
                "wait for its end, or choose another"
            ) from error
        except OSError as error:  # some network drives have no locks
            logger.warning("%s cannot be locked (%s): let no other run write there meanwhile", folder, error)
            return descriptor
        os.close(descriptor)


def take(descriptor: int) -> None:
    """Lock an open file; raise BlockingIOError if another process has locked it."""
    if sys.platform == "win32":
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except PermissionError as error:
            raise BlockingIOError(*error.args) from error
    else:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def try_writing(folder: Path, descriptor: int) -> None:
    """Write the process and the machine into the lock file, and try a small file with a long name."""
    os.ftruncate(descriptor, 0)
    os.write(descriptor, json.dumps({"process": os.getpid(), "machine": socket.gethostname()}).encode())
    os.fsync(descriptor)
    trial = folder / TRIAL
    try:
        trial.write_bytes(bytes(4096))
    finally:
        trial.unlink(missing_ok=True)
