"""Two stacks in one model: each loads alone from the files of the whole, and can be changed alone."""

import copy

import pytest
import torch
from model_runs import aligned, output, sites
from transformers import CLIPTextModel, CLIPVisionModelWithProjection, SiglipTextModel, SiglipVisionModel

from collab_heads import CollabHeadsError, fold_heads, get_adapter, prune_heads, swap_to_collaborative
from families import FAMILIES

STACKS = {
    "clip": {"text_model": CLIPTextModel, "vision_model": CLIPVisionModelWithProjection},
    "siglip": {"text_model": SiglipTextModel, "vision_model": SiglipVisionModel},
}


def changed(name):
    """The first head of every site removed, and queries and keys narrower."""
    model = FAMILIES[name].build()
    prune_heads(model, heads={path: [0] for path in sites(model)})
    swap_to_collaborative(model, dim_shared_query_key=12, kind="per_head")
    return model


@pytest.mark.parametrize("name, stack", [(name, stack) for name, stacks in STACKS.items() for stack in stacks])
def test_a_stack_loads_from_the_files_of_the_whole(name, stack, tmp_path):
    model, cls = changed(name), STACKS[name][stack]
    model.save_pretrained(tmp_path)
    alone, info = cls.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    alone = getattr(alone, stack, alone)
    whole = getattr(model, stack)
    assert alone.state_dict().keys() == whole.state_dict().keys()
    assert all(torch.equal(tensor, whole.state_dict()[key]) for key, tensor in alone.state_dict().items())


def test_a_stack_that_is_changed_alone_is_saved_with_the_whole(tmp_path):
    """And the rest can be changed after it: the whole knows what its stacks know."""
    model, inputs = FAMILIES["clip"].build(), FAMILIES["clip"].inputs()
    swap_to_collaborative(model.text_model, dim_shared_query_key=16)
    model.save_pretrained(tmp_path / "one")
    again = aligned(type(model).from_pretrained(tmp_path / "one").eval())
    assert torch.equal(output(again, inputs), output(model, inputs))
    with pytest.raises(CollabHeadsError, match=r"text_model.* is collaborative already"):
        swap_to_collaborative(again, dim_shared_query_key=16)
    swap_to_collaborative(again, dim_shared_query_key=16, sites="enc-self")
    assert set(again.config.collab_heads["sites"]) == set(sites(again))
    again.save_pretrained(tmp_path / "both")
    last = aligned(type(model).from_pretrained(tmp_path / "both").eval())
    assert torch.equal(output(last, inputs), output(again, inputs))


def test_a_folded_model_has_no_record_anywhere():
    model = FAMILIES["clip"].build()
    before = copy.deepcopy(model.config.to_dict())
    prune_heads(model, heads={path: [0] for path in sites(model)})
    assert model.config.text_config.collab_heads == model.text_model.config.collab_heads
    assert set(model.config.text_config.collab_heads["sites"]) == {f"encoder.layers.{i}.self_attn" for i in range(2)}
    fold_heads(model)
    assert model.config.to_dict() == before


def test_layers_of_one_role_are_told_apart():
    """Reports and rotations know a site by its role and layer."""
    for name in STACKS:
        model = FAMILIES[name].build()
        places = [(site.role, site.layer) for site in get_adapter(model).sites(model)]
        assert len(set(places)) == len(places)
