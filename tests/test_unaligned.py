"""`--unaligned`: a loaded model rounds otherwise, until its weights are aligned."""

import pytest
import torch
from model_runs import aligned, output
from model_sizes import FP32_NOISE
from torch.nn import functional
from transformers import BertForSequenceClassification
from unaligned import BOUNDARY, OFFSET, in_halves, loading

from families import FAMILIES


def test_a_loaded_model_rounds_otherwise_until_it_is_aligned(tmp_path, monkeypatch):
    model, inputs = FAMILIES["bert"].build(), FAMILIES["bert"].inputs()
    model.save_pretrained(tmp_path)
    expected = output(model, inputs)
    monkeypatch.setattr(functional, "linear", in_halves(functional.linear))
    load = loading(BertForSequenceClassification.from_pretrained.__func__)
    loaded = load(type(model), tmp_path).eval()
    assert {parameter.data_ptr() % BOUNDARY for parameter in loaded.parameters()} == {OFFSET}
    assert all(torch.equal(*pair) for pair in zip(loaded.parameters(), model.parameters(), strict=True))
    found = output(loaded, inputs)
    assert not torch.equal(found, expected) and torch.allclose(found, expected, atol=FP32_NOISE)
    assert torch.equal(output(aligned(loaded), inputs), expected)


@pytest.mark.parametrize("half", (torch.float16, torch.bfloat16, torch.float64))
def test_other_types_are_moved_too(half, tmp_path):
    model = FAMILIES["bert"].build().to(half)
    model.save_pretrained(tmp_path)
    loaded = loading(type(model).from_pretrained.__func__)(type(model), tmp_path, dtype=half)
    assert all(parameter.data_ptr() % BOUNDARY == OFFSET for parameter in loaded.parameters())
