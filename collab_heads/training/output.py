"""The output folder: refused when in use, cleared only of what an earlier run of ours left there."""

import platform
import re
import shutil
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from collab_heads.errors import OutputError
from collab_heads.training.checkpoint import NAME, PARTIAL, PROGRESS

RESULTS, PREDICTIONS, LOGS = "all_results.json", "predictions", "logs"
BEST, TRANSLATIONS, STATISTICS, REPORT = "best", "translations", "head_statistics", "head_report"
MODEL = {"config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt", "spiece.model"}
TOKENIZER |= {"source.spm", "target.spm", "vocab.json"}
OWN = {RESULTS, PREDICTIONS, LOGS, BEST, TRANSLATIONS, STATISTICS, REPORT} | MODEL | TOKENIZER
SECRET = re.compile(r"^(--hub_token=).*")
PACKAGES = ("torch", "transformers", "accelerate", "datasets", "collab-heads")


def check_output(output_dir: Path, *, overwrite: bool, resume: bool, sources: Sequence[str | None] = ()) -> None:
    """Check that a run may write to a folder, without touching it.

    Args:
        output_dir: the folder.
        overwrite: what an earlier run left there is to be replaced.
        resume: the run goes on from a checkpoint in this folder.
        sources: folders that the run reads from; none may be overwritten.

    Raises:
        OutputError: if it is a file, or is in use and neither to be overwritten nor to be resumed from.
    """
    for source in sources if overwrite else ():
        if source is not None and Path(source).resolve().is_relative_to(output_dir.resolve()):
            raise OutputError(f"--overwrite_output_dir would delete {source}, which the run starts from")
    if output_dir.exists() and not output_dir.is_dir():
        raise OutputError(f"--output_dir {output_dir} is a file")
    if output_dir.is_dir() and any(output_dir.iterdir()) and not overwrite and not resume:
        raise OutputError(
            f"--output_dir {output_dir} is in use: choose another, go on with --resume_from_checkpoint, "
            "or replace what is there with --overwrite_output_dir"
        )


def clear_output(output_dir: Path) -> None:
    """Delete what an earlier run left in a folder: its model, results and checkpoints; leave all else.

    In a folder with neither results nor checkpoints of ours nothing is deleted.
    """
    if not ((output_dir / RESULTS).is_file() or any(output_dir.glob(f"*_*/{PROGRESS}"))):
        return
    for path in output_dir.iterdir():
        name = path.name.removesuffix(PARTIAL)
        is_checkpoint = NAME.fullmatch(name) and (name != path.name or (path / PROGRESS).is_file())
        if name in OWN or is_checkpoint:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def provenance() -> dict:
    """What made a result: the command line and the versions."""
    versions = {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}
    return {"command": " ".join(without_token(sys.argv)), "versions": versions}


def version(package: str) -> str | None:
    """The installed version of a package, None where it runs from a plain checkout."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def without_token(argv: Sequence[str]) -> list[str]:
    """A command line with the value of --hub_token masked: results are published, logged and committed."""
    masked = [SECRET.sub(r"\1***", word) for word in argv]
    return ["***" if before == "--hub_token" else word for before, word in zip(["", *argv], masked, strict=False)]
