"""Lines of text files and columns of tables."""

import gzip
import json
import zipfile
from argparse import Namespace

import commands
import pytest

from collab_heads.command import inputs
from collab_heads.command.texts import read_data
from collab_heads.errors import ArgumentError, DataError
from collab_heads.evaluation import candidates

ROWS = 'text,other,label\nthe dog runs,a dog,1\n,empty,0\n"a cat, too",one cat,1\n'


def read(*files, column=None):
    return read_data(Namespace(data=[str(file) for file in files], column=column, skip_bad_rows=False))


def packed(path, text):
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write(text)
    return path


def written(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_lines_of_text_gzipped_or_not(tmp_path, capsys):
    text = "the dog runs\n\na cat\n"
    for file in (written(tmp_path / "a.txt", text), packed(tmp_path / "a.gz", text)):
        assert read(file) == {"source": ["the dog runs", "a cat"]}
    assert capsys.readouterr().out.count("left out 1 of 3 lines, which are empty") == 2


def test_two_files_are_pairs(tmp_path):
    one, other = written(tmp_path / "a.de", "eins\nzwei\n"), written(tmp_path / "a.en", "one\n\n")
    assert read(one, other) == {"source": ["eins"], "target": ["one"]}


def test_columns_of_tables_gzipped_or_not(tmp_path):
    table = written(tmp_path / "a.csv", ROWS)
    assert read(table, column=["text"]) == {"source": ["the dog runs", "a cat, too"]}
    both = {"source": ["the dog runs", "a cat, too"], "target": ["a dog", "one cat"]}
    assert read(table, column=["text", "other"]) == both
    assert read(packed(tmp_path / "a.csv.gz", ROWS), column=["text", "other"]) == both
    lines = written(tmp_path / "a.jsonl", '{"text": "a dog", "n": 1}\n{"text": "a cat", "n": 2}\n')
    assert read(lines, column=["text", "n"]) == {"source": ["a dog", "a cat"], "target": ["1", "2"]}


def test_what_is_refused(tmp_path):
    table, text = written(tmp_path / "a.csv", ROWS), written(tmp_path / "a.txt", "a dog\n")
    blank, blanks = written(tmp_path / "b.csv", "text,n\n,1\n"), written(tmp_path / "b.txt", " \n\n")
    nested = written(tmp_path / "a.json", json.dumps([{"text": {"de": "a"}}]))
    for files, column, error, said in (
        ([table], None, ArgumentError, "with --column; it has text, other, label"),
        ([table], ["text", "other", "label"], ArgumentError, "or two, with --column"),
        ([table], ["texts"], DataError, r"no column 'texts' \(did you mean 'text'\?\)"),
        ([table, text], ["text"], ArgumentError, "give one table, and both columns with --column"),
        ([text], ["text"], ArgumentError, "a.txt has no columns, it is not a table"),
        ([text, text, text], None, ArgumentError, "3 files, 0 of them with a weight: give one of text, two that"),
        ([f"{text}:1", text], None, ArgumentError, "2 files, 1 of them with a weight: give one of text, two that"),
        ([f"{text}:0", text], None, ArgumentError, "the weight 0 of .*a.txt must be a number above 0"),
        ([f"{text}:nan"], None, ArgumentError, "the weight nan of .*a.txt must be a number above 0"),
        ([f"{text}:1", f"{table}:1"], ["text", "other"], ArgumentError, "a mixture is of single texts"),
        ([f"{text}:1", f"{text}:2"], ["text"], ArgumentError, "a.txt:2 has no columns, it is not a table"),
        ([blank], ["text"], DataError, "b.csv: column 'text' has no text"),
        ([blank], ["text", "n"], DataError, "no pair has text on both sides"),
        ([blanks], None, DataError, "b.txt is empty"),
        ([nested], ["text"], DataError, "row 1, column 'text': an object, expected text"),
        ([written(tmp_path / "zip", b"PK\x03\x04\xff\xfe")], None, DataError, "line 1: not UTF-8"),
        ([written(tmp_path / "nulls", b"a dog\n" + bytes(64))], None, DataError, "nulls, line 2: a null byte"),
        ([tmp_path / "none.txt"], None, DataError, "none.txt: No such file"),
        ([tmp_path], None, DataError, "is a folder, no file"),
    ):
        with pytest.raises(error, match=said):
            read(*files, column=column)


def test_the_commands_read_the_tables_of_the_scripts(tmp_path, capsys):
    nested = [{"translation": {"de": "eins", "en": "one"}}, {"translation": {"de": None, "en": "two"}}]
    table = packed(tmp_path / "a.jsonl.gz", "\n".join(map(json.dumps, nested)))
    assert read(table, column=["de", "en"]) == {"source": ["eins"], "target": ["one"]}
    assert read(table, column=["de"]) == {"source": ["eins"]}
    assert "left out 1 of 2 lines" in capsys.readouterr().out
    data = written(tmp_path / "a.json", json.dumps({"data": [{"text": "one"}, {"text": "two", "id": 7}]}))
    assert read(data, column=["text"]) == {"source": ["one", "two"]}
    assert read(written(tmp_path / "a.csv", "text;n\nan, apple;1\n"), column=["text"]) == {"source": ["an, apple"]}
    assert read(written(tmp_path / "a.txt", "a\nü\n".encode("utf-16"))) == {"source": ["a", "ü"]}
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("dev.de", "eins\nzwei\n")
    assert read(tmp_path / "a.zip") == {"source": ["eins", "zwei"]}


def test_a_mixture_holds_texts_in_proportion_to_their_weights(tmp_path, capsys):
    many = written(tmp_path / "many.txt", "".join(f"many {i}\n" for i in range(50)))
    few = written(tmp_path / "few.csv", "text,n\n" + "".join(f"few {i},1\n" for i in range(8)) + ",1\n")
    lines = read(f"{many}:1.5", f"{few}:0.5", column=["text"])["source"]
    assert f"{many}:1.5: 24 of 50 texts\n{few}:0.5: 8 of 8 texts\n" in capsys.readouterr().out
    assert len(set(lines)) == len(lines) == 32 and sum(line.startswith("few") for line in lines) == 8
    assert {line.split()[0] for line in lines[:16]} == {"many", "few"}  # not one after the other
    assert read(f"{many}:1.5", f"{few}:0.5", column=["text"])["source"] == lines
    assert read(f"{many}:3", column=None)["source"] != []


def test_a_file_may_have_a_colon_in_its_name(tmp_path):
    assert read(written(tmp_path / "news:2", "a dog\n")) == {"source": ["a dog"]}
    assert len(read(f"{tmp_path / 'news:2'}:5")["source"]) == 1
    with pytest.raises(DataError, match="notes:2024: No such file"):
        read(tmp_path / "notes:2024")


def test_a_table_without_its_columns_is_refused_before_a_model_is_loaded(bert, tmp_path, monkeypatch):
    def loads(*args, **options):
        pytest.fail("a model is loaded")

    monkeypatch.setattr(inputs, "load_or_explain", loads)
    monkeypatch.setattr(candidates, "load_or_explain", loads)
    table, text = written(tmp_path / "a.csv", ROWS), written(tmp_path / "a.txt", "the dog runs\n" * 64)
    new = "--output_dir", tmp_path / "new"
    scoring = "--data", text, *new, "--evaluate", table, "--task", "similarity"
    for name, argv, flags in (
        ("compress", [bert], new),
        ("shrink", [bert], new),
        ("analyze", [bert], new),
        ("trim", [bert], new),
        ("swap", [bert, "--dim_shared_query_key", 16], new),
        ("prune", [bert, "--target_heads", 4], new),
        ("evaluate", [bert, bert, "--task", "similarity"], ()),
    ):
        said = "no column 'sentence1'" if name == "evaluate" else "name the column that holds the text"
        with pytest.raises((ArgumentError, DataError), match=said):
            commands.run(name, *argv, "--data", table, *flags)
        columns = ("a", "b", "c") if name == "evaluate" else ("a",)
        with pytest.raises(DataError, match="no column 'a'"):
            commands.run(name, *argv, "--data", table, *flags, "--column", *columns)
    for name, flags in (("compress", scoring), ("shrink", scoring)):
        with pytest.raises(DataError, match="no column 'sentence1'"):
            commands.run(name, bert, *flags, "--max_loss", 1)
    assert {each.name for each in tmp_path.iterdir()} == {"a.csv", "a.txt"}
