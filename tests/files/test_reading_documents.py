import json
import re

import pytest

from collab_heads.errors import DataError
from collab_heads.files.reading import read_document, write_document


def read(path):
    return read_document(path, 1, "list of numbers", lambda stored: [int(each) for each in stored["numbers"]])


def test_what_was_written_is_read(tmp_path):
    path = write_document(tmp_path / "new" / "numbers.json", {"version": 1, "numbers": [3, 4]})
    assert read(path) == [3, 4]
    assert path.read_text() == '{"version": 1, "numbers": [3, 4]}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    (
        (None, ": No such file or directory"),
        ("{", "is not a list of numbers: JSONDecodeError"),
        ("[]", "is not a list of numbers: TypeError"),
        ('{"numbers": []}', "is not a list of numbers: KeyError"),
        ('{"version": 2, "numbers": []}', "it is of version 2; this package reads version 1"),
        ('{"version": 1, "numbers": ["x"]}', "is not a list of numbers: ValueError"),
    ),
)
def test_anything_else_is_named(text, message, tmp_path):
    path = tmp_path / "numbers.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=message) as problem:
        read(path)
    assert str(path) in str(problem.value)
    with pytest.raises(DataError, match=rf"^{re.escape(str(tmp_path))} is a folder, no file: "):
        read(tmp_path)


def test_numbers_that_json_does_not_know_are_not_written(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        write_document(tmp_path / "numbers.json", {"version": 1, "numbers": [float("nan")]})
    assert not (tmp_path / "numbers.json").exists()


def test_a_new_file_replaces_an_old_one_whole(tmp_path):
    path = write_document(tmp_path / "numbers.json", {"version": 1, "numbers": [3] * 50})
    write_document(path, {"version": 1, "numbers": []})
    assert json.loads(path.read_text())["numbers"] == []
