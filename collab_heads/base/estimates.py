"""One line before a long work: about how long it will take, and how much memory.

The outermost call names the work by `work`, as it opens the bar; whoever knows what is to be done says it by `say`,
once. Commands print the line, functions log it where transformers' verbosity is info; else nothing is timed.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from collab_heads.base.progress import LINES
from collab_heads.errors import CollabHeadsError

LEAST = 10.0  # seconds; of shorter works nothing is said
MINUTE, HOUR = 60.0, 3600.0

logger = logging.getLogger("transformers.collab_heads")  # below transformers' own: its verbosity counts


@dataclass(frozen=True)
class Estimate:
    """The time and the memory that a work will take.

    Attributes:
        seconds: its time.
        memory: bytes, beyond what the process holds when it begins; None where this is not known.
        threads: that it runs on.
    """

    seconds: float
    memory: float | None
    threads: int

    def __add__(self, other: "Estimate") -> "Estimate":
        """Return what both take, one after the other."""
        known = [each for each in (self.memory, other.memory) if each is not None]
        return Estimate(self.seconds + other.seconds, max(known) if len(known) == 2 else None, self.threads)

    def __str__(self) -> str:
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        said = f"about {in_words(self.seconds)} on {threads}"
        if self.memory is None or (held := held_bytes()) is None:
            return said
        return f"{said}, and {(held + self.memory) / 1e9:.1f} GB of memory at its peak"


Estimating = Callable[[], Estimate | None]  # None where the time cannot be known


@dataclass
class Work:
    """A work that has begun.

    Attributes:
        name: what it is called.
        parts: the names of the works that are open in it, its own first.
        more: estimates the rest of it, which `say` does not know.
        is_said: whether its line is written.
    """

    name: str
    parts: list[str]
    more: list[Estimating] = field(default_factory=list)
    is_said: bool = False


OPEN: ContextVar[Work | None] = ContextVar("the outermost work", default=None)


@contextmanager
def work(name: str, *more: Estimating) -> Iterator[Work]:
    """Name a work while the context is open; inside of another one it is a part of that.

    Args:
        name: what it is called.
        more: estimate what follows the part that is estimated by `say`.
    """
    outer = OPEN.get()
    if outer is not None:
        outer.parts.append(name)
        try:
            yield outer
        finally:
            outer.parts.pop()
        return
    opened = Work(name, [name], list(more))
    token = OPEN.set(opened)
    try:
        yield opened
    finally:
        OPEN.reset(token)


def is_of(name: str) -> bool:
    """Return True if the open work, or one that is open in it, has this name."""
    opened = OPEN.get()
    return opened is not None and name in opened.parts


def say(estimate: Estimating) -> None:
    """Write the line of the open work, unless it is written, nobody reads it, it is short, or a part is not known.

    Args:
        estimate: estimates the part of the work that begins; it is called only if the line may be written.
    """
    opened = OPEN.get()
    if opened is None or opened.is_said or not (LINES.get() or logger.isEnabledFor(logging.INFO)):
        return
    opened.is_said = True
    whole = None
    for each in (estimate, *opened.more):
        try:
            part = each()
        except CollabHeadsError:
            return  # the work itself will say it better
        if part is None:
            return
        whole = part if whole is None else whole + part
    if whole is None or whole.seconds < LEAST:
        return
    if LINES.get():
        print(f"{opened.name}: {whole}", file=sys.stderr, flush=True)
    else:
        logger.info("%s: %s", opened.name, whole)


def in_words(seconds: float) -> str:
    """Return a time as people say it: 40 seconds, 4 minutes, 2.5 hours."""
    if seconds < 1.5 * MINUTE:
        return f"{round(seconds, -1):.0f} seconds"
    if seconds < 1.5 * HOUR:
        return f"{seconds / MINUTE:.0f} minutes"
    return f"{seconds / HOUR:.1f} hours"


def held_bytes() -> int | None:
    """Return the bytes that this process has in memory; None where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:")), None)
