"""The report of an export: what was written, how far the engine is from PyTorch, and the time of both."""

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class ExportReport:
    """The result of `export`.

    Attributes:
        folder: where the exported model is.
        to: the target.
        int8: whether weights have eight bits.
        megabytes: the size of its files.
        difference: the largest difference of an output from PyTorch's, as a share of PyTorch's largest output; over the
            steps of greedy decoding, as long as both chose the same tokens.
        agreeing: the share of the tokens chosen by greedy decoding that are PyTorch's; None for a model that does not
            generate.
        seconds_before: the time of PyTorch for the examples, one thread.
        seconds_after: that of the engine, one thread, measured in turns.
        notes: what a user should know.
    """

    folder: str
    to: str
    int8: bool
    megabytes: float
    difference: float
    agreeing: float | None
    seconds_before: float
    seconds_after: float
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict:
        """Return all numbers, ready for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        tokens = "" if self.agreeing is None else f", {self.agreeing:.1%} of greedy tokens are the same"
        kind = f"{self.to}, int8" if self.int8 else self.to
        lines = [
            f"{kind}: {self.megabytes:.1f} MB in {self.folder}",
            f"largest difference of the output from PyTorch: {self.difference:.2g} of its largest value{tokens}",
            f"time on the examples, one thread: {1000 * self.seconds_before:.1f} -> {1000 * self.seconds_after:.1f} ms",
            *self.notes,
        ]
        return "\n".join(lines)
