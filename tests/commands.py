"""How tests run the command `collab-heads` in their own process."""

from collab_heads.command import main


def run(name, *argv):
    """Read and check the flags, do the work; returns the report, and raises what the command would tell."""
    return main.run(*main.read([name, *map(str, argv)]))


def parse(name, *argv):
    """The flags of a command, checked."""
    return main.read([name, *map(str, argv)])[1]
