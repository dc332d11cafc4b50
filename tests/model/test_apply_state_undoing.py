"""What is done to a model for a try is taken back, whatever it was and however it ended."""

import threading

import pytest
import torch
from model_runs import output, swap
from model_sizes import NARROW
from opening import layers_of
from unchanged import assert_unchanged, snapshot

import collab_heads
from collab_heads.layers.output import alphas_of
from collab_heads.model.apply_state import undone
from families import FAMILIES


def test_everything_is_as_it_was(family):
    model, inputs = family.build(), family.inputs()
    adapter = collab_heads.get_adapter(model)
    before, expected = snapshot(model), output(model.eval(), inputs)
    model.train()
    before = snapshot(model)
    with undone(layers := layers_of(model), layers.with_heads):
        swap(model, "per_head+values", 12)
        collab_heads.prune_heads(model, heads={site.path: [1] for site in adapter.sites(model)})
        collab_heads.swap_to_gated(model)
        assert not torch.allclose(output(model.eval(), inputs), expected)
        model.train()
    assert_unchanged(model, before)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_copies_share_weights_until_these_are_replaced(name):
    model, inputs = FAMILIES[name].build().eval(), FAMILIES[name].inputs()
    before, places = snapshot(model), [each.data_ptr() for each in model.parameters()]
    with undone(layers := layers_of(model), layers.with_heads):
        assert [each.data_ptr() for each in model.parameters()] == places
        collab_heads.swap_to_alpha(model)
        for site in layers_of(model).with_heads:
            alphas_of(site.output).alpha.data += 0.1
        collab_heads.fold_heads(model)
        collab_heads.swap_to_gated(model, init_log_alpha=0.0)
        collab_heads.prune_heads(model, [inputs], keep=5)
        assert sum(each.numel() for each in model.parameters()) < sum(map(torch.numel, before["state"].values()))
    assert_unchanged(model, before)


def test_one_in_another(family):
    model, inputs = family.build().eval(), family.inputs()
    before, expected = snapshot(model), output(model, inputs)
    with undone(layers := layers_of(model), layers.with_heads) as copied:
        assert copied.attention[0].module is model.base_model.get_submodule(copied.attention[0].path)
        assert copied.attention[0].module is not layers.attention[0].module
        swap(model, "per_head", 16)
        swapped = output(model, inputs)
        with undone(layers_of(model), copied.with_heads):
            collab_heads.prune_heads(model, heads={layers.attention[0].path: [1]})
        assert torch.equal(output(model, inputs), swapped)
    assert_unchanged(model, before)
    assert torch.equal(output(model, inputs), expected)


def test_also_after_an_error_and_on_a_changed_model(family):
    model, inputs = family.build().eval(), family.inputs()
    swap(model, "shared", NARROW["shared"])
    before, expected = snapshot(model), output(model, inputs)
    with pytest.raises(KeyboardInterrupt), undone(layers := layers_of(model), layers.with_heads):
        collab_heads.swap_to_alpha(model)
        raise KeyboardInterrupt
    assert_unchanged(model, before)
    assert torch.equal(output(model, inputs), expected)


class Watcher:
    """Has what cannot be copied, as loggers and profilers do."""

    def __init__(self):
        self.lock, self.calls = threading.Lock(), 0

    def note(self, *_):
        self.calls += 1


def test_hooks_of_the_user_are_shared_not_copied(family):
    model, watcher = family.build().eval(), Watcher()
    site = layers_of(model).with_heads[0]
    site.module.register_forward_hook(watcher.note)
    site.value.register_forward_pre_hook(watcher.note)
    before = snapshot(model)
    with undone(layers := layers_of(model), layers.with_heads):
        output(model, family.inputs())
        seen = watcher.calls
    assert_unchanged(model, before)
    output(model, family.inputs())
    assert watcher.calls == 2 * seen > 0
