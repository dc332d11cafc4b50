"""The shapes that a compressed model may take: which sizes different sites may have beside each other."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

from collab_heads.base.option_values import ModelShape
from collab_heads.compression.choosing import Choosing
from collab_heads.compression.parts.shape import Choice
from collab_heads.errors import ArgumentError
from collab_heads.heads.fold_layout import can_say
from collab_heads.model.open_layers import OpenFeedForward, OpenLayers, OpenSite, counted_together
from collab_heads.serving.gguf_checks import check_shape
from collab_heads.sites.record import is_valid

Allowed = dict[str, list[int]]  # path -> the indices of the choices that a site may take


class AllowedChoices(ABC):
    """The choices that a shape allows.

    Attributes:
        name: its name in `shape=`.
    """

    name: ClassVar[ModelShape]

    def check(self, layers: OpenLayers) -> None:
        """Raise an error if no choice makes a model what the shape stands for."""
        return

    @abstractmethod
    def among(self, choosing: Choosing) -> Iterator[Allowed]:
        """Yield sets of choices; within a set every site may take any.

        Args:
            choosing: the sites that may change, with all their choices.
        """


class Free(AllowedChoices):
    """Every site has sizes of its own."""

    name = "free"

    def among(self, choosing):
        yield choosing.everything()


class Even(AllowedChoices):
    """All feed-forward blocks that one config entry counts keep the same number of neurons, or none.

    It serves models without a head, whose hidden states are compared: their error is not yet that of a task. At half of
    the parameters of its layers a MiniLM loses 0.3 points of STS-B and 0.4 of SST-2 less than with sizes that differ,
    although its states move more (three draws of 2,048 sentences). A Qwen3, whose predictions are compared, has 3.5 %
    more perplexity at a third, and 2.9 % with sizes that differ.
    """

    name = "even"

    def among(self, choosing):
        numbers = {block.path: choosing.neurons(block) for block in choosing.blocks}
        groups = counted_together(choosing.blocks)
        for counts in itertools.product(*(sorted({n for b in group for n in numbers[b.path]}) for group in groups)):
            yield choosing.everything() | {
                block.path: [i for i, number in enumerate(numbers[block.path]) if number in (0, count)]
                for group, count in zip(groups, counts, strict=True)
                for block in group
            }


class ForCTranslate2(AllowedChoices):
    """Allow what CTranslate2 runs without filling up: one number of heads, with one width of queries, keys and values.

    Every site has a width of its own, and may be without heads. Heads that positions turn stay as they are, and so does
    the number of heads that a table of positions has columns for.
    """

    name = "ctranslate2"

    def among(self, choosing):
        found, adapter = {site.path: choosing.heads(site) for site in choosing.attention}, choosing.layers.adapter
        if adapter.positions is not None:
            yield choosing.everything() | {path: unchanged(choosing.choices[path]) for path in found}
            return
        counts = {count for each in found.values() for count, *_ in each if count}
        if adapter.position_table is not None:
            counts = {max(counts)}
        for count in sorted(counts) or [0]:
            allowed = {
                path: [i for i, (n, width, value) in enumerate(each) if not n or (n == count and width == value)]
                for path, each in found.items()
            }
            if all(allowed.values()):
                yield choosing.everything() | allowed


class ForGguf(AllowedChoices):
    """Allow what llama.cpp runs: every site has its own number of heads and neurons, and all heads keep their width."""

    name = "gguf"

    def check(self, layers):
        """Refuse families and heads that llama.cpp does not have: export would refuse the result."""
        check_shape(layers)

    def among(self, choosing):
        fixed = {"query_key", "values"}
        yield choosing.everything() | {
            site.path: [i for i, each in enumerate(choosing.choices[site.path]) if not fixed & dict(each.sizes).keys()]
            for site in choosing.attention
        }


class Uniform(AllowedChoices):
    """Allow what the stock config of the family can say, so that plain transformers loads the model.

    Blocks that one config entry counts have one number of neurons. Where the config gives the width of a head, all
    sites have one number of heads, or heads of one width; elsewhere attention stays as it is. What a config cannot say
    stays, and so does a stack of which `sites` names a part.
    """

    name = "uniform"

    def among(self, choosing):
        whole = choosing.layers.in_order
        groups = counted_together(site for site in whole if isinstance(site, OpenFeedForward))
        chosen = {site.path for site in choosing.sites}
        options = [list(self.of_blocks(choosing, group)) for group in groups if {b.path for b in group} <= chosen]
        fixed = {path: unchanged(each) for path, each in choosing.choices.items()}
        is_whole = {site.path for site in whole if isinstance(site, OpenSite)} <= chosen
        options.append(list(self.of_attention(choosing)) if is_whole else [{}])
        for each in itertools.product(*options):
            yield {path: allowed for part in (fixed, *each) for path, allowed in part.items()}

    def of_blocks(self, choosing: Choosing, group: Sequence[OpenFeedForward]) -> Iterator[Allowed]:
        """Yield the choices of the blocks that one config entry counts, for every number that it may have."""
        yield {}
        numbers = {block.path: choosing.neurons(block) for block in group}
        for count in sorted(set.intersection(*(set(each) for each in numbers.values())) - {0}):
            if can_say(choosing.layers.model, group, count):
                yield {path: alike(each, count) for path, each in numbers.items()}

    def of_attention(self, choosing: Choosing) -> Iterator[Allowed]:
        """Yield the choices of all sites of attention, for every number of heads and every width."""
        adapter, found = choosing.layers.adapter, {site.path: choosing.heads(site) for site in choosing.attention}
        yield {}
        if adapter.head_width is None or not found:
            return
        whole = next(iter(found.values()))[-1]
        for n, width, value in sorted(set.intersection(*(set(each) for each in found.values())) - {whole}):
            fewer, narrower = n < whole[0], (width, value) != whole[1:]
            if not n or width != value or (fewer and narrower) or not self.may_say(choosing, n if fewer else None):
                continue
            if narrower and adapter.positions is not None:
                continue
            yield {path: alike(each, (n, width, value)) for path, each in found.items()}

    def may_say(self, choosing: Choosing, heads: int | None) -> bool:
        """Return True if the config of the model can give this number of heads; None for as many as it has."""
        adapter, config = choosing.layers.adapter, choosing.layers.model.config
        if heads is None:
            return True
        if adapter.head_counts is None or adapter.head_width is None or adapter.position_table is not None:
            return False
        (entry, key_entry), site = adapter.head_counts, choosing.attention[0]
        entries = {entry: heads, adapter.head_width[0]: getattr(site.module, adapter.head_width[1])}
        if key_entry is not None:
            entries[key_entry] = heads * getattr(config, key_entry) // getattr(config, entry)
        return is_valid(config, entries)


def unchanged(choices: Sequence[Choice]) -> list[int]:
    """Return the indices of the choices that keep all sizes, whatever the bits."""
    return [i for i, choice in enumerate(choices) if not choice.sizes]


def alike(sizes: Sequence[object], wanted: object) -> list[int]:
    """Return the indices of the choices that have some size, whatever the bits."""
    return [i for i, size in enumerate(sizes) if size == wanted]


MODEL_SHAPE_RULES: dict[ModelShape, AllowedChoices] = {
    each.name: each for each in (Even(), Free(), ForCTranslate2(), ForGguf(), Uniform())
}


def allowed_choices(choosing: Choosing, shape: ModelShape, *, is_even: bool) -> Iterator[list[list[int]]]:
    """Yield sets of choices that a shape allows, as indices per site in the order of `choices`.

    Args:
        choosing: the sites that may change, with all their choices.
        shape: the shape.
        is_even: whether "ctranslate2", which takes any number of neurons, is to give blocks even ones.

    Raises:
        ArgumentError: if there are none.
    """
    is_found = False
    first = list(MODEL_SHAPE_RULES[shape].among(choosing))
    second = list(Even().among(choosing)) if is_even and shape == "ctranslate2" else [choosing.everything()]
    for one, other in itertools.product(first, second):
        both = [[i for i in one[path] if i in set(other[path])] for path in choosing.choices]
        if all(both):
            is_found = True
            yield both
    if not is_found:
        heads = sorted({choosing.heads(site)[-1][0] for site in choosing.attention})
        raise ArgumentError(
            f"shape={shape!r}: the sites have {', '.join(map(str, heads))} heads, and nothing that may change makes "
            f"these numbers equal (parts={', '.join(choosing.options.counted_parts)}): let heads change, too"
        )
