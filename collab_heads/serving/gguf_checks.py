"""Check that llama.cpp can take a family, its heads and its tokenizer, before a plan and before a file is written."""

import json
from collections.abc import Mapping
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from collab_heads.contract.model_forms import GgufForm
from collab_heads.contract.registry import gguf_model_types, known_adapter
from collab_heads.errors import ArgumentError, ModelStateError, UnsupportedModelError
from collab_heads.model.open_layers import OpenLayers, OpenSite
from collab_heads.sites.site import group_size

ADVICE = "compress the original with shape='gguf'"
IDS_ONLY = "Pass tokenizer=None for a file that takes ids only"
NORMALIZED = "NFC"  # which llama.cpp leaves out: most texts are in that form


def family_form(model: PreTrainedModel) -> GgufForm:
    """Return how llama.cpp names the parts of models of a family.

    Raises:
        UnsupportedModelError: if it has no such family.
    """
    form = getattr(known_adapter(model.config), "gguf", None)
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
    activation, rotations = getattr(config, form.activation[0]), model.base_model.get_submodule(form.rotations)
    refused = {
        "does not predict tokens": not isinstance(model.get_output_embeddings(), nn.Linear),
        f"has the activation {activation!r}": activation != form.activation[1],
        f"has rotary positions of type {rotations.rope_type!r}": rotations.rope_type not in form.frequencies,
    }
    for what in (each for each, is_so in refused.items() if is_so):
        raise UnsupportedModelError(f"{name} {what}, which is not written for llama.cpp: use to='onnx'")
    return form


def check_sites(layers: OpenLayers) -> None:
    """Raise an error if llama.cpp has no such family, or no such heads."""
    family_form(layers.model)
    for site in layers.with_heads:
        check_site(site)


def check_site(site: OpenSite) -> None:
    """Raise ModelStateError if llama.cpp has no such heads; the message says which call makes others."""
    width = head_width(site)
    for what, each in (("queries and keys", site.query_key_width), ("values", site.value_width * site.num_heads)):
        if each != width * site.num_heads:
            raise ModelStateError(
                f"{site.path} has {what} of width {each // site.num_heads}, while all heads of llama.cpp have one "
                f"width, here {width}: {ADVICE}"
            )
    if group_size(site.groups) is None:
        raise ModelStateError(
            f"{site.path} has heads with the key heads {site.groups}, while each key head of llama.cpp serves the same "
            f"number of heads: {ADVICE}, or prune all heads of a key head"
        )


def head_width(site: OpenSite) -> int:
    """Return the width that heads of a site have in the original."""
    return getattr(site.module, cast(tuple[str, str], site.adapter.head_width)[1])


def check_tokenizer(tokenizer: Any, form: GgufForm, size: int) -> None:
    """Raise an error if llama.cpp cuts texts into other tokens than a tokenizer, or a model has fewer (`size`)."""
    name, backend = type(tokenizer).__name__, getattr(tokenizer, "backend_tokenizer", None)
    parts = {"model": {"type": None}} if backend is None else json.loads(backend.to_str())
    model, normalizer = parts["model"], (parts.get("normalizer") or {}).get("type")
    is_plain = not any(model.get(each) for each in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"))
    is_plain &= normalizer in (None, NORMALIZED)
    cut = cut_as(parts.get("pre_tokenizer"), form)
    is_plain &= bool(model.get("ignore_merges")) == (cut in form.whole_words)
    if model["type"] != "BPE" or not is_plain or cut is None:
        raise UnsupportedModelError(
            f"{name} is none that is written for llama.cpp: these are byte-level BPE whose words are cut as it calls "
            f"{', '.join(form.pre_tokenizers)}. {IDS_ONLY}"
        )
    count = max(tokenizer.get_vocab().values(), default=0) + 1
    if count > size:
        raise ArgumentError(f"{name} has {count} tokens, the model {size}: pass the tokenizer of the model")


def cut_as(pre_tokenizer: Mapping[str, Any] | None, form: GgufForm) -> str | None:
    """Return how llama.cpp calls the steps in which a tokenizer cuts texts into words; None where it has none such."""
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer or {}])
    for name, known in form.pre_tokenizers.items():
        if len(known) == len(steps) and all(a.items() <= b.items() for a, b in zip(known, steps, strict=True)):
            return name
    return None
