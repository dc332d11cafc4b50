"""Parallel text is read as it was written, pairs stay pairs, and what is wrong with a file is named."""

import gzip
import json
import zipfile

import datasets
import pytest

from collab_heads.data.parallel import from_files, from_hub, read_lines
from collab_heads.errors import ArgumentError, DataError
from collab_heads.files.reading import MAX_FIELD

PAIRS = [("ein Hund", "a dog"), ("zwei Hunde", "two dogs")]
SIDES = {"source": ["ein Hund", "zwei Hunde"], "target": ["a dog", "two dogs"]}


@pytest.fixture
def write(tmp_path):
    """Write text or bytes into a file, gzipped where its name says so; returns its path."""

    def write(content, name="x.de"):
        data = content if isinstance(content, bytes) else content.encode()
        path = tmp_path / name
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") and not isinstance(content, bytes) else data)
        return path

    return write


def read(*files, languages=("de", "en")) -> dict:
    return from_files({"train": files}, *languages).splits["train"]


def refused(files, *fragments, languages=("de", "en"), error=DataError):
    with pytest.raises(error) as caught:
        read(*files, languages=languages)
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize("ends", (("", ""), (".gz", ""), (".gz", ".gz")))
def test_two_text_files_plain_or_gzipped(ends, write, capsys):
    files = [
        write("".join(line + "\n" for line in lines), name + end)
        for lines, name, end in zip(SIDES.values(), ("x.de", "x.en"), ends, strict=True)
    ]
    corpus = from_files({"train": files, "validation": files}, None, None)
    assert corpus.splits == {"train": SIDES, "validation": SIDES}
    assert corpus.name == str(files[0])
    assert corpus.dropped == {"train": 0, "validation": 0}
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "text, lines",
    (
        ("a\nb", ["a", "b"]),
        ("a\r\nb\r\n", ["a", "b"]),
        ("\ufeffa\nb\n", ["a", "b"]),
        ("a\u2028b\x0bc\x85d\x1ce\nf\n", ["a\u2028b\x0bc\x85d\x1ce", "f"]),
        (" a \tb \n\n\nc\n\n", [" a \tb ", "", "", "c", ""]),
    ),
    ids=("no end", "windows", "byte-order mark", "other line breaks", "blank"),
)
@pytest.mark.parametrize("name", ("x.de", "x.de.gz"))
def test_only_a_newline_ends_a_line(text, lines, name, write):
    assert read_lines(write(text, name)) == lines


def test_pairs_with_an_empty_side_are_counted_and_dropped_on_both(write, capsys):
    source = write("ein Hund\n\nnur hier\nzwei Hunde\n \t\n")
    target = write("a dog\nonly here\n\ntwo dogs\n\n", "x.en")
    corpus = from_files({"train": [source, target]}, None, None)
    assert corpus.splits["train"] == SIDES
    assert corpus.dropped == {"train": 3}
    assert f"{source} and {target}: dropped 3 of 5 pairs with an empty side" in capsys.readouterr().out
    refused([source, write("\n1\n\n\n3\n", "y.en")], "no pair has text on both sides")


def test_the_first_pairs_of_some_splits(write):
    files = [write("a\nb\nc\n"), write("A\nB\nC\n", "x.en")]
    corpus = from_files({"train": files, "validation": files, "test": files}, None, None)
    found = corpus.first({"train": 2, "validation": None})
    assert found.splits["train"] == {"source": ["a", "b"], "target": ["A", "B"]}
    assert found.splits["validation"] == found.splits["test"] == corpus.splits["test"]
    assert (found.named("test"), found.first({}).named("tset")) == (["test"], [])


def test_files_of_different_lengths_are_refused_with_both_counts(write):
    source, target = write("a\n" * 1234), write("a\n" * 1233, "x.en")
    refused([source, target], f"{source} has 1,234 lines and {target} 1,233")


@pytest.mark.parametrize("name", ("x.de", "x.de.gz"))
def test_undecodable_bytes_are_named_by_file_and_line(name, write):
    data = "ein\nHund\nZürich\n".encode("latin-1")
    path = write(gzip.compress(data) if name.endswith("gz") else data, name)
    refused([path, write("a\nb\nc\n", "x.en")], f"{path}, line 3: not UTF-8 (byte 0xfc)")


def test_broken_gzip_files_are_named(write):
    whole = gzip.compress("".join(f"line {i}\n" for i in range(2000)).encode())
    flipped = bytes(byte ^ (255 if 40 <= i < 80 else 0) for i, byte in enumerate(whole))
    for data in (whole[:-30], b"plain text\n", flipped):
        path = write(data, "x.de.gz")
        refused([path, path], f"{path} is not a gzip file, or damaged")


def test_a_line_that_no_tokenizer_takes_is_refused_by_its_number(write):
    source, target = write("a\n" + "b " * MAX_FIELD + "\n"), write("a\nb\n", "x.en")
    refused([source, target], f"{source}, line 2: 262,144 characters, 131,072 at most")


def test_objects_and_halves_of_characters_are_no_sentences(write):
    for value, said in (("[1]", "a list, expected text: [1]"), ('"x\\ud83d"', "character 2 is half of a pair")):
        for text in (f'{{"de": "a", "en": {value}}}', f'{{"translation": {{"de": "a", "en": {value}}}}}'):
            path = write('{"de": "a", "en": 7}\n'.replace("7", '"b"') + text if "tr" not in text else text, "x.jsonl")
            refused([path], f"{path}, row ", "'en'", said)


def test_missing_and_empty_files_are_named(write, tmp_path):
    good = write("a\n")
    for name in ("none.en", "none.en.gz"):
        refused([good, tmp_path / name], str(tmp_path / name), "No such file")
    for name in ("x.en", "x.en.gz"):
        path = write("\n \n", name)
        refused([good, path], f"{path} is empty")


def tables(write, rows) -> list:
    """The same rows in every kind of table."""
    lines = [json.dumps(row) for row in rows]
    found = [write("\n".join(lines), "x.jsonl"), write("[" + ",".join(lines) + "]", "x.json")]
    if isinstance(rows[0].get("translation"), str | None):
        for separator, name in ((",", "x.csv"), ("\t", "x.tsv")):
            cells = [list(rows[0]), *(row.values() for row in rows)]
            found.append(write("".join(separator.join(row) + "\n" for row in cells), name))
    return found


def test_tables_with_a_column_per_language_or_one_for_both(write):
    columns = [{"en": en, "id": "7", "de": de} for de, en in PAIRS]
    nested = [{"id": "7", "translation": {"en": en, "fr": "non", "de": de}} for de, en in PAIRS]
    beside = [{**row, "translation": "another text"} for row in columns]
    for rows, number in ((columns, 4), (nested, 2), (beside, 4)):
        found = tables(write, rows)
        assert len(found) == number
        for path in found:
            assert read(path) == SIDES
            assert read(path, languages=("en", "de")) == {"source": SIDES["target"], "target": SIDES["source"]}


def test_packed_tables_are_tables(write, tmp_path):
    nested = [json.dumps({"id": 7, "translation": {"en": en, "de": de}}) for de, en in PAIRS]
    for name in ("x.jsonl.gz", "x.jsonl.zip", "pairs.zip"):
        path = tmp_path / name
        if name.endswith(".gz"):
            path.write_bytes(gzip.compress("\n".join(nested).encode()))
        else:
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("x.jsonl", "\n".join(nested))
        assert read(path) == SIDES


def test_null_in_a_column_of_a_table_is_a_missing_translation(write):
    path = write('{"de": "a", "en": null}\n{"de": "b", "en": "c"}\n', "x.jsonl")
    assert read(path) == {"source": ["b"], "target": ["c"]}
    refused([write('{"translation": {"de": "a", "en": "b"}}\n{"de": "x"}\n', "x.jsonl")], "row 2 has no column 'de'")


def test_a_line_break_inside_a_cell_does_not_end_the_sentence(write):
    path = write('de,en\n"ein\nHund",a dog\nzwei Hunde,two dogs\n', "x.csv")
    assert read(path) == SIDES


def test_a_missing_translation_is_an_empty_one(write):
    """null must not become the word None."""
    rows = [{"translation": {"de": de, "en": en}} for de, en in (*PAIRS, ("nur hier", None))]
    corpus = from_files({"train": [tables(write, rows)[0]]}, "de", "en")
    assert (corpus.splits["train"], corpus.dropped) == (SIDES, {"train": 1})


def test_a_missing_language_is_named_with_a_suggestion(write):
    columns = [{"de": de, "eng": en} for de, en in PAIRS]
    nested = [{"translation": row} for row in columns]
    for path in (*tables(write, columns), *tables(write, nested)):
        refused([path], f"{path} has no column 'en' (did you mean 'eng'?); its columns: de, eng")
    ragged = [{"translation": {"de": "a", "en": "b"}}, {"translation": {"de": "a"}}]
    refused([tables(write, ragged)[0]], "row 2 has no column 'en'; its columns: de")
    refused([tables(write, [{"translation": "a ||| b"}])[0]], "row 1: its translation is 'a ||| b', expected an object")


@pytest.mark.parametrize("languages", (("de", "en"), (None, None)))
def test_one_text_file_is_refused(languages, write):
    path = write("a\n")
    refused([path], f"{path} is one text file: give two", languages=languages, error=ArgumentError)


def test_a_table_without_languages_and_three_files_are_refused(write):
    path = write("de,en\na,b\n", "x.csv")
    for languages in (("de", None), (None, "en")):
        refused(
            [path], "name its columns with --source_lang and --target_lang", languages=languages, error=ArgumentError
        )
    refused([path] * 3, "3 files for train", error=ArgumentError)


def test_the_hub(monkeypatch, capsys):
    """What it is asked for, and what becomes of its rows."""
    asked = []

    def load_dataset(name, config, *, split):
        asked.append((name, config, split))
        rows = PAIRS if split == "train" else [*PAIRS, ("", "nothing")]
        return datasets.Dataset.from_list([{"translation": {"de": de, "en": en}} for de, en in rows])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    corpus = from_hub("wmt16", "de-en", "de", "en", splits=["train", "validation"])
    assert asked == [("wmt16", "de-en", "train"), ("wmt16", "de-en", "validation")]
    assert (corpus.name, corpus.splits) == ("wmt16", {"train": SIDES, "validation": SIDES})
    assert corpus.dropped == {"train": 0, "validation": 1}
    assert "wmt16, split validation: dropped 1 of 3 pairs" in capsys.readouterr().out
    with pytest.raises(DataError, match=r"wmt16, split train has no column 'enn' \(did you mean 'en'\?\)"):
        from_hub("wmt16", "de-en", "de", "enn", splits=["train"])


def test_what_the_hub_does_not_have_is_named(monkeypatch):
    def load_dataset(name, config, *, split):
        raise ValueError(f'Unknown split "{split}". Should be one of ["train"].')

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"cannot load 'x' \(None\), split 'dev': Unknown split"):
        from_hub("x", None, "de", "en", splits=["dev"])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list([]))
    with pytest.raises(DataError, match="x, split dev has no rows"):
        from_hub("x", None, "de", "en", splits=["dev"])
