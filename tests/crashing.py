"""A process that dies at its n-th operation on files."""

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

OPERATIONS = (
    (os, "replace"),
    (os, "rename"),
    (os, "unlink"),
    (os, "remove"),
    (os, "rmdir"),
    (os, "mkdir"),
    (os, "fsync"),
    (io, "open"),  # for writing
)


class Died(BaseException):
    """Stands in for SIGKILL within one process."""


@contextmanager
def watched(before: Callable[[str, str], None]) -> Iterator[None]:
    """Call a function with name and path before every operation on files."""
    stock = {name: getattr(module, name) for module, name in OPERATIONS}

    def watch(name):
        def operation(path, *more, **settings):
            mode = more[0] if more else settings.get("mode", "r")
            if name != "open" or (isinstance(mode, str) and set(mode) & set("wax+")):
                before(name, place(str(path), settings.get("dir_fd")))
            return stock[name](path, *more, **settings)

        return operation

    for module, name in OPERATIONS:
        setattr(module, name, watch(name))
    try:
        yield
    finally:
        for module, name in OPERATIONS:
            setattr(module, name, stock[name])


def place(path: str, folder: int | None) -> str:
    """A path; where it is relative to an open folder, as `shutil.rmtree` names files, with that folder."""
    link = Path(f"/proc/self/fd/{folder}")
    return path if folder is None or not link.exists() else str(link.resolve() / path)


def dies_at(number: int, function: Callable[[], object]) -> bool:
    """Call a function and let it die before its n-th operation, from 0; no later one takes place. Whether it died."""
    count = 0

    def before(name, path):
        nonlocal count
        count += 1
        if count > number:
            raise Died

    try:
        with watched(before):
            function()
    except Died:
        return True
    return False
