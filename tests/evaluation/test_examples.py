"""Examples from rows, tables and text files; what is wrong with them is said with the file and the row."""

import json
from pathlib import Path

import pytest

from collab_heads.errors import ArgumentError, DataError
from collab_heads.evaluation.examples import read_examples
from collab_heads.evaluation.tasks import Classification, Perplexity, Similarity, Translation

ROWS = [{"sentence1": "a", "sentence2": "b", "label": 0.5}, {"sentence1": "c", "sentence2": "d", "label": 1}]
COLUMNS = [["a", "c"], ["b", "d"], ["0.5", "1"]]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_rows_and_tables_hold_the_same(tmp_path):
    names = Similarity.COLUMNS
    assert read_examples(ROWS, names, None) == (COLUMNS, "data")
    table = write(tmp_path / "dev.tsv", "sentence1\tsentence2\tlabel\na\tb\t0.5\nc\td\t1\n")
    assert read_examples(str(table), names, None) == (COLUMNS, str(table))
    lines = write(tmp_path / "dev.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS))
    assert read_examples([lines], names, None)[0] == COLUMNS


def test_columns_may_have_other_names(tmp_path):
    table = write(tmp_path / "dev.csv", "review,class,sentence,label\ngood,1,x,0\nbad,0,y,1\n")
    assert read_examples(table, Classification.COLUMNS, None)[0] == [["x", "y"], ["0", "1"]]
    assert read_examples(table, Classification.COLUMNS, ["review", "class"])[0] == [["good", "bad"], ["1", "0"]]
    pairs = read_examples(table, Classification.COLUMNS, ["review", "sentence", "class"])[0]
    assert pairs == [["good", "bad"], ["x", "y"], ["1", "0"]]


def test_text_files_hold_a_column_each(tmp_path):
    source, target = write(tmp_path / "dev.de", "ein Hund\neine Katze\n"), write(tmp_path / "dev.en", "a dog\na cat\n")
    found, where = read_examples([source, target], Translation.COLUMNS, None)
    assert found == [["ein Hund", "eine Katze"], ["a dog", "a cat"]] and where == f"{source} and {target}"
    text = write(tmp_path / "text.txt", "a dog\n\n \na cat\n")
    assert read_examples(text, Perplexity.COLUMNS, None)[0] == [["a dog", "a cat"]]


def test_what_is_refused(tmp_path):
    table = write(tmp_path / "dev.tsv", "sentence1\tsentence\tscore\na\tb\t1\n")
    one, two = write(tmp_path / "one", "a\n"), write(tmp_path / "two", "a\nb\n")
    empty, bare = write(tmp_path / "empty.tsv", ""), write(tmp_path / "bare.tsv", "sentence1\tsentence2\tscore\n")
    for data, task, columns, error, said in (
        (table, Similarity, None, DataError, r"dev\.tsv has no column 'sentence2' \(did you mean 'sentence'\?\); its"),
        (table, Similarity, ["sentence1", "b", "score"], DataError, "has no column 'b'"),
        (table, Similarity, ["sentence1", "score"], ArgumentError, "2 columns .* the task has sentence1, sentence2"),
        (empty, Similarity, None, DataError, r"empty\.tsv is empty"),
        (bare, Similarity, None, DataError, "has a header and no rows"),
        (tmp_path / "none.tsv", Similarity, None, DataError, r"none\.tsv: No such file"),
        ([one, two], Translation, None, DataError, "have 1 and 2 lines"),
        (one, Translation, None, ArgumentError, "1 text files; give a table, or a file each of source, target"),
        ([table, one], Translation, None, ArgumentError, "several files, one of them a table"),
        ([], Translation, None, ArgumentError, "data must be a file, several files or a list of dicts"),
        ([ROWS[0], one], Similarity, None, ArgumentError, "data must be a file, several files or a list of dicts"),
        ([{"text": None}, {}], Perplexity, None, DataError, "row 2 has no column 'text'"),
    ):
        with pytest.raises(error, match=said):
            read_examples(data, task.COLUMNS, columns)
