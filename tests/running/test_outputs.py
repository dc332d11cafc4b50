"""How far a changed model's output is from the original's."""

import pytest
import torch
from model_configs import bert_config
from model_inputs import batch
from torch.testing import assert_close
from transformers import ElectraConfig, ElectraForPreTraining
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPooling,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
)

from collab_heads.errors import UnsupportedModelError
from collab_heads.running import outputs as outputs_module
from collab_heads.running.outputs import KEEP, Output, divergence, fewer_logits, read_output, without_far_rows
from families import FAMILIES, make

ROUNDING = 1e-12  # of float64 sums in another order


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


def test_a_number_per_token_is_no_distribution_over_tokens():
    model = make(ElectraForPreTraining, bert_config(ElectraConfig))
    inputs = batch()
    with torch.no_grad():
        found = model(**inputs)
    read = read_output(model, inputs, found)
    assert_close(read.rows, found.logits[inputs["attention_mask"].bool()][:, None])
    assert not (read.is_distribution or read.are_states)


def test_distributions_are_compared_some_rows_at_a_time(monkeypatch):
    """The copies that a portion of SmolLM2 needs, with 49,152 tokens, took a seventh of the model's memory."""
    torch.manual_seed(0)
    logits = torch.randn(7, 5, dtype=torch.float64).masked_fill(torch.arange(5) == 2, -torch.inf)
    changed = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    whole = Output(logits.log_softmax(-1), True).squared_gap(Output(changed.log_softmax(-1), True))
    (gradient,) = torch.autograd.grad(whole, changed)
    seen = []
    monkeypatch.setattr(outputs_module, "AT_ONCE", 14)
    monkeypatch.setattr(
        outputs_module, "divergence", lambda rows, other: seen.append(len(rows)) or divergence(rows, other)
    )
    parts = Output(logits.log_softmax(-1), True).squared_gap(Output(changed.log_softmax(-1), True))
    assert seen == [2, 2, 2, 1] and float(whole) > 0
    assert_close(parts, whole, rtol=ROUNDING, atol=0)
    assert_close(torch.autograd.grad(parts, changed)[0], gradient, rtol=ROUNDING, atol=0)


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


def test_the_ends_of_answers_are_distributions_over_the_tokens_of_a_text():
    model, inputs, _ = outputs("bert")
    starts, ends = torch.randn(2, 3, 9, generator=torch.Generator().manual_seed(0))
    read = read_output(model, inputs, QuestionAnsweringModelOutput(start_logits=starts, end_logits=ends))
    assert read.is_distribution and read.rows.shape == (6, 9)
    lengths = inputs["attention_mask"].sum(1).tolist()
    assert lengths == [9, 5, 7]
    for row, logits, length in zip(read.rows, torch.cat([starts, ends]), lengths * 2, strict=True):
        expected = logits[:length].log_softmax(-1)
        assert_close(row[:length], expected)
        assert (row[len(expected) :] == -torch.inf).all()
    moved = starts.clone().requires_grad_()
    other = read_output(model, inputs, QuestionAnsweringModelOutput(start_logits=moved, end_logits=ends))
    gap = read.squared_gap(other)
    assert float(gap.detach()) == 0
    gap.backward()
    assert torch.isfinite(moved.grad).all()


def test_what_cannot_be_compared_is_named():
    model, inputs, _ = outputs("bert")
    with pytest.raises(UnsupportedModelError, match=r"BertFor.* returns pooler_output: .*\(model\.bert\)"):
        read_output(model, inputs, BaseModelOutputWithPooling(pooler_output=torch.ones(3, 9)))
    assert read_output(model, inputs, BaseModelOutput(torch.ones(3, 9, 4))).is_distribution is False


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_language_model_puts_out_logits_at_even_positions(family):
    model, inputs, found = outputs(family)
    ids, size = inputs["input_ids"], model.config.vocab_size
    fewer = fewer_logits(model, inputs, ids.numel() * size // 3)
    kept = fewer[KEEP]
    assert kept[-1] == ids.shape[1] - 1 and set(kept.diff().tolist()) == {3}
    with torch.no_grad():
        rows = read_output(model, fewer, model(**fewer)).rows
    mask = inputs.get("attention_mask", torch.ones_like(ids)).bool()
    assert not mask.all()
    assert_close(rows, found.logits.float().log_softmax(-1)[:, kept][mask[:, kept]])
    one = {**inputs, "input_ids": ids[:, :1]}
    assert fewer_logits(model, one, 1)[KEEP].tolist() == [0]


def test_what_is_small_or_has_logits_at_all_positions_stays():
    for family, most in (("llama", 10**6), ("marian", 1), ("bert", 1), ("vit", 1)):
        model, inputs = FAMILIES[family].build(), FAMILIES[family].inputs()
        assert fewer_logits(model, inputs, most) is inputs


def test_a_row_of_outlying_norm_counts_as_one_of_the_median_norm():
    torch.manual_seed(0)
    rows, change = torch.randn(9, 4), torch.randn(9, 4)
    near = Output(rows / rows.norm(dim=1, keepdim=True), False, are_states=True)
    assert without_far_rows(near) is near
    far = Output(near.rows.clone(), False, are_states=True)
    far.rows[3] *= 1000
    found = without_far_rows(far)
    assert_close(found.rows, near.rows)
    changed = far.rows + change
    expected = change.square().sum() - change[3].square().sum() * (1 - 1e-6)
    assert_close(found.squared_gap(Output(changed, False)), expected)
    for rows in (torch.zeros(0, 4), torch.zeros(5, 4), torch.eye(5)[:, :1]):  # nothing, all zero, mostly zero
        assert without_far_rows(Output(rows, False)).rows is rows
