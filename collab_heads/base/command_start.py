"""A first look at the command line, before torch and transformers are imported: they take seconds.

`collab-heads compress --help` and a wrong flag need none of them. But Python runs a package before any module in it,
the command's, too. So the package's `__init__` calls `start_command` before its own imports: where the process is the
command, its flags are read and checked then, and it leaves if there is no more to do. Else all is imported as ever;
Ctrl-C meanwhile ends the process without a word about what was being imported.
"""

import os
import signal
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from pathlib import PurePath
from typing import Any

COMMAND, PACKAGE = "collab-heads", "collab_heads"
INTERRUPTED = 130  # the exit code, as shells have it


def start_command() -> None:
    """Read the command's flags, if this process is the command; leave if they are wrong, or ask for help."""
    children = sys.modules.get("multiprocessing.process")
    if children is not None and children.parent_process() is not None:
        return  # a process that the command has started has the command's own sys.argv
    if is_command(sys.argv, sys.orig_argv):
        if threading.current_thread() is threading.main_thread():
            change_handler(signal.default_int_handler, leave)  # one that ignores Ctrl-C, of a shell's `&`, stays
        import_module(f"{PACKAGE}.command.main").look(sys.argv[1:])


def leave(*_: object) -> None:
    """Leave at once: an error would go through whatever is being imported, which may hold it up or show it."""
    os.write(2, f"{COMMAND}: interrupted\n".encode())
    os._exit(INTERRUPTED)


def change_handler(old: object, new: Any) -> None:
    """Handle Ctrl-C otherwise, if it is handled as expected."""
    if signal.getsignal(signal.SIGINT) is old:
        signal.signal(signal.SIGINT, new)


def is_command(argv: Sequence[str], original: Sequence[str]) -> bool:
    """Whether a process was started as `collab-heads ...` or `python -m collab_heads ...`.

    Args:
        argv: `sys.argv`; while Python looks for the module after `-m`, its first element is "-m".
        original: `sys.orig_argv`, in which the name of that module still stands.
    """
    if not argv:
        return False
    if argv[0] == "-m":
        return "-m" in original and original[original.index("-m") + 1 :][:1] == [PACKAGE]
    return PurePath(argv[0]).stem == COMMAND
