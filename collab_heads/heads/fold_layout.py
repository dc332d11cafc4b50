"""Choose the heads and neurons of a folded model, and make the stock model of its config.

There are fewer than in the original where the family's config can say so.

One count of heads holds for all layers. Every layer keeps the heads that it has; layers with fewer heads than the count
get some of their removed heads back, as zeros. Heads that share a key head are counted by key heads, and by heads of
each.

Shapes: H heads, K key/value heads of the original model, which H / K heads share each.

Each feed-forward block has as many neurons as the block that has most left, of those that one config entry counts.
"""

import copy
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.errors import ModelStateError
from collab_heads.layers.layout import widths
from collab_heads.model.open_layers import OpenFeedForward, OpenSite, counted_together
from collab_heads.model.record_sync import is_alike
from collab_heads.sites.record import forget, is_valid, own_configs
from collab_heads.sites.state import FeedForwardState, SiteState

# Pairs of a config, of a model or of one of its stacks, and the new entries of all configs that are like it.
Changes: TypeAlias = Sequence[tuple[PretrainedConfig, Mapping[str, int]]]


@dataclass(frozen=True)
class Counts:
    """The heads of every layer of a folded model.

    Attributes:
        entries: the config entries to change, with their new values; empty where none changes.
        heads: path -> the original numbers of the heads of a layer in the folded model, ascending.
    """

    entries: Mapping[str, int]
    heads: Mapping[str, tuple[int, ...]]


def fold_counts(
    adapter: AttentionAdapter,
    config: PretrainedConfig,
    sites: Sequence[OpenSite],
    states: Mapping[str, SiteState],
) -> Counts:
    """Choose the heads of a folded model: as few as its config can say and each layer needs.

    Args:
        adapter: of the model.
        config: its config; it is not changed.
        sites: all sites of the model.
        states: path -> the recorded states of the changed ones.
    """
    whole = {site.path: states[site.path].num_heads if site.path in states else site.num_heads for site in sites}
    as_before = Counts({}, {path: tuple(range(heads)) for path, heads in whole.items()})
    if adapter.head_counts is None or adapter.head_width is None or len(set(whole.values())) != 1:
        return as_before
    (entry, key_entry), (width_entry, width) = adapter.head_counts, adapter.head_width
    heads = next(iter(whole.values()))
    key_heads = heads if key_entry is None else getattr(config, key_entry)
    kept = needed_heads(adapter, sites)
    used = [Counter(head * key_heads // heads for head in each) for each in kept.values()]
    keys_needed, sharing_needed = max(1, *map(len, used)), max(1, *(max(each.values(), default=1) for each in used))
    choices = itertools.product(range(keys_needed, key_heads + 1), range(sharing_needed, heads // key_heads + 1))
    for keys, sharing in sorted(choices, key=lambda choice: (choice[0] * choice[1], choice)):
        if keys * sharing == heads:
            break
        entries = {entry: keys * sharing, width_entry: getattr(sites[0].module, width)}
        entries |= {} if key_entry is None else {key_entry: keys}
        if is_valid(config, entries):
            filled = {
                path: filled_up(each, heads // key_heads, key_heads, keys, sharing) for path, each in kept.items()
            }
            return Counts(entries, filled)
    return as_before


def needed_heads(adapter: AttentionAdapter, sites: Sequence[OpenSite]) -> dict[str, tuple[int, ...]]:
    """Return the original numbers of the heads that a site must keep, by path.

    Where the first layer of a stack computes a position bias for all its layers, these need the same heads.
    """
    kept = {site.path: site.head_numbers for site in sites}
    if adapter.position_table is None:
        return kept
    stacks: dict[str, set[int]] = {}
    for site in sites:
        stacks.setdefault(site.role, set()).update(site.head_numbers)
    biased = {site.path: tuple(sorted(stacks[site.role])) for site in sites if site.role != "dec-enc"}
    return kept | biased


def filled_up(kept: Sequence[int], size: int, key_heads: int, keys: int, sharing: int) -> tuple[int, ...]:
    """Return the kept heads of a site, and the first others that make it `keys` key heads with `sharing` heads each.

    Args:
        kept: by their original numbers.
        size: how many heads shared a key head.
        key_heads: how many key heads there were.
        keys: the new number of key heads.
        sharing: the new number of heads that share each.
    """
    used = {head // size for head in kept}
    used |= set([key for key in range(key_heads) if key not in used][: keys - len(used)])
    found: list[int] = []
    for key in sorted(used):
        own = [head for head in kept if head // size == key]
        others = [head for head in range(key * size, (key + 1) * size) if head not in own]
        found += sorted(own + others[: sharing - len(own)])
    return tuple(found)


def stock_width(adapter: AttentionAdapter, sites: Sequence[OpenSite], states: Mapping[str, SiteState]) -> int:
    """Return the one width of all heads of a collaborative model, which its config can say.

    Args:
        adapter: of the model.
        sites: all sites of the model.
        states: path -> the recorded states of the changed ones.

    Raises:
        ModelStateError: if no stock model has such heads; the message says why.
    """
    kinds = {path: state.query_key.kind for path, state in states.items() if state.query_key is not None}
    advice = (
        "save the model as it is, and import collab_heads where it is loaded; or compress with shape='uniform', which "
        "plans what a stock config can say"
    )
    if shared := [path for path, kind in kinds.items() if kind != adapter.exact_kind]:
        raise ModelStateError(
            f"{', '.join(shared)}: heads that share their queries and keys have no stock form; {advice}"
        )
    if adapter.head_width is None:
        raise ModelStateError(
            f"{', '.join(kinds)}: heads of another width have no stock form, since no config of such a model says how "
            f"wide they are; {advice}"
        )
    if turned := [site.path for site in sites if getattr(site.query_key, "pairs", None) is not None]:
        raise ModelStateError(
            f"{', '.join(turned)}: the narrower heads keep frequency pairs of their own, while a stock model turns all "
            f"heads by those that follow from its config ({adapter.head_width[0]}); {advice}"
        )
    if removed := [path for path, state in states.items() if state.kept is not None]:
        raise ModelStateError(f"{removed[0]} has fewer heads, and narrow ones elsewhere have no such form; {advice}")
    widths = {site.path: (site.query_key_width // site.num_heads, site.value_width) for site in sites}
    found = {width for both in widths.values() for width in both}
    if len(found) > 1:
        each = ", ".join(f"{path} {query_key} and {value}" for path, (query_key, value) in widths.items())
        raise ModelStateError(
            f"heads of several widths have no stock form, since its config has one ({adapter.head_width[0]}) for all; "
            f"those of queries and keys, and of values: {each}; {advice}"
        )
    return found.pop()


@torch.no_grad()
def narrow_as_stock(sites: Mapping[str, OpenSite], stock: PreTrainedModel, width: int) -> None:
    """Turn every collaborative site into a stock one with heads of one width, in place.

    Args:
        sites: path -> site, all sites of the model.
        stock: a stock model with heads of that width; it provides its scale, and whether its key has a bias.
        width: the width of the heads.
    """
    for path, site in sites.items():
        whole, adapter = stock.base_model.get_submodule(path), site.adapter
        if site.query_key is not None:
            query, key, scale = site.query_key.shared_query, site.query_key.shared_key, adapter.scale(whole)
            if scale != site.query_key.state.scale:
                for parameter in query.parameters():
                    parameter.mul_(site.query_key.state.scale / scale)
            if key.bias is None and adapter.projections(whole)[1].bias is not None:  # the softmax cancels it
                key.bias = nn.Parameter(key.weight.new_zeros(key.out_features), key.weight.requires_grad)
            adapter.uninstall(site.module, query, key)
            adapter.note_scale(site.module, scale)
        setattr(site.module, cast(tuple[str, str], adapter.head_width)[1], width)


def stock_twin(model: PreTrainedModel, changes: Changes) -> PreTrainedModel:
    """Return a model of the same config with other entries and without our record, on the meta device."""
    config = copy.deepcopy(model.config)
    for part in (config, *(value for value in vars(config).values() if isinstance(value, PretrainedConfig))):
        update(part, changes)
        forget(part)
    with torch.device("meta"):
        return type(model)(config)


def write_entries(model: PreTrainedModel, changes: Changes) -> None:
    """Update the configs of a model and of its stacks, in place; models that shared them keep the old ones."""
    if any(entries for _, entries in changes):
        own_configs(model)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            update(module.config, changes)


def update(config: PretrainedConfig, changes: Changes) -> None:
    """Update a config, in place, with the entries that are for it."""
    for other, entries in changes:
        if is_alike(config, other):
            config.update(dict(entries))


@dataclass(frozen=True)
class NeuronCount:
    """The number of neurons of the feed-forward blocks of a folded model that one config entry counts.

    Attributes:
        config: the config of the model or stack that has the blocks.
        entries: its entry with the new value; empty if the blocks have as many neurons as in the original.
        blocks: the blocks.
        count: the number of neurons that each of them has in the folded model.
    """

    config: PretrainedConfig
    entries: Mapping[str, int]
    blocks: Sequence[OpenFeedForward]
    count: int


def fold_neurons(
    model: PreTrainedModel, blocks: Sequence[OpenFeedForward], states: Mapping[str, FeedForwardState]
) -> list[NeuronCount]:
    """Choose the neurons of a folded model: as few as its configs can say and each block needs.

    Args:
        model: the model.
        blocks: all its feed-forward blocks.
        states: path -> the recorded states of the changed ones.
    """
    found = []
    for group in counted_together(blocks):
        whole = max(states[block.path].num_neurons if block.path in states else block.num_neurons for block in group)
        count, config = max(1, *(block.num_neurons for block in group)), group[0].config
        if count < whole and can_say(model, group, count):
            found.append(NeuronCount(config, {group[0].entry: count}, group, count))
        else:
            found.append(NeuronCount(config, {}, group, whole))
    return found


def can_say(model: PreTrainedModel, blocks: Sequence[OpenFeedForward], count: int) -> bool:
    """Return True if a config entry gives these blocks another number of neurons, and changes nothing else.

    That of SigLIP's images counts the neurons of its pooling, too; DINOv2 has one that it ignores.
    """
    config, entry = blocks[0].config, blocks[0].entry
    if not hasattr(config, entry):
        return False
    try:
        other, stock = stock_twin(model, [(config, {entry: count})]), stock_twin(model, [])
    except Exception:  # of huggingface_hub's validation, which has its own classes
        return False
    outputs = {name: module for name, module in model.named_modules() if module in {block.output for block in blocks}}
    if any(widths(other.get_submodule(name))[0] != count for name in outputs):
        return False
    inside = {name for name, module in model.named_modules() if any(module in block.modules for block in blocks)}
    shapes = {name: tensor.shape for name, tensor in stock.state_dict().items()}
    changed = [name for name, tensor in other.state_dict().items() if tensor.shape != shapes[name]]
    return all(name.rpartition(".")[0] in inside for name in changed)
