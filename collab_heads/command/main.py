"""Which command is asked for."""

import sys
from collections.abc import Sequence
from importlib import import_module

from collab_heads.checks import check_choice
from collab_heads.errors import CollabHeadsError

COMMANDS = {  # name -> its module, imported when it is asked for
    "analyze": "collab_heads.command.analyze",
    "compress": "collab_heads.command.compress",
}
USAGE = f"usage: python -m collab_heads COMMAND ...\n\ncommands: {', '.join(COMMANDS)}; COMMAND --help explains one"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code, after saying on stderr what went wrong."""
    name, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print(USAGE)
        return 0
    try:
        check_choice("command", name, COMMANDS)
        import_module(COMMANDS[name]).main(rest)
    except CollabHeadsError as problem:
        print(f"collab_heads: {problem}", file=sys.stderr)
        return 1
    return 0
