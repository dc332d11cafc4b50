"""LoRA of attention on swapped, pruned and compressed models: every site is reached, and merging is exact."""

import pytest
import torch
from changed_heads import mix, removal
from later import peft
from model_runs import output
from model_sizes import EXACT64

import collab_heads
from collab_heads import fold_heads, peft_targets, prune_heads, swap_to_gated
from collab_heads.errors import ArgumentError, ModelStateError
from families import FAMILIES, LAYOUTS

ALL = ("query", "key", "value", "output")


def swapped(model, inputs):
    collab_heads.swap_to_collaborative(model, dim_shared_query_key=16)


def pruned(model, inputs):
    prune_heads(model, heads=removal(model, empty=False))


def emptied(model, inputs):
    prune_heads(model, heads=removal(model))


def compressed(model, inputs):
    collab_heads.compress(model, [inputs] * 2, 0.6, refine_steps=0)


CHANGES = {change.__name__: change for change in (swapped, pruned, emptied, compressed)}
KNOWN = ("bert", "gpt2", "t5", "qwen3")
CASES = [
    pytest.param(name, change, marks=() if name in ("bert", "gpt2") and change != "compressed" else pytest.mark.slow)
    for name in dict.fromkeys([*KNOWN, *LAYOUTS])
    for change in CHANGES
]


def changed(name, change):
    model, inputs = FAMILIES[name].build(), FAMILIES[name].inputs()
    if change == "swapped" and "collaborative" not in collab_heads.get_adapter(model).capabilities:
        pytest.skip("rotations keep its queries and keys as they are")
    CHANGES[change](model, inputs)
    return model.double().eval(), inputs


def adapted(model, targets):
    """With LoRA that is not zero, and the modules that have it."""
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)).double()
    return wrapped.eval(), {m for m in wrapped.modules() if isinstance(m, peft.tuners.lora.LoraLayer)}


@pytest.mark.parametrize(("name", "change"), CASES)
def test_every_part_of_every_site_is_adapted_and_merges_exactly(name, change):
    model, inputs = changed(name, change)
    adapter = collab_heads.get_adapter(model)
    targets, before = peft_targets(model, ALL), output(model, inputs)
    sites = [model.base_model.get_submodule(site.path) for site in adapter.sites_with_heads(model)]
    inside = [{id(module) for module in site.modules()} for site in sites]
    chosen = [id(model.get_submodule(path)) for path in targets]
    assert all(ids & set(chosen) for ids in inside) and len(set(chosen)) == len(chosen)
    wrapped, adapters = adapted(model, targets)
    assert len(adapters) == len(targets)
    expected = output(wrapped, inputs)
    assert (expected - before).abs().max() > 1e-3
    torch.testing.assert_close(output(wrapped.merge_and_unload(), inputs), expected, rtol=0, atol=EXACT64)


# What PEFT's own defaults reach: names of modules, or its error.
DEFAULTS = {
    ("bert", "swapped"): {"value"},
    ("bert", "pruned"): {"query", "value"},
    ("t5", "swapped"): {"v"},
    ("qwen3", "pruned"): {"v_proj"},  # its queries are `shared_query` where the groups of its heads are unequal
    ("gpt2", "pruned"): {"c_attn"},
    ("gpt2", "swapped"): "c_attn.* not found",
    ("modernbert", "pruned"): "specify `target_modules`",
    ("whisper", "swapped"): "specify `target_modules`",
    ("clip", "swapped"): "specify `target_modules`",
    ("marian", "swapped"): "specify `target_modules`",
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "change"), DEFAULTS)
def test_defaults_of_peft_are_as_documented(name, change):
    reached = DEFAULTS[name, change]
    model, _ = changed(name, change)
    if isinstance(reached, str):
        with pytest.raises(ValueError, match=reached):
            adapted(model, None)
        return
    wrapped, adapters = adapted(model, None)
    names = {path.rsplit(".", 1)[-1] for path, module in wrapped.named_modules() if module in adapters}
    assert names == reached


def test_the_default_is_that_of_peft_where_nothing_is_changed():
    model = FAMILIES["bert"].build()
    assert peft_targets(model) == [
        f"bert.encoder.layer.{layer}.attention.self.{name}" for layer in range(2) for name in ("query", "value")
    ]
    assert peft_targets(model.bert, "key") == [f"encoder.layer.{layer}.attention.self.key" for layer in range(2)]
    assert peft_targets(FAMILIES["gpt2"].build(), ["query", "key", "value"]) == [
        f"transformer.h.{layer}.attn.c_attn" for layer in range(2)
    ]


def test_what_cannot_be_is_refused():
    model = FAMILIES["bert"].build()
    with pytest.raises(ArgumentError, match=r"parts must be a text or a list \(a text\), not 3"):
        peft_targets(model, 3)
    for parts in (["queries"], "queries"):
        with pytest.raises(ArgumentError, match=r"unknown part .*known: query, key, value, output"):
            peft_targets(model, parts)
    with pytest.raises(ArgumentError, match="nothing to adapt"):
        peft_targets(model, [])
    for change in (swap_to_gated, mix):
        change(model)
        assert peft_targets(model)
        with pytest.raises(ModelStateError, match=r"holds gates or alphas.*fold_heads first"):
            peft_targets(model, "output")
        fold_heads(model)
    prune_heads(model, heads={"enc-self": [[0, 1, 2, 3]] * 2})
    with pytest.raises(ArgumentError, match="no site of the model has a query or value left"):
        peft_targets(model)
