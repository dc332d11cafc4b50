"""export: write a model for the engine that serves it, run it there, and compare it with PyTorch."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from collab_heads.base.arguments import checking_arguments
from collab_heads.base.checks import check_choice
from collab_heads.base.option_values import EXPORT_TARGETS, ExportTarget
from collab_heads.base.progress import one_bar, progress_bar
from collab_heads.errors import ArgumentError, OutputError, SwapError
from collab_heads.files.folders import contents, write_folder
from collab_heads.model.batches import each_batch
from collab_heads.model.refusals import check_wrapper
from collab_heads.serving.comparison import Comparison
from collab_heads.serving.example_inputs import example_inputs, padded, two_rows
from collab_heads.serving.report import ExportReport
from collab_heads.serving.targets import TARGETS

PHASES = ("writing", 2), ("comparing", 2), ("timing", 1)


@checking_arguments
@one_bar("export", PHASES)
def export(
    model: PreTrainedModel,
    folder: str | Path,
    to: ExportTarget = "onnx",
    *,
    tokenizer: Any = None,
    int8: bool = False,
    batches: Iterable[Mapping] | None = None,
) -> ExportReport:
    """Write a model for an engine, run what was written there, and compare its outputs with PyTorch's.

    The model may be an original one, or compressed, pruned, collaborative or gated; it is not changed. If the outputs
    differ, or anything fails, nothing is left in the folder. Graphs take any number of rows and tokens; those of models
    that generate have a cache. `load_exported` loads them, and so does `ExportedModel` of transformers. What is for
    CTranslate2 loads there: `ctranslate2.Encoder`, `Generator` or `Translator`.

    Examples:
        >>> import tempfile
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4))
        >>> with tempfile.TemporaryDirectory() as place:
        ...     report = export(model, place + "/stock", to="transformers")
        >>> report.difference
        0.0

    Args:
        model: the model, on the processor.
        folder: a new or an empty folder.
        to: the target: "onnx" (ONNX Runtime), "openvino", "ctranslate2" (heads of a site get one width; what is missing
            is filled with zeros, and listed), or "transformers" (a checkpoint that loads without this package, and that
            other tools read; what its config cannot say is refused).
        tokenizer: the tokenizer or processor, saved beside the model; CTranslate2's vocabulary is made from it.
        int8: store weights in eight bits (all targets but "transformers"; "openvino" needs nncf).
        batches: input dicts as the model takes them, to compare with; None: random ones. Inputs that they do not name
            are no inputs of a graph, but for the mask of a text.

    Returns:
        The size, the differences and the times; `print` it.

    Raises:
        ArgumentError: if the target is unknown or has no int8, the tokenizer is none, or no examples can be made.
        MissingPackageError: if a package of the target is not installed, or transformers is too old for graphs.
        OutputError: if the folder is not empty, or cannot be written.
        SwapError: if the config of a stock checkpoint cannot say what the model is, or the outputs differ.
        UnsupportedModelError: if the exporter cannot export the model, or it is wrapped.
    """
    check_choice("target", to, EXPORT_TARGETS)
    check_wrapper(model)
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise ArgumentError(
            f"tokenizer is a {type(tokenizer).__name__}, which has no save_pretrained: pass a tokenizer"
        )
    target, folder = TARGETS[to], Path(folder)
    target.check(model, int8)
    if folder.exists() and (not folder.is_dir() or contents(folder)):
        raise OutputError(f"{folder} is not empty: choose a new folder")
    given = list(each_batch(batches)) if batches is not None else [example_inputs(model)]
    training, found = model.training, dict[str, Any]()

    def fill(place: Path) -> None:
        with progress_bar(desc="writing", total=1):
            example = padded(model, two_rows(given[0]))
            found["notes"] = target.write(model, place, example, tokenizer=tokenizer, int8=int8)
            if tokenizer is not None:
                tokenizer.save_pretrained(place)
        found["comparison"] = target.compare(model, place, given, tokenizer)
        check_difference(found["comparison"], to, None if int8 else target.tolerance)
        found["bytes"] = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())

    model.eval()
    try:
        write_folder(folder, fill, sum(parameter.nbytes for parameter in model.parameters()))
    finally:
        model.train(training)
    compared: Comparison = found["comparison"]
    return ExportReport(str(folder), to, int8, found["bytes"] / 1e6, *compared, notes=found["notes"])


def check_difference(found: Comparison, to: str, tolerance: float | None) -> None:
    """Raise SwapError if an exported model puts out something else than its original."""
    if tolerance is not None and not found.difference <= tolerance:
        raise SwapError(
            f"the model in {to} differs from PyTorch by {found.difference:.2g} of its largest output, more than "
            f"{tolerance:.2g}: nothing was written. Other batches may be nearer to what the model reads"
        )
