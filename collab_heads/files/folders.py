"""Write folders that are either complete or absent, with a manifest of the files that we wrote into them.

A folder is written as `NAME.partial` and renamed when it is complete and on disk. A folder that it replaces is first
renamed to `NAME.replaced`, and one that is deleted to `NAME.deleted`. So the old or the new folder is whole at every
moment, and `recover` restores it or deletes what is left over. Only files that a manifest lists, and that are as it
says, are ever deleted. Files that the user added or changed stay, or move to the new folder. Whoever writes, deletes or
recovers a folder has locked it (`locks.py`), so what is left over is never that of a living process.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TypeVar

from collab_heads.errors import OutputError
from collab_heads.files.atomic import sync, write_json, writing
from collab_heads.files.locks import PARTIAL, locked
from collab_heads.files.reading import read_text

GGUF, OF_GGUF = "model.gguf", ".gguf"  # the name of a file for llama.cpp in its folder, and the end of any
MANIFEST = "manifest.json"
FIELD, VERSION = "collab_heads_manifest", 1
OLD, DELETED, KEPT = ".replaced", ".deleted", ".kept"
CHUNK = 1 << 20

logger = logging.getLogger(__name__)
T = TypeVar("T")


def write_folder(folder: Path, fill: Callable[[Path], T], size: int | None = None, *, only_new: bool = False) -> T:
    """Write a folder, and return what `fill` returns; one that exists stays whole until the new one is complete.

    Args:
        folder: its final path.
        fill: writes the files into the folder that it is given.
        size: bytes that are needed, if known; for the message of an error.
        only_new: whether it has to be new or empty; a link to an empty folder is then followed.

    Raises:
        OutputError: before `fill` is called if another process is writing the folder, or `only_new` and it holds files;
            also if it cannot be written.
    """
    if only_new:
        folder = Path(os.path.realpath(folder))
    with unharmed(folder, size):
        if only_new:
            check_new(folder)
        found = fill(begin(folder))
        commit(folder)
    return found


@contextmanager
def alone_in(folder: str | Path) -> Iterator[None]:
    """Keep others from writing a folder, or the one that a link leads to, while the context is open.

    Raises:
        OutputError: if another process or thread is writing there, or nothing can be written there.
    """
    folder = Path(os.path.realpath(folder))
    with ExitStack() as stack:
        with writing(folder):
            stack.enter_context(locked(folder))
        yield


def check_new(folder: Path) -> None:
    """Raise OutputError unless a folder is empty, or is not there and can be."""
    try:
        str(folder).encode()  # else safetensors cannot write there
        is_current = os.path.realpath(folder) == os.path.realpath(".")
        is_taken = folder.exists() and (not folder.is_dir() or bool(contents(folder)))
    except (OSError, ValueError) as error:  # ValueError: a null byte, or no text
        raise OutputError(f"{str(folder)!r:.200} cannot be a folder: {error!s:.200}: choose another name") from error
    if is_current:
        raise OutputError("the folder is the current one, which would be replaced: choose a new folder in it")
    if is_taken:
        raise OutputError(f"{folder} is not empty: choose a new folder")


@contextmanager
def unharmed(folder: Path, size: int | None = None) -> Iterator[None]:
    """Lock a folder, and restore it if the context fails to write it; a failure to write becomes an OutputError."""
    with writing(folder, size), locked(folder):
        try:
            yield
        except BaseException:
            with suppress(OSError):  # what cannot be put back now is put back by the next run
                erase(beside(folder, PARTIAL))
            with suppress(OSError):
                recover(folder)
            raise


def begin(folder: Path) -> Path:
    """Make the partial folder of a folder and return it; from then on everything in it is ours."""
    partial = beside(folder, PARTIAL)
    if os.path.lexists(partial):
        erase(partial) if is_ours(partial) else keep(partial)
    partial.mkdir(parents=True)
    write_manifest(partial, None)
    return partial


def commit(folder: Path) -> None:
    """List and sync the files of the partial folder, and rename it to its final path."""
    partial, old = beside(folder, PARTIAL), beside(folder, OLD)
    names = contents(partial)
    write_manifest(partial, {name: digest(partial / name) for name in names})
    for path in [partial / name for name in names] + [path for path in partial.rglob("*") if path.is_dir()]:
        sync(path)
    if folder.is_symlink() or folder.is_file():
        keep(folder)
    if folder.exists() and any(folder.iterdir()):
        move_aside(folder, old)
    elif folder.exists() and os.name == "nt":
        folder.rmdir()  # elsewhere the new folder takes the place of an empty one at once
    os.rename(partial, folder)
    sync(folder.parent)
    if old.exists():
        finish(old, folder)


def retire(folder: Path) -> None:
    """Delete the files that we wrote into a folder, and the folder if nothing else is in it."""
    deleted = beside(folder, DELETED)
    with writing(folder), locked(folder):
        move_aside(folder, deleted)
        sync(folder.parent)
        finish(deleted, folder)


def recover(folder: Path) -> None:
    """Repair a folder whose writer was killed; files that are not ours are kept."""
    with writing(folder), locked(folder):
        partial, old, deleted = (beside(folder, end) for end in (PARTIAL, OLD, DELETED))
        if is_ours(partial):
            if not os.path.lexists(folder) and is_whole(partial):
                os.rename(partial, folder)  # the writer was killed right before this
            else:
                erase(partial)
        if is_ours(old) and not os.path.lexists(folder) and is_whole(old):
            os.rename(old, folder)
        if is_begun(folder / (MANIFEST + PARTIAL)):
            (folder / (MANIFEST + PARTIAL)).unlink()
        if (read_manifest(folder) or {}).get("files") == {}:  # the user's folder, not moved aside or restored
            (folder / MANIFEST).unlink()
        for leftover in (old, deleted):
            if is_ours(leftover):
                finish(leftover, folder)


def finish(leftover: Path, home: Path) -> None:
    """Delete our files in a folder that was renamed; the others move to `home`, unless such a file is there."""
    listed = (read_manifest(leftover) or {}).get("files") or {}
    for name, entry in listed.items():
        path = leftover / name
        is_file = path.is_file() and not path.is_symlink() and stays_inside(leftover, name)
        if is_file and digest(path) == entry:  # else it was changed since
            path.unlink()
    for name in contents(leftover):
        if not os.path.lexists(home / name):
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            os.rename(leftover / name, home / name)
    if left := contents(leftover):
        logger.warning("%s keeps %s, which we did not write, or which was changed since", leftover, ", ".join(left))
        return
    remove_empty(leftover)


def move_aside(folder: Path, leftover: Path) -> None:
    """Rename a folder that is to be replaced or deleted, so that `recover` can restore the user's files in it."""
    make_way(leftover, folder)
    if not (folder / MANIFEST).exists():
        write_manifest(folder, {})  # a folder of the user's: nothing in it is ours
    os.rename(folder, leftover)


def make_way(leftover: Path, home: Path) -> None:
    """Free the name of a leftover: finish one of ours, and move anything else out of the way."""
    if is_ours(leftover):
        finish(leftover, home)
    if os.path.lexists(leftover):
        keep(leftover)


def erase(partial: Path) -> None:
    """Delete a partial folder of ours; the manifest that marks it as ours is deleted last.

    Raises:
        OutputError: if it is not ours.
    """
    if not is_ours(partial):
        raise OutputError(f"{partial} is in the way, and we did not write it: move it")
    for name in contents(partial):
        (partial / name).unlink()
    remove_empty(partial)


def remove_empty(folder: Path) -> None:
    """Remove a folder in which only empty folders and the manifest are left."""
    for inner in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
        inner.rmdir()
    for name in (MANIFEST + PARTIAL, MANIFEST):
        (folder / name).unlink(missing_ok=True)
    folder.rmdir()


def keep(path: Path) -> Path:
    """Move what is not ours out of the way, to the first free name; log a warning and return the new path."""
    number, free = 1, beside(path, KEPT)
    while os.path.lexists(free):
        number, free = number + 1, beside(path, f"{KEPT}{number + 1}")
    os.rename(path, free)
    logger.warning("%s was there, and we did not write it: it is %s now", path, free)
    return free


def beside(path: Path, end: str) -> Path:
    """Return the path with an ending added to its name."""
    return path.with_name(path.name + end)


def contents(folder: Path) -> list[str]:
    """Return the files in a folder, at any depth, except its manifest: paths relative to it."""
    ours = {folder / MANIFEST, folder / (MANIFEST + PARTIAL)} if is_ours(folder) else set()
    paths = [path for path in folder.rglob("*") if path not in ours and (path.is_symlink() or not path.is_dir())]
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def digest(path: Path) -> dict[str, int | str]:
    """Return size and SHA-256 of a file."""
    sha256, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            sha256.update(chunk)
            size += len(chunk)
    return {"bytes": size, "sha256": sha256.hexdigest()}


def digest_of(content: bytes) -> dict[str, int | str]:
    """Return size and SHA-256 of the content that a file will have."""
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def write_manifest(folder: Path, files: Mapping[str, object] | None, field: str = FIELD, **more) -> None:
    """Write the manifest of a folder: the files that we wrote, or None while they are being written."""
    write_json(folder / MANIFEST, {field: VERSION, "files": files, **more})


def read_manifest(folder: Path, field: str = FIELD) -> dict | None:
    """Return the manifest of a folder; None if it is missing, damaged or not one of ours."""
    try:
        manifest = json.loads(read_text(folder / MANIFEST))
        files = manifest["files"]
        fits = manifest[field] == VERSION and isinstance(files, dict | None) and all(map(is_inside, files or ()))
        return manifest if fits else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def is_inside(name: str) -> bool:
    """Return True if a relative path stays below its start."""
    readings = PurePosixPath(name), PureWindowsPath(name)
    return not any(each.anchor or ".." in each.parts for each in readings) and "\0" not in name


def stays_inside(folder: Path, name: str) -> bool:
    """Return True if the folder of a file, named relative to another folder, lies in that, also where links lead."""
    try:
        return (folder / name).parent.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # a loop of links, a null byte
        return False


def is_ours(folder: Path) -> bool:
    """Return True if a folder has a manifest of ours, or holds at most the beginning of one."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    if read_manifest(folder) is not None:
        return True
    return all(path.name == MANIFEST + PARTIAL and is_begun(path) for path in folder.iterdir())


def is_begun(partial: Path) -> bool:
    """Return True if a file is the beginning of a manifest of ours."""
    beginning = b'{\n "collab_heads_'
    return partial.is_file() and beginning.startswith(partial.read_bytes()[: len(beginning)])


def is_whole(folder: Path) -> bool:
    """Return True if a folder has a finished manifest of ours, and every file is as it was written."""
    return (folder / MANIFEST).exists() and damage(folder) is None


def damage(folder: Path) -> str | None:
    """Return what differs from a folder's manifest, naming the file; None if every file is as it was written.

    A folder without a manifest cannot be checked, and gives None.
    """
    if not (folder / MANIFEST).exists():
        return None
    files = (read_manifest(folder) or {}).get("files")
    if files is None:
        return f"{MANIFEST} is damaged"
    for name, entry in files.items():
        path = folder / name
        try:
            if not path.is_file():
                return f"{name} is missing"
            if (size := path.stat().st_size) != entry["bytes"]:
                return f"{name} has {size:,} bytes instead of {entry['bytes']:,}"
            if digest(path) != entry:
                return f"{name} is not what was written: its SHA-256 differs"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        except (KeyError, TypeError, ValueError):
            return f"{MANIFEST} is damaged"
    return None


def gguf_at(path: Path) -> Path | None:
    """Return the file for llama.cpp at a path, which may be that of its folder; None if there is none."""
    found = path if path.suffix == OF_GGUF else path / GGUF
    try:
        return found if found.is_file() else None
    except (OSError, ValueError):  # ValueError: a null byte
        return None
