"""Prediction files as GLUE's server takes them."""

import numpy as np
import pytest

from collab_heads.data.classification import submission_lines, submission_name, submission_text
from collab_heads.data.glue_tasks import AX, TASKS, Task

NAMES = {  # from GLUE's FAQ: the files of a submission
    "cola": ["CoLA.tsv"],
    "sst2": ["SST-2.tsv"],
    "mrpc": ["MRPC.tsv"],
    "stsb": ["STS-B.tsv"],
    "qqp": ["QQP.tsv"],
    "mnli": ["MNLI-m.tsv", "MNLI-mm.tsv", "AX.tsv"],
    "qnli": ["QNLI.tsv"],
    "rte": ["RTE.tsv"],
    "wnli": ["WNLI.tsv"],
}
LOGITS = np.array([[0.1, -2.0], [-0.3, 0.2], [-5.0, -4.0]])


def test_files_are_named_as_the_server_wants_them():
    assert NAMES.keys() == TASKS.keys()
    for name, files in NAMES.items():
        splits = ["test_matched", "test_mismatched", AX] if name == "mnli" else ["test"]
        assert [submission_name(TASKS[name], split) for split in splits] == files


@pytest.mark.parametrize("name", ("cola", "sst2", "mrpc", "qqp", "wnli"))
def test_most_classes_are_numbered(name):
    assert submission_lines(TASKS[name], LOGITS) == ["index\tprediction", "0\t0", "1\t1", "2\t1"]


@pytest.mark.parametrize("name", ("qnli", "rte"))
def test_entailment_is_spelt_out(name):
    lines = submission_lines(TASKS[name], LOGITS)
    assert lines == ["index\tprediction", "0\tentailment", "1\tnot_entailment", "2\tnot_entailment"]


def test_scores_are_clipped_to_the_scale_of_stsb_and_have_three_decimals():
    scores = np.array([-0.7, 0.0, 2.34567, 4.9996, 5.2], dtype=np.float32)
    values = ["0.000", "0.000", "2.346", "5.000", "5.000"]
    lines = ["index\tprediction", *(f"{i}\t{value}" for i, value in enumerate(values))]
    assert submission_lines(TASKS["stsb"], scores) == lines


def test_own_tasks_get_their_own_names_and_scores_as_they_are():
    words = Task(None, ("text",), ("bad", "good"), "classification")
    assert submission_lines(words, LOGITS)[1:] == ["0\tbad", "1\tgood", "2\tgood"]
    numbers = Task(None, ("text",), (), "regression")
    assert submission_lines(numbers, np.array([-7.25, 9.0]))[1:] == ["0\t-7.25", "1\t9"]
    assert submission_lines(numbers, np.array([0.00012345678], dtype=np.float32))[1:] == ["0\t0.0001234568"]
    assert submission_name(words, "test") == "predictions.tsv"


def test_a_test_split_has_its_file():
    names = [submission_name(TASKS["mnli"], split) for split in ("test_matched", "test_mismatched")]
    assert names == ["MNLI-m.tsv", "MNLI-mm.tsv"]
    text = submission_text(TASKS["mnli"], np.eye(3)[[2, 0]])
    assert text == "index\tprediction\n0\tcontradiction\n1\tentailment\n"
