"""How many heads the layers of a folded model have: fewer than at first, where the family's config can say so.

One count holds for all layers. Every layer keeps the heads that it has; those with fewer than the count get some of
their removed heads back, as zeros. Heads that share a key head are counted by key heads, and by heads of each.

Shapes: H heads, K key/value heads of the original model, which H / K heads share each.
"""

import copy
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PretrainedConfig

from collab_heads.attention_adapter import AttentionAdapter
from collab_heads.model.open_site import OpenSite
from collab_heads.state import SiteState


@dataclass(frozen=True)
class Counts:
    """The heads of every layer of a folded model.

    Attributes:
        entries: of the config, and their new values; empty where it says nothing else than before.
        heads: path -> the original numbers of the heads that a layer has then, ascending.
    """

    entries: Mapping[str, int]
    heads: Mapping[str, tuple[int, ...]]


def fold_counts(
    adapter: AttentionAdapter,
    config: PretrainedConfig,
    sites: Sequence[OpenSite],
    states: Mapping[str, SiteState],
) -> Counts:
    """Choose the heads of a folded model: as few as its config can say, and each layer needs.

    Args:
        adapter: of the model.
        config: its config; only read.
        sites: all of the model.
        states: path -> what is recorded of the changed ones.
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
    """Path -> the original numbers of the heads that a site must keep.

    Where the first layer of a stack makes a bias of positions for all its layers, those need the same heads.
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
    """Heads that a site keeps, and the first others that make it `keys` key heads with `sharing` heads each.

    Args:
        kept: by their original numbers.
        size: how many heads shared a key head.
        key_heads: how many key heads there were.
        keys: how many there are to be.
        sharing: how many heads are to share each.
    """
    used = {head // size for head in kept}
    used |= set([key for key in range(key_heads) if key not in used][: keys - len(used)])
    found: list[int] = []
    for key in sorted(used):
        own = [head for head in kept if head // size == key]
        others = [head for head in range(key * size, (key + 1) * size) if head not in own]
        found += sorted(own + others[: sharing - len(own)])
    return tuple(found)


def is_valid(config: PretrainedConfig, entries: Mapping[str, int]) -> bool:
    """Whether transformers takes a config with these entries: Llama's wants a width that is a multiple of the heads."""
    changed = {**copy.deepcopy(config).to_dict(), **entries}
    try:
        type(config).from_dict(changed)
    except Exception:  # of huggingface_hub's validation, which has its own classes
        return False
    return True
