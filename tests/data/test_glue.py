"""Where the examples of a task come from: GLUE's own files, the Hub, or files of one's own."""

import json

import pytest

import tiny
from collab_heads.data.glue import Data, from_files, from_folder, from_hub
from collab_heads.data.glue_tasks import AX, LAYOUTS, TASKS
from collab_heads.errors import ArgumentError, DataError

# The header lines of the files that gluebenchmark.com serves: train, and test where it differs by more than the label.
MNLI = (
    "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse "
    "sentence1 sentence2"
)
HEADERS = {
    "cola": (None, "index sentence"),
    "sst2": ("sentence label", "index sentence"),
    "mrpc": ("Quality #1_ID #2_ID #1_String #2_String", "index #1_ID #2_ID #1_String #2_String"),
    "stsb": tuple(
        f"index genre filename year old_index source1 source2 sentence1 sentence2{x}" for x in (" score", "")
    ),
    "qqp": ("id qid1 qid2 question1 question2 is_duplicate", "id question1 question2"),
    "mnli": (f"{MNLI} label1 gold_label", MNLI),
    "qnli": ("index question sentence label", "index question sentence"),
    "rte": ("index sentence1 sentence2 label", "index sentence1 sentence2"),
    "wnli": ("index sentence1 sentence2 label", "index sentence1 sentence2"),
}
TEXTS = {"#1_String", "#2_String", "sentence1", "sentence2", "sentence", "question", "question1", "question2"}
# labels as the files spell them -> as the task numbers them
LABELS = {
    "stsb": {"0.000": 0.0, "3.80": 3.8, "5": 5.0},
    "mnli": {"contradiction": 2, "entailment": 0, "neutral": 1},
    "qnli": {"not_entailment": 1, "entailment": 0},
    "rte": {"not_entailment": 1, "entailment": 0},
}
NUMBERS = {"1": 1, "0": 0}
DEVS = {"mnli": ("_matched", "_mismatched")}


def columns(header):
    return [name.replace("_String", " String").replace("_ID", " ID") for name in header.split()]


def fields(name, header, split, number, label):
    """One row: a text says which split, column and row it is of."""
    if header is None:
        return ["gj04", label, "", f"{split} sentence {number}"]
    known = {LAYOUTS[name].label: label, **{column: f'"{split} {column} {number}' for column in TEXTS}}
    return [known.get(column, number) for column in header.split()]


def write_task(folder, name, label=None):
    """A task's files with one row per label; returns the folder that holds the task's."""
    train, test = HEADERS[name]
    labels = [label] if label else list(LABELS.get(name, NUMBERS))
    task = folder / LAYOUTS[name].folder
    task.mkdir(parents=True)
    splits = ["train", *(f"{kind}{suffix}" for kind in ("dev", "test") for suffix in DEVS.get(name, ("",)))]
    for split in splits:
        header = test if split.startswith("test") else train
        rows = [fields(name, header, split, number, label) for number, label in enumerate(labels)]
        lines = ([columns(header)] if header else []) + rows
        text = "".join("\t".join(map(str, line)) + "\n" for line in lines)
        (task / f"{split}.tsv").write_text(text, encoding="utf-8-sig" if name == "mrpc" else "utf-8")
    return folder


def expected_texts(name, split, count):
    """What `write_task` wrote."""
    header = HEADERS[name][split.startswith("test")]
    if header is None:
        return [[f"{split} sentence {number}" for number in range(count)]]
    named = [column for column in header.split() if column in TEXTS]
    return [[f'"{split} {column} {number}' for number in range(count)] for column in named]


def test_every_task_has_a_layout_with_as_many_texts():
    assert TASKS.keys() == LAYOUTS.keys() == HEADERS.keys()
    for name, task in TASKS.items():
        assert task.name == name
        assert len(task.texts) == len(LAYOUTS[name].texts) in (1, 2)
        assert task.num_labels == {"stsb": 1, "mnli": 3}.get(name, 2)
        assert len(set(task.labels)) == len(task.labels)


@pytest.mark.parametrize("name", TASKS)
def test_files_of_every_task_are_read(name, tmp_path):
    write_task(tmp_path, name)
    data = from_folder(name, tmp_path, test=True)
    spelt = LABELS.get(name, NUMBERS)
    suffixes = DEVS.get(name, ("",))
    assert list(data.splits) == ["train", *(f"{kind}{s}" for kind in ("validation", "test") for s in suffixes)]
    assert data.task is TASKS[name]
    for split, found in data.splits.items():
        texts = expected_texts(name, split.replace("validation", "dev"), len(spelt))
        assert [found[column] for column in data.task.texts] == texts
        labelled = set() if split.startswith("test") else {"label"}
        assert found.keys() == {*data.task.texts, *labelled}
        if labelled:
            assert found["label"] == list(spelt.values())
            assert {type(label) for label in found["label"]} == {float if name == "stsb" else int}


def test_a_folder_may_be_the_task_itself_and_test_files_are_read_on_demand(tmp_path):
    write_task(tmp_path, "mnli")
    for path in (tmp_path / "MNLI").glob("test*"):
        path.unlink()
    whole, own = from_folder("mnli", tmp_path), from_folder("mnli", str(tmp_path / "MNLI"))
    assert whole == own
    assert list(own.splits) == ["train", "validation_matched", "validation_mismatched"]
    with pytest.raises(DataError, match=r"MNLI/test_matched\.tsv: No such file"):
        from_folder("mnli", tmp_path, test=True)


@pytest.mark.parametrize("relative", (False, True))
def test_the_diagnostic_set_is_read_where_it_lies_beside_mnli(relative, tmp_path, monkeypatch):
    write_task(tmp_path, "mnli")
    tiny.write_glue(tmp_path, "diagnostic", ["index", "sentence1", "sentence2"], {"diagnostic": [[0, "x", "y"]]})
    monkeypatch.chdir(tmp_path.parent)
    folder = tmp_path.name if relative else tmp_path
    data = from_folder("mnli", folder, test=True)
    assert data.splits[AX] == {"premise": ["x"], "hypothesis": ["y"]}
    assert data.named("test") == ["test_matched", "test_mismatched", AX]
    assert AX not in from_folder("mnli", folder).splits


def test_a_folder_without_the_task_is_refused(tmp_path):
    write_task(tmp_path, "rte")
    with pytest.raises(DataError, match=r"no train.tsv here or in WNLI/: expected the GLUE files of wnli"):
        from_folder("wnli", tmp_path)


@pytest.mark.parametrize(
    "name, label, column, allowed",
    (
        ("cola", "2", "label", "0, 1"),
        ("mrpc", "equivalent", "Quality", "0, 1"),
        ("qqp", "1.0", "is_duplicate", "0, 1"),
        ("rte", "1", "label", "entailment, not_entailment"),
        ("mnli", "-", "gold_label", "entailment, neutral, contradiction"),
        ("stsb", "nan", "score", "a finite number"),
        ("stsb", "good", "score", "a finite number"),
    ),
)
def test_labels_that_the_task_does_not_know_are_refused(name, label, column, allowed, tmp_path):
    write_task(tmp_path, name, label=label)
    with pytest.raises(DataError) as caught:
        from_folder(name, tmp_path)
    assert f"train.tsv, example 1: label '{label}' in column '{column}'; allowed: {allowed}" in str(caught.value)


def test_rows_with_missing_fields_can_be_skipped(tmp_path):
    write_task(tmp_path, "qqp")
    with (tmp_path / "QQP" / "train.tsv").open("a") as file:
        file.write("7\t8\n")
    with pytest.raises(DataError, match=r"train.tsv, row 4: 2 fields, expected 6"):
        from_folder("qqp", tmp_path)
    assert from_folder("qqp", tmp_path, skip_bad_rows=True).splits["train"]["label"] == [1, 0]


def test_rows_of_test_files_are_never_skipped(tmp_path):
    write_task(tmp_path, "qqp")
    path = tmp_path / "QQP" / "test.tsv"
    header, *rows = path.read_text().splitlines()
    path.write_text("\n".join([header, "0\tshort", *rows]) + "\n")
    with pytest.raises(DataError, match=r"test.tsv, row 2: 2 fields, expected 3"):
        from_folder("qqp", tmp_path, test=True, skip_bad_rows=True)


def hub(splits, texts):
    """What `datasets.load_dataset` would give: columns that we do not want, too."""
    return {
        split: {"idx": [0, 1], "label": [-1, -1] if split.startswith("test") else [1, 0]}
        | {text: [f"{split} {text} {i}" for i in range(2)] for text in texts}
        for split in splits
    }


@pytest.mark.parametrize("name", ("sst2", "mnli"))
def test_tasks_are_read_from_the_hub(name, monkeypatch):
    asked, suffixes, texts = [], DEVS.get(name, ("",)), TASKS[name].texts
    splits = ["train", *(f"{kind}{suffix}" for kind in ("validation", "test") for suffix in suffixes)]

    def load(*names):
        asked.append(names)
        return hub(["test"] if names[1] == "ax" else splits, texts)

    monkeypatch.setattr("datasets.load_dataset", load)
    data = from_hub(name)
    assert list(data.splits) == [split for split in splits if not split.startswith("test")]
    assert asked == [("nyu-mll/glue", name)]
    data, diagnostic = from_hub(name, test=True), [AX] if name == "mnli" else []
    assert asked[1:] == [("nyu-mll/glue", name), *(("nyu-mll/glue", "ax") for _ in diagnostic)]
    assert list(data.splits) == splits + diagnostic
    for split, found in data.splits.items():
        labelled = {} if split.startswith("test") else {"label": [1, 0]}
        source = "test" if split == AX else split
        assert found == {text: [f"{source} {text} 0", f"{source} {text} 1"] for text in texts} | labelled


def test_a_hub_that_cannot_be_reached_points_to_data_dir(monkeypatch):
    def fail(*names):
        raise ConnectionError("no route")

    monkeypatch.setattr("datasets.load_dataset", fail)
    with pytest.raises(DataError, match=r"nyu-mll/glue, rte.*\(ConnectionError: no route\).*--data_dir"):
        from_hub("rte")


def write_files(folder, train, validation=None, test=None, kind="csv"):
    """Write own files; returns their paths."""
    paths = []
    for name, rows in (("train", train), ("validation", validation or train), ("test", test)):
        if rows is not None:
            path = folder / f"{name}.{kind}"
            paths.append(str(path))
            if kind == "csv":
                tiny.write_csv(path, rows)
            else:
                path.write_text("\n".join(json.dumps(row) for row in rows))
    return paths


def examples(*labels, **more):
    return [{"sentence1": f"a {i}", "sentence2": f"b {i}", "label": v, **more} for i, v in enumerate(labels)]


@pytest.mark.parametrize("kind", ("csv", "json"))
@pytest.mark.parametrize(
    "labels, names, numbers",
    (
        (("yes", "no", "maybe", "no"), ("maybe", "no", "yes"), [2, 1, 0, 1]),
        ((10, 9, 0, 10), ("0", "9", "10"), [2, 1, 0, 2]),
        (("1", "0"), ("0", "1"), [1, 0]),
        ((" pos", "neg "), ("neg", "pos"), [1, 0]),
        (("1", "x"), ("1", "x"), [0, 1]),
        ((1.5, 2.0), (), [1.5, 2.0]),
        (("3.0", "-2"), ("-2", "3"), [1, 0]),
        ((1.0, 0.0, 1.0), ("0", "1"), [1, 0, 1]),
        ([f"{i}.0" for i in range(21)], (), [float(i) for i in range(21)]),
    ),
)
def test_own_files_are_classification_or_regression_by_their_labels(kind, labels, names, numbers, tmp_path):
    data = from_files(*write_files(tmp_path, examples(*labels), kind=kind))
    assert data.task.labels == names
    assert (data.task.name, data.task.metric) == (None, "classification" if names else "regression")
    assert data.task.texts == ("sentence1", "sentence2")
    for split in ("train", "validation"):
        assert data.splits[split]["label"] == numbers
        assert data.splits[split]["sentence2"] == [f"b {i}" for i in range(len(labels))]


def test_whole_numbers_of_a_regression_may_stand_in_validation(tmp_path):
    data = from_files(*write_files(tmp_path, examples("0.5", "1"), examples("1", "0")))
    assert data.splits["validation"]["label"] == [1.0, 0.0]


def test_a_test_file_needs_no_labels(tmp_path):
    train = examples("b", "a", id=7)
    test = [{"sentence2": "y", "sentence1": "x"}]
    data = from_files(*write_files(tmp_path, train, test=test))
    assert data.splits["test"] == {"sentence1": ["x"], "sentence2": ["y"]}
    assert list(data.splits) == ["train", "validation", "test"]
    with pytest.raises(DataError, match=r"test\.csv has no column 'sentence2'"):
        from_files(*write_files(tmp_path, train, test=[{"sentence1": "x"}]))


def test_a_text_may_stand_in_a_column_named_label(tmp_path):
    rows = [{"label": f"text {i}", "gold": name} for i, name in enumerate(("bad", "good", "bad"))]
    data = from_files(*write_files(tmp_path, rows), label="gold")
    (column,) = data.task.texts
    assert data.splits["train"] == {column: ["text 0", "text 1", "text 2"], "label": [0, 1, 0]}
    with pytest.raises(ArgumentError, match="--text_columns: 'gold' holds the labels"):
        from_files(*write_files(tmp_path, rows), label="gold", texts=["label", "gold"])


@pytest.mark.parametrize("label, again", (("label", "label_text"), ("label_text", "label")))
def test_a_column_that_says_the_label_again_is_no_text(label, again, tmp_path):
    """So that no answer stands in the input."""
    rows = [{"text": f"t {i}", "label": i % 2, "label_text": ("no", "yes")[i % 2]} for i in range(5)]
    assert from_files(*write_files(tmp_path, rows), label=label).task.texts == ("text",)
    assert from_files(*write_files(tmp_path, rows), label=label, texts=[again]).task.texts != ("text",)
    rows[0]["label_text"] = "yes"
    assert len(from_files(*write_files(tmp_path, rows), label=label).task.texts) == 2


def test_the_texts_are_sentence1_and_2_or_the_first_other_columns(tmp_path):
    def texts(row):
        return from_files(*write_files(tmp_path, [{**row, "label": "a"}, {**row, "label": "b"}])).task.texts

    assert texts({"idx": 1, "title": "t", "body": "b"}) == ("title", "body")
    assert texts({"title": "t", "sentence2": "b", "sentence1": "n"}) == ("sentence1", "sentence2")
    assert texts({"id": 1, "text": "t", "index": 3}) == ("text",)
    with pytest.raises(DataError, match=r"train\.csv has no column of text beside 'label'"):
        texts({"idx": 1})
    with pytest.raises(DataError, match=r"3 columns beside 'label' \(author, date, text\): name .* --text_columns"):
        texts({"author": "x", "date": "2020", "text": "t"})


@pytest.mark.parametrize("name", ("", "Unnamed: 0", "ID", "Idx", "INDEX", "__index_level_0__"))
def test_numbers_of_rows_are_no_text(name, tmp_path):
    """pandas writes them into a column without a name, and reads that as "Unnamed: 0"."""
    rows = [{name: i, "sentence": f"text {i}", "label": "ab"[i % 2]} for i in range(4)]
    assert from_files(*write_files(tmp_path, rows)).task.texts == ("sentence",)


def test_columns_of_text_can_be_named(tmp_path):
    files = write_files(tmp_path, [{"author": "x", "text": f"t {i}", "note": "n", "label": "ab"[i]} for i in range(2)])
    assert from_files(*files, texts=["text"]).splits["train"]["text"] == ["t 0", "t 1"]
    assert from_files(*files, texts=["note", "text"]).task.texts == ("note", "text")
    with pytest.raises(DataError, match=r"train\.csv has no column 'txt' \(did you mean 'text'\?\)"):
        from_files(*files, texts=["txt"])


def test_what_was_read_is_printed(tmp_path, capsys):
    from_files(*write_files(tmp_path, examples("1.0", "0.0")))
    said = f"{tmp_path}/train.csv: the text is in 'sentence1' and 'sentence2'; 'label' makes 2 classes (0, 1)\n"
    assert said in capsys.readouterr().out
    from_files(*write_files(tmp_path, [{"text": "x", "label": 0.5}, {"text": "y", "label": 1}]))
    assert "the text is in 'text'; 'label' makes a regression" in capsys.readouterr().out
    from_files(*write_files(tmp_path, examples(*(f"class {i:03}" for i in range(500)))))
    assert "makes 500 classes (class 000, class 001" in (said := capsys.readouterr().out) and len(said) < 400


@pytest.mark.parametrize("labels", (("a", "b", " "), ("1", "0", ""), ("1.5", "0.5", "")))
@pytest.mark.parametrize("split", (0, 1))
def test_a_row_without_a_label_is_refused(split, labels, tmp_path):
    whole = examples("1.5", "0.5") if "." in labels[0] else examples(*labels[:2])
    parts = [whole, whole]
    parts[split] = examples(*labels)
    with pytest.raises(DataError, match=rf"{('train', 'validation')[split]}\.csv, row 3: no label in column 'label'"):
        from_files(*write_files(tmp_path, *parts))


def test_labels_with_a_decimal_comma_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"row 2: label '0,5' in column 'label': write a decimal point"):
        from_files(*write_files(tmp_path, examples("1", "0,5", "2.5")))
    assert from_files(*write_files(tmp_path, examples("a", "0,5"))).task.labels == ("0,5", "a")


def test_one_split_may_write_whole_numbers_with_a_fraction(tmp_path):
    data = from_files(*write_files(tmp_path, examples("1.0", "0.0"), examples("0", "1")))
    assert data.task.labels == ("0", "1") and data.splits["validation"]["label"] == [0, 1]
    data = from_files(*write_files(tmp_path, examples("1.0", "0.0"), examples("0.5", "1")))
    assert data.task.labels == () and data.splits["train"]["label"] == [1.0, 0.0]


def test_numbers_that_are_none_are_no_classes(tmp_path):
    for value in ("nan", "inf"):
        with pytest.raises(DataError, match=f"label '{value}' in column 'label'; allowed: a finite number"):
            from_files(*write_files(tmp_path, examples("1", "0", value)))


def test_labels_that_training_did_not_have_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"validation\.csv, example 2: label 'c' in column 'label'; allowed: a, b"):
        from_files(*write_files(tmp_path, examples("b", "a"), examples("a", "c")))
    with pytest.raises(DataError, match=r"validation\.csv, example 1: label 'x' .*; allowed: a finite number"):
        from_files(*write_files(tmp_path, examples("0.5"), examples("x")))


def test_a_missing_label_column_is_refused_and_another_can_be_named(tmp_path):
    rows = [{"text": "x", "labels": "b"}, {"text": "y", "labels": "a"}]
    with pytest.raises(DataError, match=r"train\.csv has no column 'label' \(did you mean 'labels'\?\)"):
        from_files(*write_files(tmp_path, rows))
    data = from_files(*write_files(tmp_path, rows), label="labels")
    assert (data.task.texts, data.splits["train"]["label"]) == (("text",), [1, 0])
    unlabelled = [{"text": "x"}]
    with pytest.raises(DataError, match=r"validation\.csv has no column 'labels'"):
        from_files(*write_files(tmp_path, rows, unlabelled), label="labels")


@pytest.mark.parametrize("column", ("sentence1", "label"))
def test_json_cells_without_a_value_are_refused(column, tmp_path):
    rows = examples("a", "b")
    rows[1][column] = None
    with pytest.raises(DataError, match=column):
        from_files(*write_files(tmp_path, rows, kind="json"))


@pytest.mark.parametrize("value, kind", (({"x": 1}, "an object"), (["x"], "a list")))
@pytest.mark.parametrize("column", ("sentence1", "label"))
def test_objects_are_neither_texts_nor_labels(column, value, kind, tmp_path):
    rows = examples("a", "b")
    rows[1][column] = value
    with pytest.raises(DataError, match=rf"train\.json, row 2, column '{column}': {kind}, expected text"):
        from_files(*write_files(tmp_path, rows, kind="json"))


def test_whole_numbers_that_no_float_holds_are_classes(tmp_path):
    data = from_files(*write_files(tmp_path, examples(7, 10**400), kind="json"))
    assert data.task.labels == ("7", str(10**400))


def test_the_first_examples_of_every_split_of_a_kind():
    columns = {"sentence": list("abcd"), "label": [0, 1, 0, 1]}
    names = ("train", "validation_matched", "validation_mismatched", "test")
    data = Data(TASKS["sst2"], {name: columns for name in names})
    short = data.first({"train": None, "validation": 2})
    assert [len(short.splits[name]["sentence"]) for name in names] == [4, 2, 2, 4]
    assert short.splits["validation_mismatched"] == {"sentence": ["a", "b"], "label": [0, 1]}
    assert len(data.splits["validation_matched"]["label"]) == 4
    assert data.first({"train": 9}).splits == data.splits
    assert (data.named("validation"), data.named("test")) == (list(names[1:3]), ["test"])
