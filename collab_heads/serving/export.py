"""export: write a model for the engine that serves it, run it there, and compare it with PyTorch."""

import copy
import dataclasses
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from collab_heads.base.arguments import checking_arguments
from collab_heads.base.checks import check_choice
from collab_heads.base.numerics import keeping_threads
from collab_heads.base.option_values import EXPORT_TARGETS, LAYERED, ExportTarget
from collab_heads.base.progress import one_bar, progress_bar
from collab_heads.base.report import Report
from collab_heads.errors import ArgumentError, ModelStateError
from collab_heads.files.atomic import write_file
from collab_heads.files.folders import check_new, write_folder
from collab_heads.heads.fold import fold_heads
from collab_heads.layers.weight_grid import leave_grids
from collab_heads.model.opened import opened
from collab_heads.model.refusals import check_weights, check_wrapper, unmark_dequantised
from collab_heads.running.batches import each_batch, evaluating
from collab_heads.saving.card import README
from collab_heads.saving.source_files import bring_modules
from collab_heads.saving.vocabularies import check_words
from collab_heads.serving.comparison import Comparison, check_examples, naming_outputs
from collab_heads.serving.example_inputs import example_inputs, padded, two_rows, without_labels
from collab_heads.serving.for_ctranslate2 import CTranslate2
from collab_heads.serving.for_executorch import ExecuTorch
from collab_heads.serving.for_gguf import Gguf
from collab_heads.serving.for_graphs import Onnx, OpenVino
from collab_heads.serving.for_transformers_js import TransformersJs, dtype_of
from collab_heads.serving.layer_checkpoint import check_layers, write_layers
from collab_heads.serving.sentence_encoder import (
    embedding_texts,
    is_sentence_encoder,
    sentence_encoder,
    write_served,
)
from collab_heads.serving.served_card import served_card
from collab_heads.serving.target import Target
from collab_heads.sites.record import CollabConfig


@dataclass(frozen=True)
class ExportReport(Report):
    """The result of `export`.

    Attributes:
        folder: where the exported model is.
        to: the target.
        int8: whether the engine multiplies in eight bits.
        megabytes: the size of its files.
        difference: the largest difference of an output from PyTorch's, as a share of the largest value of that output
            in PyTorch; over the steps of greedy decoding, as long as both chose the same tokens.
        agreeing: the share of the tokens chosen by greedy decoding that are PyTorch's; None for a model that does not
            generate.
        margin: how far, where a text first gets another token, PyTorch's own is ahead: the largest difference of their
            scores, as a share of PyTorch's largest output. After that token the text continues otherwise.
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
    margin: float
    seconds_before: float
    seconds_after: float
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        kind = f"{self.to}, int8" if self.int8 else self.to
        return [
            f"{kind}: {self.megabytes:.1f} MB in {self.folder}",
            f"largest difference of the output from PyTorch: {self.difference:.2g} of its largest value",
            *self.about_tokens(),
            f"time on the examples, one thread: {1000 * self.seconds_before:.1f} -> {1000 * self.seconds_after:.1f} ms",
            *self.notes,
        ]

    def about_tokens(self) -> Iterator[str]:
        """Yield what the share of equal tokens means."""
        if self.agreeing is None:
            return
        yield f"{self.agreeing:.1%} of greedy tokens are PyTorch's"
        if self.agreeing < 1:
            what = (
                "eight bits decide otherwise there: measure the quality on texts of your own"
                if self.int8
                else "a tie, which rounding decides, and no fault"
            )
            yield (
                f"  where a text first gets another token, PyTorch's own is ahead by {self.margin:.2g} of the largest "
                f"value or less: {what}; after that token, the text continues otherwise"
            )


class StockCheckpoint(Target):
    """A checkpoint that plain transformers loads, and whatever reads its checkpoints."""

    name = "transformers"

    def check(self, model, int8, tokenizer):
        """Refuse weights that stand in two places, unless the model ties them itself: none can be saved twice."""
        super().check(model, int8, tokenizer)
        tied, first = getattr(model, "all_tied_weights_keys", None) or {}, dict[int, str]()
        for name, weight in model.named_parameters(remove_duplicate=False):
            if name not in tied and first.setdefault(id(weight), name) != name:
                raise ModelStateError(
                    f"{name} is {first[id(weight)]}, too, which a checkpoint of transformers cannot say: give one a "
                    "copy of its own (copy.deepcopy) first"
                )

    def write(self, model, folder, example, *, tokenizer, int8):
        """Make a stock model of a copy, and save it."""
        copied = copy.deepcopy(model)
        unmark_dequantised(copied)
        leave_grids(copied)
        notes = self.save(copied, folder)
        if is_sentence_encoder(model):
            bring_modules(model.config, folder)  # sentence-transformers loads it as it loads the original
        return notes

    def save(self, copied: PreTrainedModel, folder: Path) -> tuple[str, ...]:
        """Fold a model in place, and save it; return notes."""
        is_changed = CollabConfig.on(copied).sites or CollabConfig.on(copied).feed_forwards
        notes = (str(fold_heads(copied)),) if is_changed else ()
        copied.save_pretrained(folder)
        return notes

    def load(self, model, folder):
        return type(model).from_pretrained(folder, dtype=model.dtype, return_dict=True).eval()


class LayerCheckpoint(StockCheckpoint):
    """A stock checkpoint in which every layer has sizes of its own, for a transformers that builds such layers."""

    def check(self, model, int8, tokenizer):
        super().check(model, int8, tokenizer)
        check_layers(model)

    def save(self, copied, folder):
        with opened(copied, changes=True, of="layers") as layers:
            return write_layers(layers, folder)


TARGETS: dict[ExportTarget, Target] = {
    each.name: each
    for each in (Onnx(), TransformersJs(), OpenVino(), ExecuTorch(), CTranslate2(), Gguf(), StockCheckpoint())
}
ROUNDINGS = 8  # of the weights' type, by which the same weights may differ elsewhere; seen: 1.8 in bfloat16
PHASES = ("checking", 1), ("writing", 2), ("comparing", 2), ("timing", 1)


@checking_arguments
@one_bar("export", PHASES)
def export(
    model: PreTrainedModel,
    folder: str | Path,
    to: ExportTarget = "onnx",
    *,
    tokenizer: Any = None,
    int8: bool = False,
    per_layer: bool = False,
    batches: Iterable[Mapping] | None = None,
) -> ExportReport:
    """Write a model for an engine, run what was written there, and compare its outputs with PyTorch's.

    The model may be an original one, or compressed, pruned, collaborative or gated; it is not changed. If the outputs
    differ, or anything fails, nothing is left in the folder. Its README.md says how to load it. Graphs take any number
    of rows and tokens; those of models that generate have a cache. A graph of a model that was loaded from a folder of
    sentence-transformers puts out `sentence_embedding`, too, with the pooling and the layers of that folder.
    `load_exported` loads graphs, and so does `ExportedModel` of transformers. It also calls `model.gguf`, which
    llama.cpp generates with. What is for CTranslate2 loads there (`ctranslate2.Encoder`, `Generator` or `Translator`).

    Examples:
        >>> import tempfile
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4))
        >>> with tempfile.TemporaryDirectory() as place:
        ...     report = export(model, place + "/stock", to="transformers")
        >>> report.difference < 1e-5  # float32; loaded weights lie at other addresses, where sums round otherwise
        True

    Args:
        model: the model, on the processor.
        folder: a new or an empty folder.
        to: the target: "onnx" (ONNX Runtime), "transformers.js" (the same graphs, with the names and in the layout of
            that library), "openvino", "executorch" (no encoder-decoders; memory is planned for texts as long as the
            model reads, as many at a time as the first batch has; decoders read one at a time, with a cache for
            `generation_config.cache_config["max_cache_len"]` tokens, at most 2,048 by default), "ctranslate2" (heads of
            a site get one width; what is missing is filled with zeros, and listed), "gguf" (llama.cpp: heads of one
            width, and the same number of them for each key head of a block, and in some families the same sizes in all
            blocks; the rest is refused), or "transformers" (a checkpoint that loads without this package, and that
            other tools read; what its config cannot say is refused).
        tokenizer: the tokenizer or processor, saved beside the model; CTranslate2's vocabulary is made from it, and the
            one in a GGUF file.
        int8: multiply in eight bits ("transformers" does not): weights get eight bits, but those that lie on grids of
            fewer keep them, and the engine rounds what they multiply, too. CTranslate2 rounds all weights itself;
            llama.cpp always multiplies weights on grids in eight bits; ExecuTorch gives linear maps alone eight bits.
        per_layer: give every layer its own heads, key heads and neurons in the config, and not those of the largest
            layer (only "transformers"). transformers refuses such a config so far; README.md in the folder has the
            lines with which it loads, and this package loads it.
        batches: input dicts as the model takes them, to compare with; None: random ones. Inputs that they do not name
            are not inputs of a graph, but for the mask of a text.

    Returns:
        The size, the differences and the times; `print` it.

    Raises:
        ArgumentError: if the target is unknown or has no int8, the tokenizer is none or knows no words, or no examples
            can be made.
        MissingPackageError: if a package of the target is not installed, or transformers is too old for graphs.
        OutputError: if the folder is not empty, another process is writing it, or it cannot be written.
        ModelStateError: if the config of a stock checkpoint cannot say what the model is, or the outputs differ.
        UnsupportedModelError: if the exporter cannot export the model, it is wrapped, or its folder of
            sentence-transformers holds a module that a graph cannot.
        DataError: if a module in that folder is damaged, or does not fit the others.
    """
    check_choice("target", to, EXPORT_TARGETS)
    check_wrapper(model)
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise ArgumentError(
            f"tokenizer is a {type(tokenizer).__name__}, which has no save_pretrained: pass a tokenizer"
        )
    check_words(tokenizer)
    check_weights(model)
    if per_layer and to != LAYERED:
        raise ArgumentError(f"per_layer=True: only to={LAYERED!r} has configs of layers, not {to!r}")
    target, folder = LayerCheckpoint() if per_layer else TARGETS[to], Path(folder)
    target.check(model, int8, tokenizer)
    check_new(folder)
    is_encoder = is_sentence_encoder(model)
    encoder = sentence_encoder(model) if is_encoder and target.embeds else None
    given = [example_inputs(model)] if batches is None else [without_labels(batch) for batch in each_batch(batches)]

    def fill(place: Path) -> ExportReport:
        with progress_bar(desc="writing", total=1):
            example = padded(model, two_rows(given[0]))
            if int8 and target.has_own_code:
                check_code(target, model, place, example, given[:1], tokenizer)
            notes = target.write(model, place, example, tokenizer=tokenizer, int8=int8)
            if tokenizer is not None:
                tokenizer.save_pretrained(place)
            if encoder is not None:
                write_served(encoder, place, reads_texts=tokenizer is not None)
            (place / README).unlink(missing_ok=True)  # of a trimmed model
        with naming_outputs(model):
            compared = target.compare(model, place, given, tokenizer)
        is_int8 = target.is_int8(model, int8)
        check_difference(compared, to, target.int8_tolerance if is_int8 else tolerance_of(target, model))
        target.settle(model, place, int8)
        size = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
        return ExportReport(str(folder), to, is_int8, size / 1e6, *compared, notes=notes)

    with evaluating(model), keeping_threads(), embedding_texts(model, encoder):
        with naming_outputs(model):
            check_examples(model, given)
        report = write_folder(folder, fill, sum(parameter.nbytes for parameter in model.parameters()), only_new=True)
    said = dataclasses.replace(report, folder="this folder")  # cards are published: they name no place on this machine
    card = served_card(model, to, said, is_encoder and tokenizer is not None, per_layer, dtype_of(model, int8))
    write_file(Path(os.path.realpath(folder), README), card.encode("utf-8"))  # not in the manifest: users edit cards
    return report


def check_code(
    target: Target, model: PreTrainedModel, folder: Path, example: Mapping, batches: Sequence[Mapping], tokenizer: Any
) -> None:
    """Raise an error if the engine computes something else than the model, which eight bits would hide.

    Args:
        target: the target.
        model: the model.
        folder: a folder in which the model is written in full, compared, and deleted.
        example: a batch of at least two rows.
        batches: what is compared.
        tokenizer: the tokenizer, or None.
    """
    with tempfile.TemporaryDirectory(dir=folder) as place:
        target.write(model, Path(place), example, tokenizer=tokenizer, int8=False)
        with naming_outputs(model):
            compared = target.compare(model, Path(place), batches, tokenizer)
    check_difference(compared, target.name, tolerance_of(target, model))


def tolerance_of(target: Target, model: PreTrainedModel) -> float:
    """Return the largest difference that rounding makes, in the types of a model's weights."""
    coarsest = max(torch.finfo(each.dtype).eps for each in model.parameters() if each.is_floating_point())
    return max(target.tolerance, ROUNDINGS * coarsest)


def check_difference(found: Comparison, to: str, tolerance: float) -> None:
    """Raise ModelStateError if an exported model puts out something else than its original."""
    if not found.difference <= tolerance:
        raise ModelStateError(
            f"the model in {to} differs from PyTorch by {found.difference:.2g} of its largest output, more than "
            f"{tolerance:.2g}: nothing was written. Other batches may be nearer to what the model reads"
        )
    if not found.margin <= 2 * tolerance:  # two scores that move by the tolerance, one up and one down
        raise ModelStateError(
            f"the model in {to} chooses a token where PyTorch's own is ahead by {found.margin:.2g} of its largest "
            f"output, more than {2 * tolerance:.2g}: nothing was written. It decodes otherwise than it reads a text: "
            "choose another target"
        )
