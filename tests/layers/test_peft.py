"""LoRA beside gates and alphas: refused where it would be wrong, exact where it is not."""

import pytest
import torch
from changed_heads import changed, output_projections
from later import peft
from model_runs import output, swap
from model_sizes import EXACT64, HEADS

from collab_heads import fold_heads, prune_heads
from families import FAMILIES

OUTPUTS = {"bert": r".*attention\.output\.dense", "t5": r".*\.o", "marian": r".*\.out_proj", "gpt2": r".*attn\.c_proj"}
each_model = pytest.mark.parametrize("name", OUTPUTS)


def gated(name):
    return changed(FAMILIES[name], state="gated", empty=False)


def mixed(name):
    return changed(FAMILIES[name], state=None, alphas=True)


def adapted(model, targets):
    """With LoRA that is not zero."""
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    return wrapped.double().eval()


@each_model
def test_gated_projections_are_refused(name):
    with pytest.raises(ValueError, match="not supported") as caught:
        adapted(gated(name), OUTPUTS[name])
    assert "prune_heads or fold_heads" in str(caught.value)


def assert_merges_exactly(wrapped, before, inputs):
    expected = output(wrapped, inputs)
    assert (expected - before).abs().max() > 1e-3
    merged = wrapped.merge_and_unload()
    torch.testing.assert_close(output(merged, inputs), expected, rtol=0, atol=EXACT64)


@each_model
@pytest.mark.parametrize("state", (None, "gated"))
def test_mixed_projections_are_refused(name, state):
    """Removal would leave alphas, so that it is no way out."""
    model = changed(FAMILIES[name], state=state, empty=False, alphas=True)
    with pytest.raises(ValueError, match="not supported") as caught:
        adapted(model, OUTPUTS[name])
    assert "call collab_heads.fold_heads first" in str(caught.value)
    fold_heads(model)
    before = output(model, FAMILIES[name].inputs())
    assert_merges_exactly(adapted(model, OUTPUTS[name]), before, FAMILIES[name].inputs())


@each_model
@pytest.mark.parametrize("make", (gated, mixed))
def test_all_linear_passes_changed_projections_over(name, make):
    model, inputs = make(name), FAMILIES[name].inputs()
    before, projections = output(model, inputs), output_projections(model)
    wrapped = adapted(model, "all-linear")
    touched = [module for module in wrapped.modules() if isinstance(module, peft.tuners.lora.LoraLayer)]
    assert touched
    assert not any(isinstance(p, peft.tuners.lora.LoraLayer) for p in output_projections(model).values())
    assert all(
        ours is theirs for ours, theirs in zip(output_projections(model).values(), projections.values(), strict=True)
    )
    assert_merges_exactly(wrapped, before, inputs)


@each_model
@pytest.mark.parametrize("way_out", (prune_heads, fold_heads))
def test_after_the_way_out_it_merges_exactly(name, way_out):
    model, inputs = gated(name), FAMILIES[name].inputs()
    way_out(model)
    before = output(model, inputs)
    wrapped = adapted(model, OUTPUTS[name])
    assert all(isinstance(p, peft.tuners.lora.LoraLayer) for p in output_projections(model).values())
    assert_merges_exactly(wrapped, before, inputs)


@pytest.mark.parametrize("targets", ("all-linear", None))
@each_model
def test_sites_without_heads_are_passed_over(name, targets):
    """Also by PEFT's default targets, queries and values by name, where it has some."""
    if targets is None and name == "marian":
        targets = ["q_proj", "v_proj"]
    model = FAMILIES[name].build().double()
    last = {role: [list(range(HEADS)), [0]] for role in FAMILIES[name].roles}
    prune_heads(model, heads=last)
    before = output(model, FAMILIES[name].inputs())
    wrapped = adapted(model, targets)
    assert_merges_exactly(wrapped, before, FAMILIES[name].inputs())


SHARED = ["shared_query", "shared_key"]
VALUES = {"bert": "value", "t5": "v", "marian": "v_proj", "gpt2": "value"}


@each_model
def test_targets_of_a_swapped_model(name, kind):
    """What the README names adapts queries, keys and values of every site, and merges exactly."""
    model = FAMILIES[name].build().double()
    swap(model, kind, 16)
    before = output(model, FAMILIES[name].inputs())
    wrapped = adapted(model, [*SHARED, VALUES[name]])
    touched = [module for module in wrapped.modules() if isinstance(module, peft.tuners.lora.LoraLayer)]
    assert len(touched) == 3 * FAMILIES[name].num_sites
    assert_merges_exactly(wrapped, before, FAMILIES[name].inputs())
