"""A terminal that remembers what progress bars draw on it."""

import functools
import io
import re
from contextlib import contextmanager

import pytest
from transformers.utils import logging

from collab_heads.base import progress

UP = "\x1b[A"  # moves the cursor to the line above, to a bar around the present one


class Terminal(io.StringIO):
    def isatty(self):
        return True

    @property
    def frames(self) -> list[str]:
        """Everything drawn, in turn; a bar that is removed is not a frame."""
        return [frame.strip() for frame in re.split(r"[\r\n]", self.getvalue()) if frame.strip()]

    @property
    def names(self) -> list[str]:
        """The names of the bars, in the order of their first frames."""
        return list(dict.fromkeys(frame.split(":")[0] for frame in self.frames))

    @property
    def percentages(self) -> list[int]:
        return [int(found[1]) for frame in self.frames if (found := re.search(r"(\d+)%", frame))]

    @property
    def phases(self) -> list[str]:
        """The phases of the bar, in turn, without their numbers."""
        found = (re.search(r"<[^,]*, ([a-z ]+[a-z])", frame) for frame in self.frames)
        return list(dict.fromkeys(each[1] for each in found if each))


@contextmanager
def shown():
    """Show progress bars on a terminal of its own; in all other tests they are off."""
    stream = Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "is_watched", lambda: True)
        patch.setattr(progress, "tqdm", functools.partial(progress.tqdm, file=stream))
        logging.enable_progress_bar()
        try:
            yield stream
        finally:
            logging.disable_progress_bar()
    assert progress.OPEN.get() is None
