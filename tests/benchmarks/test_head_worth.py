"""What predicts the worth of a head: the truth is that of `prune_heads`, and the summaries are what they say."""

import copy
import importlib

import pytest
import torch
from model_inputs import batch
from model_sizes import HEADS
from pages import ROOT
from transformers import AutoModel

import collab_heads
from collab_heads.fitting.head_regression import regressions
from families import FAMILIES

NOISE = 1e-9  # of float64 models


@pytest.fixture
def program(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def labelled():
    inputs = batch(decoder=True)
    inputs["labels"] = inputs.pop("decoder_input_ids")
    inputs["labels"][1, 3:] = -100
    return inputs


def case_of(truths, name):
    if name == "bert":
        model, batches = AutoModel.from_config(FAMILIES["bert"].build().config), [batch()]
    else:
        model, batches = FAMILIES[name].build(), [labelled()]
    return truths.Case(model.double().eval(), batches, [batches], [], "harm", 1)


def losses(truths, case, model, truth):
    """By hand: of every sentence, summed over its labels."""
    inputs = case.tested[0]
    with torch.no_grad():
        whole, changed = case.model(**inputs), model(**inputs)
    if "labels" not in inputs:
        rows = [truths.embeddings(each, inputs) for each in (whole, changed)]
        return 1 - torch.cosine_similarity(*rows, dim=-1)
    found = []
    for logits in (whole.logits, changed.logits):
        each = [
            sum(-logits[row, place].log_softmax(-1)[label] for place, label in enumerate(labels) if label != -100)
            for row, labels in enumerate(inputs["labels"].tolist())
        ]
        found.append(torch.stack(each))
    return found[1] - found[0]


@pytest.mark.parametrize("name", ("bert", "marian", "t5"))
def test_the_truth_is_that_of_a_pruned_model(name, program):
    truths = program("head_truth")
    case = case_of(truths, name)
    truth = truths.Truth(case)
    fits = regressions(case.model, truth.sites, case.draws[0])
    before = {key: each.clone() for key, each in case.model.state_dict().items()}
    weights = torch.tensor([6.0, 3, 6]).double() if name != "bert" else torch.ones(3).double()
    assert torch.equal(truth.weights, weights)
    for removed in ({truth.sites[-1].path: [1]}, {truth.sites[0].path: [0, 2], truth.sites[-1].path: [3]}):
        for fit in (None, fits):
            pruned = copy.deepcopy(case.model)
            collab_heads.prune_heads(pruned, None if fit is None else case.draws[0], heads=removed)
            expected = losses(truths, case, pruned, truth)
            atol = 1e-5 if name != "bert" else NOISE  # losses are computed in float32
            torch.testing.assert_close(truth.harm(removed, fit), expected, rtol=0, atol=atol)
            assert float(expected.abs().max()) > 100 * atol
    assert all(torch.equal(each, before[key]) for key, each in case.model.state_dict().items())
    alone = truth.of_each_head(fits)
    assert alone.shape == (HEADS * len(truth.sites), 3)
    torch.testing.assert_close(alone[HEADS + 2], truth.harm({truth.sites[1].path: [2]}, fits), rtol=0, atol=NOISE)


@pytest.mark.parametrize("name", ("marian", "gpt2"))
def test_a_divergence_is_that_of_the_predictions(name, program):
    truths = program("head_truth")
    case = case_of(truths, "marian")
    if name == "gpt2":  # predicts the next token: the last position predicts nothing
        case.model, inputs = FAMILIES["gpt2"].build().double().eval(), batch()
        case.tested = [inputs | {"labels": inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)}]
    truth, inputs = truths.Truth(case, by_divergence=True), case.tested[0]
    assert torch.equal(truth.whole, torch.zeros(3).double())
    removed = {truth.sites[0].path: [1]}
    with torch.no_grad():
        whole = case.model(**inputs).logits.log_softmax(-1)
        with collab_heads.analysis.without_heads(case.model, removed):
            changed = case.model(**inputs).logits.log_softmax(-1)
    expected, shift = torch.zeros(3).double(), int(name == "gpt2")
    for row, labels in enumerate(inputs["labels"].tolist()):
        for place, label in enumerate(labels[shift:]):
            if label != -100:
                expected[row] += (whole[row, place].exp() * (whole[row, place] - changed[row, place])).sum()
    torch.testing.assert_close(truth.harm(removed), expected, rtol=0, atol=1e-5)
    assert float(expected.max()) > 1e-3 and torch.equal(truth.weights, (inputs["labels"][:, shift:] != -100).sum(1))


def test_a_site_without_heads_keeps_its_mean_output(program):
    truths = program("head_truth")
    case = case_of(truths, "bert")
    truth = truths.Truth(case)
    site, fits = truth.sites[0], regressions(case.model, truth.sites, case.draws[0])
    seen = []
    handle = site.output.register_forward_hook(lambda _, __, out: seen.append(out))
    truth.harm({site.path: []} | {site.path: list(range(HEADS))}, fits)
    handle.remove()
    mean = fits[site.path].weight @ fits[site.path].mean + site.output.bias
    torch.testing.assert_close(seen[-1], mean.expand_as(seen[-1]).detach(), rtol=0, atol=NOISE)


def test_halves_intervals_and_reliability(program):
    worth, truths = program("head_worth"), program("head_truth")
    truth = truths.Truth(case_of(truths, "bert"))
    scores = torch.tensor([5.0, 1, 2, 6, 7, 8, 3, 4])
    assert worth.best_half(scores) == {0, 3, 4, 5}
    first, second = (site.path for site in truth.sites)
    assert worth.worst_half(truth, scores) == {first: [1, 2], second: [2, 3]}
    assert worth.within_layers(truth, scores, torch.tensor([5.0, 1, 2, 6, -7, -8, -3, -4])) == pytest.approx(0.0)
    harms = scores.double()[:, None].expand(8, 20)
    draws = torch.stack([scores.double(), -scores.double()])
    assert worth.interval(draws[:1], harms[None], torch.ones(20)) == (1.0, 1.0)
    assert worth.interval(draws, harms[None], torch.ones(20)) == (-1.0, 1.0)
    assert worth.reliability(harms) == pytest.approx(1.0)
    noise = torch.randn(8, 20, generator=torch.Generator().manual_seed(0)).double()
    assert abs(worth.reliability(noise)) < 0.5


def test_the_table_shows_half_widths_and_shares_of_random_halves(program, monkeypatch):
    shown = program("shown.head_worth")
    assert shown.half_width({"95 %": "+0.20 to +0.50", "95 %, refitted": "-0.10 to +0.50"}, "refitted") == 0.3
    rows = {
        model: {"random": {"gone": whole}, "good": {"gone": part}}
        for model, whole, part in (("a", 1.0, 0.5), ("b", 2.0, 0.25))
    }
    monkeypatch.setattr(shown, "of_models", lambda: rows)
    assert shown.of_random("good", "") == pytest.approx(0.25)
    assert shown.overlap([3.0, 2, 1, 0], [0.0, 9, 1, 8]) == 0.5
