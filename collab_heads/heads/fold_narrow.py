"""Narrow heads as a stock model has them: for families whose config says how wide a head is."""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from collab_heads.attention_adapter import AttentionAdapter
from collab_heads.errors import SwapError
from collab_heads.model.open_site import OpenSite
from collab_heads.state import SiteState


def stock_width(adapter: AttentionAdapter, sites: Sequence[OpenSite], states: Mapping[str, SiteState]) -> int:
    """The width that all heads of a collaborative model have, so that its config can say it.

    Args:
        adapter: of the model.
        sites: all of it.
        states: path -> what is recorded of the changed ones.

    Raises:
        SwapError: if no stock model has such heads; the message says why.
    """
    kinds = {path: state.query_key.kind for path, state in states.items() if state.query_key is not None}
    advice = "save the model as it is, and import collab_heads where it is loaded"
    if shared := [path for path, kind in kinds.items() if kind != adapter.exact_kind]:
        raise SwapError(f"{', '.join(shared)}: heads that share their queries and keys have no stock form; {advice}")
    if adapter.head_width is None:
        raise SwapError(
            f"{', '.join(kinds)}: heads of another width have no stock form, since no config of such a model says how "
            f"wide they are; {advice}"
        )
    if turned := [site.path for site in sites if getattr(site.query_key, "pairs", None) is not None]:
        raise SwapError(
            f"{', '.join(turned)}: the narrower heads keep frequency pairs of their own, while a stock model turns all "
            f"heads by those that follow from its config ({adapter.head_width[0]}); {advice}"
        )
    if removed := [path for path, state in states.items() if state.kept is not None]:
        raise SwapError(f"{removed[0]} has fewer heads, and narrow ones elsewhere have no such form; {advice}")
    widths = {site.path: (site.query_key_width // site.num_heads, site.value_width) for site in sites}
    found = {width for both in widths.values() for width in both}
    if len(found) > 1:
        each = ", ".join(f"{path} {query_key} and {value}" for path, (query_key, value) in widths.items())
        raise SwapError(
            f"heads of several widths have no stock form, since its config has one ({adapter.head_width[0]}) for all; "
            f"those of queries and keys, and of values: {each}; {advice}"
        )
    return found.pop()


@torch.no_grad()
def narrow_as_stock(sites: Mapping[str, OpenSite], stock: PreTrainedModel, width: int) -> None:
    """Make every collaborative site a stock one with heads of a width, in place.

    Args:
        sites: path -> site, all of the model.
        stock: a model with heads of that width, for what is not the same in it: a scale, a bias of the key.
        width: of the heads.
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
