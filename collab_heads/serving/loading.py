"""load_exported: load what `export` wrote, in the engine that it was written for."""

import os
from pathlib import Path

import transformers
from transformers import AutoTokenizer

from collab_heads.base.arguments import checking_arguments
from collab_heads.base.checks import check_count
from collab_heads.base.extras import MissingPackageError, is_installed
from collab_heads.errors import ModelStateError
from collab_heads.files.folders import gguf_at
from collab_heads.saving.source_files import files_in
from collab_heads.serving.converted import encodes, is_converted
from collab_heads.serving.converted_encoder import ConvertedEncoder
from collab_heads.serving.exported_folder import CONFIG, EXPORT, GENERATION, naming, read_exported
from collab_heads.serving.graph_engines import ENGINES, check_inside
from collab_heads.serving.served_gguf import ServedGguf
from collab_heads.serving.served_model import ServedModel, served_class
from collab_heads.serving.served_program import ServedProgram, holds_cache
from collab_heads.serving.served_translator import ServedTranslator


def check_exporters(what: str) -> None:
    """Check that the installed transformers runs what its exporters export, as it does since 5.23.

    Args:
        what: what needs it, in the plural; for the message.

    Raises:
        MissingPackageError: if it is an earlier one.
    """
    if not all(is_installed(name) for name in ("transformers.exporters", "transformers.exporters.runners")):
        raise MissingPackageError(
            f"{what} need transformers 5.23 or later, not {transformers.__version__}: "
            "pip install 'transformers>=5.23,<6'"
        )


Served = ServedModel | ServedGguf | ServedProgram | ConvertedEncoder | ServedTranslator


@checking_arguments
def load_exported(folder: str | Path, *, threads: int | None = None, check: bool = True) -> Served:
    """Load what `export` wrote for ONNX Runtime, OpenVINO, ExecuTorch, llama.cpp or CTranslate2.

    Of CTranslate2 these are encoders, and translation models, of which `generate` alone is as in transformers.
    Whoever wrote the folder, nothing in it is run but the graphs, by their engine. What contradicts itself is refused.

    Args:
        folder: the folder, or a file for llama.cpp.
        threads: the threads of the engine; None for all cores. ExecuTorch has one number for the whole process.
        check: whether each file is compared with its digest in `manifest.json`, where the folder has one. Pass False
            if you changed a file yourself.

    Returns:
        A model that is called, and generates, as the original does; a sentence encoder also has `encode(texts)`.

    Raises:
        DataError: if there is no such folder, it holds no export, or a file in it is damaged; the message names it.
        MissingPackageError: if the engine is not installed, or transformers is older than 5.23.
    """
    folder = Path(folder)
    if threads is not None:
        check_count("threads", threads, least=1, most=1 << 16)
    if (file := gguf_at(folder)) is not None:
        return ServedGguf(file, threads or os.cpu_count() or 1, check)
    if is_converted(folder):
        return load_converted(folder, threads or os.cpu_count() or 1, check)
    check_exporters("exported models")
    exported, engine, caches, texts, width, limits = read_exported(folder, check)
    with naming(folder):
        exported.to("cpu", **ENGINES[engine].options(threads))
    if holds_cache(exported):
        with naming(folder / GENERATION):
            return ServedProgram(exported, folder, limits["input_ids"][1])
    with naming(folder / CONFIG):
        return served_class(exported)(exported, caches, folder, texts, width, limits)


def load_converted(folder: Path, threads: int, check: bool) -> ConvertedEncoder | ServedTranslator:
    """Load an encoder or a translation model in CTranslate2, the latter with the tokenizer in its folder."""
    if encodes(folder):
        return ConvertedEncoder(folder, threads, check)
    if not files_in(folder):
        raise ModelStateError(f"{folder} has no tokenizer: export with tokenizer=, or save it there")
    for file in files_in(folder):
        check_inside(file)
    with naming(folder):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return ServedTranslator(folder, tokenizer, threads, check)


def is_exported(name: str | Path) -> bool:
    """Return True for a folder that `export` wrote, or a file for llama.cpp."""
    folder = Path(name)
    return os.path.isfile(folder / EXPORT) or is_converted(folder) or gguf_at(folder) is not None
