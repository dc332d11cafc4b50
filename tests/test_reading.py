"""What is read stays bounded by the size of the file, and what is wrong with it is named."""

import gzip
import tracemalloc

import pytest

from collab_heads.analysis.treebank.conllu import read_conllu
from collab_heads.errors import DataError
from collab_heads.reading import ALWAYS_UNPACKED, MAX_FIELD, read_bytes, read_text
from collab_heads.training.data.parallel import read_lines

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
