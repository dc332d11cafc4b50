"""Example inputs are what a model takes."""

import pytest
import torch

from collab_heads.errors import ArgumentError
from collab_heads.serving.example_inputs import example_inputs, first_row, padded, two_rows
from families import FAMILIES


@pytest.mark.parametrize("name", ("bert", "gpt2", "vit", "clip", "wav2vec2", "whisper", "t5"))
def test_a_model_takes_them(name):
    model = FAMILIES[name].build().eval()
    inputs = example_inputs(model)
    assert model.main_input_name in inputs and all(len(tensor) == 2 for tensor in inputs.values())
    with torch.no_grad():
        model.generate(**inputs, max_new_tokens=2) if model.can_generate() else model(**inputs)


def test_padding_stands_where_the_model_does_not_read():
    for name, place in (("bert", -1), ("gpt2", 0)):
        mask = example_inputs(FAMILIES[name].build())["attention_mask"]
        assert mask[0].all() and not mask[1, place] and mask[1].any()


def test_the_same_seed_gives_the_same():
    model = FAMILIES["bert"].build()
    assert torch.equal(example_inputs(model, 1)["input_ids"], example_inputs(model, 1)["input_ids"])
    assert not torch.equal(example_inputs(model, 1)["input_ids"], example_inputs(model, 2)["input_ids"])


def test_other_inputs_are_asked_for():
    model = FAMILIES["bert"].build()
    model.main_input_name, model.forward = "boxes", lambda boxes: boxes
    with pytest.raises(ArgumentError, match="takes boxes, of which no examples can be made: pass batches"):
        example_inputs(model)


def test_one_row_becomes_two():
    batch = {"input_ids": torch.ones(1, 3), "labels": torch.ones(1), "use_cache": False}
    found = two_rows(batch)
    assert found["input_ids"].shape == (2, 3) and found["use_cache"] is False and "labels" not in found
    assert two_rows({"input_ids": torch.ones(3, 3)})["input_ids"].shape == (3, 3)


def test_the_first_row_alone():
    found = first_row({"input_ids": torch.arange(6).view(2, 3), "use_cache": False})
    assert found["input_ids"].tolist() == [[0, 1, 2]] and found["use_cache"] is False


@pytest.mark.parametrize(
    "name, hidden", [("bert", slice(3, 6)), ("gpt2-decoder", slice(0, 3)), ("marian", slice(3, 6))]
)
def test_padding_where_the_model_wants_it(name, hidden):
    """Decoders continue what stands last."""
    model, batch = FAMILIES[name].build(), {"attention_mask": torch.ones(3, 6, dtype=torch.long)}
    found = padded(model, batch)["attention_mask"]
    assert found[1, hidden].sum() == 0 and found.sum() == 15 and batch["attention_mask"].all()
    assert torch.equal(padded(model, {"attention_mask": found})["attention_mask"], found)  # has some already
    assert padded(model, {"pixel_values": 1}) == {"pixel_values": 1}
    assert torch.equal(padded(model, {"input_ids": torch.zeros(3, 6, dtype=torch.long)})["attention_mask"], found)
