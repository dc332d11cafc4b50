"""Locks on files and folders that are being written: each has one writer at a time, and a lock ends with its process.

The lock of a folder is the file `NAME.writing` beside it, or a file inside it where nothing can be made beside it. It
is removed after the work. One that a killed process left is free, and removed by the next writer.
"""

import errno
import io
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from collab_heads.errors import OutputError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

PARTIAL, WRITING = ".partial", ".writing"  # endings of what is being written, and of the lock beside it
INSIDE = ".collab_heads.lock"
OWNER = b'{"process": '  # the beginning of every lock's content
FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
PATIENCE = 60.0  # seconds to wait for another writer of the same file
logger = logging.getLogger(__name__)
owners: dict[str, int] = {}  # path of a lock of this process -> thread
held: set[int] = set()  # descriptors of the locks of folders of this process
without_locks: set[int] = set()  # drives that were warned of


def drop_inherited() -> None:
    """Close the locks that a forked process inherited: a worker that outlives the run must not keep them."""
    owners.clear()
    while held:
        os.close(held.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=drop_inherited)


class InUseError(OutputError):
    """Raised if another process or thread is writing a folder."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep all others from writing a folder while the context is open.

    The folder need not exist. The thread that has locked it may lock it again, and may write its partial folder.

    Raises:
        InUseError: if another process or thread has locked it.
        OSError: if the lock cannot be made.
    """
    folder = Path(os.path.realpath(folder.absolute().parent), folder.name)
    if any(owners.get(str(path)) == threading.get_ident() for path in (*places(folder), *places(whole(folder)))):
        yield
        return
    with made(folder.parent):
        path, descriptor = lock(folder)
        try:
            yield
        finally:
            release(path, descriptor)


def places(folder: Path) -> list[Path]:
    """Return the paths that the lock of a folder can have."""
    return [*([folder.with_name(folder.name + WRITING)] if folder.name else []), folder / INSIDE]


def whole(partial: Path) -> Path:
    """Return the folder that a partial folder will become; of any other folder itself."""
    return partial.parent / partial.name.removesuffix(PARTIAL)


@contextmanager
def made(folder: Path) -> Iterator[None]:
    """Make a folder and its parents; those that did not exist are removed at the end if they are still empty."""
    new: list[Path] = []  # the innermost last
    try:
        for path in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
            path.mkdir(exist_ok=True)
            new.append(path)
        yield
    finally:
        with suppress(OSError):  # not empty
            for path in reversed(new):
                path.rmdir()


def lock(folder: Path) -> tuple[Path, int]:
    """Lock a folder; return the path and the descriptor of its lock."""
    paths = places(folder)
    try:
        return paths[0], lock_at(paths[0], folder)
    except OSError as error:
        if error.errno in FORBIDDEN and folder.is_dir():
            return paths[-1], lock_at(paths[-1], folder)
        raise


def lock_at(path: Path, folder: Path) -> int:
    """Lock a folder by a file, in which our name is written; return its descriptor."""
    try:
        descriptor = acquire(path)
    except BlockingIOError as error:
        owner = ""
        with suppress(OSError):  # on Windows nobody else can read it
            owner = f" ({path.read_text(encoding='utf-8', errors='replace'):.200})"
        raise InUseError(
            f"{folder} is in use by a run that is still going on{owner}: wait for its end, or choose another folder"
        ) from error
    if not OWNER.startswith(os.read(descriptor, len(OWNER))):
        release(path, descriptor, remove=False)
        raise OutputError(f"{path} is in the way, and we did not write it: move it, or choose another folder")
    held.add(descriptor)
    with suppress(OSError):  # a full disk; it only tells others who we are
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.write(descriptor, json.dumps({"process": os.getpid(), "machine": socket.gethostname()}).encode())
    return descriptor


def release(path: Path, descriptor: int, *, remove: bool = True) -> None:
    """Remove a lock and give it up; in a forked process, which never had it, do nothing."""
    if remove and descriptor not in held:
        return
    held.discard(descriptor)
    try:
        if remove:
            with suppress(OSError):  # Windows removes no open file
                path.unlink()  # while it is locked: no one else can have taken it
    finally:
        owners.pop(str(path), None)
        os.close(descriptor)
    if remove and os.name == "nt":
        with suppress(OSError):
            path.unlink()


@contextmanager
def sole_writer(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing, after the end of whoever is writing it; what a killed process wrote is dropped.

    Raises:
        OutputError: if another process or thread goes on writing it for a minute.
        OSError: if it cannot be opened.
    """
    path = path.absolute()
    try:
        with io.open(path, "wb", opener=lambda *_: acquire(path, PATIENCE)) as file:  # noqa: UP020 - as Path.open
            file.truncate()
            yield file
    except BlockingIOError as error:
        raise OutputError(
            f"{path} is being written by another process, for {PATIENCE:.0f} s now: wait for its end, or choose another"
        ) from error
    finally:
        if owners.get(str(path)) == threading.get_ident():
            del owners[str(path)]


def acquire(path: Path, patience: float = 0.0) -> int:
    """Open a file, which is made if needed, and lock it; return its descriptor.

    Where locks are not supported (on some network drives) it is locked within this process only, with one warning.

    Args:
        path: absolute.
        patience: seconds to wait for another process or thread that has locked it.

    Raises:
        BlockingIOError: if another still has it after this time.
        OSError: if it cannot be opened.
    """
    until, me = time.monotonic() + patience, threading.get_ident()
    while True:
        try:
            if owners.setdefault(str(path), me) != me:
                raise BlockingIOError
            try:
                return opened(path)
            except BaseException:
                owners.pop(str(path), None)
                raise
        except BlockingIOError:
            if time.monotonic() >= until:
                raise
            time.sleep(0.02)


def opened(path: Path) -> int:
    """Open and lock a file; raise BlockingIOError if another process has locked it."""
    while True:
        descriptor = os.open(path, FLAGS, 0o666)
        try:
            take(descriptor)
            if is_at(path, descriptor):
                return descriptor  # else its owner has just ended, and has removed or renamed the file: try again
        except BlockingIOError:
            os.close(descriptor)
            raise
        except OSError as error:
            if (drive := os.fstat(descriptor).st_dev) not in without_locks:
                without_locks.add(drive)
                logger.warning("%s cannot be locked (%s): let no other run write there meanwhile", path, error)
            return descriptor
        os.close(descriptor)


def is_at(path: Path, descriptor: int) -> bool:
    """Return True if a path still leads to an open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def take(descriptor: int) -> None:
    """Lock an open file; raise BlockingIOError if it is locked."""
    if sys.platform == "win32":
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except PermissionError as error:
            raise BlockingIOError(*error.args) from error
    else:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
