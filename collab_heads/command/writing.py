"""What the commands write: the changed model, how it came to be, and pictures where they can be drawn."""

import shutil
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import cast

from torch import nn

from collab_heads.analysis.plots.canvas import save_figure
from collab_heads.base.extras import missing
from collab_heads.collaborative.report import SwapReport
from collab_heads.command.flags.shared import MODULES
from collab_heads.command.inputs import Loaded
from collab_heads.compression.plan import CompressionPlan
from collab_heads.compression.report import CompressReport
from collab_heads.distillation.checkpoint import DistillReport
from collab_heads.files.atomic import write_json
from collab_heads.files.folders import write_folder
from collab_heads.heads.report import FoldReport, PruneReport
from collab_heads.model.card import complete

Report = CompressReport | SwapReport | PruneReport | FoldReport
SENTENCE_TRANSFORMERS = (MODULES, "config_sentence_transformers.json", "sentence_bert_config.json", "[0-9]*_*")


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
    """Write what `from_pretrained` loads, in the dtype that the model had, and beside it what was done.

    Args:
        args: the flags; of a folder of sentence-transformers the other parts are copied.
        loaded: the model, changed, and its tokenizer.
        name: of the JSON file that says what was done.
        report: what was done.
        record: what that file says, if it is more than the report.
        distilled: what was learned after it, for the model card.
        more: writes other files into the folder that it is given.
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

    write_folder(Path(args.output_dir), fill, sum(parameter.nbytes for parameter in model.parameters()))
    print(f"model: {args.output_dir}")


def write_plan(made: CompressionPlan, output_dir: str) -> None:
    """Write what every budget would cost."""

    def fill(folder: Path) -> None:
        write_json(folder / "plan.json", made.to_dict())
        draw(made, "plan", folder)

    write_folder(Path(output_dir), fill)
    print(f"plan: {output_dir}")


def draw(made: CompressionPlan, name: str, folder: Path, measured: tuple[float, float] | None = None) -> None:
    """Draw what every budget would cost, and what one did cost, where there is matplotlib."""
    if not missing("plots"):
        save_figure(made.picture([] if measured is None else [measured]), folder / name)


def drawing(made: CompressionPlan, name: str, measured: tuple[float, float]) -> Callable[[Path], object]:
    """`draw`, once a folder is known."""
    return partial(draw, made, name, measured=measured)


def copy_modules(source: Path, folder: Path) -> None:
    """Copy what makes a folder one of sentence-transformers: its settings, and its other modules, a folder each."""
    if not (source / MODULES).is_file():
        return
    for path in (path for pattern in SENTENCE_TRANSFORMERS for path in sorted(source.glob(pattern))):
        if path.is_dir():
            shutil.copytree(path, folder / path.name)
        else:
            shutil.copyfile(path, folder / path.name)
