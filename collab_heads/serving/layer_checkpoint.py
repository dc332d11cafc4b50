"""Write a stock checkpoint in whose config every layer has sizes of its own (`per_layer_config` of transformers 5.23).

Layer i is what the layer's class makes of the config with the entries of layer i. transformers builds no model in this
way yet (its issue 45332), and refuses such a config.
"""

import copy
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME

from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.contract.registry import get_adapter, layered_model_types
from collab_heads.errors import ModelStateError, UnsupportedModelError
from collab_heads.files.atomic import write_file
from collab_heads.heads.fold import is_held, like_those_of, restore_output
from collab_heads.heads.fold_layout import filled_up, stock_twin
from collab_heads.layers.output import HeadOutputProjection, fold_output
from collab_heads.model.apply_state import apply_state, restore_neurons
from collab_heads.model.open_layers import OpenLayers, OpenSite
from collab_heads.model.refusals import check_feed_forwards, check_prunable
from collab_heads.saving.layer_configs import LAYERS
from collab_heads.sites.record import CollabConfig, is_valid
from collab_heads.sites.site import AttentionSite


def check_layers(model: PreTrainedModel) -> None:
    """Refuse a model whose layers have no stock form with sizes of their own.

    Raises:
        UnsupportedModelError: if stock layers of the family are not made from a config each.
        ModelStateError: if heads are narrower, or share queries and keys, or weights are quantised; the site is named.
    """
    adapter = get_adapter(model)
    if not adapter.layer_configs:
        raise UnsupportedModelError(
            f"{type(model).__name__} is of type {model.config.model_type!r}, per_layer=True is for "
            f"{', '.join(layered_model_types())}: leave it out, or use to='onnx'"
        )
    layers = OpenLayers.of(model, adapter)
    check_prunable(layers, layers.with_heads)
    check_feed_forwards(model, [block for block in layers.feed_forwards if block.num_neurons])
    for site in layers.with_heads:
        if site.query_key is not None and not is_held(adapter, site.state):
            raise ModelStateError(
                f"{site.path} has narrower or shared queries, keys or values, while all heads of a stock model have "
                "their own, of one width: compress the original with parts=('heads', 'neurons')"
            )


@torch.no_grad()
def write_layers(layers: OpenLayers, folder: Path) -> tuple[str, ...]:
    """Turn a model into one with stock layers of any sizes, in place, and save it; return notes.

    Heads and neurons come back as zeros where a config cannot do without: all heads where the family gives no number of
    them, heads of a key head that has fewer than another one, and a head, or a neuron, in a layer without any.
    """
    model, adapter, notes = layers.model, layers.adapter, list[str]()
    config = model.config
    config.update(common_sizes(layers))
    whole = {site.path: site for site in adapter.sites(stock_twin(model, []))}
    heads = {site: stock_heads(adapter, site.head_numbers, whole[site.path]) for site in layers.attention}
    sizes = sizes_of(layers, heads, whole)
    first = sizes[0]
    if all(each == first for each in sizes.values()) and is_valid(config, first):
        config.update(first)
    twin = OpenLayers.of(layered_twin(layers, sizes), adapter)
    stock = {site.path: site for site in twin.attention}
    for site, kept in heads.items():
        restore_heads(site, stock[site.path], kept)
        if zeros := len(kept) - site.num_heads:
            notes.append(f"{site.path}: heads of zeros: {zeros} of {len(kept)}")
    for block in layers.feed_forwards:
        if not block.num_neurons:
            restore_neurons(block, 1)
            notes.append(f"{block.path}: a neuron of zeros")
    CollabConfig().write(model, before=layers.record)
    model.save_pretrained(folder)
    return (*notes, *write_sizes(folder / CONFIG_NAME, model.config, sizes))


def common_sizes(layers: OpenLayers) -> dict[str, int]:
    """Return the entries of a config that it may leave out, and which follow from the sizes of a layer then."""
    adapter, found = layers.adapter, dict[str, int]()
    if adapter.head_width is not None:
        entry, attribute = adapter.head_width
        found[entry] = getattr(layers.attention[0].module, attribute)
    return found | {block.entry: layers.record.site(block.site).num_neurons for block in layers.feed_forwards}


def stock_heads(adapter: AttentionAdapter, kept: Sequence[int], whole: AttentionSite) -> tuple[int, ...]:
    """Return the heads of a stock layer with some heads: these, and those that it cannot do without.

    Args:
        adapter: of the model.
        kept: the original numbers of the heads that a site has.
        whole: the site in the original.
    """
    if adapter.head_counts is None:
        return tuple(range(whole.num_heads))
    size = whole.num_heads // whole.num_key_heads
    used = Counter(head // size for head in kept)
    return filled_up(kept, size, whole.num_key_heads, max(1, len(used)), max(used.values(), default=1))


def sizes_of(
    layers: OpenLayers, heads: Mapping[OpenSite, Sequence[int]], whole: Mapping[str, AttentionSite]
) -> dict[int, dict[str, int]]:
    """Return the config entries of every layer by its number."""
    found: dict[int, dict[str, int]] = {site.site.layer: {} for site in layers.attention}
    for site, kept in heads.items() if layers.adapter.head_counts is not None else ():
        entry, key_entry = cast(tuple[str, str | None], layers.adapter.head_counts)
        size = whole[site.path].num_heads // whole[site.path].num_key_heads
        keys = {} if key_entry is None else {key_entry: len({head // size for head in kept})}
        found[site.site.layer] |= {entry: len(kept)} | keys
    for block in layers.feed_forwards:
        found[block.site.layer][block.entry] = max(1, block.num_neurons)
    return found


def layered_twin(layers: OpenLayers, sizes: Mapping[int, Mapping[str, int]]) -> PreTrainedModel:
    """Return a stock model, on the meta device, each layer of which its class makes of a config with its own sizes."""
    twin = stock_twin(layers.model, [])
    for number, path in {site.site.layer: layers.adapter.layer_path(site.path) for site in layers.attention}.items():
        config, (parent, _, name) = copy.deepcopy(twin.config), path.rpartition(".")
        config.update(dict(sizes[number]))
        make = cast(Any, type(twin.base_model.get_submodule(path)))
        with torch.device("meta"):
            setattr(twin.base_model.get_submodule(parent), name, make(config, number))
    return twin


def restore_heads(site: OpenSite, stock: OpenSite, kept: Sequence[int]) -> None:
    """Turn a site into a stock one with some heads, of which those that it lacks are zeros, in place."""
    if isinstance(site.output, HeadOutputProjection):
        fold_output(site.output)
    if site.query_key is not None:  # it holds stock weights
        apply_state(site, replace(site.state, query_key=None, gates=None, alphas=False))
    if tuple(kept) != site.head_numbers:
        like, places = like_those_of(site), places_in(site, kept)
        stock.module.to(like.dtype).to_empty(device=like.device)
        restore_output(site.output, places, len(kept), stock.output, like)
        site.adapter.restore(site.module, stock.module, places)


def places_in(site: OpenSite, kept: Sequence[int]) -> list[int]:
    return [kept.index(head) for head in site.head_numbers]


def write_sizes(file: Path, config: PretrainedConfig, sizes: Mapping[int, Mapping[str, int]]) -> Iterator[str]:
    """Write what layers have of their own into the file of a config, and yield notes."""
    own = {
        number: {name: size for name, size in each.items() if size != getattr(config, name)}
        for number, each in sizes.items()
    }
    digits = len(str(len(own)))  # layers in the order of numbers, where names are sorted
    found = {str(number).zfill(digits): entries for number, entries in own.items() if entries}
    if found:
        entries = json.loads(file.read_text(encoding="utf-8")) | {LAYERS: found}
        write_file(file, (json.dumps(entries, indent=2, sort_keys=True) + "\n").encode("utf-8"))
        yield f"{len(found)} of {len(own)} layers have sizes of their own ({LAYERS}): README.md says how stock loads it"
