"""Models are built as their records say; one in use catches up with one that another process changed further."""

import copy

import pytest
import torch
from model_runs import sites, swap
from slow_cases import slow
from transformers import PreTrainedModel

from collab_heads import compress, prune_heads, swap_to_collaborative
from collab_heads.errors import ConfigError
from collab_heads.saving.rebuild import catch_up
from collab_heads.sites.record import FIELD
from families import FAMILIES

BEFORE = {
    "stock": lambda model: None,
    "pruned": lambda model: prune_heads(model, heads={path: [1] for path in sites(model)}),
    "collaborative": lambda model: swap_to_collaborative(model, dim_shared_query_key=16),
    "narrowed": lambda model: swap_to_collaborative(model, dim_value=0.5),
}


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("name", ("bert", *slow("marian", "t5")))
def test_a_model_catches_up_with_a_compressed_one(name, before):
    model, inputs = FAMILIES[name].build().eval(), FAMILIES[name].inputs()
    BEFORE[before](model)
    first = next(iter(sites(model).values()))
    for parameter in first.parameters():
        parameter.requires_grad_(False)
    other = copy.deepcopy(model)
    compress(model, [inputs, inputs], 0.45, refine_steps=0)
    catch_up(other, getattr(model.config, FIELD))
    configs = [
        [module.config.to_dict()[FIELD] for module in each.modules() if isinstance(module, PreTrainedModel)]
        for each in (other, model)
    ]  # T5 gives each stack its own
    assert configs[0] == configs[1]
    shapes = [{name: (p.shape, p.requires_grad) for name, p in each.named_parameters()} for each in (other, model)]
    assert shapes[0] == shapes[1] and list(shapes[0]) == list(shapes[1])
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        mine.data.copy_(theirs)
    with torch.no_grad():
        assert torch.equal(other(**inputs)[0], model(**inputs)[0])


def test_nothing_to_catch_up_with_changes_nothing():
    model = FAMILIES["bert"].build()
    names = {name: tensor.shape for name, tensor in model.state_dict().items()}
    catch_up(model, None)
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == names
    assert not hasattr(model.config, FIELD)


def test_a_kind_that_its_family_cannot_have():
    for name, kind, other in (("bert", "per_head", "rotary"), ("qwen3", "stock+values", "shared")):
        model = FAMILIES[name].build()
        swap(model, kind, 16)
        for site in model.config.collab_heads["sites"].values():
            site["query_key"]["kind"] = other
        with pytest.raises(ConfigError, match=rf"of the kind '{other}' does not fit the model; '\w+' does"):
            type(model)(model.config)
