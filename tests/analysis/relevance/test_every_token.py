"""The relevance of every token to every generated one: by another computation, conserved, whose token is whose."""

import math

import pytest
import torch
from heads_by_hand import CHANGES, EOS, LENGTHS, STEPS, ended, model_in, single
from model_inputs import cast
from model_sizes import EXACT64, LAYERS
from relevance_by_hand import FP32_NORMS, labelled, without_biases

from collab_heads import prune_heads
from collab_heads.analysis import token_contributions
from collab_heads.analysis.relevance.backward import conservative, explaining
from families import FAMILIES

TRANSLATORS = tuple(name for name, family in FAMILIES.items() if family.generates and "dec-enc" in family.roles)
DECODERS = tuple(n for n, family in FAMILIES.items() if family.roles.keys() == {"dec-self"} and family.generates)
OTHERS = tuple(change for change in CHANGES if change != "pruned shared")
CONSERVED = 1e-8  # relative, in float64: a model has some ten thousand products; seen: 1e-13


def whole(model, inputs, **options):
    inputs = cast(inputs, model.dtype)
    return token_contributions(model, [inputs], exclude=[EOS], keep_relevance=True, **options)


def prompts() -> dict:
    """A prompt of four tokens and its continuation of five, and one of two and three."""
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(3))
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[0, :4] = labels[1, :2] = labels[1, 5:] = -100
    mask[1, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def by_hand(model, inputs, row: int) -> tuple[list[list[float]], list[list[float]]]:
    """T5, sentence by sentence and position by position, from embeddings of its own: [P][S], [P][T]."""
    ids, targets = inputs["input_ids"][row, : LENGTHS[row]], inputs["decoder_input_ids"][row, : STEPS[row]]
    found = [], []
    for step in range(STEPS[row]):
        with explaining(model):
            states = [model.shared(each)[None].detach().requires_grad_() for each in (ids, targets[: step + 1])]
            with conservative(model):
                logits = model(inputs_embeds=states[0], decoder_inputs_embeds=states[1]).logits
            slopes = torch.autograd.grad(logits[0, -1].max(), states)
        for side, state, slope in zip(found, states, slopes, strict=True):
            products = [float(token @ each) for token, each in zip(state[0].detach(), slope[0], strict=True)]
            side.append(products + [0.0] * (STEPS[row] - len(products)) * (side is found[1]))
    return found


def entropy(sizes: list[float]) -> float:
    shares = [abs(size) / sum(map(abs, sizes)) for size in sizes]
    return -sum(share * math.log(share) for share in shares if share)


def test_relevance_entropy_and_influence_are_what_they_are_by_hand():
    model, (inputs, _) = model_in("t5"), ended("t5")
    found = whole(model, inputs)
    for row, sentence in enumerate(found.sentences):
        source, target = by_hand(model, inputs, row)
        expected = torch.tensor(source, dtype=torch.float64), torch.tensor(target, dtype=torch.float64)
        torch.testing.assert_close(sentence.relevance.source, expected[0], rtol=FP32_NORMS, atol=FP32_NORMS)
        torch.testing.assert_close(sentence.relevance.target, expected[1], rtol=FP32_NORMS, atol=FP32_NORMS)
        assert sentence.source_entropy.tolist() == pytest.approx(list(map(entropy, source)), abs=FP32_NORMS)
        assert sentence.target_entropy.tolist() == pytest.approx(list(map(entropy, target)), abs=FP32_NORMS)
        shares = [[abs(size) / sum(map(abs, sizes)) for size in sizes] for sizes in source]
        influence = [LENGTHS[row] * sum(column) / STEPS[row] for column in zip(*shares, strict=True)]
        assert sentence.influence.tolist() == pytest.approx(influence, abs=FP32_NORMS)
    assert float(found.sentences[0].source_entropy.min()) > 0.1 and float(found.sentences[0].influence.std()) > 0.1


@pytest.mark.parametrize("change", ("pruned shared", *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)))
def test_shares_sum_to_one_and_influence_to_the_tokens(change):
    model, inputs = model_in("marian", change), labelled("marian")
    found = whole(model, inputs)
    for row, sentence in enumerate(found.sentences):
        source, target = sentence.relevance.contributions()
        assert source.shape == (STEPS[row], LENGTHS[row]) and target.shape == (STEPS[row], STEPS[row])
        ones = torch.ones(STEPS[row], dtype=torch.float64)
        torch.testing.assert_close(source.sum(1) + target.sum(1), ones, rtol=0, atol=EXACT64)
        torch.testing.assert_close(source.sum(1), sentence.source, rtol=0, atol=EXACT64)
        assert torch.equal(target, target.tril()) and bool((target.diagonal() > 0).all())  # nothing from later ones
        assert float(sentence.influence.sum()) == pytest.approx(LENGTHS[row], abs=EXACT64)
        assert bool((sentence.source_entropy <= math.log(LENGTHS[row])).all())
        assert float(sentence.target_entropy[0]) == 0  # there is nothing but the start token yet


@pytest.mark.parametrize("name", ("marian", "t5", "qwen3"))
def test_on_a_model_without_biases_relevance_adds_up_to_the_logit(name):
    model = without_biases(FAMILIES[name].build())
    inputs = prompts() if name == "qwen3" else cast(labelled(name), torch.float64)
    found = whole(model, inputs)
    with torch.no_grad():
        logits = model.eval()(**inputs).logits
    for row, sentence in enumerate(found.sentences):
        relevance = sentence.relevance
        first = (4, 2)[row] - 1 if name == "qwen3" else 0
        largest = logits[row, first : first + len(relevance.source)].max(-1)
        total = relevance.source.sum(1) + relevance.target.sum(1)
        limit = FP32_NORMS if name != "marian" else CONSERVED
        torch.testing.assert_close(total, largest.values.double(), rtol=limit, atol=limit)
        assert relevance.said == tuple(largest.indices.tolist())


@pytest.mark.parametrize("name", (*TRANSLATORS, *DECODERS))
def test_going_through_the_vocabulary_once_changes_nothing(name, monkeypatch):
    model = model_in(name)
    inputs = prompts() if name in DECODERS else FAMILIES[name].inputs()
    quick = whole(model, inputs)
    monkeypatch.setattr(type(model), "get_output_embeddings", lambda self: None)
    slow = whole(model, inputs)
    for one, two in zip(quick.sentences, slow.sentences, strict=True):
        torch.testing.assert_close(one.relevance.source, two.relevance.source, rtol=0, atol=FP32_NORMS)
        torch.testing.assert_close(one.relevance.target, two.relevance.target, rtol=0, atol=FP32_NORMS)
        assert float(two.relevance.source.abs().max()) > 1e-3


def test_sentences_keep_their_order_and_their_tokens():
    model, inputs = model_in("marian"), labelled("marian")
    found = whole(model, inputs)
    start = model.config.decoder_start_token_id
    for row, sentence in enumerate(found.sentences):
        alone = whole(model, single(inputs, row, LENGTHS[row], STEPS[row])).sentences[0]
        torch.testing.assert_close(sentence.relevance.source, alone.relevance.source, rtol=0, atol=EXACT64)
        assert sentence.relevance.source_ids == tuple(inputs["input_ids"][row, : LENGTHS[row]].tolist())
        assert sentence.relevance.target_ids == (start, *inputs["labels"][row, : STEPS[row] - 1].tolist())
        assert sentence.relevance.words()[0] == tuple(map(str, sentence.relevance.source_ids))


def test_sentences_of_one_token():
    model = model_in("marian")
    inputs = {"input_ids": torch.tensor([[5], [9]]), "labels": torch.tensor([[7, 8], [EOS, -100]])}
    found = whole(model, inputs)
    assert found.counts.tolist() == [2, 1] and [len(each.influence) for each in found.sentences] == [1, 1]
    for sentence in found.sentences:
        assert float(sentence.source_entropy.abs().max()) == 0 and sentence.influence.tolist() == [1.0]
        assert bool((sentence.source > 0).all()) and bool((sentence.source < 1).all())
    assert math.isnan(float(found.curve().error[1])) and found.to_dict()["by_position"]["source"]["error"][1] is None


def test_without_any_heads_a_token_comes_from_the_one_before_alone():
    model, inputs = model_in("marian"), labelled("marian")
    prune_heads(model, heads={role: [[0, 1, 2, 3]] * LAYERS for role in ("enc-self", "dec-self", "dec-enc")})
    found = whole(model, inputs)
    for sentence in found.sentences:
        assert not sentence.source.any() and not sentence.influence.any() and not sentence.relevance.source.any()
        for entropies in (sentence.source_entropy, sentence.target_entropy):
            assert not entropies.any()
        assert torch.equal(sentence.relevance.contributions()[1], torch.eye(len(sentence.source)).double())


def test_a_continuation_sees_its_prompt_and_itself():
    model, inputs = model_in("qwen3"), prompts()
    found = whole(model, inputs)
    first, second = (sentence.relevance for sentence in found.sentences)
    assert (first.source.shape, first.target.shape) == ((5, 4), (5, 4))
    assert (second.source.shape, second.target.shape) == ((3, 2), (3, 2))
    assert not first.target[0].any() and not first.target.triu().any() and bool(first.target[-1].all())
    assert second.source_ids == tuple(inputs["input_ids"][1, :2].tolist())
    assert second.target_ids == tuple(inputs["input_ids"][1, 2:4].tolist())
