"""Attention maps in the places of the original's heads, zeros where heads were removed."""

import pytest
import torch
from heads_by_hand import ended, model_in
from model_inputs import cast

from collab_heads import get_adapter, prune_heads
from collab_heads.analysis import maps_in_place
from collab_heads.errors import ArgumentError, ShapeError

NAMES = {"enc-self": "encoder_attentions", "dec-self": "decoder_attentions", "dec-enc": "cross_attentions"}


def seen(model, inputs):
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(**cast(inputs, model.dtype), output_attentions=True)


@pytest.mark.parametrize("name", ("bert", "marian", "gpt2"))
def test_heads_stand_at_their_numbers_and_removed_ones_are_empty(name):
    """Of a layer that keeps some, of one that keeps none, and of those that keep all."""
    model, inputs = model_in(name), ended(name)[0]
    sites = get_adapter(model).sites(model)
    whole = sites[0].num_heads
    prune_heads(model, heads={sites[0].path: [1], sites[1].path: list(range(whole))})
    outputs = seen(model, inputs)
    kept = {sites[0].path: [head for head in range(whole) if head != 1], sites[1].path: []}
    for role in dict.fromkeys(site.role for site in sites):
        attentions = outputs[NAMES[role]] if len({site.role for site in sites}) > 1 else outputs.attentions
        placed = maps_in_place(model, attentions, role=role)
        for site, maps, found in zip([s for s in sites if s.role == role], attentions, placed, strict=True):
            stay = kept.get(site.path, list(range(whole)))
            assert found.shape == (len(maps), whole, *maps.shape[2:]) and torch.equal(found[:, stay], maps)
            assert not found[:, [head for head in range(whole) if head not in stay]].any()


def test_a_module_of_several_layers():
    model = model_in("albert")
    outputs = seen(model, ended("albert")[0])
    assert all(map(torch.equal, maps_in_place(model, outputs.attentions), outputs.attentions))


def test_refusals():
    model = model_in("marian")
    maps = seen(model, ended("marian")[0]).encoder_attentions
    for given, error, said in (
        ({}, ArgumentError, "has maps of enc-self, dec-self, dec-enc: say with role="),
        ({"role": "dec-sel"}, ArgumentError, "did you mean 'dec-self'"),
        ({"role": "enc-self", "attentions": [None, maps[1]]}, ArgumentError, "attentions holds None: pass the maps"),
        ({"role": "enc-self", "attentions": maps[:1]}, ShapeError, "1 layers, and the model has 2"),
        (
            {"role": "enc-self", "attentions": [each[:, 1:] for each in maps]},
            ShapeError,
            r"attentions\[0\] has the shape",
        ),
    ):
        with pytest.raises(error, match=said):
            maps_in_place(model, **{"attentions": maps} | given)
