"""Keep the measurements of every site in a file: a plan that was killed goes on from there."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from collab_heads.base.checks import is_number
from collab_heads.compression import bits
from collab_heads.compression.options import PlanOptions
from collab_heads.compression.parts.shape import Shape
from collab_heads.compression.parts.table import parts_of
from collab_heads.errors import OutputError
from collab_heads.files.checkpoint import check_same_run, digest_of_batches, digest_of_model
from collab_heads.files.folders import alone_in
from collab_heads.files.reading import read_document, write_document
from collab_heads.model.open_layers import OpenLayers
from collab_heads.running.threads import stored_threads
from collab_heads.sites.state import expect

VERSION = 4  # of the file


@dataclass(frozen=True)
class MeasuredPart:
    """The measurements of one part of a site.

    Attributes:
        errors: size, as in `Choice` -> squared error of the site, by rising size, in fits without refinement.
        moved: size -> squared error of the output, in such fits, at one or two of these sizes.
        left: the share of the output's error that refinement leaves; None where this was not measured.
    """

    errors: Mapping[int, float]
    moved: Mapping[int, float] = field(default_factory=dict)
    left: float | None = None

    def effects(self) -> dict[int, float]:
        """Return the squared error of the output for every size.

        It is in proportion to that of the site. Where two were measured, the factor changes evenly between them.
        """
        near = sorted((error, squares / error) for size, squares in self.moved.items() if (error := self.errors[size]))
        if not near:
            return dict.fromkeys(self.errors, 0.0)
        tried, factors = zip(*near, strict=True)
        return {size: float(error * np.interp(error, tried, factors)) for size, error in self.errors.items()}

    def to_dict(self) -> dict:
        return {"errors": list(self.errors.items()), "moved": list(self.moved.items()), "left": self.left}

    @classmethod
    def from_dict(cls, stored: Mapping) -> "MeasuredPart":
        """Return what `to_dict` described; ValueError and other errors on numbers that no measurement has."""
        errors, moved = (dict(map(tuple, stored[name])) for name in ("errors", "moved"))
        made = cls(errors, moved, stored["left"])
        numbers = [*made.errors.values(), *made.moved.values(), *([] if made.left is None else [made.left])]
        expect(all(is_number(each) and each >= 0 for each in numbers), "numbers", numbers, "finite ones, 0 or more")
        return made


MeasuredSite = Mapping[str, MeasuredPart]  # by the name of a part, or "bits"


@dataclass
class MeasuredSites:
    """The sites that were measured so far.

    Attributes:
        path: the file; None to keep nothing.
        run: the description of the run that measures them.
        sites: path of a site -> part -> what was measured.
        threads: torch's threads, of which the last bits depend; a run that goes on takes as many.
    """

    path: Path | None = None
    run: Mapping[str, Any] = field(default_factory=dict)
    sites: dict[str, MeasuredSite] = field(default_factory=dict)
    threads: int = field(default_factory=torch.get_num_threads)

    def add(self, path: str, measured: MeasuredSite) -> None:
        """Add a site, and write the file."""
        self.sites[path] = measured
        if self.path is not None:
            sites = {name: {part: each.to_dict() for part, each in of.items()} for name, of in self.sites.items()}
            stored = {"version": VERSION, "run": self.run, "threads": self.threads, "sites": sites}
            write_document(self.path, stored)

    @classmethod
    def read(cls, path: Path, run: Mapping[str, Any], shapes: Mapping[str, Shape]) -> "MeasuredSites":
        """Read a file of this run, if it is there.

        Args:
            path: the file.
            run: the description of the run.
            shapes: path -> shape, of the sites to measure.

        Raises:
            DataError: if it holds something else.
            OutputError: if it is of another run.
        """

        def build(stored: Any) -> MeasuredSites:
            try:
                check_same_run(path, stored["run"], run)
            except OutputError as error:
                raise OutputError(f"{error}; or give another file for measurements") from None
            sites: dict[str, MeasuredSite] = {
                name: {part: MeasuredPart.from_dict(each) for part, each in of.items()}
                for name, of in stored["sites"].items()
            }
            for name, of in sites.items():
                expect(name in shapes, "a site", name, "one of the model")
                wanted = sizes_of(shapes[name])
                expect(of.keys() == wanted.keys(), "the parts of", name, "its own")
                for part, each in of.items():
                    sizes = wanted[part]
                    expect(list(each.errors) == sizes, f"the sizes of {name}", list(each.errors), str(sizes))
                    tried = list(each.moved)
                    expect(set(tried) <= set(sizes), f"the sizes of {name} that were tried", tried, "some of its own")
            return cls(path, run, sites, stored_threads(stored["threads"]))

        return read_document(path, VERSION, "file of measurements", build) if path.exists() else cls(path, run)


def sizes_of(shape: Shape) -> dict[str, list[int]]:
    """Return the sizes at which errors are measured: part, or "bits" -> sizes."""
    found: dict[str, list[int]] = {name: part.sizes(shape) for name, part in parts_of(shape).items()}
    return found | ({bits.NAME: [*shape.bits]} if shape.bits else {})


@contextmanager
def kept_measurements(
    path: str | Path | None,
    layers: OpenLayers,
    batches: Sequence[Mapping],
    options: PlanOptions,
    shapes: Mapping[str, Shape],
) -> Iterator[MeasuredSites]:
    """Read what was measured before the run was killed, and keep other runs from the file meanwhile.

    Args:
        path: the file; None to keep nothing.
        layers: the layers of the model.
        batches: the batches that it is measured on.
        options: the options of the plan.
        shapes: path -> shape, of the sites to measure.
    """
    if path is None:
        yield MeasuredSites()
        return
    run = {
        "model": digest_of_model(layers.model),
        "batches": digest_of_batches(batches),
        "sites": list(shapes),
        "parts": options.counted_parts,
        "kind": options.kind,
        "multiple_of": options.multiple_of,
        "refine_steps": options.refine_steps,
        "seed": options.seed,
        "bits": list(options.grid_bits),
        "table_bits": list(options.grid_table_bits),
    }
    with alone_in(path):
        yield MeasuredSites.read(Path(path), run, shapes)
