"""Tables are read as they were written, and what is wrong with them is named."""

import csv
import json
import time
import zipfile

import pyarrow
import pytest
from pyarrow import parquet

from collab_heads.base.extras import MissingPackageError
from collab_heads.data.tables import check_columns, is_table, read_csv, read_json, read_table, read_tsv, text_of
from collab_heads.errors import DataError
from collab_heads.files.reading import MAX_FIELD

READERS = (read_tsv, read_csv, read_json)


@pytest.fixture
def write(tmp_path):
    """Write text or bytes into a file; returns its path."""

    def write(content, name="table.tsv"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def refused(reader, path, *fragments, **more):
    """The file is refused, by its name and with every fragment."""
    with pytest.raises(DataError) as caught:
        reader(path, **more)
    for fragment in (str(path), *fragments):
        assert fragment in str(caught.value)


@pytest.mark.parametrize("reader, text", ((read_tsv, "a\tb\n1\t2\n"), (read_csv, "a,b\n1,2\n"), (read_json, None)))
def test_a_byte_order_mark_is_no_part_of_the_first_column(reader, text, write):
    path = write("\ufeff" + (text or '{"a": "1", "b": "2"}\n'))
    assert reader(path) == [{"a": "1", "b": "2"}]


def test_tsv_keeps_every_character_between_tabs(write):
    cells = ['"open', "it''s \"so\" ", ' a,b\\n "', "x\u2028y\x85z\x0bq"]
    path = write("\t".join("abcd") + "\n" + "\t".join(cells) + "\n")
    assert read_tsv(path) == [dict(zip("abcd", cells, strict=True))]


def test_tsv_takes_windows_line_ends(write):
    assert read_tsv(write("a\tb\r\n1\t2\r\n3\t\r\n")) == [{"a": "1", "b": "2"}, {"a": "3", "b": ""}]


def test_words_that_look_like_nothing_stay_words(write):
    words = ["NA", "null", "nan", "None", "", "3"]
    for reader, separator in ((read_tsv, "\t"), (read_csv, ",")):
        path = write(f"a{separator}b\n" + "".join(f"x{separator}{word}\n" for word in words))
        assert [row["b"] for row in reader(path)] == words


def test_tsv_without_a_header_line(write):
    path = write("1\t2\n3\t4\n")
    assert read_tsv(path, ["x", "y"]) == [{"x": "1", "y": "2"}, {"x": "3", "y": "4"}]
    refused(read_tsv, write("1\t2\n3\n"), "row 2: 1 fields, expected 2 (x, y)", header=["x", "y"])


@pytest.mark.parametrize("end", ("", "\n", "\n\n\n", "\r\n\r\n", "\n \t \n"))
def test_tsv_blank_lines_at_the_end_are_no_rows(end, write):
    assert read_tsv(write("a\tb\n1\t2" + end)) == [{"a": "1", "b": "2"}]


@pytest.mark.parametrize("reader", (read_tsv, read_csv))
@pytest.mark.parametrize("end", ("\n", "\r\n"))
def test_a_blank_line_of_one_column_is_an_empty_text(reader, end, write):
    """Predictions are numbered as the rows of the file are."""
    path = write(end.join(("", "text", "good", "", "bad", "", "", "")))
    assert [row["text"] for row in reader(path)] == ["good", "", "bad"]


def test_tsv_rows_of_empty_fields_are_rows(write):
    assert read_tsv(write("a\tb\n1\t2\n\t\n\n3\t4\n\t\n")) == [
        {"a": "1", "b": "2"},
        {"a": "", "b": ""},
        {"a": "3", "b": "4"},
    ]


def test_tsv_rows_of_a_wrong_length_are_refused_or_skipped(write, capsys):
    path = write("a\tb\n1\t2\n3\n4\t5\t6\n7\t8\n")
    refused(read_tsv, path, "row 3: 1 fields, expected 2 (a, b)", "2 such rows", "--skip_bad_rows")
    assert capsys.readouterr().out == ""
    assert read_tsv(path, skip_bad_rows=True) == [{"a": "1", "b": "2"}, {"a": "7", "b": "8"}]
    assert "skipped 2 rows of 4" in capsys.readouterr().out


@pytest.mark.parametrize("reader", READERS)
def test_a_file_in_another_encoding_is_refused_by_its_line(reader, write):
    refused(reader, write("a\tb\n1\t2\nZürich\t3\n".encode("latin-1")), "line 3: not UTF-8 (byte 0xfc)")


@pytest.mark.parametrize("reader", READERS)
def test_a_missing_file_a_folder_and_an_empty_file_are_refused(reader, write, tmp_path):
    refused(reader, tmp_path / "none.tsv", "No such file")
    refused(reader, tmp_path, "is a folder, no file")
    for nothing in ("", "\n\n", "\ufeff \r\n"):
        refused(reader, write(nothing), "is empty")


@pytest.mark.parametrize(
    "reader, text", ((read_tsv, "a\tb\n"), (read_csv, "a,b\n"), (read_csv, "a,b\n\n"), (read_json, "[]"))
)
def test_a_file_with_no_rows_is_refused(reader, text, write):
    refused(reader, write(text), "no rows")


def test_csv_quotes_hold_commas_newlines_and_doubled_quotes(write):
    path = write('a,b\n"x, y","line 1\nline ""2"""\r\nplain,"\r\n"\n')
    assert read_csv(path) == [{"a": "x, y", "b": 'line 1\nline "2"'}, {"a": "plain", "b": "\r\n"}]


@pytest.mark.parametrize("character", ("\u2028", "\x85", "\x0b", "\x0c", "\x1c"))
def test_csv_lines_end_at_newlines_only(character, write):
    path = write(f'a,b\nx{character}y,1\n"x{character}y",2\n')
    assert read_csv(path) == [{"a": f"x{character}y", "b": "1"}, {"a": f"x{character}y", "b": "2"}]


def test_csv_a_quote_that_is_not_closed_is_refused(write):
    refused(read_csv, write('a,b\n1,2\n3,"4\n'), "line 3:", "not closed")
    refused(read_csv, write('a,b\n1,"2" 3\n4,5\n'), "line 2:", "not doubled")


def test_csv_ragged_rows_are_refused_by_their_line(write):
    refused(read_csv, write('a,b\n"1\n1",2\n3,4,5\n'), "line 4: 3 fields, expected 2 (a, b)", "double quotes")
    refused(read_csv, write("a,b\n1\n"), "line 2: 1 fields, expected 2")


def test_csv_blank_lines_are_no_rows(write):
    assert read_csv(write("a,b\n1,2\n\n3,4\n\n")) == [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]


def test_json_lines_and_lists_are_the_same(write):
    rows = [{"a": "x\ny", "b": 1}, {"b": 2.5, "a": "\u2028"}]
    for text in (
        "\n".join(json.dumps(row) for row in rows),
        "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\r\n\n",
        json.dumps(rows),
        "\n " + json.dumps(rows, indent=2),
    ):
        assert read_json(write(text)) == rows


def test_broken_json_is_refused_by_its_line(write):
    refused(read_json, write('{"a": 1}\n\n{"a": 2,}\n'), "line 3: ")
    refused(read_json, write('[\n{"a": 1},\n{"a" 2}\n]'), "line 3: Expecting ':'")
    refused(read_json, write('[{"a": 1}'), "line 1: ")


def test_rows_may_have_other_keys_unless_one_is_needed(write):
    rows = [{"a": 1, "b": 2}, {"a": 1, "b": 3, "c": None}, {"a": 1}]
    path = write("\n".join(map(json.dumps, rows)))
    assert read_json(path) == rows
    check_columns(path, rows, ["a"])
    with pytest.raises(DataError, match=r"row 3 has no column 'b'; its columns: a"):
        check_columns(path, rows, ["a", "b"])
    refused(read_json, write('[{"a": 1}, [1, 2]]'), "row 2: expected an object, found [1, 2]")


@pytest.mark.parametrize("indent", (None, 2))
def test_a_list_may_be_the_data_of_an_object(indent, write):
    rows = [{"a": "x"}, {"a": "y"}]
    assert read_json(write(json.dumps({"schema": {}, "data": rows}, indent=indent))) == rows
    assert read_json(write(json.dumps({"a": 1, "b": "data"}, indent=indent))) == [{"a": 1, "b": "data"}]


@pytest.mark.parametrize("text", ("[1, 2]", "[null]", "5\n6\n", "null", '"abc"\n', '{"a": 1}\n5\n'))
def test_json_rows_that_are_no_objects_are_refused(text, write):
    refused(read_json, write(text), "expected an object")


@pytest.mark.parametrize(
    "text, said",
    (
        ('{"a": "1"}\n{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "line 2: lists or objects are nested too deeply"),
        ("[" * 100_000, ": lists or objects are nested too deeply"),
        ('{"a": 1}\n{"a": ' + "9" * 5000 + "}", "line 2: a whole number has too many digits"),
        ('{"a": "x"}\n{"a": "pi\\ud83d"}', "row 2, column 'a': '\\ud83d' at character 3 is half of a pair"),
    ),
    ids=("nested", "opened", "digits", "surrogate"),
)
def test_json_that_python_cannot_hold_is_refused_by_its_line(text, said, write):
    refused(read_json, write(text), said)


@pytest.mark.parametrize("reader, separator", ((read_tsv, "\t"), (read_csv, ","), (read_json, None)))
def test_a_field_that_no_tokenizer_takes_is_refused_by_row_and_column(reader, separator, write):
    before = csv.field_size_limit()
    for length in (MAX_FIELD, MAX_FIELD + 1):
        field = "x" * length
        rows = [{"a": "1", "b": "2"}, {"a": "3", "b": field}]
        lines = [json.dumps(row) if separator is None else separator.join(row.values()) for row in rows]
        path = write("\n".join([*([] if separator is None else [f"a{separator}b"]), *lines]))
        if length == MAX_FIELD:
            assert reader(path) == rows
    refused(reader, path, "row 2, column 'b': 131,073 characters, 131,072 at most")
    assert csv.field_size_limit() == before


def test_the_kind_of_a_table_is_its_suffix(write):
    for name, text in (
        ("t.csv", 'a,b\n"1",x\ty\n'),
        ("t.tsv", "a\tb\n1\tx\ty\n".replace("x\ty", "x,y")),
        ("t.json", '[{"a": "1", "b": "z"}]'),
        ("t.jsonl", '{"a": "1", "b": "z"}\n'),
    ):
        path = write(text, name)
        expected = {"t.csv": "x\ty", "t.tsv": "x,y"}.get(name, "z")
        assert read_table(path) == read_table(str(path)) == [{"a": "1", "b": expected}]


@pytest.mark.parametrize("encoding", ("utf-16", "utf-16-le", "utf-16-be", "utf-32"))
def test_a_mark_of_utf_16_names_the_encoding(encoding, write):
    text = "\ufeff" * encoding.endswith("e") + "a\tb\nZürich\t2\n"
    assert read_tsv(write(text.encode(encoding))) == [{"a": "Zürich", "b": "2"}]
    assert read_csv(write(text.encode(encoding))) == [{"a": "Zürich", "b": "2"}]
    if encoding == "utf-16":
        refused(read_tsv, write(text.encode(encoding)[:-1]), "line 2: not UTF-16")


@pytest.mark.parametrize("separator", (",", ";", "\t"))
def test_csv_is_separated_as_its_header_is(separator, write):
    cells = [["text", "the, label"], ["a; b, c\td", "1"], ['say ""x""', "2"]]
    lines = [separator.join(f'"{cell}"' for cell in row) for row in cells]
    expected = [{"text": "a; b, c\td", "the, label": "1"}, {"text": 'say "x"', "the, label": "2"}]
    assert read_csv(write("\n".join(lines))) == expected
    plain = write(f"text{separator}label\nit's{separator}1\n")
    assert read_csv(plain) == [{"text": "it's", "label": "1"}]
    refused(read_csv, write(f"a{separator}b\n1{separator}2{separator}3\n"), "line 2: 3 fields", "must stand in double")
    assert read_csv(write("sentence\na; b\n")) == [{"sentence": "a; b"}]


def test_parquet_is_read_within_bounds(tmp_path, monkeypatch):
    rows = [{"text": "a", "label": 1.0}, {"text": None, "label": 0.5}]
    path = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert read_table(path) == rows
    (tmp_path / "x.parquet").write_bytes(b"PAR1" + path.read_bytes()[9:])
    refused(read_table, tmp_path / "x.parquet", "is not a Parquet file, or damaged")
    parquet.write_table(pyarrow.table({"a": ["x" * 100_000] * 1000}), path)
    assert path.stat().st_size < 10_000
    refused(read_table, path, "unpacks to more than 16,777,216")
    monkeypatch.setattr("collab_heads.base.extras.is_installed", lambda module: False)
    with pytest.raises(MissingPackageError, match="Parquet files need datasets"):
        read_table(path)


def test_a_field_without_a_value_is_no_text():
    assert (text_of("a", ""), text_of(1.0, "")) == ("a", "1.0")
    for nothing in (None, float("nan")):
        with pytest.raises(DataError, match=r"here: no value .*, expected text"):
            text_of(nothing, "here")


def test_zip_files_hold_one_file(tmp_path):
    def packed(files):
        path = tmp_path / "t.csv.zip"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in files.items():
                archive.writestr(name, text)
        return path

    assert read_table(packed({"t.csv": "a,b\n1,2\n", "__MACOSX/t.csv": "x"})) == [{"a": "1", "b": "2"}]
    assert is_table(packed({"t.jsonl": "{}"})) and not is_table(packed({"t.txt": "x"}))
    refused(read_table, packed({"a.csv": "a\n1\n", "b.csv": "a\n1\n"}), "holds 2 files, expected one")
    refused(read_table, packed({}), "holds 0 files")
    refused(read_table, packed({"t.csv": "\n" * (1 << 25)}), "unpacks to more than")
    path = packed({"t.csv": "a\n1\n"})
    path.write_bytes(path.read_bytes()[:-30])
    refused(read_table, path, "is not a zip file, or damaged")
    refused(read_table, tmp_path / "none.zip", "No such file")


def test_a_header_of_many_columns_is_checked_at_once(write):
    names = [f"c{i}" for i in range(20_000)]
    started = time.monotonic()
    rows = read_csv(write(",".join(names) + "\n" + ",".join("1" * len(names)) + "\n"))
    assert len(rows[0]) == len(names) and time.monotonic() - started < 3  # one by one they took more than ten
    with pytest.raises(DataError) as caught:
        check_columns("t.csv", rows, ["c"])
    assert "c0, c1, c2" in str(caught.value) and "(20,000 in all)" in str(caught.value) and len(str(caught.value)) < 300
    refused(read_csv, write(",".join(names + names) + "\n"), "'c0'", "(20,000 in all) more than once")


@pytest.mark.parametrize("name", ("t.txt", "t", "t.csv.bz2"))
def test_an_unknown_kind_of_table_is_refused(name, write):
    refused(read_table, write("a,b\n1,2\n", name), "unknown kind of file", ".csv, .tsv, .json, .jsonl")


def test_missing_columns_are_refused_with_a_suggestion():
    rows = [{"sentence": "x", "label": "1"}]
    check_columns("t.csv", rows, ["label", "sentence"])
    with pytest.raises(DataError) as caught:
        check_columns("t.csv", rows, ["label", "sentense"])
    message = "t.csv has no column 'sentense' (did you mean 'sentence'?); its columns: sentence, label"
    assert str(caught.value) == message
    with pytest.raises(DataError, match=r"no column 'qqqq'; its columns"):
        check_columns("t.csv", rows, ["qqqq"])
