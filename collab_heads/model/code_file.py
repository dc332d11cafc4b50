"""The file beside a config that `trust_remote_code=True` runs; files of others are never written to."""

from pathlib import Path

from transformers import PretrainedConfig

from collab_heads.files import write_file
from collab_heads.model.marks import MODULE, MODULES, marked, names_our_code

SOURCE = Path(__file__).parents[1] / f"{MODULE}.py"
OURS = SOURCE.read_bytes().splitlines()[0]  # how our file has begun in every version


def free_module(folder: Path) -> str | None:
    """The name under which our code can lie in a folder; None where others have a file or a link of every name."""
    return next((name for name in MODULES if is_free(folder / f"{name}.py")), None)


def is_free(file: Path) -> bool:
    """Whether nothing is there, or our code."""
    return is_ours(file) or not (file.exists() or file.is_symlink())


def is_ours(file: Path) -> bool:
    """Whether a file is our code, of this version or another."""
    return file.is_file() and not file.is_symlink() and file.read_bytes().startswith(OURS)


def write_code(config: PretrainedConfig, folder: Path) -> None:
    """Write the file that `auto_map` names beside a config, if it names ours; without one nothing is left of it."""
    module = free_module(folder) if names_our_code(marked(config)) else None
    if module is not None:
        write_file(folder / f"{module}.py", SOURCE.read_bytes())
    for name in MODULES:
        if name != module and is_ours(file := folder / f"{name}.py"):
            file.unlink()
