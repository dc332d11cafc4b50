"""Portions hold the same examples, shortest first, without padding that no row of a portion needs."""

import pytest
import torch
from model_inputs import batch, cast
from model_runs import output
from model_sizes import EXACT64

from collab_heads.running.batches import output_mask
from collab_heads.running.portions import ROWS_WITHOUT_TOKENS, portions
from families import FAMILIES

LENGTHS = (9, 5, 7)  # of the sentences in `batch`


def ids(portion):
    return portion["input_ids"].tolist()


def test_shortest_first_and_trimmed():
    inputs = batch()
    short, long = portions(inputs, False, size=14)
    assert ids(short) == [inputs["input_ids"][1, :7].tolist(), inputs["input_ids"][2, :7].tolist()]
    assert ids(long) == [inputs["input_ids"][0].tolist()]
    assert short["attention_mask"].tolist() == [[1] * 5 + [0] * 2, [1] * 7]


def test_examples_alike_keep_their_order():
    """Also without masks: then rows of tokens have the length of their tensor, and images count as of one length."""
    inputs = {"input_ids": torch.arange(160).view(40, 4)}
    assert [ids(each) for each in portions(inputs, False, 24)] == [
        each.tolist() for each in inputs["input_ids"].split(6)
    ]
    images = torch.arange(40.0).view(40, 1, 1, 1)
    cut = [portion["pixel_values"] for portion in portions({"pixel_values": images}, False)]
    assert all(map(torch.equal, cut, images.split(ROWS_WITHOUT_TOKENS))) and len(cut) == 3


def test_portions_hold_as_many_positions_as_they_may():
    """Long sentences come in small portions, a sentence that is too long alone."""
    lengths = torch.tensor([30, 3, 4, 9, 5, 10, 4])
    mask = (torch.arange(30) < lengths[:, None]).long()
    sizes = [tuple(p["input_ids"].shape) for p in portions({"input_ids": mask, "attention_mask": mask}, False, size=20)]
    assert sizes == [(4, 5), (2, 10), (1, 30)]


def test_all_inputs_of_an_example_stay_together():
    inputs = {
        **batch(),
        "token_type_ids": torch.arange(27).view(3, 9),
        "labels": torch.tensor([0, 1, 2]),
        "return_dict": True,
    }
    first = next(iter(portions(inputs, False, size=1)))
    assert first["labels"].tolist() == [1]
    assert first["token_type_ids"].tolist() == [[9, 10, 11, 12, 13]]
    assert first["return_dict"] is True


def test_inputs_lie_in_memory_as_models_expect():
    """Losses of translation models view their labels."""
    inputs = {**batch(), "labels": torch.tensor([[5, 6, -100], [7, -100, -100], [8, 9, -100]])}
    for portion in portions(inputs, True):
        assert all(tensor.is_contiguous() for tensor in portion.values())
        assert portion["labels"].shape[1] == 2


def test_padding_before_the_tokens_stays():
    inputs = {"input_ids": torch.ones(2, 4).long(), "attention_mask": torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])}
    assert [portion["input_ids"].shape[1] for portion in portions(inputs, False, size=1)] == [4, 4]


def test_labels_of_tokens_are_trimmed_with_them():
    labels = torch.arange(27).view(3, 9)
    short, *_ = portions({**batch(), "labels": labels}, False, size=1)
    assert short["labels"].tolist() == [labels[1, :5].tolist()]


def test_labels_of_many_classes_are_not_those_of_tokens():
    """Also where there are as many classes as tokens."""
    shapes = {tuple(portion["labels"].shape) for portion in portions({**batch(), "labels": torch.rand(3, 9)}, False, 1)}
    assert shapes == {(1, 9)}


@pytest.mark.parametrize("width", (4, 9))  # also one that the source happens to have
def test_labels_of_a_decoder_have_a_length_of_their_own(width):
    labels = torch.full((3, width), -100)
    labels[0, :2], labels[1, :4], labels[2, :1] = 5, 6, 7
    trimmed = {
        tuple(row)
        for portion in portions({**batch(), "labels": labels}, True, size=1)
        for row in portion["labels"].tolist()
    }
    assert trimmed == {(5, 5), (6, 6, 6, 6), (7,)}


def test_decoder_inputs_are_trimmed_by_their_mask():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 0]])
    inputs = {**batch(), "decoder_input_ids": torch.ones(3, 3).long(), "decoder_attention_mask": mask}
    widths = [tuple(p["decoder_input_ids"].shape) for p in portions(inputs, True, size=1)]
    assert sorted(widths) == [(1, 1), (1, 2), (1, 2)]


@pytest.mark.parametrize(
    "inputs",
    (
        {**batch(), "position_ids": torch.arange(9)[None]},  # one row for all examples
        {**batch(), "encoder_outputs": (torch.zeros(3, 4, 8),)},
        {"input_ids": torch.zeros(0, 4).long()},
        {},
        {"scale": torch.tensor(1.0)},
    ),
)
def test_what_cannot_be_cut_stays_whole(inputs):
    (portion,) = portions(inputs, False, size=1)
    assert portion is inputs


def test_a_mask_of_another_shape_trims_nothing():
    inputs = {"input_ids": torch.ones(2, 4).long(), "attention_mask": torch.zeros(2, 6).long()}
    assert [portion["input_ids"].shape for portion in portions(inputs, False, size=1)] == [(1, 4)] * 2


@pytest.mark.parametrize("name", FAMILIES)
def test_models_compute_the_same_for_what_counts(name):
    """Every example of every portion, against the whole batch."""
    family = FAMILIES[name]
    model = family.build().double()
    inputs = cast(family.inputs(), torch.float64)
    numbered = {**inputs, "number": torch.arange(len(next(iter(inputs.values()))))}
    whole = output(model, inputs)
    for portion in portions(numbered, model.config.is_encoder_decoder, size=1):
        number = int(portion.pop("number"))
        alone = output(model, portion)
        expected = whole[number : number + 1]
        if alone.ndim == 3:  # per token
            expected = expected[:, : alone.shape[1]]
            used = None if model.config.is_encoder_decoder else output_mask(model, portion)
            if used is not None:
                alone, expected = alone[used], expected[used]
        if "input_ids" in inputs and "pixel_values" in inputs:  # how near a text is to every image
            expected = expected[:, number : number + 1]
        torch.testing.assert_close(alone, expected, rtol=0, atol=EXACT64)
