"""What the command `compress` writes: the smaller model, how it came to be, and the curve of what budgets cost."""

import shutil
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_heads.analysis.plots.files import save_figure
from collab_heads.command.models import MODULES
from collab_heads.compression.compression_plan import CompressionPlan
from collab_heads.compression.report import CompressReport
from collab_heads.distillation.report import DistillReport
from collab_heads.errors import UnsupportedModelError
from collab_heads.extras import missing
from collab_heads.files import write_json
from collab_heads.model.card import complete

SENTENCE_TRANSFORMERS = (MODULES, "config_sentence_transformers.json", "sentence_bert_config.json", "[0-9]*_*")


def check_class(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError if the model was loaded as another class than it is: its head would be lost."""
    named = model.config.architectures
    if named and type(model).__name__ not in named:
        raise UnsupportedModelError(
            f"the model is a {named[0]}, which transformers lacks, and would lose its head as a "
            f"{type(model).__name__}: load it in Python, and call compress"
        )


def write_plan(made: CompressionPlan, folder: Path) -> None:
    """Write what every budget would cost."""
    write_json(folder / "plan.json", made.to_dict())
    if not missing("plots"):
        save_figure(made.picture(), folder / "plan")


def write_model(
    source: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    made: CompressionPlan,
    report: CompressReport,
    distilled: DistillReport | None,
    folder: Path,
) -> None:
    """Write what `from_pretrained` loads, and beside it what was done.

    Args:
        source: what the model was loaded from; of a folder of sentence-transformers the other parts are copied.
        model: compressed.
        tokenizer: of the model.
        made: the plan that it followed.
        report: what was done.
        distilled: what the distillation after it did; None without.
        folder: where to.
    """
    copy_modules(source, folder)
    model.save_pretrained(folder)
    complete(model.config, folder, report="\n".join(str(each) for each in (report, distilled) if each is not None))
    tokenizer.save_pretrained(folder)
    write_json(
        folder / "compression.json",
        {**report.to_dict(), "distilled": None if distilled is None else distilled.to_dict(), "plan": made.to_dict()},
    )
    if not missing("plots"):
        measured = report.costs[report.of].share, report.measured_error
        save_figure(made.picture([measured]), folder / "compression")


def copy_modules(source: Path, folder: Path) -> None:
    """Copy what makes a folder one of sentence-transformers: its settings, and its other modules, a folder each."""
    if not (source / MODULES).is_file():
        return
    for path in (path for pattern in SENTENCE_TRANSFORMERS for path in sorted(source.glob(pattern))):
        if path.is_dir():
            shutil.copytree(path, folder / path.name)
        else:
            shutil.copyfile(path, folder / path.name)
