"""The contract of every family with fewer neurons in its feed-forward blocks, and with blocks without any."""

import copy
import subprocess
import sys

import pytest
import torch
from changed_heads import loss
from compressing import batches_of, first_block
from model_inputs import cast
from model_runs import aligned, output, pickled
from opening import layers_of
from slow_cases import slow
from transformers import AutoConfig, AutoModel

import collab_heads
from collab_heads import compress, fold_heads, get_adapter, prune_heads, prune_neurons
from collab_heads.layers.layout import weight_of
from collab_heads.layers.removed import EmptyProjection
from collab_heads.model.apply_state import keep_neurons
from collab_heads.running.batches import run_batches, sides
from collab_heads.sites.record import FIELD, CollabConfig
from families import FAMILIES, each

KEPT = (0, 3, 4, 10, 11, 12, 20, 36)  # of 37 neurons
SAME = 1e-10  # float64: the same products in another order; differences seen: 1e-13
FUNCTION = 1e-5  # ESM's own GELU, in float32
REFIT = 1e-5  # float64, with a ridge of 1e-6: all neurons, fitted to themselves

of_family = pytest.mark.parametrize("name", each(FAMILIES))
of_every_family = pytest.mark.parametrize("name", FAMILIES)  # the core: siblings join
with_empty_blocks = pytest.mark.parametrize("empty", (False, True), ids=("some-left", "none-left"))


def blocks_of(model):
    return layers_of(model).feed_forwards


def kept_of(block, empty):
    """The neurons that a block of the tests keeps: every second block may lose all."""
    return () if empty and block.site.layer % 2 == 0 else KEPT


def narrowed(model, empty=False):
    """The model with fewer neurons, nothing refitted."""
    config = CollabConfig.on(model)
    states = {
        block.path: keep_neurons(block, config.site(block.site), kept_of(block, empty)) for block in blocks_of(model)
    }
    config.with_sites(states).write(model)
    return model


def masked(model, empty=False):
    """The same, with columns of zeros instead."""
    for block in blocks_of(model):
        gone = [index for index in range(block.num_neurons) if index not in kept_of(block, empty)]
        weight_of(block.output).data[:, gone] = 0
    return model


def reads_and_reads(block, model, batches):
    """The inputs of a block and of its last projection, call by call."""
    seen = [], []
    handles = [
        module.register_forward_pre_hook(lambda _, args, into=into: into.append(args[0]))
        for module, into in zip((block.first[0], block.output), seen, strict=True)
    ]
    run_batches(model, batches, {}, "test")
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.core
@of_every_family
def test_every_layer_has_a_block_whose_neurons_are_known(name):
    """The neurons that the adapter describes are the inputs of the last projection."""
    family = FAMILIES[name]
    model = family.build()
    blocks = blocks_of(model)
    layers = {(site.role.split("-")[0], site.layer, site.stack) for site in get_adapter(model).sites(model)}
    assert {(block.role.split("-")[0], block.site.layer, block.site.stack) for block in blocks} == layers
    for block in blocks:
        assert sides(block.site)[0] in (block.site.stack, "encoder", "decoder")
        read, neurons = reads_and_reads(block, model, [family.inputs()])
        with torch.no_grad():
            for states, expected in zip(read, neurons, strict=True):
                torch.testing.assert_close(block.neurons(states), expected, rtol=FUNCTION, atol=FUNCTION)


@with_empty_blocks
@pytest.mark.core
@of_every_family
def test_pruned_equals_masked(name, empty):
    family = FAMILIES[name]
    stock, inputs = family.build().double(), family.inputs()
    expected = output(masked(copy.deepcopy(stock), empty), inputs)
    assert (expected - output(stock, inputs)).abs().max() > 1e-3
    before = stock.num_parameters()
    model = narrowed(stock, empty)
    torch.testing.assert_close(output(model, inputs), expected, rtol=0, atol=max(SAME, family.exact64))
    assert model.num_parameters() < before
    assert [block.num_neurons for block in blocks_of(model)] == [len(kept_of(b, empty)) for b in blocks_of(model)]


@with_empty_blocks
@of_family
def test_saved_and_loaded_it_is_the_same(name, empty, tmp_path):
    """As task model and as base model; a second save writes the same record."""
    family = FAMILIES[name]
    model, inputs = narrowed(family.build(), empty), family.inputs()
    expected = output(aligned(model), inputs)
    model.save_pretrained(tmp_path)
    again = aligned(type(model).from_pretrained(tmp_path)).eval()
    assert torch.equal(output(again, inputs), expected)
    assert getattr(again.config, FIELD) == getattr(model.config, FIELD)
    assert CollabConfig.on(again).feed_forwards.keys() == {block.path for block in blocks_of(model)}
    base = family.base.from_pretrained(tmp_path)
    ours, theirs = base.base_model.state_dict(), model.base_model.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items() if name in theirs)


@pytest.mark.slow
def test_it_loads_in_a_fresh_process(tmp_path):
    family = FAMILIES["marian"]
    model = narrowed(family.build(), empty=True)
    model.save_pretrained(tmp_path)
    torch.save([family.inputs(), output(aligned(model), family.inputs())], tmp_path / "expected.pt")
    code = (
        "import sys, torch, transformers, collab_heads\n"
        f"model = transformers.{type(model).__name__}.from_pretrained(sys.argv[1]).eval()\n"
        "inputs, expected = torch.load(sys.argv[1] + '/expected.pt')\n"
        "with torch.no_grad():\n    found = model(**inputs).logits\n"
        "torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


@of_family
def test_the_last_projection_is_refitted_to_what_the_block_put_out(name):
    """With all neurons it is what it was; with fewer the error on the batches is below that of the columns alone."""
    family = FAMILIES[name]
    stock = family.build().double()
    batches = [cast(each, stock.dtype) for each in batches_of(family, 6)]
    model, cut = copy.deepcopy(stock), narrowed(copy.deepcopy(stock))
    report = prune_neurons(model, batches, keep=len(KEPT))
    assert [block.num_neurons for block in blocks_of(model)] == [len(KEPT)] * len(report.blocks)
    assert (report.model_parameters_after, report.removed) == (
        model.num_parameters(),
        sum(block.neurons_before - len(KEPT) for block in report.blocks),
    )
    first = first_block(stock)
    if name.startswith("albert"):
        return  # the block's inputs change with it
    read, neurons = reads_and_reads(first, stock, batches)
    with torch.no_grad():
        wanted = torch.cat([first.output(each).flatten(0, -2) for each in neurons])
        fitted, plain = (
            torch.cat([(b := first_block(m)).output(b.neurons(each)).flatten(0, -2) for each in read])
            for m in (model, cut)
        )
    assert (fitted - wanted).square().mean() < (plain - wanted).square().mean()


@of_family
def test_a_block_without_neurons_is_its_mean(name):
    family = FAMILIES[name]
    model = family.build().double()
    batches = [cast(each, model.dtype) for each in batches_of(family, 2)]
    report = prune_neurons(model, batches, keep={first_block(model).path: 0})
    block = first_block(model)
    assert len(report.blocks) == 1 and block.num_neurons == 0
    assert all(isinstance(module, EmptyProjection) for module in block.modules)
    with torch.no_grad():
        read, _ = reads_and_reads(block, model, batches)
        put_out = block.output(block.neurons(read[0])).flatten(0, -2)
    constant = torch.zeros(()) if block.output.bias is None else block.output.bias
    assert torch.equal(put_out, constant.expand_as(put_out).to(put_out))
    assert report.blocks[0].share_lost == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    "name", ("bert", "qwen3", *slow(*(name for name in FAMILIES if name not in ("bert", "qwen3"))))
)
def test_it_composes_with_everything_else(name):
    """Heads, narrower queries, keys and values, and neurons; compressed twice."""
    family = FAMILIES[name]
    model = family.build().eval()
    prune_neurons(model, batches_of(family, 2), keep=24)
    prune_heads(model, heads={get_adapter(model).sites(model)[-1].path: [0, 1]})
    first = compress(model, batches_of(family, 4), 0.7, refine_steps=0)
    assert first.costs["parameters"].share <= 0.7
    second = compress(model, batches_of(family, 4), 0.9, refine_steps=0)
    assert second.costs["parameters"].before <= first.costs["parameters"].after
    states = CollabConfig.on(model).feed_forwards
    assert all(state.num_neurons == (128 if name == "dinov2" else 37) for state in states.values())
    assert torch.isfinite(output(model, family.inputs())).all()


@with_empty_blocks
@of_family
def test_it_trains_copies_and_pickles(name, empty):
    family = FAMILIES[name]
    model, inputs = narrowed(family.build(), empty), family.inputs()
    expected = output(model, inputs)
    assert torch.equal(output(copy.deepcopy(model), inputs), expected)
    loss(model, inputs).backward()
    for block in blocks_of(model):
        for module in block.modules:
            for parameter in module.parameters():
                assert parameter.requires_grad == (parameter.grad is not None) == (parameter.numel() > 0)
    assert torch.equal(output(pickled(model), inputs), expected)


@with_empty_blocks
@of_family
def test_folded_it_is_stock_again(name, empty, tmp_path):
    """Its config says how many neurons are left in the largest block; the others get zeros. The outputs stay."""
    family = FAMILIES[name]
    model, inputs = narrowed(family.build().double(), empty), family.inputs()
    expected, left = output(model, inputs), [block.num_neurons for block in blocks_of(model)]
    report = fold_heads(model)
    assert not hasattr(model.config, FIELD)
    stock = type(model)(copy.deepcopy(model.config))  # as `from_pretrained` makes it
    assert {n: p.shape for n, p in model.state_dict().items()} == {n: p.shape for n, p in stock.state_dict().items()}
    assert [type(each).__qualname__ for each in model.modules()] == [
        type(each).__qualname__ for each in stock.modules()
    ]
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float64).eval()
    for folded in (model, loaded):
        torch.testing.assert_close(output(folded, inputs), expected, rtol=0, atol=max(SAME, family.exact64))
    fewer = {block.path: max(1, *left) for block in blocks_of(model) if has_entry(name, block)}
    assert report.neuron_counts == fewer
    whole = {block.path: block.num_neurons for block in blocks_of(family.build())}
    assert {block.path: block.num_neurons for block in blocks_of(model)} == whole | fewer


def has_entry(name, block):
    """DINOv2's config gives a ratio; SigLIP's entry for images counts the neurons of the pooling, too."""
    return not (name.startswith(("dinov2", "siglip-vision")) or (name == "siglip" and block.path.startswith("vision")))


def test_a_record_that_does_not_fit_is_refused(tmp_path):
    model = narrowed(FAMILIES["bert"].build())
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    path = first_block(model).path
    for entries, message in (
        ({"num_neurons": 38}, "the recorded 38 neurons do not fit the model's 37"),
        ({"neurons": 40}, "neurons is 40, expected an integer from 0 to 37"),
        ({"neurons": 37}, "expected fewer than num_neurons"),
        ({"role": "enc-mlp"}, "role"),
        ({"width": 3}, "unknown entries"),
    ):
        other = copy.deepcopy(config)
        getattr(other, FIELD)["sites"][path].update(entries)
        with pytest.raises(collab_heads.errors.ConfigError, match=message) as caught:
            AutoModel.from_config(other)
        assert path in str(caught.value)
    getattr(config, FIELD)["sites"]["encoder.layer.9"] = getattr(config, FIELD)["sites"][path]
    with pytest.raises(collab_heads.errors.ConfigError, match=r"encoder\.layer\.9.*does not have"):
        AutoModel.from_config(config)
