"""Saves of a model that die on the way: at each operation on files in this process, or by SIGKILL in one of its own."""

import builtins
import io
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from crashing import Died, watched
from transformers import modeling_utils


@contextmanager
def every_operation(before: Callable[[str, str], None]) -> Iterator[None]:
    """Call a function before every operation on files, and while a file of weights is there by half."""
    stock_open, stock_save = builtins.open, modeling_utils.safe_save_file

    def save(tensors, filename, *args, **kwargs):
        before("save", str(filename))
        stock_save(tensors, filename, *args, **kwargs)
        content = Path(filename).read_bytes()
        os.truncate(filename, len(content) // 2)
        before("save the other half", str(filename))
        Path(filename).write_bytes(content)

    with watched(before):
        builtins.open, modeling_utils.safe_save_file = io.open, save
        try:
            yield
        finally:
            builtins.open, modeling_utils.safe_save_file = stock_open, stock_save


def dies_at(number: int, function: Callable[[], object], die: Callable[[], None]) -> bool:
    """Call a function and let it die before its n-th operation, from 0; no later one takes place. Whether it died."""
    count = 0

    def before(name, path):
        nonlocal count
        count += 1
        if count > number:
            die()

    try:
        with every_operation(before):
            function()
    except Died:
        return True
    return False


def stopped_at(number: int, function: Callable[[], object]) -> bool:
    """Die in this process."""

    def die():
        raise Died

    return dies_at(number, function, die)


def killed_at(number: int, function: Callable[[], object]) -> bool:
    """Be killed, in a copy of this process."""
    if (child := os.fork()) == 0:
        try:
            dies_at(number, function, lambda: os.kill(os.getpid(), signal.SIGKILL))
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])
