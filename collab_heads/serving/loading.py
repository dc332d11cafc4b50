"""load_exported: load what `export` wrote, in the engine that it was written for."""

import os
from pathlib import Path

import transformers

from collab_heads.base.arguments import checking_arguments
from collab_heads.base.checks import check_count
from collab_heads.base.extras import MissingPackageError, is_installed
from collab_heads.files.folders import gguf_at
from collab_heads.serving.exported_folder import CONFIG, GENERATION, naming, read_exported
from collab_heads.serving.graph_engines import ENGINES
from collab_heads.serving.served_gguf import ServedGguf
from collab_heads.serving.served_model import ServedModel
from collab_heads.serving.served_program import ServedProgram, holds_cache


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


Served = ServedModel | ServedGguf | ServedProgram


@checking_arguments
def load_exported(folder: str | Path, *, threads: int | None = None, check: bool = True) -> Served:
    """Load what `export` wrote for ONNX Runtime, OpenVINO, ExecuTorch or llama.cpp.

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
    check_exporters("exported models")
    exported, engine, caches, texts, width, limits = read_exported(folder, check)
    with naming(folder):
        exported.to("cpu", **ENGINES[engine].options(threads))
    if holds_cache(exported):
        with naming(folder / GENERATION):
            return ServedProgram(exported, folder, limits["input_ids"][1])
    with naming(folder / CONFIG):
        return ServedModel(exported, caches, folder, texts, width, limits)
