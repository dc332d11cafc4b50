"""How large a site would be is how large it is when it is."""

import pytest
from compressing import first_site

import collab_heads
from collab_heads.compression.choices import Choice, SiteShape, size_of, steps
from families import FAMILIES, swap


def shape_of(site, kind="per_head"):
    return SiteShape.of(site, kind)


def resized(model, shape, choice, kind):
    """The model with what a choice means, made by the public functions."""
    site = first_site(model)
    if choice.heads < shape.num_heads:
        collab_heads.prune_heads(model, {site.path: list(range(choice.heads, shape.num_heads))})
    dim = shape.dim_query_key(choice)
    value = choice.heads * choice.value if choice.value < shape.dim_value else None
    if dim is not None or value is not None:
        collab_heads.swap_to_collaborative(
            model, dim_shared_query_key=dim, dim_value=value, mixing=kind, sites=[site.path]
        )


def real_size(site):
    """Parameters and cached elements of a site, counted in its modules."""
    parts = [site.value, site.output]
    parts += [site.query_key] if site.query_key is not None else list(site.projections)
    width = site.projections[1].out_features if site.query_key is None else site.query_key.cache_width
    return sum(p.numel() for part in parts for p in part.parameters()), width + site.value.out_features


CHOICES = [(3, None, 8), (4, 4, 8), (4, None, 4), (2, 4, 4), (4, None, 8)]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("before", [None, "pruned", "shared", "per_head", "values"])
def test_predicted_sizes_are_real(family, kind, choice, before):
    model, choice = family.build(), Choice(*choice)
    site = first_site(model)
    if before == "pruned":
        collab_heads.prune_heads(model, {site.path: [3]})
        choice = Choice(min(choice.heads, 3), choice.query_key, choice.value)
    elif before == "values":
        collab_heads.swap_to_collaborative(model, dim_value=0.5, sites=[site.path])
        choice = Choice(choice.heads, None, 4)
    elif before is not None:
        swap(model, before, 20 if before == "shared" else 16, sites=[site.path])
        choice = Choice(choice.heads, None, choice.value)
    shape = shape_of(first_site(model), kind)
    if kind == "shared" and choice.query_key is not None:
        choice = Choice(choice.heads, 12, choice.value)
    resized(model, shape, choice, kind)
    size = size_of(shape, choice)
    assert (size.parameters, size.cache) == real_size(first_site(model))


def test_the_site_as_it_is_comes_last_and_no_choice_is_wider(family, kind):
    shape = shape_of(first_site(family.build()), kind)
    choices = list(shape.choices())
    assert choices[-1] == shape.unchanged == Choice(4, None, 8)
    assert len(set(choices)) == len(choices)
    for choice in choices:
        dim = shape.dim_query_key(choice)
        assert dim is None or dim <= choice.heads * shape.dim_head
        assert size_of(shape, choice).parameters > 0


def test_steps_are_few_multiples_of_four():
    assert steps(32) == [4, 8, 12, 16, 20, 24, 28]
    assert steps(64) == [8, 16, 24, 32, 40, 48, 56]
    assert steps(80) == [8, 16, 24, 32, 40, 48, 56, 64, 72]
    assert steps(384) == [48, 96, 144, 192, 240, 288, 336]
    assert steps(4) == []


@pytest.mark.parametrize("name, differ", [("bert", True), ("bert-decoder", False)])
def test_decoders_have_no_full_width_beside_a_narrow_one(name, differ):
    """Each step of decoding would pad all that is cached: slower than the original."""
    site = first_site(FAMILIES[name].build())
    choices = list(shape_of(site).choices())
    uneven = [choice for choice in choices if (choice.query_key is None) != (choice.value == 8)]
    assert bool(uneven) == differ
    asked = SiteShape.of(site, "per_head", ("values",))
    assert {choice.value for choice in asked.choices()} == {4, 8}
    assert {choice.query_key for choice in asked.choices()} == {None}
