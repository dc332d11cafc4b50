"""prune_neurons: what it keeps, what it refuses, what it reports; families are in test_neuron_contract."""

import copy
import json
import math

import pytest
import torch
from compressing import batches_of, first_block
from later import peft
from model_inputs import cast
from model_runs import output
from opening import layers_of
from torch.nn.utils import prune
from transformers.models.bert.modeling_bert import BertIntermediate
from unchanged import refused

from collab_heads import distill, fold_heads, prune_neurons
from collab_heads.errors import ArgumentError, CalibrationError, ModelStateError, NonFiniteError, UnsupportedModelError
from collab_heads.running.batches import run_batches
from families import FAMILIES

BERT, MARIAN = FAMILIES["bert"], FAMILIES["marian"]
CONSTANT = 1e-4  # float32; differences seen: 1e-6


def neurons_of(model):
    return {block.path: block.num_neurons for block in layers_of(model).feed_forwards}


@pytest.mark.parametrize(
    "keep, expected",
    [
        (0.5, {"enc-ffn": 24, "dec-ffn": 24}),  # 18.5 of 37, in multiples of 8
        (5, {"enc-ffn": 5, "dec-ffn": 5}),
        (1.0, {"enc-ffn": 37, "dec-ffn": 37}),
        ({"enc-ffn": 0.2}, {"enc-ffn": 8, "dec-ffn": 37}),
        ({"enc-ffn": 0, "decoder.layers.0": 7}, {"enc-ffn": 0, "decoder.layers.0": 7, "dec-ffn": 37}),
    ],
)
def test_what_each_block_keeps(keep, expected):
    model = MARIAN.build()
    report = prune_neurons(model, batches_of(MARIAN), keep=keep)
    roles = {block.path: block.role for block in layers_of(model).feed_forwards}
    assert neurons_of(model) == {path: expected.get(path, expected[role]) for path, role in roles.items()}
    assert report.removed == sum(37 - count for count in neurons_of(model).values())
    assert all(0 <= block.share_lost <= 1 + 1e-9 for block in report.blocks)
    assert json.loads(json.dumps(report.to_dict()))["removed"] == report.removed
    assert f"{report.removed} neurons removed" in str(report)


def test_more_neurons_lose_less():
    losses = []
    for keep in (8, 16, 24, 32):
        report = prune_neurons(BERT.build(), batches_of(BERT, 8), keep=keep)
        losses.append(report.blocks[0].share_lost)
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]


BAD = {
    "share of none": (0.0, ArgumentError, "a float is a share of its 37 neurons and must be in (0, 1]"),
    "more than all": (38, ArgumentError, "it has 37 neurons: expected 0 to 37"),
    "negative": (-1, ArgumentError, "expected 0 to 37"),
    "nan": (math.nan, ArgumentError, "must be in (0, 1]"),
    "true": (True, ArgumentError, "expected a number of neurons, or a share"),
    "attention": ({"enc-self": 8}, ArgumentError, "enc-self is not a role that can be named here; these can: enc-ffn"),
    "other role": ({"dec-ffn": 8}, ArgumentError, "dec-ffn"),
    "path": ({"encoder.layer.00": 8}, ArgumentError, "did you mean 'encoder.layer.0'"),
    "nothing": ({}, ArgumentError, "keep is an empty dict"),
}


@pytest.mark.parametrize("keep, error, message", BAD.values(), ids=BAD)
def test_bad_numbers(keep, error, message):
    model = BERT.build()
    with refused(model, error, message):
        prune_neurons(model, batches_of(BERT), keep=keep)


def shared(model):
    layers = model.base_model.encoder.layer
    layers[1].intermediate.dense.weight = layers[0].intermediate.dense.weight


def twice(model):
    model.head = model.base_model.encoder.layer[0].output.dense


def of_their_own(model):
    layer = model.base_model.encoder.layer[0]
    layer.__class__ = type("MixtureLayer", (type(layer),), {"__module__": __name__})


class Reordering(BertIntermediate):
    """A module between the projections uses the neurons in an order of its own."""

    def forward(self, states):
        made = super().forward(states)
        return torch.cat([made[..., ::2], made[..., 1::2]], -1)


def reordered(model):
    model.base_model.encoder.layer[0].intermediate.__class__ = Reordering


def half_shared(model):
    layers = model.base_model.encoder.layer
    layers[1].intermediate = layers[0].intermediate


def hooked_around(model):
    output = model.base_model.encoder.layer[0].output
    output.forward = output.forward


def pruned_by_torch(model):
    prune.l1_unstructured(model.base_model.encoder.layer[0].output.dense, "weight", 0.5)


def quantised(model):
    dense = model.base_model.encoder.layer[0].output.dense
    dense.weight = torch.nn.Parameter(dense.weight.to(torch.int8), requires_grad=False)


def hooked(model):
    dense = model.base_model.encoder.layer[0].output.dense
    dense.forward = dense.forward


@pytest.mark.parametrize(
    "change, message",
    [
        (shared, "stands in another place, too"),
        (twice, "stands in another place, too"),
        (of_their_own, "holds a MixtureLayer, which is not a part of a feed-forward block of the family"),
        (reordered, "holds a Reordering, which is not a part"),
        (half_shared, "stands in another place, too"),
        (hooked_around, "has a forward of its own"),
        (pruned_by_torch, "not a plain nn.Linear"),
        (quantised, "not floating point"),
        (hooked, "has a forward of its own"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_blocks_that_cannot_be_changed(change, message):
    """They are refused by name; other parts of the model can change."""
    model = BERT.build()
    change(model)
    with refused(model, ModelStateError, message, "encoder.layer.0"):
        prune_neurons(model, batches_of(BERT), keep=8)


def test_bad_models_and_batches():
    model = BERT.build()
    with refused(model, CalibrationError, "batches is empty"):
        prune_neurons(model, [], keep=8)
    with torch.no_grad():
        first_block(model).first[0].weight[3, 3] = math.nan
    with refused(model, NonFiniteError, "encoder.layer.0.intermediate.dense.weight contains NaN"):
        prune_neurons(model, batches_of(BERT), keep=8)
    with pytest.raises(UnsupportedModelError, match="PEFT"):
        prune_neurons(
            peft.get_peft_model(BERT.build(), peft.LoraConfig(target_modules=["query"])).base_model.model,
            batches_of(BERT),
            keep=8,
        )


def test_distillation_trains_changed_blocks_and_nothing_else():
    model = BERT.build()
    original = copy.deepcopy(model)
    prune_neurons(model, batches_of(BERT), keep={first_block(model).path: 8})
    before = copy.deepcopy(model)
    report = distill(model, original, batches_of(BERT, 9), 4, learning_rate=3e-3)
    assert report.after.hidden <= report.before.hidden
    names = {name for name, p in model.named_parameters() if not torch.equal(p, before.get_parameter(name))}
    assert {name.split("encoder.")[-1] for name in names} == {
        f"layer.0.{part}.dense.{tensor}" for part in ("intermediate", "output") for tensor in ("weight", "bias")
    }


def test_blocks_that_take_tokens_in_chunks():
    whole, chunked = BERT.build(), BERT.build()
    for module in chunked.modules():
        if hasattr(module, "chunk_size_feed_forward"):
            module.chunk_size_feed_forward = 1
    for model in (whole, chunked):
        prune_neurons(model, batches_of(BERT), keep=8)
    torch.testing.assert_close(*(output(model, BERT.inputs()) for model in (whole, chunked)), rtol=0, atol=1e-5)
    assert chunked.bert.encoder.layer[0].chunk_size_feed_forward == 1


def test_frozen_weights_stay_frozen_there_and_back():
    """Also those of a block without neurons; without elements no weight is trained, since some optimizers fail."""
    for keep in (16, 0):
        model = BERT.build()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("intermediate" not in name)
        before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        prune_neurons(model, batches_of(BERT), keep=keep)
        now = {name: parameter.requires_grad for name, parameter in model.named_parameters() if parameter.numel()}
        assert now == {name: before[name] for name in now}
        model(**BERT.inputs()).logits.sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=math.inf)
        fold_heads(model)
        assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before


def test_what_is_lost_is_the_share_of_the_variance():
    model, batches = BERT.build().double(), [cast(each, torch.float64) for each in batches_of(BERT, 4)]
    original, block = copy.deepcopy(model), first_block(model)
    seen = []
    handle = first_block(original).first[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    run_batches(original, batches, {}, "test")
    handle.remove()
    report = prune_neurons(model, batches, keep={block.path: 8})
    masks = [batch["attention_mask"].bool() for batch in batches]
    with torch.no_grad():
        before, after = (
            torch.cat([b.output(b.neurons(x))[mask] for x, mask in zip(seen, masks, strict=True)])
            for b in (first_block(original), first_block(model))
        )
    expected = (after - before).square().sum() / (before - before.mean(0)).square().sum()
    assert report.blocks[0].share_lost == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_neurons_that_put_out_constants(dtype):
    model = BERT.build().to(dtype)
    block = first_block(model)
    with torch.no_grad():
        for first in block.first:
            first.weight.zero_()
            first.bias.fill_(3)
    inputs = BERT.inputs()
    before = output(model, inputs)
    report = prune_neurons(model, batches_of(BERT), keep={block.path: 8})
    assert report.blocks[0].share_lost == 0
    torch.testing.assert_close(
        output(model, inputs), before, atol=CONSTANT, rtol=CONSTANT
    )  # the bias makes up for them
