"""A batch that is wrong is named by its number and by what is wrong with it, wherever batches are given."""

import pytest
import torch
from heads_by_hand import EOS, STEPS, ended, model_in
from model_inputs import batch, cast
from unchanged import assert_unchanged, refused, snapshot

from collab_heads import analyze_heads
from collab_heads.analysis import head_importance, head_relevance, head_statistics, leave_one_out, mean_loss
from collab_heads.analysis.measures.sentences import Sentences
from collab_heads.errors import ArgumentError, CalibrationError, NonFiniteError
from families import FAMILIES


@pytest.fixture(scope="module")
def marian():
    return model_in("marian")


@pytest.fixture
def inputs(marian):
    inputs, _ = ended("marian")
    labels = inputs["decoder_input_ids"].roll(-1, 1)
    for row, length in enumerate(STEPS):
        labels[row, length:] = -100
    return cast({**inputs, "labels": labels}, marian.dtype)


MEASURES = {
    "importance": head_importance,
    "loss": mean_loss,
    "analysis": analyze_heads,
    "gradient": lambda model, batches: analyze_heads(model, batches, parts=("gradient",)),
    "relevance": head_relevance,
    "statistics": lambda model, batches: head_statistics(model, batches, exclude=[EOS]),
}
WRONG = {  # how a batch is wrong -> what changes in it, and what is said
    "vocabulary": (lambda batch: {"input_ids": batch["input_ids"] + 10_000}, ""),
    "text": (lambda batch: {"input_ids": "the dog"}, ""),
    "negative": (lambda batch: {"input_ids": batch["input_ids"] - 1000}, ""),
    "numbers": (lambda batch: {"input_ids": batch["input_ids"].float()}, ""),
    "mask": (lambda batch: {"attention_mask": batch["attention_mask"][:, :-1]}, ""),
}


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("kind", WRONG)
def test_a_batch_that_the_model_cannot_take(measure, kind, marian, inputs):
    change, said = WRONG[kind]
    with refused(marian, CalibrationError, "batch 1", said):
        MEASURES[measure](marian, [inputs, inputs | change(inputs)])


@pytest.mark.parametrize("measure", MEASURES)
def test_a_batch_that_is_none(measure, marian, inputs):
    with refused(marian, CalibrationError, "batch 1 is a list, expected a dict"):
        MEASURES[measure](marian, [inputs, [1, 2]])


@pytest.mark.parametrize("measure", MEASURES)
def test_a_batch_without_values_or_names(measure, marian, inputs):
    away = inputs | {"attention_mask": inputs["attention_mask"].to("meta")}
    with refused(marian, CalibrationError, "batch 1: its attention_mask is on the meta device, without values"):
        MEASURES[measure](marian, [inputs, away])
    with refused(marian, CalibrationError, "batch 1: 5 is not the name of a model input"):
        MEASURES[measure](marian, [inputs, inputs | {5: 0}])


@pytest.mark.parametrize("measure", ("importance", "loss", "analysis", "gradient"))
def test_a_batch_without_labels_or_without_any_that_counts(measure, marian, inputs):
    without = {name: tensor for name, tensor in inputs.items() if name != "labels"}
    with refused(marian, CalibrationError, "gives no loss for batch 1: it needs labels"):
        MEASURES[measure](marian, [inputs, without])
    nothing = inputs | {"labels": torch.full_like(inputs["labels"], -100)}
    with refused(marian, NonFiniteError, "the loss of batch 1 is nan: does it have a label that counts (not -100)?"):
        MEASURES[measure](marian, [inputs, nothing])


@pytest.mark.parametrize(
    "options, said",
    (
        ({"num_examples": -1}, "num_examples -1 must be a whole number, 0 or more"),
        ({"num_examples": 1.5}, "num_examples 1.5 must be"),
        ({"contribution_sentences": 0}, "contribution_sentences 0 must be a whole number, 1 or more"),
        ({"contribution_sentences": -3}, "contribution_sentences -3 must be"),
    ),
)
def test_counts_that_cannot_be(options, said, marian, inputs):
    with refused(marian, ArgumentError, said):
        analyze_heads(marian, [inputs], **options)


def test_the_first_no_sentences_are_refused(inputs):
    for number in (0, -1):
        with pytest.raises(ArgumentError, match="the number of sentences"):
            next(Sentences([inputs]).first(number))


@pytest.mark.parametrize("measure", ("importance", "loss", "relevance"))
def test_what_a_classifier_notes_in_its_config_is_taken_back(measure):
    """transformers writes `problem_type` there in the first pass with labels."""
    model, inputs = FAMILIES["bert"].build(), batch()
    labelled = inputs | {"labels": torch.tensor([0, 1, 0])}
    before = snapshot(model)
    MEASURES[measure](model, [labelled])
    assert_unchanged(model, before)
    with refused(model, CalibrationError, "batch 1"):
        MEASURES[measure](model, [labelled, inputs | {"input_ids": inputs["input_ids"] + 10_000}])


@pytest.mark.parametrize("given", (1.5, None))
def test_what_evaluates_must_give_a_number(given, marian):
    if given is None:
        with refused(marian, ArgumentError, "evaluate must give a number, and the loss of the whole model is None"):
            leave_one_out(marian, lambda model: None)
    else:
        assert leave_one_out(marian, lambda model: torch.tensor(given)).original == given
