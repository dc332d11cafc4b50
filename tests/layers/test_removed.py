"""Rows of Linears, and the stand-ins of a site without heads."""

import pytest
import torch
from model_runs import main_output, sites
from model_sizes import HEADS
from torch import nn

from collab_heads import get_adapter, prune_heads
from collab_heads.layers.removed import NoHeads, NoValues, is_empty, keep_rows
from families import FAMILIES


@pytest.mark.parametrize("trained", (True, False))
@pytest.mark.parametrize("bias", (True, False))
def test_keeping_rows(bias, trained):
    made = nn.Linear(5, 6, bias).requires_grad_(trained)
    before = {name: p.detach().clone() for name, p in made.named_parameters()}
    keep_rows(made, [0, 2], 3)
    for name, parameter in made.named_parameters():
        assert torch.equal(parameter, before[name][[0, 1, 4, 5]])
        assert parameter.requires_grad == trained
        assert parameter.untyped_storage().nbytes() == parameter.numel() * 4  # no view into the old one
    assert (made.in_features, made.out_features) == (5, 4)
    assert made(torch.zeros(1, 5)).shape == (1, 4)


def test_stand_ins():
    states = torch.randn(2, 3, 5, dtype=torch.float64)
    keys, values = NoHeads().keys(states), NoValues()(states)
    assert keys.shape == (2, 3, 1) and values.shape == (2, 3, 0)
    assert keys.dtype == values.dtype == torch.float64
    assert keys.abs().max() == 0
    assert NoHeads.cache_width + NoValues.out_features == 1
    assert list(NoHeads().parameters()) == list(NoValues().parameters()) == []


def test_empty_modules():
    model = FAMILIES["bert"].build()
    prune_heads(model, heads={"enc-self": [list(range(HEADS)), [0]]})
    assert [is_empty(module) for module in sites(model).values()] == [True, False]
    assert not is_empty(nn.Linear(1, 1))


@pytest.mark.parametrize("name", ("t5", "vit", "gpt2-decoder", "esm", "whisper", "modernbert", "qwen3"))
def test_a_norm_before_a_site_without_heads_has_a_gradient(name):
    """DDP stops where a trained parameter has none."""
    model = FAMILIES[name].build()

    def without_gradient():
        model.zero_grad()
        main_output(model(**FAMILIES[name].inputs())).square().mean().backward()
        return {name for name, parameter in model.named_parameters() if parameter.grad is None}

    before = without_gradient()
    site = get_adapter(model).sites(model)[1]
    prune_heads(model, heads={site.path: list(range(HEADS))})
    assert without_gradient() <= before


NAMES = (
    ("bert", "num_attention_heads", "all_head_size"),
    ("t5", "n_heads", "inner_dim"),
    ("gpt2-decoder", "num_heads", "split_size"),
)


def test_attributes_of_a_shrunk_module():
    """Names that the stock classes, or whoever reads them, rely on."""
    for name, heads, width in NAMES:
        model = FAMILIES[name].build()
        first = get_adapter(model).sites(model)[0].path
        for kept in (3, 1, 0):
            now = getattr(sites(model)[first], heads)
            present = [2, 0, 1, 3][-now:] if now < HEADS else range(HEADS)
            removed = {4: [2], 3: [0, 1], 1: [3]}[now]
            assert set(removed) <= set(present)
            prune_heads(model, heads={first: removed})
            module = sites(model)[first]
            assert (getattr(module, heads), getattr(module, width)) == (kept, kept * 8)
            assert module.training is False and not any(part.training for part in module.modules())
