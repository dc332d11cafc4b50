"""One progress bar for one call.

The outermost call opens the bar: a public function with several phases by `one_bar`, a single loop by `progress_bar`. A
loop inside an open bar opens no second one: it advances the open one and names the phase.

Commands write lines where nobody watches: one every half minute, so that a log shows that they work.
"""

import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Event, Thread
from typing import Any

from tqdm import tqdm
from transformers.utils import logging

Phases = Sequence[tuple[str, float]]  # description, weight
SHARES = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"  # the format of a bar of several phases
SECONDS = 30.0  # between two lines
LINES: ContextVar[bool] = ContextVar("whether lines are written where no bar is shown", default=False)


@contextmanager
def one_bar(what: str, phases: Phases = (), *, disable: bool = False) -> Iterator[None]:
    """Show one progress bar for a call of several phases, while the context is open; also a decorator.

    Each `progress_bar` inside is a phase. It advances the bar by its share of what is left; phases that do not occur
    take no room. Inside an open bar the call is itself a phase of it.

    Args:
        what: the name of the call, beside the bar.
        phases: the descriptions of the `progress_bar`s inside, in their order, and how long each takes beside the
            others. Where none is given, every loop takes half of what is left.
        disable: hide the bar everywhere, as in all processes but the first.
    """
    above = OPEN.get()
    if above is not None:
        stretch = above.part(what, phases)
    else:
        bar = Bar(disable, desc=what, total=1.0, bar_format=SHARES, smoothing=0, leave=False)
        stretch = Stretch(bar, 0.0, 1.0, phases)
    with stretch:
        yield
        stretch.bar.move(stretch.end)


def progress_bar(
    iterable: Iterable | None = None,
    *,
    desc: str,
    total: int | None = None,
    initial: int = 0,
    disable: bool = False,
    leave: bool = False,
    **options: Any,
) -> "Loop":
    """Show how far a loop is: on a bar of its own, or inside an open bar on that one.

    A bar is shown only where stderr is a terminal or a notebook and transformers shows bars, too: in a log file it
    would add a line for every step. The environment variable TQDM_DISABLE also hides it.

    Args:
        iterable: what the loop goes over; without it, call `update` inside a `with` block.
        desc: what the loop does; the name of a phase inside `one_bar`.
        total: the number of steps; None for the length of the iterable, where it has one.
        initial: the number of steps that were done before.
        disable: hide the bar everywhere, as in all processes but the first; inside an open bar, leave that as it is.
        leave: keep a bar of its own on the screen at the end.
        options: other arguments of tqdm, for a bar of its own.
    """
    return Loop(iterable, desc, total, initial, disable, {"leave": leave, **options})


class Bar:
    """The open bar.

    Args:
        disable: hide it.
        options: arguments of tqdm, which draws it once the first phase begins.

    Attributes:
        note: numbers to show beside it, of a bar that is one loop.
        phase: the phase it is in.
    """

    def __init__(self, disable: bool, **options: Any):
        self.note = self.phase = ""
        self.in_shares = "bar_format" in options
        self.options, self.last = options, 0.0
        self.drawn: tqdm | None = None
        self.kind: type[tqdm] = Lines if LINES.get() and not is_watched() else tqdm
        if disable or not (is_shown() or self.kind is Lines):
            options["disable"] = True  # no other value: it would override TQDM_DISABLE
        self.silenced = False

    def open(self) -> None:
        """Draw the bar, and hide those of transformers and huggingface_hub until it closes."""
        if self.drawn is None:
            self.drawn = self.kind(**self.options)
            if not self.drawn.disable and self.kind is not Lines:
                self.silenced = logging.is_progress_bar_enabled()
                logging.disable_progress_bar()

    def move(self, share: float) -> None:
        """Move a bar of several phases forward, to a share of its length."""
        if self.drawn is not None and self.in_shares and share > self.drawn.n:
            self.drawn.n = share
            self.draw()

    def say(self, *, phase: str | None = None, note: str | None = None, now: bool = False) -> None:
        """Change the text beside the bar."""
        self.phase, self.note = self.phase if phase is None else phase, self.note if note is None else note
        if self.drawn is not None:
            self.drawn.postfix = ", ".join(filter(None, [self.note, self.phase]))
            self.draw(now=now)

    def draw(self, *, now: bool = False) -> None:
        """Draw the bar, at most ten times a second unless `now` is set."""
        if self.drawn is None or self.drawn.disable:
            return
        if now or time.monotonic() - self.last >= self.drawn.mininterval:
            self.drawn.refresh()
            self.last = time.monotonic()

    def close(self, *, done: bool) -> None:
        """Remove the bar, or leave it there if its options say so."""
        if self.drawn is None:
            return
        if done:
            self.move(1.0)
            self.say(phase="", now=True)
        self.drawn.close()
        if self.silenced:
            logging.enable_progress_bar()


class Lines(tqdm):
    """A bar that is written as a line from time to time, with the phase, the time so far, and an estimate."""

    def __init__(self, **options: Any):
        super().__init__(**{**options, "leave": False, "bar_format": None, "delay": math.inf})  # nothing to remove
        self.closed = Event()
        if not self.disable:
            counted = (
                "{percentage:.0f} %, {elapsed} so far, about {remaining} to go" if self.total else "{n_fmt}, {elapsed}"
            )
            self.bar_format = f"{{desc}}: {counted}{{postfix}}"
            Thread(target=self.write_lines, daemon=True).start()

    def write_lines(self) -> None:
        """Write a line every half minute, until the bar is closed."""
        while not self.closed.wait(SECONDS):
            print(self, file=self.fp, flush=True)

    def display(self, *args: Any, **options: Any) -> bool:
        """Draw nothing."""
        return True

    def close(self) -> None:
        self.closed.set()
        super().close()


class Stretch:
    """A stretch of the open bar: all of it, or what a call inside it or a step of a loop takes of it.

    Args:
        bar: the bar.
        start: its first point, as a share of the bar.
        end: its last point.
        phases: the announced parts to come, with their weights.
        above: the stretch that it is a part of; None for the whole bar.
        depth: the number of loops inside the bar that it lies in; only those in no other are named.

    Attributes:
        reached: the point where the next part begins.
    """

    def __init__(
        self,
        bar: Bar,
        start: float,
        end: float,
        phases: Phases = (),
        above: "Stretch | None" = None,
        depth: int = 0,
    ):
        self.bar, self.reached, self.end, self.above, self.depth = bar, start, end, above, depth
        self.phases, self.is_announced = list(phases), bool(phases)

    def part(self, what: str, phases: Phases = ()) -> "Stretch":
        """Give a part of what is left to a phase: its share of the announced ones, or half where none is announced."""
        self.bar.open()
        share = 0.0 if self.is_announced else 0.5
        names = [name for name, _ in self.phases]
        if what in names:
            (_, weight), *self.phases = self.phases[names.index(what) :]  # those before it do not occur
            later = sum(weight for _, weight in self.phases)
            share = weight / (weight + later) if later else 1.0
        start = self.reached
        self.reached += (self.end - start) * share
        return Stretch(self.bar, start, self.reached, phases, self, self.depth)

    def __enter__(self) -> "Stretch":
        OPEN.set(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Return to the stretch above, unless something has closed that one before."""
        innermost = OPEN.get()
        while innermost is not None and innermost is not self:
            innermost = innermost.above
        if innermost is self:
            OPEN.set(self.above)
        if self.above is None:
            self.bar.close(done=kind is None)


OPEN: ContextVar[Stretch | None] = ContextVar("the innermost stretch of the open bar", default=None)


class Loop:
    """A loop that shows how far it is, see `progress_bar`; it can be iterated over, or advanced inside `with`."""

    def __init__(
        self,
        iterable: Iterable | None,
        what: str,
        total: int | None,
        initial: int,
        disable: bool,
        options: Mapping[str, Any],
    ):
        self.iterable, self.what, self.done, self.disable, self.options = iterable, what, initial, disable, options
        self.total = len(iterable) if total is None and hasattr(iterable, "__len__") else total  # type: ignore[arg-type]
        self.step: Stretch | None = None  # of the bar, for the step that runs
        self.start = self.end = 0.0
        self.has_bar = self.is_named = False  # draws a bar of its own; is the phase of a bar
        self.note = ""

    def __iter__(self) -> Iterator:
        if self.step is not None:
            yield from self.steps()
        else:
            with self:
                yield from self.steps()

    def steps(self) -> Iterator:
        for each in self.iterable or ():
            yield each
            self.update()

    def __enter__(self) -> "Loop":
        above = OPEN.get()
        self.has_bar = above is None
        if above is None:
            numbers = {"desc": self.what, "total": self.total, "initial": self.done}
            self.step = Stretch(Bar(self.disable, **numbers, **self.options), 0.0, 0.0)
            self.step.bar.open()
        elif self.disable:
            self.step = Stretch(Bar(True), 0.0, 0.0, above=above)
        else:
            self.step = above.part(self.what)
            self.start, self.end, self.is_named = self.step.reached, self.step.end, not above.depth
            self.step.depth += self.total != 1
            self.advance(now=True)
        self.step.__enter__()
        return self

    def update(self, count: int = 1) -> None:
        """Count steps that are done."""
        assert self.step is not None, "a loop is advanced inside `with`"
        self.done += count
        if self.has_bar and self.step.bar.drawn is not None:
            self.step.bar.drawn.update(count)
        elif not self.disable:
            self.advance()

    def advance(self, *, now: bool = False) -> None:
        """Move the open bar to the step that now runs, and say which one it is."""
        assert self.step is not None
        if self.total:
            length = (self.end - self.start) / self.total
            self.step.reached = self.start + length * min(self.done, self.total)
            self.step.end = min(self.step.reached + length, self.end)
            self.step.bar.move(self.step.reached)
        if self.is_named:
            count = f" {self.done:{len(str(self.total))}}/{self.total}" if self.total else f" {self.done}"
            said = self.what + (count if self.total != 1 else "")
            self.step.bar.say(phase=", ".join(filter(None, [said, self.note])), now=now)

    def show(self, note: str) -> None:
        """Show numbers beside the loop."""
        self.note = note
        if self.has_bar and self.step is not None:
            self.step.bar.say(note=note, now=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self.step is not None:
            if self.is_named:
                self.step.bar.say(phase="")
            if not self.has_bar and not self.disable and kind is None:
                self.step.bar.move(self.end)
            self.step.__exit__(kind, error, trace)
            self.step = None


def is_shown() -> bool:
    """Return True if bars are shown: stderr is watched, and transformers shows its bars, too."""
    return is_watched() and logging.is_progress_bar_enabled()


def is_watched() -> bool:
    """Return True if stderr is a terminal or a notebook."""
    return sys.stderr is not None and (sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel"))


@contextmanager
def showing_bars(show: bool) -> Iterator[None]:
    """Hide progress bars while the context is open, those of transformers and huggingface_hub included, unless `show`.

    Args:
        show: leave the bars on; where stderr is neither a terminal nor a notebook our own become lines, and the others
            are hidden nevertheless.
    """
    before, lines = logging.is_progress_bar_enabled(), LINES.set(show)
    if not (show and is_watched()):
        logging.disable_progress_bar()
    try:
        yield
    finally:
        LINES.reset(lines)
        if before:
            logging.enable_progress_bar()
