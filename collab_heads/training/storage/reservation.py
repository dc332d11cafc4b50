"""Lock an output folder, so that only one run at a time writes to it; the lock ends with its process."""

import json
import logging
import os
import pickle
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedModel

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


def agreed(accelerator: Accelerator, function: Callable[[], Result]) -> Result:
    """Call a function on the main process, and return its result or raise its exception on all processes.

    So no process is left waiting after an error. Use it also for results that every process could compute: the last
    bits of floating-point numbers may differ between processes.
    """
    outcome: list = [None, None]
    if accelerator.is_main_process:
        try:
            outcome[0] = function()
        except Exception as error:  # whatever it is: the others wait for an outcome
            outcome[1] = error
    if accelerator.num_processes > 1:
        shared = [outcome[0], None if outcome[1] is None else sendable(outcome[1])]
        broadcast_object_list(shared)
        outcome = outcome if accelerator.is_main_process else shared
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def sendable(error: Exception) -> Exception:
    """Return an exception that other processes can read: itself, or a RuntimeError with its name and message."""
    try:
        pickle.loads(pickle.dumps(error))  # as the broadcast does
    except Exception:  # a class that is local, or whose __init__ wants other arguments than its message
        return RuntimeError(f"{type(error).__name__} in the first process: {error}")
    return error


def same_weights(accelerator: Accelerator, model: PreTrainedModel) -> None:
    """Copy the weights of the first process to all others, in place: the last bits of computed ones may differ."""
    if accelerator.num_processes > 1:
        for parameter in model.parameters():
            values = parameter.data.contiguous()  # broadcast sends memory in its own order
            torch.distributed.broadcast(values, 0)
            parameter.data.copy_(values)
