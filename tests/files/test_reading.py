"""What is read stays bounded by the size of the file, and what is wrong with it is named."""

import gzip
import os
import socket
import tracemalloc

import pytest

from collab_heads.data.parallel import read_lines
from collab_heads.errors import DataError
from collab_heads.files.conllu import read_conllu
from collab_heads.files.reading import ALWAYS_UNPACKED, MAX_FIELD, read_bytes, read_text
from collab_heads.training import HeadRotation
from collab_heads.training.options.heads import read_alive
from collab_heads.training.options.parser import read_flags

MB = 1 << 20


@pytest.fixture(scope="module")
def bomb(tmp_path_factory):
    """40 MB of line ends in 0.04 MB."""
    path = tmp_path_factory.mktemp("bomb") / "x.gz"
    with gzip.open(path, "wb") as file:
        for _ in range(40):
            file.write(b"\n" * MB)
    assert path.stat().st_size < 50_000
    return path


@pytest.mark.parametrize("reader", (read_bytes, read_text, read_lines, read_conllu))
def test_a_small_file_cannot_fill_memory(reader, bomb):
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"x\.gz has \d\d,\d+ bytes and unpacks to more than 16,777,216"):
            reader(bomb)
        assert tracemalloc.get_traced_memory()[1] < 3 * ALWAYS_UNPACKED
    finally:
        tracemalloc.stop()


def test_text_that_packs_well_is_read(tmp_path):
    """A large file may unpack to fifty times its size: the bound grows with it."""
    lines = "".join(f"sentence {i} of {i % 7}\n" for i in range(1_200_000)).encode()
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(lines, 1))
    assert len(lines) > ALWAYS_UNPACKED
    assert read_bytes(path) == lines


def test_a_line_of_a_treebank_that_is_too_long_is_named(tmp_path):
    path = tmp_path / "x.conllu"
    path.write_text("# sent_id = 1\n# text = " + "x" * MAX_FIELD + "\n")
    with pytest.raises(DataError, match=r"x.conllu, line 2: 131,081 characters"):
        read_conllu(path)


def test_numbers_of_a_treebank_with_thousands_of_digits_are_named(tmp_path):
    path = tmp_path / "x.conllu"
    digits = "1" * 5000
    for id_, head in ((digits, "0"), (f"1-{digits}", "_"), ("1", digits)):
        path.write_text("\t".join([id_, "dogs", *"____", head, "root", "_", "_"]) + "\n")
        with pytest.raises(DataError, match=r"x.conllu, line 1: "):
            read_conllu(path)


@pytest.fixture
def no_files(tmp_path):
    """Paths to what is not a file: name -> path."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(tmp_path / "socket"))  # the path of a socket is short
        found = {name: tmp_path / name for name in ("fifo", "folder", "socket")}
        yield found | {"device": "/dev/full", "endless": "/dev/zero", "terminal": "/dev/tty", "kernel": "/proc/kmsg"}


KINDS = {"fifo": "named pipe", "folder": "folder", "socket": "socket"}


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
@pytest.mark.parametrize("kind", ("fifo", "folder", "socket", "device", "endless", "terminal", "kernel"))
def test_what_is_no_file_is_refused_before_it_is_opened(kind, no_files):
    """A named pipe waits until somebody writes to it, a device gives bytes without end."""
    if not os.path.exists(no_files[kind]):
        pytest.skip("it is not there")
    for reader in (read_text, read_lines, read_conllu, read_flags, read_alive, HeadRotation.from_json):
        with pytest.raises(DataError, match=f"{no_files[kind]} is a {KINDS.get(kind, 'device')}, no file: give a file"):
            reader(str(no_files[kind]))


def test_a_name_that_is_too_long_is_no_file():
    with pytest.raises(DataError, match="x: File name too long"):
        read_text("x" * 300)


@pytest.mark.skipif(not os.path.exists("/dev/fd"), reason="there are no descriptors by name")
def test_a_pipe_that_a_shell_has_opened_is_read():
    reading, writing = os.pipe()
    os.write(writing, b"a sentence\n")
    os.close(writing)
    try:
        assert read_lines(f"/dev/fd/{reading}") == ["a sentence"]
    finally:
        os.close(reading)
