"""What a decoder has read: the reference, its own words in beams of unequal length, or those of another sentence."""

import pytest
import torch
from heads_by_hand import LENGTHS, STEPS, model_in, single
from model_configs import marian_config
from model_sizes import EXACT64
from relevance_by_hand import labelled
from transformers import BartModel
from unchanged import assert_unchanged, refused, snapshot

from collab_heads import get_adapter
from collab_heads.analysis import token_contributions
from collab_heads.analysis.relevance.prefixes import with_prefixes
from collab_heads.analysis.relevance.sides import sides_of
from collab_heads.errors import ArgumentError, CalibrationError, UnsupportedModelError
from families import FAMILIES

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
CONTINUATIONS = [[20, 21], [22, 23, 24, 25], [26, 27, 28]]


def prompts(side: str = "right") -> dict[str, torch.Tensor]:
    rows = [(*one, *two) for one, two in zip(PROMPTS, CONTINUATIONS, strict=True)]
    longest = max(map(len, rows))
    pad = [(longest - len(row)) * (side == "left") for row in rows]
    inputs = {name: torch.full((3, longest), filler) for name, filler in BLANK.items()}
    for index, row in enumerate(rows):
        where = slice(pad[index], pad[index] + len(row))
        inputs["input_ids"][index, where] = torch.tensor(row)
        inputs["attention_mask"][index, where] = 1
        inputs["labels"][index, pad[index] + len(PROMPTS[index]) : pad[index] + len(row)] = torch.tensor(
            CONTINUATIONS[index]
        )
    return inputs


BLANK = {"input_ids": 1, "attention_mask": 0, "labels": -100}


def changed(model, batches, kind, **options) -> list[dict]:
    return list(with_prefixes(model, sides_of(model, get_adapter(model)), batches, kind, **options))


def halves(inputs) -> list[dict]:
    return [{name: each[part] for name, each in inputs.items()} for part in (slice(0, 2), slice(2, 3))]


@pytest.mark.parametrize("beams", (pytest.param(1, marks=pytest.mark.slow), 3))
def test_its_own_prefixes_are_what_a_translator_generates(beams):
    """Rows of a batch end one after the other; what follows the end is not a prefix."""
    model, inputs = model_in("marian"), labelled("marian")
    source = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    most = {"max_length": 1 + 2 * 9 + 8, "num_beams": beams, "do_sample": False}

    def said(row: int) -> list[int]:
        return model.generate(**{name: each[row : row + 1] for name, each in source.items()}, **most)[0].tolist()

    for end in dict.fromkeys(said(0)[2:]):  # a token that lets sentences end at different places
        model.generation_config.eos_token_id = end
        every = [said(row) for row in range(3)]
        prefixes = [ids[: ids.index(end)] if end in ids else ids for ids in every]
        if len(set(map(len, prefixes))) > 1:
            break
    found = token_contributions(model, [source], prefixes="own", num_beams=beams, keep_relevance=True, exclude=[end])
    assert [sentence.relevance.target_ids for sentence in found.sentences] == list(map(tuple, prefixes))
    assert len(set(map(len, prefixes))) > 1 and found.prefixes == "own"
    for row, prefix in enumerate(prefixes):
        alone = {**single(inputs, row, LENGTHS[row], STEPS[row]), "decoder_input_ids": torch.tensor([prefix])}
        del alone["labels"]
        wanted = token_contributions(model, [alone], exclude=[end])
        torch.testing.assert_close(found.sentences[row].source, wanted.sentences[0].source, rtol=0, atol=EXACT64)


def test_batches_need_no_labels_for_a_translators_own_prefixes_and_ignore_them():
    model, inputs = model_in("marian"), labelled("marian")
    source = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    before = snapshot(model)
    assert token_contributions(model, [source], prefixes="own") == token_contributions(model, [inputs], prefixes="own")
    assert_unchanged(model, before)


@pytest.mark.parametrize("side", ("right", "left"))
def test_its_own_continuations_are_what_a_decoder_generates(side):
    model = model_in("qwen3")
    (found,) = changed(model, [prompts(side)], "own")
    for row, (prompt, more) in enumerate(zip(PROMPTS, CONTINUATIONS, strict=True)):
        said = model.generate(torch.tensor([prompt]), max_new_tokens=len(more), do_sample=False)[0].tolist()
        used = found["attention_mask"][row].bool()
        assert found["input_ids"][row][used].tolist() == said
        assert found["labels"][row][used].tolist() == [-100] * len(prompt) + said[len(prompt) :]
        assert bool((found["labels"][row][~used] == -100).all())


def test_a_continuation_of_its_own_ends_with_the_end():
    model = model_in("qwen3")
    said = model.generate(torch.tensor([PROMPTS[1]]), max_new_tokens=4, do_sample=False)[0].tolist()
    model.generation_config.eos_token_id = [said[3]]
    (found,) = changed(model, [halves(prompts())[0]], "own")
    expected = said[2 : said.index(said[3], 2) + 1]
    assert found["labels"][1][found["labels"][1] != -100].tolist() == expected and len(expected) < 4


def test_random_prefixes_are_those_of_other_sentences():
    model, inputs = FAMILIES["marian"].build(), labelled("marian")
    for seed in range(5):
        (found,) = changed(model, [inputs], "random", seed=seed)
        rows = [[row for row in range(3) if torch.equal(inputs["labels"][row], each)] for each in found["labels"]]
        order = [row for (row,) in rows]
        assert sorted(order) == [0, 1, 2] and all(row != place for place, row in enumerate(order))
        assert all(torch.equal(found[name], inputs[name]) for name in ("input_ids", "attention_mask"))
    given = {**inputs, "decoder_input_ids": torch.arange(18).reshape(3, 6), "decoder_attention_mask": torch.eye(3, 6)}
    (found,) = changed(model, [given], "random", seed=1)
    order = [row.tolist()[0] // 6 for row in found["decoder_input_ids"]]
    assert torch.equal(found["decoder_attention_mask"], torch.eye(3, 6)[order])
    assert torch.equal(found["labels"], inputs["labels"][order])


def test_random_prefixes_are_the_same_for_all_models():
    inputs = labelled("marian")
    one, two = (changed(FAMILIES[name].build(), [inputs, inputs], "random") for name in ("marian", "t5"))
    assert [batch["labels"].tolist() for batch in one] == [batch["labels"].tolist() for batch in two]


def test_a_last_batch_of_one_borrows_from_the_batch_before():
    model, inputs = FAMILIES["marian"].build(), labelled("marian")
    _, last = changed(model, halves(inputs), "random")
    assert any(torch.equal(last["labels"][0], row) for row in inputs["labels"][:2])
    with pytest.raises(ArgumentError, match="those of other sentences: give batches of two or more"):
        changed(model, halves(inputs)[1:], "random")


def test_random_continuations_are_those_of_other_prompts():
    model = FAMILIES["qwen3"].build()
    for batches in ([prompts()], halves(prompts())):
        said = []
        for batch in changed(model, batches, "random", seed=3):
            for row in range(len(batch["labels"])):
                used = batch["attention_mask"][row].bool()
                own = PROMPTS[len(said)]
                assert batch["input_ids"][row][used].tolist()[: len(own)] == own
                said.append(batch["labels"][row][batch["labels"][row] != -100].tolist())
                assert batch["input_ids"][row][used].tolist() == own + said[-1]
        assert all(mine != given and mine in CONTINUATIONS for mine, given in zip(said, CONTINUATIONS, strict=True))


def test_what_is_refused():
    model, inputs = FAMILIES["marian"].build(), labelled("marian")
    for options, words in (
        ({"prefixes": "ownn"}, "unknown prefixes 'ownn' (did you mean 'own'?)"),
        ({"prefixes": "own", "num_beams": 0}, "num_beams 0 must be a whole number, 1 or more"),
        ({"prefixes": "random", "seed": -1}, "seed must be a whole number"),
    ):
        with refused(model, ArgumentError, words):
            token_contributions(model, [inputs], **options)
    with refused(model, CalibrationError, "cannot generate from batch 1"):
        token_contributions(model, [inputs, {"attention_mask": inputs["attention_mask"]}], prefixes="own")
    bare = BartModel(marian_config())
    with refused(bare, UnsupportedModelError, "BartModel generates nothing, so it has no prefixes of its own"):
        token_contributions(bare, [inputs], prefixes="own")
    decoder = FAMILIES["qwen3"].build()
    for kind in ("own", "random"):
        with refused(decoder, CalibrationError, "needs labels that say where a prompt ends"):
            token_contributions(decoder, [{"input_ids": inputs["input_ids"]}], prefixes=kind)
        with refused(decoder, CalibrationError, "no prompt, or no continuation"):
            token_contributions(decoder, [{**prompts(), "labels": prompts()["input_ids"]}], prefixes=kind)
