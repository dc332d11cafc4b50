"""A first look at the command line, before torch and transformers are imported, which takes seconds.

`collab-heads compress --help` and a wrong flag need neither. But Python imports a package before any module in it, and
so before the module of the command. The package's `__init__` therefore calls `start_command` before its own imports. If
the process is the command, `start_command` reads and checks the flags, and exits if there is nothing more to do.
Otherwise the imports follow as usual. Ctrl-C during these imports ends the process without a traceback.
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
# What a thread of torch tries, on Linux, before it sleeps. By default threads that wait for each other keep the cores
# from the programs that they wait for: beside two busy processes half of MiniLM took over 300 s, so 56; alone both 22.
SPINS = {"GOMP_SPINCOUNT": "20000"}
SAID = (*SPINS, "OMP_WAIT_POLICY")


def start_command() -> None:
    """Read and check the flags if this process is the command; exit if they are wrong or only ask for help."""
    children = sys.modules.get("multiprocessing.process")
    if children is not None and children.parent_process() is not None:
        return  # a process that the command has started has the command's own sys.argv
    if is_command(sys.argv, sys.orig_argv):
        if threading.current_thread() is threading.main_thread():
            change_handler(signal.default_int_handler, leave)  # one that ignores Ctrl-C, of a shell's `&`, stays
        if not any(name in os.environ for name in SAID):
            os.environ.update(SPINS)  # torch reads it when it is imported
        import_module(f"{PACKAGE}.command.main").look(sys.argv[1:])


def leave(*_: object) -> None:
    """Exit at once, without an exception, which would pass through a running import: that may block or print it."""
    os.write(2, f"{COMMAND}: interrupted\n".encode())
    os._exit(INTERRUPTED)


def change_handler(old: object, new: Any) -> None:
    """Replace the handler of Ctrl-C by `new` if it is `old`."""
    if signal.getsignal(signal.SIGINT) is old:
        signal.signal(signal.SIGINT, new)


def is_command(argv: Sequence[str], original: Sequence[str]) -> bool:
    """Return True if a process was started as `collab-heads ...` or `python -m collab_heads ...`.

    Args:
        argv: `sys.argv`; while Python looks for the module after `-m`, its first element is "-m".
        original: `sys.orig_argv`, which still holds the name of that module.
    """
    if not argv:
        return False
    if argv[0] == "-m":
        return "-m" in original and original[original.index("-m") + 1 :][:1] == [PACKAGE]
    return PurePath(argv[0]).stem == COMMAND
