"""Fewer heads as a stock model: for families whose config says heads and their width apart."""

import copy
import json

import pytest
import torch
from changed_heads import adapter_sites
from model_runs import of_dtype, output, sites
from model_sizes import EXACT64, FP32_NOISE, HEADS
from test_head_contract import PLAIN_LOAD, run_apart, shape_of

from collab_heads import fold_heads, prune_heads
from collab_heads.heads.fold_layout import filled_up
from families import FAMILIES

# heads to remove in the two layers of every role -> heads that each layer of a folded T5, Qwen3, ViT has
REMOVED = {
    "the same": ([[0], [0]], 3, HEADS, 3),
    "others": ([[0], [1]], HEADS, HEADS, 3),  # T5's layers share their positions; a key head serves one head or two
    "more in one": ([[1, 3], [3]], 3, HEADS, 3),
    "one of each key head": ([[0, 2], [1, 3]], HEADS, 2, 2),
    "whole key heads": ([[0, 1], [2, 3]], HEADS, 2, 2),
    "all of one": ([[0, 1, 2, 3], [0, 1]], 2, 2, 2),
}
NAMES = ("t5", "qwen3", "vit")
CASES = [pytest.param(name, which, id=f"{name}-{which}") for name in NAMES for which in REMOVED]
SIBLINGS = [pytest.param(name, "whole key heads") for name in ("llama", "mistral", "qwen2", "gemma3", "dinov2", "deit")]


def pruned(name, which, dtype=torch.float64):
    model = of_dtype(FAMILIES[name].build().eval(), dtype)
    roles = dict.fromkeys(site.role for site in adapter_sites(model))
    prune_heads(model, heads={role: REMOVED[which][0] for role in roles})
    return model


def stock_of(model):
    """A new model of the same config."""
    return type(model)(copy.deepcopy(model.config)).to(model.dtype)


@pytest.mark.parametrize(("name", "which"), [*CASES, *SIBLINGS])
def test_the_folded_model_has_the_heads_that_its_layers_need(name, which):
    model, inputs = pruned(name, which), FAMILIES[name].inputs()
    before, removed = output(model, inputs), model.num_parameters()
    kept = {site.path: site.num_heads for site in adapter_sites(model)}
    report = fold_heads(model)
    count = REMOVED[which][1 + NAMES.index(name)] if name in NAMES else 2
    assert {site.num_heads for site in adapter_sites(model)} == {count}
    assert shape_of(model)[0] == shape_of(stock_of(model))[0]
    assert {type(module) for module in sites(model).values()} == {type(m) for m in sites(stock_of(model)).values()}
    torch.testing.assert_close(output(model, inputs), before, rtol=0, atol=EXACT64)
    assert report.head_count == (None if count == HEADS else count)
    assert {path: count - len(back) for path, back in report.restored.items()} == kept
    if count < HEADS:
        assert model.num_parameters() < FAMILIES[name].build().num_parameters()
        assert f"every layer has {count} heads now" in str(report)
    if set(kept.values()) == {count} and name != "t5":  # T5's table of positions loses columns, too
        assert model.num_parameters() == removed


@pytest.mark.parametrize("which", ["the same", "more in one"])
def test_positions_of_t5_keep_the_columns_of_their_heads(which):
    model, stock = pruned("t5", which), FAMILIES["t5"].build().double()
    fold_heads(model)
    for ours, theirs in zip(sites(model).values(), sites(stock).values(), strict=True):
        if theirs.has_relative_attention_bias:
            left = [head for head in range(HEADS) if head not in set.intersection(*map(set, REMOVED[which][0]))]
            assert torch.equal(ours.relative_attention_bias.weight, theirs.relative_attention_bias.weight[:, left])
            assert ours.relative_attention_bias.embedding_dim == len(left)


@pytest.mark.parametrize(("name", "width"), [("t5", "d_kv"), ("qwen3", "head_dim"), ("qwen2", "head_dim")])
def test_it_is_saved_loads_and_generates(name, width, tmp_path):
    model, inputs = pruned(name, "all of one", torch.float32), FAMILIES[name].inputs()
    fold_heads(model)
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored[width] == 8 and "collab_heads" not in stored
    again = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(output(again, inputs), output(model, inputs), rtol=0, atol=FP32_NOISE)
    settings = {"max_new_tokens": 6, "do_sample": False}
    given = {key: inputs[key] for key in ("input_ids", "attention_mask")}
    with_cache, without = (again.generate(**given, **settings, use_cache=use_cache) for use_cache in (True, False))
    assert torch.equal(with_cache, without)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "qwen3", "llama", "vit"])
def test_plain_transformers_loads_it(name, tmp_path):
    model, inputs = pruned(name, "all of one", torch.float32), FAMILIES[name].inputs()
    before = output(model, inputs)
    fold_heads(model)
    torch.testing.assert_close(run_apart(PLAIN_LOAD, model, inputs, tmp_path), before, rtol=0, atol=FP32_NOISE)


def test_a_count_that_the_config_refuses_is_not_chosen():
    """Llama wants a width that is a multiple of the heads: 3 heads of 32 do not load, 4 do."""
    llama = FAMILIES["llama"].build().config.__class__
    config = llama(**{**FAMILIES["llama"].build().config.to_dict(), "num_key_value_heads": HEADS})
    model = type(FAMILIES["llama"].build())(config)
    prune_heads(model, heads={"dec-self": [[0], [1]]})
    assert fold_heads(model).head_count is None and model.config.num_attention_heads == HEADS
    prune_heads(model, heads={"dec-self": [[0, 1], [1, 3]]})
    assert fold_heads(model).head_count == 2 and model.config.num_key_value_heads == 2


def test_other_models_of_the_same_config_keep_theirs():
    model = FAMILIES["qwen3"].build()
    other = type(model)(model.config)
    prune_heads(model, heads={"dec-self": [[0, 1], [0, 1]]})
    fold_heads(model)
    assert (model.config.num_attention_heads, other.config.num_attention_heads) == (2, HEADS)
    output(other, FAMILIES["qwen3"].inputs())


def test_filled_up():
    assert filled_up((1, 5), size=4, key_heads=3, keys=2, sharing=2) == (0, 1, 4, 5)
    assert filled_up((9,), size=4, key_heads=3, keys=2, sharing=1) == (0, 9)
    assert filled_up((), size=1, key_heads=4, keys=2, sharing=1) == (0, 1)


@pytest.mark.parametrize("name", ["bert", "t5", "gpt2-decoder"])
def test_what_was_frozen_stays_so(name):
    """A frozen layer, one that lost all its heads among them, and one that is trained."""
    model = FAMILIES[name].build()
    first, second = (site.path for site in adapter_sites(model)[:2])
    model.requires_grad_(False)
    model.base_model.get_submodule(second).requires_grad_(True)
    trained = {path for path, parameter in model.named_parameters() if parameter.requires_grad}
    prune_heads(model, heads={first: [0, 1], second: [0]})
    fold_heads(model)
    assert {path for path, parameter in model.named_parameters() if parameter.requires_grad} == trained
