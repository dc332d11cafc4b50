"""How large a site would be is how large it is when it is."""

import pytest
from compressing import first_block, first_site
from model_runs import swap

import collab_heads
from collab_heads.compression.parts.part import narrower
from collab_heads.compression.parts.shape import UNCHANGED, AttentionShape, Choice, FeedForwardShape
from collab_heads.compression.parts.table import choices_of, parts_of, size_with
from collab_heads.compression.parts.table import resized as geometry_of
from collab_heads.model.apply_state import keep_neurons
from collab_heads.sites.state import FeedForwardState
from families import FAMILIES


def shape_of(site, kind="per_head"):
    return AttentionShape.of(site, kind)


def resized(model, shape, choice, kind):
    """The model with what a choice means, made by the public functions."""
    site, after = first_site(model), geometry_of(shape, choice)
    if after.num_heads < shape.geometry.num_heads:
        collab_heads.prune_heads(model, heads={site.path: list(range(after.num_heads, shape.geometry.num_heads))})
    dim = None if choice.get("query_key") is None else after.query_key_width
    value = after.num_heads * after.dim_value if after.dim_value < shape.geometry.dim_value else None
    if dim is not None or value is not None:
        collab_heads.swap_to_collaborative(
            model, dim_shared_query_key=dim, dim_value=value, kind=kind, sites=[site.path]
        )


def real_size(site):
    """Parameters and cached elements of a site, counted in its modules."""
    if not site.num_heads:
        return sum(p.numel() for p in site.output.parameters()), 1
    parts = [site.value, site.output]
    parts += [site.query_key] if site.query_key is not None else list(site.projections)
    width = site.projections[1].out_features if site.query_key is None else site.query_key.cache_width
    return sum(p.numel() for part in parts for p in part.parameters()), width + site.value.out_features


CHOICES = [{"heads": 0}, {"heads": 3}, {"query_key": 4}, {"values": 4}, {"heads": 2, "query_key": 4, "values": 4}, {}]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("before", [None, "pruned", "shared", "per_head", "values"])
def test_predicted_sizes_are_real(family, kind, choice, before):
    model, choice = family.build(), dict(choice)
    site = first_site(model)
    if before == "pruned":
        collab_heads.prune_heads(model, heads={site.path: [3]})
        choice.pop("heads" if choice.get("heads") == 3 else "", None)
    elif before == "values":
        collab_heads.swap_to_collaborative(model, dim_value=0.5, sites=[site.path])
        choice = {name: size for name, size in choice.items() if name == "heads"}
    elif before is not None:
        swap(model, before, 20 if before == "shared" else 16, sites=[site.path])
        choice.pop("query_key", None)
    shape = shape_of(first_site(model), kind)
    if kind == "shared" and "query_key" in choice:
        choice["query_key"] = 12
    choice = Choice.of(**choice)
    resized(model, shape, choice, kind)
    size = size_with(shape, choice)
    assert (size.parameters, size.cache) == real_size(site.now(site.state))


def test_the_site_as_it_is_comes_last_and_no_choice_is_wider(family, kind):
    shape = shape_of(first_site(family.build()), kind)
    choices = list(choices_of(shape))
    assert choices[-1] == UNCHANGED == Choice()
    assert [part.size(shape, UNCHANGED) for part in parts_of(shape).values()] == [4, 32 if kind == "shared" else 8, 8]
    assert len(set(choices)) == len(choices)
    for choice in choices:
        geometry = geometry_of(shape, choice)
        assert geometry.query_key_width <= geometry.num_heads * geometry.dim_head
        left = size_with(shape, choice)
        assert left.parameters > 0 or (choice.get("heads") == 0 and left.per_query == left.per_pair == 0)


def test_steps_are_few_multiples_of_four():
    assert narrower(32) == [4, 8, 12, 16, 20, 24, 28]
    assert narrower(64) == [8, 16, 24, 32, 40, 48, 56]
    assert narrower(80) == [8, 16, 24, 32, 40, 48, 56, 64, 72]
    assert narrower(384) == [48, 96, 144, 192, 240, 288, 336]
    assert narrower(4) == []


@pytest.mark.parametrize("name, differ", [("bert", True), ("bert-decoder", False)])
def test_decoders_have_no_full_width_beside_a_narrow_one(name, differ):
    """Each step of decoding would pad all that is cached: slower than the original."""
    site = first_site(FAMILIES[name].build())
    choices = list(choices_of(shape_of(site)))
    uneven = [choice for choice in choices if (choice.get("query_key") is None) != (choice.get("values") is None)]
    assert bool(uneven) == differ
    asked = AttentionShape.of(site, "per_head", ("values",))
    assert set(choices_of(asked)) == {Choice.of(values=4), UNCHANGED}


@pytest.mark.parametrize("neurons", [0, 8, 37])
def test_predicted_sizes_of_blocks_are_real(family, neurons):
    model = family.build()
    block = first_block(model)
    shape, choice = FeedForwardShape.of(block), Choice.of(neurons=neurons)
    assert 0 in [each.get("neurons") for each in choices_of(shape)] and list(choices_of(shape))[-1] == UNCHANGED
    keep_neurons(block, FeedForwardState(block.role, 37, 37), range(neurons))
    size = size_with(shape, choice)
    assert size.parameters == sum(p.numel() for module in block.modules for p in module.parameters())
    assert (size.cache, size.per_key, size.per_pair) == (0, 0, 0)
    assert size.per_query == sum(module.weight.numel() for module in block.modules)
