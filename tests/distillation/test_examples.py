"""Which batches are trained on, which are held out, and in which order; what a decoder reads."""

import pytest
import torch
from distilling import changed_pair, random_batches
from model_sizes import FP32_NOISE
from torch.testing import assert_close

from collab_heads import distill
from collab_heads.distillation.examples import in_order, list_batches, num_examples, split
from collab_heads.running.translations import LENGTH, MORE, with_translations
from families import FAMILIES


def numbers(part):
    return [number for number, _ in part]


def test_every_eighth_batch_is_held_out():
    train, held_out = split(random_batches(17), 300)
    assert numbers(held_out) == [7, 15]
    assert numbers(train) == [number for number in range(17) if number not in (7, 15)]


def test_of_many_batches_no_more_than_a_few_are_held_out():
    for steps, count in ((1000, 16), (300, 9), (100, 4), (1, 4)):
        train, held_out = split(random_batches(1) * 800, steps)
        assert len(held_out) == count and len(train) == 800 - count


@pytest.mark.parametrize("steps", (1, 7, 8, 15, 20, 63, 150, 300))
def test_there_are_examples_for_every_step(steps):
    batches = [{"number": torch.tensor([i])} for i in range(num_examples(steps, 4) // 4)]
    train, held_out = split(batches, steps)
    assert len(train) >= steps and held_out


def test_of_few_batches_some_rows_are_held_out():
    batches = random_batches(2, rows=16)
    train, held_out = split(batches, 300)
    assert numbers(train) == numbers(held_out) == [0, 1]
    for number, batch in enumerate(batches):
        for name, tensor in batch.items():
            assert torch.equal(torch.cat([train[number][1][name], held_out[number][1][name]]), tensor)
            assert len(held_out[number][1][name]) == 2


def single(count):
    return [{name: tensor[:1] for name, tensor in batch.items()} for batch in random_batches(count)]


@pytest.mark.parametrize("count, trained, held", ((1, [0], [0]), (3, [0, 1], [2])))
def test_single_rows(count, trained, held):
    train, held_out = split(single(count), 300)
    assert (numbers(train), numbers(held_out)) == (trained, held)


def test_a_batch_that_cannot_be_divided_stays_whole():
    whole = random_batches(1)[0] | {"position_ids": torch.arange(9)[None]}
    train, held_out = split([whole, *random_batches(1)], 300)
    assert numbers(train) == [0, 1] and numbers(held_out) == [1] and len(train[0][1]["input_ids"]) == 4


def test_every_epoch_has_all_batches_in_an_order_of_its_own():
    places = in_order(7, 3, 14)
    assert sorted(places[:7]) == sorted(places[7:]) == list(range(7))
    assert places[:7] != places[7:] and places != in_order(7, 4, 14) and places[:9] == in_order(7, 3, 9)


def test_labels_are_kept_for_decoders_only():
    labels = torch.tensor([[4, 5, -100]] * 4)
    (batch,) = random_batches(1)
    assert "labels" not in list_batches(FAMILIES["bert"].build(), [batch | {"labels": labels}])[0]
    marian = FAMILIES["marian"].build()
    assert torch.equal(list_batches(marian, [batch | {"labels": labels}])[0]["labels"], labels)
    given = batch | {"decoder_input_ids": labels.abs(), "labels": labels}
    assert "labels" not in list_batches(marian, [given])[0]
    assert "labels" not in list_batches(marian, [batch | {"labels": torch.tensor([0, 1, 1, 0])}])[0]


@pytest.mark.parametrize("family", ("marian", "t5"))
def test_the_original_translates_what_has_no_targets(family):
    """What the decoder reads is what greedy search wrote, up to its end."""
    original, batches, ends = FAMILIES[family].build(), random_batches(3), 0
    (written,) = original.generate(batches[0]["input_ids"][:1], num_beams=1, do_sample=False, max_new_tokens=6)
    end = original.generation_config.eos_token_id = int(written[3])
    original.generation_config.forced_eos_token_id = None
    part = list(enumerate(batches))
    found = with_translations(original.train(), part)
    assert original.training
    original.eval()
    for (_, batch), (_, more) in zip(part, found, strict=True):
        longest = LENGTH * 9 + MORE
        for row, length in enumerate(batch["attention_mask"].sum(1)):
            alone = {name: tensor[row : row + 1, :length] for name, tensor in batch.items()}
            (tokens,) = original.generate(**alone, num_beams=1, do_sample=False, max_new_tokens=longest)
            expected = tokens.tolist()
            if end in expected[1:]:
                expected, ends = expected[: expected.index(end, 1)], ends + 1
            used = more["decoder_attention_mask"][row].bool()
            assert more["decoder_input_ids"][row][used].tolist() == expected
    assert ends


@pytest.mark.slow
def test_translation_models_learn_with_targets_and_without():
    (given,) = [FAMILIES["marian"].inputs()]
    source = {name: tensor for name, tensor in given.items() if name != "decoder_input_ids"}
    labels = source | {"labels": torch.tensor([[5, 6, 2], [7, 2, -100], [9, 8, 2]])}
    reports = []
    for batch in (source, labels, given):
        model, original = changed_pair("marian")
        reports.append(distill(model, original, [batch], steps=10))
        assert reports[-1].after.total(1.0) < reports[-1].before.total(1.0)
    assert len({report.before for report in reports}) == 3


@pytest.mark.slow
def test_labels_are_what_the_decoder_reads():
    labels = torch.tensor([[5, 6, 2], [7, 2, -100], [9, 8, 2]])
    model, original = changed_pair("marian")
    source = {n: t for n, t in FAMILIES["marian"].inputs().items() if n != "decoder_input_ids"}
    ids = original.prepare_decoder_input_ids_from_labels(labels)
    reports = []
    for batch in (source | {"labels": labels}, source | {"decoder_input_ids": ids}):
        model, original = changed_pair("marian")
        reports.append(distill(model, original, [batch], steps=3))
    assert_close(reports[0].after.hidden, reports[1].after.hidden, rtol=FP32_NOISE, atol=0)
    assert_close(reports[0].after.output, reports[1].after.output, rtol=FP32_NOISE, atol=0)


@pytest.mark.slow
def test_only_what_will_be_read_is_translated(monkeypatch):
    """Of ten batches one is held out, and a run of three steps trains on three."""
    model, original = changed_pair("marian")
    stock, written = type(original).generate, []

    def generate(self, *args, **options):
        written.append(1)
        return stock(self, *args, **options)

    monkeypatch.setattr(type(original), "generate", generate)
    distill(model, original, random_batches(10), steps=3)
    assert len(written) == 4
