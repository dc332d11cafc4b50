"""Check that llama.cpp can take a family and the sizes of its layers, before a plan and before a file is written."""

from collections.abc import Iterator
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from collab_heads.contract.model_forms import GgufForm
from collab_heads.contract.registry import gguf_form, gguf_model_types
from collab_heads.errors import ModelStateError, UnsupportedModelError
from collab_heads.model.open_layers import OpenFeedForward, OpenLayers, OpenLayerSite, OpenSite
from collab_heads.sites.site import group_size

ADVICE = "compress the original with shape='gguf'"
EVEN_ADVICE = "compress the original with shape='uniform'"


def family_form(model: PreTrainedModel) -> GgufForm:
    """Return how llama.cpp names the parts of models of a family.

    Raises:
        UnsupportedModelError: if it has no such family.
    """
    form = gguf_form(model.config)
    if form is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} is of type {model.config.model_type!r}, GGUF is for "
            f"{', '.join(gguf_model_types())}: use to='onnx', which takes every shape"
        )
    return form


def form_for(model: PreTrainedModel) -> GgufForm:
    """Return how llama.cpp names the parts of a model.

    Raises:
        UnsupportedModelError: if it computes something else than a model of this family and config.
    """
    config, name, form = model.config, type(model).__name__, family_form(model)
    refused = {
        f"has {entry}={value!r}": value not in (*values, None)
        for entry, values in form.computed.items()
        for value in [getattr(config, entry, None)]
    }
    if form.embeds:
        refused["does not put out states alone"] = model.base_model is not model
    else:
        refused["does not predict tokens"] = not isinstance(model.get_output_embeddings(), nn.Linear)
    if form.rotations is not None:
        kind = model.base_model.get_submodule(form.rotations).rope_type
        refused[f"has rotary positions of type {kind!r}"] = kind not in form.frequencies
    for what in (each for each, is_so in refused.items() if is_so):
        raise UnsupportedModelError(f"{name} {what}, which is not written for llama.cpp: use to='onnx'")
    return form


def adds(site: OpenLayerSite) -> bool:
    """Return True if a site adds a bias to the residual stream, even with nothing left in it."""
    bias = cast(Any, site.output).bias
    return bias is not None and bool(bias.any())


def is_there(site: OpenSite, block: OpenFeedForward, form: GgufForm) -> bool:
    """Return True if a block computes something. One that norms its sums does, even with nothing left in it."""
    return bool(form.embeds or site.num_heads or block.num_neurons or adds(site) or adds(block))


def check_shape(layers: OpenLayers) -> None:
    """Raise an error if llama.cpp has no such family, or only blocks of the same sizes: for plans with sizes free.

    Raises:
        UnsupportedModelError: naming the shape to plan with.
    """
    form = family_form(layers.model)
    if form.uneven is None:
        raise UnsupportedModelError(
            f"all blocks of the architecture {form.even!r} of llama.cpp have the same sizes, and shape='gguf' plans "
            "sizes for each: use shape='uniform'"
        )
    check_sites(layers)


def check_sites(layers: OpenLayers) -> None:
    """Raise an error if llama.cpp has no such family, or no such heads, or no such sizes beside each other."""
    form = family_form(layers.model)
    for site in layers.with_heads:
        check_site(site, form)
    if form.uneven is None:
        check_even(layers, form)


def check_even(layers: OpenLayers, form: GgufForm) -> None:
    """Raise ModelStateError if blocks have sizes of their own; the message names the first of them."""
    pairs = zip(layers.attention, layers.feed_forwards, strict=True)
    expected: dict[str, int] = {}
    for site, block in (pair for pair in pairs if is_there(*pair, form)):
        for path, what, count in sizes_of(site, block):
            whole = layers.model.config.hidden_size // head_width(site, form)
            wanted = whole if form.fills and what == "heads" else expected.setdefault(what, count)
            if count != wanted or not count:
                raise ModelStateError(
                    f"{path} has {count} {what}, while all blocks of the architecture {form.even!r} of llama.cpp have "
                    f"the same number, here {wanted or 'at least 1'}: {EVEN_ADVICE}"
                )


def sizes_of(site: OpenSite, block: OpenFeedForward) -> Iterator[tuple[str, str, int]]:
    """Yield the path, the name and the number of each size of a block."""
    yield site.path, "heads", site.num_heads
    yield site.path, "key heads", max(site.groups, default=-1) + 1
    yield block.path, "neurons", block.num_neurons


def check_site(site: OpenSite, form: GgufForm) -> None:
    """Raise ModelStateError if llama.cpp has no such heads; the message says which call makes others."""
    width, advice = head_width(site, form), ADVICE if form.uneven else EVEN_ADVICE
    for what, each in (("queries and keys", site.query_key_width), ("values", site.value_width * site.num_heads)):
        if each != width * site.num_heads:
            raise ModelStateError(
                f"{site.path} has {what} of width {each // site.num_heads}, while all heads of llama.cpp have one "
                f"width, here {width}: {advice}"
            )
    if group_size(site.groups) is None:
        raise ModelStateError(
            f"{site.path} has heads with the key heads {site.groups}, while each key head of llama.cpp serves the same "
            f"number of heads: {advice}, or prune all heads of a key head"
        )
    if site.is_swapped:
        raise ModelStateError(f"{site.path} has other projections of queries and keys than llama.cpp: {advice}")


def head_width(site: OpenSite, form: GgufForm) -> int:
    """Return the width that heads of a site have in the original."""
    return getattr(site.module, form.head_width)
