"""An open site holds what its path leads to, before and after changes."""

from pathlib import Path

import pytest
from model_runs import swap
from opening import layers_of

import collab_heads
from collab_heads.adapters.bert import BertAdapter
from collab_heads.contract.registry import head_numbers
from collab_heads.errors import ArgumentError
from collab_heads.layers.output import HeadOutputProjection
from collab_heads.model import open_layers
from collab_heads.model.open_layers import OpenLayers
from families import FAMILIES, LAYOUTS


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_open_site_is_what_its_path_leads_to(name):
    model = FAMILIES[name].build()
    adapter = collab_heads.get_adapter(model)
    opened = layers_of(model).with_heads
    assert [site.site for site in opened] == adapter.sites(model)
    for site in opened:
        assert site.module is model.base_model.get_submodule(site.path)
        assert site.output is adapter.output_projection(model, site.site)
        assert site.projections == adapter.projections(site.module)
        assert site.value == adapter.value_projection(site.module)
        assert (site.role, site.num_heads) == (site.site.role, site.site.num_heads)
        assert site.head_numbers == tuple(range(site.num_heads))
        assert site.read().query.shape[0] == site.num_heads


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_stays_good_while_the_model_changes(name):
    model = FAMILIES[name].build()
    opened = layers_of(model).with_heads
    before = [(site.output, site.output_weight().clone()) for site in opened]
    if FAMILIES[name].shares:
        swap(model, "shared", 20)
    collab_heads.swap_to_gated(model)
    for site, (output, weight) in zip(opened, before, strict=True):
        assert site.is_swapped == FAMILIES[name].shares and site.module is model.base_model.get_submodule(site.path)
        assert site.output is output and isinstance(output, HeadOutputProjection)
        assert site.output_weight().equal(weight)


def test_heads_keep_their_numbers_and_sites_without_heads_stay_closed():
    model = FAMILIES["bert"].build()
    adapter = collab_heads.get_adapter(model)
    first, second = (site.path for site in adapter.sites(model))
    collab_heads.prune_heads(model, heads={first: [0, 2], second: [0, 1, 2, 3]})
    (left,) = layers_of(model).with_heads
    assert (left.path, left.head_numbers, left.num_heads) == (first, (1, 3), 2)
    numbers = {site.path: site.head_numbers for site in layers_of(model).attention}
    assert numbers == head_numbers(model, adapter) == {first: (1, 3), second: ()}


def test_an_output_projection_that_is_not_known_is_missed_late():
    """Swapping without calibration does not need it."""

    class WithoutOutput(BertAdapter):
        output = None

    model = FAMILIES["bert"].build()
    site = OpenLayers.of(model, WithoutOutput()).attention[0]
    assert site.read().num_heads == site.num_heads
    with pytest.raises(ArgumentError, match="WithoutOutput does not say where the output projection"):
        _ = site.output


def test_only_open_sites_look_their_modules_up():
    package = Path(open_layers.__file__).parents[1]
    files = [file for file in package.rglob("*.py") if "get_submodule(site.path)" in file.read_text(encoding="utf-8")]
    assert sorted(file.name for file in files) == ["open_layers.py"]
