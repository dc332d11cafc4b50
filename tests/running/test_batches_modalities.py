"""What a model reads, and batches that hold something else: refused, with a way out, and the model as it was."""

import copy

import pytest
import torch
from model_inputs import batch, image_batch, spectrum_batch, wave_batch
from unchanged import refused

from collab_heads import analyze_heads, compress, distill, get_adapter, prune_heads, swap_to_collaborative
from collab_heads.analysis import head_importance
from collab_heads.errors import ArgumentError, CalibrationError
from collab_heads.running.batches import modalities, reads_texts, reads_texts_alone
from families import FAMILIES

READS = {
    "bert": {"texts": "input_ids"},
    "marian": {"texts": "input_ids"},
    "vit": {"images": "pixel_values"},
    "clip": {"texts": "input_ids", "images": "pixel_values"},
    "clip-text": {"texts": "input_ids"},
    "siglip-vision": {"images": "pixel_values"},
    "whisper": {"audio": "input_features"},
    "wav2vec2": {"audio": "input_values"},
}


@pytest.mark.parametrize("name", READS)
def test_what_models_read(name):
    model = FAMILIES[name].build()
    assert modalities(model) == READS[name]
    assert reads_texts(model) == ("texts" in READS[name])
    assert reads_texts_alone(model) == (list(READS[name]) == ["texts"])


TEXTS = {"input_ids": batch()["input_ids"], "attention_mask": batch()["attention_mask"]}
# The model, a batch that it cannot take, and what the error says of both.
WRONG = {
    "images for texts": ("bert", image_batch(), ("texts (input_ids)", "images (pixel_values)", "its tokenizer")),
    "audio for texts": ("marian", spectrum_batch(), ("texts (input_ids)", "audio (input_features)")),
    "texts for images": ("vit", TEXTS, ("images (pixel_values)", "texts (input_ids)", "its image processor")),
    "texts for audio": ("whisper", TEXTS, ("audio (input_features)", "texts (input_ids)", "its feature extractor")),
    "images for audio": ("wav2vec2", image_batch(), ("audio (input_values)", "images (pixel_values)")),
    "texts without images": (
        "clip",
        TEXTS,
        ("texts (input_ids) and images (pixel_values)", "holds texts (input_ids):"),
    ),
    "images without texts": ("siglip", image_batch(), ("its tokenizer and its image processor",)),
    "audio beside texts": ("bert", TEXTS | wave_batch(), ("texts (input_ids) and audio (input_values)",)),
}


def removal(model):
    return {site.path: [0] for site in get_adapter(model).sites(model)}


CALLS = {
    "swap": lambda model, batches: swap_to_collaborative(model, dim_shared_query_key=16, batches=batches),
    "compress": lambda model, batches: compress(model, batches),
    "prune": lambda model, batches: prune_heads(model, heads=removal(model), batches=batches),
    "importance": lambda model, batches: head_importance(model, batches),
    "distill": lambda model, batches: distill(model, copy.deepcopy(model), batches, steps=1),
    "statistics": lambda model, batches: analyze_heads(model, batches, parts="statistics"),
    "relevance": lambda model, batches: analyze_heads(model, batches, parts="relevance"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("what", WRONG)
def test_batches_of_another_kind_are_refused(what, call):
    name, wrong, fragments = WRONG[what]
    model = FAMILIES[name].build()
    if call == "distill":  # which asks for a changed model first
        prune_heads(model, heads=removal(model))
    with refused(model, CalibrationError, type(model).__name__, "batch 0", *fragments):
        CALLS[call](model, [wrong])


@pytest.mark.parametrize("name", ("vit", "whisper", "wav2vec2"))
def test_models_without_tokens_have_no_token_counts(name):
    model = FAMILIES[name].build()
    kind = next(iter(READS[name]))
    with refused(model, ArgumentError, "token_counts", f"reads {kind}", "leave it out"):
        analyze_heads(model, [FAMILIES[name].inputs()], parts="roles", token_counts=torch.ones(61))


@pytest.mark.parametrize("name", ("vit", "wav2vec2", "clip", "siglip"))
def test_a_treebank_is_for_texts_alone(name):
    model = FAMILIES[name].build()
    with refused(model, ArgumentError, "treebank", f"reads {' and '.join(READS.get(name, READS['clip']))}"):
        analyze_heads(model, [FAMILIES[name].inputs()], parts="roles", treebank=[])
