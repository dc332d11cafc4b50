"""Read files that others made: an error names the file, and what is read is bounded by the size of the file."""

import codecs
import gzip
import json
import os
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from collab_heads.errors import DataError
from collab_heads.files.atomic import write_file

# Text packs to a fifth, a list of like lines perhaps to a twentieth; what unpacks to more is made to fill memory.
LARGEST_RATIO = 50
ALWAYS_UNPACKED = 1 << 24  # bytes, 16 MiB: small files may hold anything
CHUNK = 1 << 20
OPENED = ("/dev/fd", "/proc/self/fd")  # paths in these are descriptors that a shell passed on
KERNEL = ("/proc", "/sys")  # files in these have no end that is known, and some wait forever
SNAPSHOTS = "models--*/snapshots"  # in the cache of the Hub
KINDS = {stat.S_ISDIR: "folder", stat.S_ISFIFO: "named pipe", stat.S_ISSOCK: "socket"}
# Bytes at the beginning of a text that name its encoding; a mark of UTF-32 begins with one of UTF-16.
MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
MAX_FIELD = 1 << 17  # characters; a tokenizer takes up to a second for so many, and models read the first thousand


def check_file(path: str | Path) -> None:
    """Raise DataError unless a path leads to a file, or to a pipe that is already open.

    A device returns bytes without end, and a named pipe waits until another process writes to it, perhaps forever, as
    some files of the kernel do (`/proc/kmsg`). Pipes that a shell has opened (`/dev/stdin`, `<(command)`) are read.
    """
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:  # ValueError: a null byte
        raise DataError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    is_opened = str(path) == "/dev/stdin" or str(Path(path).parent) in OPENED
    of_kernel = any(os.path.ismount(each) and os.stat(each).st_dev == found.st_dev for each in KERNEL)
    if (stat.S_ISREG(found.st_mode) and not of_kernel) or (stat.S_ISFIFO(found.st_mode) and is_opened):
        return
    kind = next((name for is_kind, name in KINDS.items() if is_kind(found.st_mode)), "device")
    raise DataError(f"{path} is a {kind}, no file: give a file, or a pipe as /dev/stdin or <(command)")


def own_file(path: Path, folder: Path) -> Path:
    """Return the path of a file in a folder that others made, after checking that it does not lead out of it.

    A link may lead to any file of the user's, which a copy would publish. In the cache of the Hub files are links to
    the `blobs` of their repository, which pass.

    Raises:
        DataError: if it leads out of the folder, or is a link to another folder.
    """
    target, home = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    blobs = [each.parent / "blobs" for each in home.parents if each.match(SNAPSHOTS)]
    if not any(target.is_relative_to(each) for each in (home, *blobs)):
        raise DataError(f"{path} leads out of {folder}, to {target}: put the file itself there if you want it copied")
    if path.is_symlink() and target.is_dir():
        raise DataError(f"{path} is a link to a folder: put the folder itself there if you want it copied")
    return path


def read_bytes(path: str | Path) -> bytes:
    """Return the content of a file, unpacked if its name ends in `.gz`, or in `.zip` and it holds one file.

    At most 50 times the size of the file is unpacked, or 16 MiB if that is more.

    Raises:
        DataError: if it cannot be read, is damaged, or unpacks to more; memory use stays within the bound.
    """
    path = Path(path)
    check_file(path)
    try:
        if path.suffix not in PACKED:
            return path.read_bytes()
        limit, data = largest_unpacked(path), bytearray()
        with PACKED[path.suffix](path) as file:
            while chunk := file.read(CHUNK):
                data += chunk
                check_unpacked(path, len(data), limit)
        return bytes(data)
    except UNPACKING as error:
        kind = "zip" if path.suffix == ".zip" else "gzip"
        raise DataError(f"{path} is not a {kind} file, or damaged: {error}") from error
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error


def largest_unpacked(path: Path) -> int:
    """Return how many bytes a packed file may unpack to."""
    return max(ALWAYS_UNPACKED, LARGEST_RATIO * path.stat().st_size)


def check_unpacked(path: Path, size: int, limit: int) -> None:
    """Raise DataError if a packed file has unpacked to more bytes than its limit."""
    if size > limit:
        raise DataError(
            f"{path} has {path.stat().st_size:,} bytes and unpacks to more than {limit:,}: text does not pack so "
            "tightly; if it is what you want to read, unpack it first (gunzip)"
        )


@contextmanager
def opened_zip(path: Path) -> Iterator[Any]:
    """Open the only file in a zip archive; raises DataError if it holds several, or none."""
    with zipfile.ZipFile(path) as archive, archive.open(name_in_zip(archive, path)) as file:
        yield file


def name_in_zip(archive: zipfile.ZipFile, path: Path) -> str:
    """Return the name of the only file in an archive; folders and what macOS adds do not count."""
    names = [name for name in archive.namelist() if not name.endswith("/") and not name.startswith("__MACOSX/")]
    if len(names) != 1:
        raise DataError(f"{path} holds {len(names)} files, expected one: unpack it first, and give the file")
    return names[0]


def unpacked_name(path: str | Path) -> str:
    """Return the name that a file has unpacked: without `.gz`, or the name in a zip archive."""
    path = Path(path)
    if path.suffix != ".zip":
        return path.name.removesuffix(".gz")
    check_file(path)
    try:
        with zipfile.ZipFile(path) as archive:
            return name_in_zip(archive, path)
    except (*UNPACKING, OSError) as error:
        raise DataError(f"{path} is not a zip file, or damaged: {error}") from error


PACKED: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".zip": opened_zip}
# RuntimeError: a zip file with a password; NotImplementedError: packed in a way that Python does not know
UNPACKING = (EOFError, zlib.error, gzip.BadGzipFile, zipfile.BadZipFile, RuntimeError, NotImplementedError)


def read_text(path: str | Path) -> str:
    """Return the text of a file, unpacked as `read_bytes` does, without a byte-order mark.

    Raises:
        DataError: as `read_bytes`, and if it is neither UTF-8 nor begins with the mark of UTF-16 or UTF-32; the message
            names the line.
    """
    data = read_bytes(path)
    encoding = next((name for mark, name in MARKS.items() if data.startswith(mark)), "utf-8-sig")
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        known = "UTF-8" if encoding == "utf-8-sig" else encoding.upper()
        raise DataError(f"{path}, line {line}: not {known} (byte 0x{error.object[error.start]:02x})") from error


def parse_json(text: str, **options) -> Any:
    """Parse JSON with `json.loads`; every error is a ValueError.

    Raises:
        ValueError: also on lists and objects that are nested too deeply, and on numbers of thousands of digits.
    """
    try:
        return json.loads(text, **options)
    except RecursionError as error:
        raise ValueError("lists or objects are nested too deeply to be read") from error
    except ValueError as error:
        if "integer string conversion" in str(error):
            raise ValueError("a whole number has too many digits to be read (thousands)") from error
        raise


def check_field(where: str, name: str | None, text: str) -> None:
    """Check that a text can be tokenized.

    Args:
        where: file and row, for the message.
        name: of the column, if there are columns.
        text: the field.

    Raises:
        DataError: if it is too long, or holds half a character (a lone surrogate, which JSON can write).
    """
    place = where if name is None else f"{where}, column {name!r}"
    if len(text) > MAX_FIELD:
        raise DataError(
            f"{place}: {len(text):,} characters, {MAX_FIELD:,} at most: models read the first thousand, so cut it "
            "(is there a line break or a quote missing?)"
        )
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{place}: {text[error.start]!r} at character {error.start + 1} is half of a pair of surrogates, no "
                "character: write both halves, or leave it out"
            ) from error


T = TypeVar("T")
WRONG = (ValueError, LookupError, TypeError, AttributeError, RuntimeError, OverflowError)  # `build` on a changed file


def write_document(path: str | Path, content: Mapping) -> Path:
    """Write one line of JSON; an existing file is replaced when the new one is complete.

    Raises:
        OutputError: if it cannot be written; an existing file is kept.
        ValueError: if a number is NaN or infinite, which JSON does not know.
    """
    return write_file(path, (json.dumps(content, allow_nan=False) + "\n").encode())


def read_document(path: str | Path, version: int, what: str, build: Callable[[Any], T]) -> T:
    """Read a file of ours and return what `build` makes of it.

    Args:
        path: the file.
        version: the one that this package reads.
        what: what the file holds, for the message.
        build: makes the result from the parsed JSON.

    Raises:
        DataError: if the file is missing, damaged or of another version.
    """
    try:
        stored = parse_json(read_text(path))
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"{path} is not a {what}: {error!r:.200}") from error
    return built(stored, version, f"{path} is not a {what}", build)


def built(stored: Any, version: int, problem: str, build: Callable[[Any], T]) -> T:
    """Return what `build` makes of parsed JSON.

    Args:
        stored: the JSON.
        version: the one that this package reads.
        problem: the beginning of the message.
        build: makes the result.

    Raises:
        DataError: if the JSON is something else, or of another version.
    """
    try:
        if stored["version"] != version:
            raise DataError(f"{problem}: it is of version {stored['version']!r}; this package reads version {version}")
        return build(stored)
    except DataError:
        raise
    except WRONG as error:
        raise DataError(f"{problem}: {error!r:.200}") from error
