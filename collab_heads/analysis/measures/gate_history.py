"""The gates of a model over a training: plain numbers, kept beside the model."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from collab_heads.base.checks import did_you_mean
from collab_heads.errors import ArgumentError, NonFiniteError, ShapeError
from collab_heads.files.reading import read_document, write_document
from collab_heads.sites.site import AttentionSite

VERSION = 1


@dataclass(frozen=True, eq=False)
class GateHistory:
    """The probability P(open) of every gate at the recorded steps.

    Attributes:
        sites: the sites that have gates, in model order.
        heads: path -> the original numbers of its heads; sites that are not listed are numbered from 0.
        steps: optimizer steps, increasing.
        probabilities: path -> [steps, H], float64 on the CPU.
    """

    sites: tuple[AttentionSite, ...]
    heads: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    steps: tuple[int, ...] = ()
    probabilities: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self):
        if not self.sites:
            raise ArgumentError("a history of gates needs at least one site")
        empty = {site.path: torch.zeros(0, site.num_heads, dtype=torch.float64) for site in self.sites}
        if not self.steps:
            object.__setattr__(self, "probabilities", empty | dict(self.probabilities))
        for path in self.probabilities.keys() | self.heads.keys():
            if path not in empty:
                raise ArgumentError(f"{path!r} is none of the sites{did_you_mean(path, empty)}")
        for site in self.sites:
            check_probabilities(site, self.probabilities.get(site.path), len(self.steps))
        if any(later <= earlier for earlier, later in zip(self.steps, self.steps[1:], strict=False)):
            raise ArgumentError(f"the steps of a history must increase, not {', '.join(map(str, self.steps))}")

    def record(self, step: int, probabilities: Mapping[str, Tensor | Sequence[float]]) -> "GateHistory":
        """Return the history with one more step; this one does not change.

        Args:
            step: later than all recorded steps.
            probabilities: path -> [H], P(open) of the gates of every site.

        Raises:
            ArgumentError: if the step is not later than the last, a site is missing or unknown, or a number is not a
                probability.
            ShapeError: if there is not one number per head.
            NonFiniteError: if a number is NaN or infinite.
        """
        for path in probabilities.keys() - {site.path for site in self.sites}:
            raise ArgumentError(f"{path!r} is none of the sites{did_you_mean(path, self.probabilities)}")
        longer = {}
        for site in self.sites:
            if site.path not in probabilities:
                raise ArgumentError(f"step {step} has no probabilities of {site.path}")
            row = torch.as_tensor(probabilities[site.path]).detach().to("cpu", torch.float64)
            check_probabilities(site, row[None], 1)
            longer[site.path] = torch.cat([self.probabilities[site.path], row[None]])
        return dataclasses.replace(self, steps=(*self.steps, int(step)), probabilities=longer)

    def save(self, path: str | Path) -> None:
        """Write a JSON file; it replaces an existing one only when complete."""
        described = {
            "version": VERSION,
            "sites": [site.to_dict() for site in self.sites],
            "heads": {path: list(numbers) for path, numbers in self.heads.items()},
            "steps": list(self.steps),
            "probabilities": {path: each.tolist() for path, each in self.probabilities.items()},
        }
        write_document(path, described)

    @classmethod
    def load(cls, path: str | Path) -> "GateHistory":
        """Read a file that `save` wrote.

        Raises:
            DataError: if the file is missing, damaged or of another version.
        """
        return read_document(path, VERSION, "history of gates", cls._from_dict)

    @classmethod
    def _from_dict(cls, stored: Any) -> "GateHistory":
        sites = tuple(AttentionSite.from_dict(site) for site in stored["sites"])
        heads = {path: tuple(numbers) for path, numbers in stored["heads"].items()}
        steps = tuple(int(step) for step in stored["steps"])
        numbers = {
            site.path: torch.tensor(stored["probabilities"][site.path], dtype=torch.float64).reshape(
                len(steps), site.num_heads
            )
            for site in sites
        }
        return cls(sites, heads, steps, numbers)


def check_probabilities(site: AttentionSite, probabilities: Tensor | None, steps: int) -> None:
    """Raise an error unless there is one probability per step and head."""
    if probabilities is None or tuple(probabilities.shape) != (steps, site.num_heads):
        shape = "no" if probabilities is None else tuple(probabilities.shape)
        raise ShapeError(f"{site.path}: {shape} probabilities for {steps} steps and {site.num_heads} heads")
    if not probabilities.isfinite().all():
        raise NonFiniteError(f"{site.path}: a probability is NaN or infinite")
    if probabilities.numel() and (probabilities.min() < 0 or probabilities.max() > 1):
        wrong = probabilities[(probabilities < 0) | (probabilities > 1)][0]
        raise ArgumentError(f"{site.path}: {float(wrong):g} is no probability")
