"""Relevance of heads: what it is, by other computations; that batches and lossless changes do not matter; refusals."""

import json
import weakref

import pytest
import torch
from changed_heads import NARROW, adapter_sites, emptied, gate, output_projections
from heads_by_hand import EOS, LENGTHS, STEPS, ended, model_in, outputs_by_hand, single
from model_configs import t5_config
from model_inputs import batch, cast
from model_runs import swap
from model_sizes import EXACT64, HEAD_WIDTH, HEADS, KINDS, WIDTH
from relevance_by_hand import FP32_NORMS, LOSSLESS, assert_alike, labelled, relevance
from torch import nn
from transformers import (
    T5EncoderModel,
)
from unchanged import assert_unchanged, refused, snapshot

import collab_heads
from collab_heads.analysis import head_relevance
from collab_heads.errors import ArgumentError, CalibrationError, NonFiniteError, UnsupportedModelError
from families import FAMILIES, make

FAR = 1e-3


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_gives_shares_in_every_layer(name):
    model = model_in(name, dtype=torch.float32)
    found = head_relevance(model, [FAMILIES[name].inputs()], exclude=[])
    assert found.relevance.keys() == {site.path for site in adapter_sites(model)} == found.signed.keys()
    for path, shares in found.relevance.items():
        assert shares.shape == found.signed[path].shape == (HEADS,) and shares.dtype == torch.float64
        assert (shares > 0).all() and float(shares.sum()) == pytest.approx(1.0)
        assert found.signed[path].isfinite().all()
    assert found.sentences == 3


def test_by_hand_on_one_layer():
    """The encoder of T5 without its feed-forward: norm(x + sum of W_h Z_h), seen with the norm's scale constant."""
    config = t5_config()
    config.num_layers = 1
    model = make(T5EncoderModel, config).double()
    block, norm = model.encoder.block[0], model.encoder.final_layer_norm
    block.layer[1].DenseReluDense.wo.weight.data.zero_()
    inputs, seen = batch(), []
    direction = torch.randn(WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    with norm.register_forward_pre_hook(lambda module, args: seen.append(args[0])):
        (heads,) = outputs_by_hand(model, inputs).values()
    scale = torch.rsqrt(seen[0].float().pow(2).mean(-1) + norm.variance_epsilon)
    weights = block.layer[0].SelfAttention.o.weight.detach().unflatten(1, (HEADS, HEAD_WIDTH))
    count = inputs["attention_mask"].bool()
    expected = torch.zeros(3, HEADS, dtype=torch.float64)
    for row, token in count.nonzero().tolist():
        for head in range(HEADS):
            added = weights[:, head] @ heads[0][row, token, head]
            expected[row, head] += scale[row, token] * (direction * norm.weight.detach()) @ added

    def target(outputs, inputs):
        return (outputs.last_hidden_state @ direction) * inputs["attention_mask"]

    found = head_relevance(model, [inputs], target=target)
    (path,) = found.signed
    torch.testing.assert_close(found.signed[path], expected.mean(0), rtol=0, atol=EXACT64)
    shares = expected.abs() / expected.abs().sum(1, keepdim=True)
    torch.testing.assert_close(found.relevance[path], shares.mean(0), rtol=0, atol=EXACT64)
    assert float(shares.std(0).max()) > 0.05  # a mean over sentences, not of their sum
    assert found.positions == 3 * 9 and found.sentences == 3


@pytest.mark.parametrize("name", ("bert", "marian", "t5", "albert", "marian-decoder", "gpt2-decoder", "vit"))
def test_sentences_count_alike_in_whatever_batch(name):
    """One padded batch, two of unequal size, and where there is padding every sentence by itself without it."""
    model, inputs = model_in(name), labelled(name)
    whole = relevance(model, [inputs])
    parts = [{key: value[part] for key, value in inputs.items()} for part in (slice(0, 2), slice(2, 3))]
    tolerance = FP32_NORMS if name == "t5" else LOSSLESS
    assert_alike(relevance(model, parts), whole, tolerance)
    if name in ("bert", "albert", "marian", "t5"):
        singles = [single(inputs, row, LENGTHS[row], STEPS[row]) for row in range(3)]
        assert_alike(relevance(model, singles), whole, tolerance)
        alone = relevance(model, singles[:1])
        assert max(float((alone.relevance[path] - v).abs().max()) for path, v in whole.relevance.items()) > FAR
    if "labels" in inputs:
        assert whole.positions == sum(STEPS)


def test_sentences_without_a_position_do_not_count():
    model, inputs = model_in("marian"), labelled("marian")
    expected = relevance(model, [{key: value[:2] for key, value in inputs.items()}])
    inputs["labels"][2] = -100
    assert_alike(relevance(model, [inputs]), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ("bert", "marian", "t5", "gpt2"))
def test_lossless_changes_do_not_matter(name, kind):
    model, inputs = model_in(name), labelled(name)
    expected = relevance(model, [inputs])
    swap(model, kind)
    assert_alike(relevance(model, [inputs]), expected, FP32_NORMS if name == "t5" else LOSSLESS)
    swapped = model_in(name)
    swap(swapped, kind, NARROW[kind])
    path = next(iter(expected.signed))
    assert float((relevance(swapped, [inputs]).signed[path] - expected.signed[path]).abs().max()) > FAR


@pytest.mark.parametrize("name", ("bert", "marian", "albert", "t5"))
def test_useless_heads_get_zero(name):
    model, inputs, useless = model_in(name), labelled(name), {}
    for index, (path, projection) in enumerate(output_projections(model).items()):
        useless[path] = index % HEADS
        columns = slice(useless[path] * HEAD_WIDTH, (useless[path] + 1) * HEAD_WIDTH)
        projection.weight.data[:, columns] = 0.0
    for path, values in relevance(model, [inputs]).relevance.items():
        assert (values == 0).nonzero().flatten().tolist() == [useless[path]]


def test_gated_and_pruned_models():
    """A closed head has no say; the others have what they have in the pruned model, without sites without heads."""
    model, inputs = model_in("marian"), labelled("marian")
    gate(model)
    empty, gated = emptied(model), relevance(model, [inputs])
    collab_heads.prune_heads(model)
    pruned = relevance(model, [inputs])
    assert pruned.signed.keys() == gated.signed.keys() - empty and empty
    assert not any(gated.relevance[path].any() for path in empty)
    for path, values in pruned.relevance.items():
        torch.testing.assert_close(values, gated.relevance[path][gated.relevance[path] != 0], rtol=0, atol=LOSSLESS)
    assert sum(map(len, pruned.relevance.values())) < 24 - HEADS * len(empty)


@pytest.mark.parametrize("name", ("bert", "marian", "albert-groups", "t5"))
def test_the_model_is_left_as_it_was(name):
    """Modes, hooks, gradients, parameters: of a model in training with checkpoints, half frozen, a gradient at hand."""
    model, inputs = model_in(name, dtype=torch.float32).train(), labelled(name)
    expected = head_relevance(model_in(name, dtype=torch.float32), [inputs])
    if model.supports_gradient_checkpointing:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    model.base_model.eval()
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 2 == 0)
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    before, state = snapshot(model), torch.get_rng_state()
    with torch.no_grad():
        found = head_relevance(model, [inputs])
        assert not torch.is_grad_enabled()
    assert found == expected  # without dropout
    assert_unchanged(model, before)
    assert torch.equal(first.grad, torch.ones_like(first)) and torch.equal(torch.get_rng_state(), state)


def test_only_one_batch_is_held():
    model, inputs, alive = model_in("bert"), labelled("bert"), []

    def batches():
        for _ in range(3):
            assert not any(each() is not None for each in alive)
            yield dict(inputs)

    handle = model.classifier.register_forward_hook(lambda module, args, out: alive.append(weakref.ref(out)))
    assert head_relevance(model, batches()).sentences == 9 and len(alive) == 3
    handle.remove()


def test_bad_batches_are_refused():
    model, (inputs, _) = model_in("bert"), ended("bert")
    for batches, *fragments in (
        ([], "empty"),
        (inputs, "expected an iterable"),
        ([inputs, ["text"]], "batch 1", "list"),
        ([inputs, {"pixels": torch.zeros(1)}], "BertForSequenceClassification", "batch 1", "pixels"),
    ):
        with refused(model, CalibrationError, *fragments):
            head_relevance(model, batches)
    model = model_in("bert-decoder")
    inputs = cast(FAMILIES["bert-decoder"].inputs(), torch.float64)
    with refused(model, CalibrationError, "no position counted", "[2]"):
        relevance(model, [{**inputs, "attention_mask": torch.zeros(3, 9).long()}])
    alone = {key: value for key, value in inputs.items() if "encoder" not in key}
    with refused(model, CalibrationError, "crossattention.self was not reached"):
        relevance(model, [alone])
    with refused(model, CalibrationError, "(3, 9)", "(3, 4)"):
        head_relevance(model, [{**inputs, "logits_to_keep": 4}])


def test_bad_arguments_are_refused():
    model, (inputs, _) = model_in("bert"), ended("bert")
    with refused(model, ArgumentError, "[SEP]", "token ids"):
        head_relevance(model, [inputs], exclude="[SEP]")
    with pytest.raises(UnsupportedModelError, match="DataParallel"):
        head_relevance(nn.DataParallel(model), [inputs])


def test_weights_that_are_nan_are_named():
    model, (inputs, _) = model_in("bert"), ended("bert")
    path = adapter_sites(model)[1].path
    model.base_model.get_submodule(path).value.weight.data[0, 0] = float("nan")
    with refused(model, NonFiniteError, f"{path}: the relevance", "NaN or inf"):
        head_relevance(model, [inputs])


def test_a_model_without_heads_has_nothing_to_measure():
    model, (inputs, _) = model_in("bert"), ended("bert")
    collab_heads.prune_heads(model, heads={"enc-self": [list(range(HEADS))] * 2})
    found = head_relevance(model, [inputs])
    assert found.sites == () and found.signed == {} and found.sentences == 3 and str(found)


def test_the_table_and_the_numbers():
    model, (inputs, _) = model_in("bert"), ended("bert")
    found = relevance(model, [inputs])
    lines, path = str(found).split("\n"), found.sites[0].path
    shares = found.relevance[path]
    order = shares.argsort(descending=True).tolist()
    assert f"  {', '.join(f'{head} ({shares[head]:.2f})' for head in order[:3])}  {shares.min():.3f}  " in lines[2]
    assert f"{float(found.signed[path].sum()):.3f}" in lines[2] and "3 sentences, 3 positions" in lines[-1]
    numbers = json.loads(json.dumps(found.to_dict()))
    assert numbers["relevance"][path] == shares.tolist() and numbers["signed"][path] == found.signed[path].tolist()
    assert numbers["excluded"] == [EOS] and numbers["sites"][1]["path"] == found.sites[1].path
    assert relevance(model, [inputs]) == found and relevance(model, [inputs], exclude=[]) != found
