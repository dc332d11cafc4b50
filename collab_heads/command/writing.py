"""The output of the commands: the changed model, a record of the change, and pictures where matplotlib is installed."""

import os
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import cast

from torch import nn

from collab_heads.base.extras import missing
from collab_heads.collaborative.report import SwapReport
from collab_heads.command.inputs import Loaded
from collab_heads.compression.compression_plan import CompressionPlan
from collab_heads.compression.report import CompressReport
from collab_heads.distillation.checkpoint import DistillReport
from collab_heads.files.atomic import write_json
from collab_heads.files.folders import write_folder
from collab_heads.heads.report import FoldReport, PruneReport
from collab_heads.model.card import complete
from collab_heads.model.sentence_encoder import copy_modules
from collab_heads.plots.canvas import save_figure
from collab_heads.vocabulary.trim import VocabularyReport

Report = CompressReport | SwapReport | PruneReport | FoldReport | VocabularyReport


def write_model(
    args: Namespace,
    loaded: Loaded,
    name: str,
    report: Report,
    record: Mapping | None = None,
    *,
    distilled: DistillReport | None = None,
    more: Callable[[Path], object] | None = None,
) -> None:
    """Write a folder for `from_pretrained`, with the model in its original dtype and a record of the change beside it.

    Args:
        args: the flags; if the model is a sentence-transformers folder, its other parts are copied.
        loaded: the changed model and its tokenizer.
        name: name of the JSON file with the record.
        report: the report of the change.
        record: content of the JSON file; default: the report.
        distilled: report of a distillation after the change, for the model card.
        more: writes other files into the folder that it receives.
    """
    model = loaded.model
    said = "\n".join(str(each) for each in (report, distilled) if each is not None)
    cast(nn.Module, model).to(loaded.dtype)

    def fill(folder: Path) -> None:
        copy_modules(Path(args.model), folder)
        model.save_pretrained(folder)
        complete(model.config, folder, report=said)
        loaded.tokenizer.save_pretrained(folder)
        write_json(folder / f"{name}.json", report.to_dict() if record is None else record)
        if more is not None:
            more(folder)

    size = sum(parameter.nbytes for parameter in model.parameters())
    write_folder(Path(os.path.realpath(args.output_dir)), fill, size)
    print(f"model: {args.output_dir}")


def write_plan(made: CompressionPlan, output_dir: str) -> None:
    """Write a compression plan, the cost of every budget, as JSON and as a picture."""

    def fill(folder: Path) -> None:
        write_json(folder / "plan.json", made.to_dict())
        draw(made, "plan", folder)

    write_folder(Path(os.path.realpath(output_dir)), fill)
    print(f"plan: {output_dir}")


def draw(made: CompressionPlan, name: str, folder: Path, measured: tuple[float, float] | None = None) -> None:
    """Draw the cost of every budget, and the measured cost of one, if matplotlib is installed."""
    if not missing("plots"):
        save_figure(made.picture([] if measured is None else [measured]), folder / name)


def drawing(made: CompressionPlan, name: str, measured: tuple[float, float]) -> Callable[[Path], object]:
    """Return `draw` as a function of the folder alone."""
    return partial(draw, made, name, measured=measured)
