"""Write files that are either complete or absent, even if the process is killed or the disk is full."""

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from collab_heads.errors import CollabHeadsError, OutputError
from collab_heads.files.locks import PARTIAL, sole_writer

KEPT = "What was there before stays"
FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
# what a failure looks like through safetensors and tokenizers (Rust), and through torch's zip writer
OF_FULL = re.compile(r"No space left|[Qq]uota exceeded")
RUST_FAILED = re.compile(r"\bos error (\d+)")
TORCH_FAILED = re.compile(r"PytorchStreamWriter|inline_container|file write failed|basic_ios")


def write_file(path: str | Path, content: bytes) -> Path:
    """Write a file under another name, sync it to disk, then rename it: a reader never sees half of it.

    The file's folder is made if needed. An existing file is replaced. Of several writers each waits for the one before.

    Raises:
        OutputError: if it cannot be written, or a device is there; an existing file is kept.
    """
    path = Path(path)
    partial = path.with_name(path.name + PARTIAL)
    with writing(path, len(content)):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise OutputError(f"{path} is a device or a pipe, which a file would replace: choose another path")
        path.parent.mkdir(parents=True, exist_ok=True)
        with sole_writer(partial) as file:
            try:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                if os.name == "nt":
                    file.close()  # Windows renames no open file
                os.replace(partial, path)
            except BaseException:
                with suppress(OSError):
                    partial.unlink()
                raise
        sync(path.parent)
    return path


def write_json(path: str | Path, content: Mapping) -> Path:
    """Write JSON as `write_file` writes bytes."""
    return write_file(path, (json.dumps(content, indent=1) + "\n").encode("utf-8"))


def sync(path: Path) -> None:
    """Sync the content of a file, or the names in a folder, to disk, so that they survive a power cut."""
    is_folder = path.is_dir()
    if is_folder and os.name == "nt":
        return  # Windows has no such call for folders
    descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (is_folder and error.errno == errno.EINVAL):  # some network drives sync files only
            raise
    finally:
        os.close(descriptor)


@contextmanager
def writing(path: Path, size: int | None = None, kept: str = KEPT) -> Iterator[None]:
    """Turn a failure to write inside the context into an OutputError that names the path.

    Args:
        path: what is written.
        size: bytes that it needs, if known; for the message.
        kept: what the message says of what was there.
    """
    try:
        yield
    except CollabHeadsError:
        raise
    except Exception as error:
        reason = why_not_written(error)
        if reason is None:
            raise
        needed = "" if size is None else f"about {size / 1e6:.1f} MB are needed, and "
        raise OutputError(
            f"cannot write {path}: {reason}; {needed}{free_bytes(path) / 1e6:.1f} MB are free there. {kept}: "
            "make room, or choose another place"
        ) from error


def why_not_written(error: Exception) -> str | None:
    """Return the reason in plain words; None for an error that is not a failure to write."""
    of_rust = RUST_FAILED.search(str(error))
    number = int(of_rust[1]) if of_rust else getattr(error, "errno", None)
    if number in FULL or OF_FULL.search(str(error)):
        return f"the disk, or the space that you may use on it, is full ({error})"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if of_rust:
        return str(error)
    if isinstance(error, RuntimeError) and TORCH_FAILED.search(str(error)):
        return f"the disk is full or has failed ({str(error).splitlines()[0]})"
    return None


def free_bytes(path: Path) -> int:
    """Return the free bytes on the disk of a path, which need not exist."""
    there = next(each for each in (path, *path.absolute().parents) if os.path.exists(each))  # or its name is too long
    return shutil.disk_usage(there).free
