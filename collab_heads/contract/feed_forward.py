"""Find the feed-forward blocks of a family: the data of an adapter, and the sites that follow from it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedModel

from collab_heads.base.option_values import FeedForwardRole
from collab_heads.layers.layout import widths
from collab_heads.sites.site import AttentionSite, FeedForwardSite


@dataclass(frozen=True)
class FeedForwardNames:
    """The names of the parts of a feed-forward block: last(activation(first(x))), or last(activation(a) * b).

    A gated block computes a and b with two projections, or as the halves of what one makes.

    Attributes:
        block: regular expression of the path of the module that holds the parts, relative to the base model.
        first: path of the first projections in it.
        last: path of the last projection in it.
        activation: path of the module of the activation in it; None where that is the function GELU.
        fused: whether one first projection makes both branches of a gated block.
        entry: the config entry for the number of neurons of all such blocks.
    """

    block: str
    first: tuple[str, ...]
    last: str
    activation: str | None
    fused: bool = False
    entry: str = "intermediate_size"


class FeedForwardBlock(NamedTuple):
    """A feed-forward block of a model: its site, and the names of its parts in the module at the path of the site."""

    site: FeedForwardSite
    names: FeedForwardNames


def feed_forward_blocks(
    model: PreTrainedModel, names: Sequence[FeedForwardNames], attention: Sequence[AttentionSite]
) -> list[FeedForwardBlock]:
    """List the feed-forward blocks of a model, in model order.

    Layer, stack and the side of an encoder-decoder are those of the attention that is nearest to a block.

    Args:
        model: the model.
        names: the names in its family; of several that fit a block, the first whose parts it has.
        attention: the sites of attention of the model.
    """
    found = []
    for path, module in model.base_model.named_modules():
        for each in names:
            if re.fullmatch(each.block, path) and all(holds(module, part) for part in (*each.first, each.last)):
                near = max(attention, key=lambda site: shared_length(site.path, path), default=None)
                if near is not None:
                    neurons, _ = widths(module.get_submodule(each.last))
                    role: FeedForwardRole = "enc-ffn" if near.role == "enc-self" else "dec-ffn"
                    site = FeedForwardSite(path, role, near.layer, neurons, near.stack)
                    found.append(FeedForwardBlock(site, each))
                break
    return found


def holds(module: nn.Module, path: str) -> bool:
    """Return True if a module has a submodule with a path."""
    try:
        module.get_submodule(path)
    except AttributeError:
        return False
    return True


def shared_length(path: str, other: str) -> int:
    """Return the number of parts with which two paths begin alike."""
    parts, others = path.split("."), other.split(".")
    return next(
        (i for i, (a, b) in enumerate(zip(parts, others, strict=False)) if a != b), min(len(parts), len(others))
    )
