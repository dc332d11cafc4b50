"""The models that `evaluate` scores: tokenizers, how each is loaded while it is scored, the size of weights."""

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from collab_heads.base.checks import missing_folder
from collab_heads.base.option_values import EVALUATION_TASKS, EvaluationTask
from collab_heads.base.report import portable_name
from collab_heads.base.wrappers import check_model, is_in_engine
from collab_heads.errors import ArgumentError, LoadError
from collab_heads.files.folders import gguf_at
from collab_heads.running.batches import evaluating
from collab_heads.saving.loading import load_named, load_or_explain, placed
from collab_heads.serving.converted import encodes, is_converted
from collab_heads.serving.exported_folder import CONFIG
from collab_heads.serving.graph_engines import ENGINES
from collab_heads.serving.loading import is_exported, load_exported
from collab_heads.serving.served_translator import ServedTranslator

Source = PreTrainedModel | str  # a model, or the name of its folder or on the Hub
TOKENIZER = "tokenizer_config.json"  # what every saved tokenizer has
# the weights in a folder, of an export or of a checkpoint; the first kind that is there counts
WEIGHTS = (
    ("*.onnx", "*.onnx.data"),
    ("openvino_*.xml", "openvino_*.bin"),
    ("*.pte",),
    ("*.gguf",),
    ("model.bin",),
    ("*.safetensors",),
    ("pytorch_model*.bin",),
    ("onnx/*.onnx",),
)

# target of an export -> the tasks on which `evaluate` runs what was written for it
RUNS: dict[str, tuple[EvaluationTask, ...]] = {
    **dict.fromkeys((*ENGINES, "transformers"), EVALUATION_TASKS),
    "ctranslate2": ("translation", "similarity", "retrieval"),
    "gguf": ("perplexity", "similarity", "retrieval"),
}


class Candidate(NamedTuple):
    """A model to be scored, which may not be loaded yet, with its tokenizer."""

    name: str
    source: Source
    tokenizer: Any


def name_in(source: Source) -> str:
    """Return the name of a model in the table."""
    return portable_name(source) if isinstance(source, str) else type(source).__name__


def check_source(source: Source) -> None:
    """Raise an error of ours for a folder without a model, and for what is no model; other names may be on the Hub."""
    if is_in_engine(source):
        return
    if not isinstance(source, str):
        check_model(source)
    elif gguf_at(Path(source)) is not None:
        return
    elif os.path.isdir(source) and not os.path.isfile(os.path.join(source, CONFIG)):
        raise LoadError(f"{source} holds no model: it has no {CONFIG}")
    elif os.path.isabs(source) and not os.path.isdir(source):
        raise LoadError(f"{missing_folder(source)}: give a folder, or a name on the Hub")


def candidates(sources: Sequence[tuple[str, Source]], tokenizer: Any) -> list[Candidate]:
    """Return the models with their tokenizers, which alone are loaded; the original's serves models without one."""
    found: list[Candidate] = []
    for name, source in sources:
        own = tokenizer or (found[0].tokenizer if found else None)
        if isinstance(source, str) and has_tokenizer(source):
            own = load_or_explain(AutoTokenizer, source)
        if own is None:
            raise ArgumentError(f"{name} brings no tokenizer: pass it as tokenizer")
        found.append(Candidate(name, source, own))
    return found


@contextmanager
def running(candidate: Candidate, device: str) -> Iterator[PreTrainedModel]:
    """Have a model in evaluation mode while the context is open; one that was loaded for it is in memory no longer."""
    gc.collect()  # the model before, if its modules refer to each other
    model = load(candidate, device) if isinstance(candidate.source, str) else candidate.source
    with evaluating(model):
        yield model


def load(candidate: Candidate, device: str) -> PreTrainedModel:
    """Load a checkpoint with the class that its config names, or what `export` wrote, with one thread."""
    source = str(candidate.source)
    if is_converted(Path(source)) and not encodes(Path(source)):
        return ServedTranslator(Path(source), candidate.tokenizer)
    if is_exported(source):
        return load_exported(source, threads=1)
    return placed(load_named(load_or_explain(AutoConfig, source), source), device)


def has_tokenizer(source: str) -> bool:
    """Return True for a folder with a tokenizer, and a name on the Hub."""
    return not os.path.exists(source) or os.path.isfile(os.path.join(source, TOKENIZER))


def megabytes(model: PreTrainedModel, source: Source) -> float:
    """Return the size of weights in 10^6 bytes: of the files in a folder, else of the tensors in memory."""
    if isinstance(source, str) and (files := files_of_weights(Path(source))):
        return sum(file.stat().st_size for file in files) / 1e6
    return sum(each.nbytes for each in (*model.parameters(), *model.buffers())) / 1e6


def files_of_weights(folder: Path) -> list[Path]:
    """Return the files that hold the weights of a checkpoint or an exported model; empty for what is not there."""
    if folder.is_file():
        return [folder]
    for patterns in WEIGHTS:
        if files := [file for pattern in patterns for file in folder.glob(pattern)]:
            return files
    return []
