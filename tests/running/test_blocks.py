"""Runs that begin at a block compute what the whole model does, and no more than they need."""

from functools import partial

import pytest
import torch
from opening import layers_of

from collab_heads.running import blocks
from collab_heads.running.batches import run_batches
from collab_heads.running.blocks import BlockStarts
from collab_heads.running.portions import portions
from families import FAMILIES

SHARED = ("albert", "albert-groups")  # a block that runs several times


def starts_of(name, sites=None):
    """A model, and its starts on two batches that are cut into portions."""
    model, batch = FAMILIES[name].build().eval(), FAMILIES[name].inputs()
    cut = partial(portions, is_encoder_decoder=model.config.is_encoder_decoder, size=24)
    layers = layers_of(model)
    return layers, BlockStarts(model, layers.in_order if sites is None else sites, [batch, batch], cut)


def outputs(starts):
    """The tensors that the model puts out, portion by portion, and the names of the modules that ran."""
    found, ran, handles = [], set(), []
    for name, module in starts.model.named_modules():
        handles.append(module.register_forward_hook(lambda *_, name=name: ran.add(name)))

    def see(_, args, out):
        values = out.values() if isinstance(out, dict) else out
        found.append([each for each in values if isinstance(each, torch.Tensor)])

    handles.append(starts.model.register_forward_hook(see))
    run_batches(starts.model, starts.batches, {}, "running", cut=starts.cut)
    for handle in handles:
        handle.remove()
    return found, ran


def equal(one, other):
    return len(one) == len(other) and all(
        len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))
        for mine, theirs in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in SHARED])
def test_every_start_puts_out_what_the_model_does(name):
    layers, starts = starts_of(name)
    whole, _ = outputs(starts)
    assert starts.blocks and len(whole) > 1
    for site in layers.in_order:
        with starts.at(site.path):
            again, ran = outputs(starts)
        assert equal(again, whole)
        place = starts.blocks.index(starts.block_of[site.path])
        inside = [block for block in starts.blocks if any(each.startswith(f"{block}.") for each in ran)]
        assert inside == starts.blocks[place:]
    assert equal(outputs(starts)[0], whole)


def test_a_block_that_serves_several_layers_is_no_start():
    for name in SHARED:
        layers, starts = starts_of(name)
        whole, _ = outputs(starts)
        assert starts.blocks == []
        with starts.at(layers.in_order[-1].path):
            assert equal(outputs(starts)[0], whole)


def test_a_change_inside_the_block_counts():
    layers, starts = starts_of("llama")
    site = layers.attention[-1]
    starts.advance(site.path)
    with torch.no_grad():
        site.output.weight.mul_(0.5)
    whole, _ = outputs(starts)
    with starts.at(site.path):
        assert equal(outputs(starts)[0], whole)


def test_an_earlier_start_is_made_again():
    layers, starts = starts_of("bert")
    first, second = layers.attention
    whole, _ = outputs(starts)
    starts.advance(second.path)
    with starts.at(first.path):
        again, ran = outputs(starts)
    assert equal(again, whole) and any(name.startswith(starts.blocks[0]) for name in ran)


def test_sites_that_run_before_others():
    layers, starts = starts_of("bert")
    first, _, second, _ = paths = [site.path for site in layers.in_order]

    def run(*until):
        return [path for path in paths if starts.runs(path, until)]

    assert run(first) == paths[:2] and run(second) == run(second, first) == paths
    starts.advance(second)
    assert run(second) == paths[2:]
    assert run(first) == run(second, first) == paths  # a start further back is made again
    assert run(second, "pooler") == paths and starts.runs("pooler", [second])  # outside of the blocks
    _, starts = starts_of("albert")
    assert starts.runs("any", [])  # no run begins inside


def test_a_run_within_some_sites_ends_after_them():
    layers, starts = starts_of("marian")
    paths = [site.path for site in layers.in_order if site.path.startswith("encoder.layers.1")]
    with starts.within(paths):
        found, ran = outputs(starts)
    blocks = {name for name in starts.blocks if any(each.startswith(f"{name}.") for each in ran)}
    assert found == [] and blocks == {"model.encoder.layers.1"}


def test_what_a_later_block_does_to_its_input_is_not_kept():
    layers, starts = starts_of("llama")
    site = layers.attention[-1]
    block = starts.model.get_submodule(starts.block_of[site.path])
    handle = block.register_forward_pre_hook(lambda _, args: (args[0].add_(1.0),))
    whole, _ = outputs(starts)
    assert starts.blocks
    for _ in range(2):
        with starts.at(site.path):
            assert equal(outputs(starts)[0], whole)
    handle.remove()


def test_blocks_that_depend_on_more_than_their_input_are_no_starts():
    """The last block adds what the first one left behind."""
    model, batch = FAMILIES["llama"].build().eval(), FAMILIES["llama"].inputs()
    first, last = model.model.layers[0], model.model.layers[-1]
    left = []
    first.register_forward_pre_hook(lambda _, args: left.append(len(left)))
    last.register_forward_hook(lambda _, args, out: out + len(left))
    starts = BlockStarts(model, layers_of(model).in_order, [batch], lambda batch: (batch,))
    assert starts.blocks == []


def test_nothing_is_kept_that_is_too_large(monkeypatch):
    layers, starts = starts_of("bert")
    whole, _ = outputs(starts)
    starts.limit = 1
    with starts.at(layers.attention[-1].path):
        again, ran = outputs(starts)
    assert equal(again, whole) and starts.blocks == [] and starts.kept == {}
    assert any("layer.0" in name for name in ran)
    _, fitting = starts_of("bert")
    fitting.advance(layers.attention[-1].path)
    size = blocks.bytes_of(fitting.kept)
    for limit, is_kept in ((0.5 * size, False), (2 * size, True)):  # foreseen from the first portion
        _, limited = starts_of("bert")
        limited.limit = limit
        assert bool(limited.blocks) is is_kept


def test_a_forward_of_an_instance_comes_back():
    layers, starts = starts_of("bert")
    block = starts.model.get_submodule(starts.blocks[0])
    mine = block.forward
    block.forward = mine
    with starts.at(layers.attention[-1].path):
        assert block.forward is not mine
    assert vars(block)["forward"] is mine
    del block.forward
    with starts.at(layers.attention[-1].path):
        pass
    assert "forward" not in vars(block)


def test_mutants_are_caught(monkeypatch):
    """A start that puts out the first portion for all, and one that keeps no copy."""
    kept = BlockStarts.put_out_kept

    def first_alone(self, of_list, *args, **kwargs):
        self.number = 0
        return kept(self, of_list)

    def itself(self, of_list, *args, **kwargs):
        return self.kept[of_list][self.number]

    with monkeypatch.context() as patch:
        patch.setattr(blocks.BlockStarts, "put_out_kept", first_alone)
        with pytest.raises(AssertionError):
            test_every_start_puts_out_what_the_model_does("bert")
    with monkeypatch.context() as patch:
        patch.setattr(blocks.BlockStarts, "put_out_kept", itself)
        with pytest.raises(AssertionError):
            test_what_a_later_block_does_to_its_input_is_not_kept()
