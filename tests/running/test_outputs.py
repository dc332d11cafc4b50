"""How far a changed model's output is from the original's."""

import pytest
import torch
from torch.testing import assert_close
from transformers.modeling_outputs import BaseModelOutput, QuestionAnsweringModelOutput, SequenceClassifierOutput

from collab_heads.errors import UnsupportedModelError
from collab_heads.running.outputs import Output, read_output
from families import FAMILIES


def outputs(family: str, inputs=None):
    model = FAMILIES[family].build().eval()
    inputs = FAMILIES[family].inputs() if inputs is None else inputs
    with torch.no_grad():
        return model, inputs, model(**inputs)


@pytest.mark.parametrize("family", ["marian", "t5", "t5-encoder", "marian-decoder"])
def test_only_tokens_that_count_are_rows(family):
    model, inputs, found = outputs(family)
    mask = inputs["attention_mask"]
    if model.config.is_encoder_decoder:  # its decoder inputs hold no padding token
        mask = torch.ones_like(inputs["decoder_input_ids"])
    values = found[0][mask.bool()]
    expected = values if family == "t5-encoder" else values.log_softmax(-1)
    assert_close(read_output(model, inputs, found).rows, expected)


def test_a_classifier_has_a_row_per_example():
    assert read_output(*outputs("bert")).rows.shape == (3, 2)


def test_small_changes_of_a_distribution_add_like_squares():
    torch.manual_seed(0)
    logits, change = torch.randn(7, 5, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64)
    original = Output(logits.log_softmax(-1), True)
    gaps = [float(original.squared_gap(Output((logits + s * change).log_softmax(-1), True))) for s in (1e-3, 2e-3)]
    p = logits.softmax(-1)
    variance = ((p * change.square()).sum(-1) - (p * change).sum(-1).square()).sum()
    assert_close(gaps[0], 1e-6 * float(variance), rtol=1e-2, atol=0)  # third order: 1e-3 of it
    assert_close(gaps[1] / gaps[0], 4.0, rtol=1e-2, atol=0)
    assert original.square() == 7


def test_states_are_compared_with_how_they_vary():
    rows = torch.tensor([[1.0, 2.0], [3.0, 2.0]])
    original = Output(rows, False)
    assert original.square() == 2
    assert float(original.squared_gap(Output(rows + 1, False))) == 4


def test_a_regression_has_numbers_and_a_classifier_a_distribution():
    model, inputs, _ = outputs("bert")
    for labels, problem, expected in ((1, None, False), (3, None, True), (3, "multi_label_classification", False)):
        model.config.problem_type = problem
        read = read_output(model, inputs, SequenceClassifierOutput(logits=torch.ones(3, labels)))
        assert (read.is_distribution, read.rows.shape) == (expected, (3, labels))


def test_what_cannot_be_compared_is_named():
    model, inputs, _ = outputs("bert")
    with pytest.raises(UnsupportedModelError, match="BertForSequenceClassification returns start_logits, end_logits"):
        starts = torch.ones(3, 9)
        read_output(model, inputs, QuestionAnsweringModelOutput(start_logits=starts, end_logits=starts))
    assert read_output(model, inputs, BaseModelOutput(torch.ones(3, 9, 4))).is_distribution is False
