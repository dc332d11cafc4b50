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
MODEL = {"config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt", "spiece.model"}
OWN = {RESULTS, PREDICTIONS, LOGS} | MODEL | TOKENIZER
SECRET = re.compile(r"^(--hub_token=).*")
PACKAGES = ("torch", "transformers", "accelerate", "datasets", "collab-heads")


def check_output(output_dir: Path, *, overwrite: bool, resume: bool) -> None:
    """Check that a run may write to a folder, without touching it.

    Raises:
        OutputError: if it is a file, or is in use and neither to be overwritten nor to be resumed from.
    """
    if output_dir.exists() and not output_dir.is_dir():
        raise OutputError(f"--output_dir {output_dir} is a file")
    if output_dir.is_dir() and any(output_dir.iterdir()) and not overwrite and not resume:
        raise OutputError(
            f"--output_dir {output_dir} is in use: choose another, go on with --resume_from_checkpoint, "
            "or replace what is there with --overwrite_output_dir"
        )


def clear_output(output_dir: Path) -> None:
    """Delete what an earlier run left in a folder: its model, results and checkpoints; leave all else."""
    for path in output_dir.iterdir() if output_dir.is_dir() else ():
        name = path.name.removesuffix(PARTIAL)
        is_checkpoint = NAME.fullmatch(name) and (name != path.name or (path / PROGRESS).is_file())
        if name in OWN or is_checkpoint:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def provenance() -> dict:
    """What made a result: the command line and the versions."""
    versions = {"python": platform.python_version()} | {name: metadata.version(name) for name in PACKAGES}
    return {"command": " ".join(without_token(sys.argv)), "versions": versions}


def without_token(argv: Sequence[str]) -> list[str]:
    """A command line with the value of --hub_token masked: results are published, logged and committed."""
    masked = [SECRET.sub(r"\1***", word) for word in argv]
    return ["***" if before == "--hub_token" else word for before, word in zip(["", *argv], masked, strict=False)]
