"""MPNet as most of its users have it: inside a sentence-transformers model that pools over the tokens of a sentence."""

import inspect
import json
from contextlib import AbstractContextManager

import pytest
import torch
from later import Later
from model_sizes import VOCABULARY
from public_names import functions
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers_made import fast
from transformers import PreTrainedTokenizerFast

import collab_heads
from collab_heads.errors import UnsupportedModelError
from families import FAMILIES

sentence_transformers = Later("sentence_transformers", optional=True)
LOSSLESS = 1e-5  # of embeddings of length 1 in float32; seen: 1e-7
SENTENCES = ["w5 w9 w20", "w7", "w31 w8 w15 w60 w12 w3 w44", "w20 w9 w5 w50"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model and a tokenizer of words w0 to w60."""
    path = tmp_path_factory.mktemp("mpnet")
    FAMILIES["mpnet"].build().mpnet.save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w1", unk_token="w3")
    tokenizer.save_pretrained(path)
    return path


def embedder(path):
    """Of a plain model: mean pooling comes with it."""
    return sentence_transformers.SentenceTransformer(str(path), device="cpu")


def embeddings(model, batch_size=4):
    return model.encode(SENTENCES, batch_size=batch_size, convert_to_tensor=True, show_progress_bar=False)


@pytest.mark.parametrize("mixing", ("shared", "per_head"))
def test_sentences_embed_as_before(folder, mixing):
    model = embedder(folder)
    before = embeddings(model)
    assert (before[0] - before[2]).abs().max() > 1e-2
    collab_heads.swap_to_collaborative(model[0].auto_model, kind=mixing)
    torch.testing.assert_close(embeddings(model), before, rtol=0, atol=LOSSLESS)
    torch.testing.assert_close(embeddings(model, batch_size=1), before, rtol=0, atol=LOSSLESS)  # without padding


def test_a_compressed_one_is_saved_and_loads_again(folder, tmp_path):
    model = embedder(folder)
    before, small = embeddings(model), model[0].auto_model
    tokens = model[0].tokenizer(SENTENCES * 4, padding=True, return_tensors="pt")
    batches = [{name: tokens[name][i : i + 8] for name in ("input_ids", "attention_mask")} for i in (0, 8)]
    report = collab_heads.compress(small, batches, 0.6, refine_steps=5)
    assert report.costs["parameters"].after <= 0.6 * report.costs["parameters"].before
    after = embeddings(model)
    assert 1e-4 < (after - before).abs().max() < 0.5
    model.save(str(tmp_path))
    again = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu")
    assert again[0].auto_model.config.collab_heads == small.config.collab_heads
    torch.testing.assert_close(embeddings(again), after, rtol=0, atol=LOSSLESS)


BATCH = {"input_ids": torch.tensor([[5, 6]])}
GIVEN = {
    "batches": [BATCH],
    "scores": {"encoder.layer.0.attention.attn": torch.ones(4)},
    "evaluate": lambda model: 0.0,
    "folder": "heads",
    "heads": {},
    "tokenizer": fast("WordPiece"),
}


def functions_of_a_model():
    for name, function in functions().items():
        if next(iter(inspect.signature(function).parameters), None) == "model":
            yield pytest.param(function, id=name)


@pytest.mark.parametrize("function", functions_of_a_model())
def test_every_function_says_what_to_pass(function, folder):
    """The one expression that works; also where other arguments make no sense."""
    _, *others = inspect.signature(function).parameters.values()
    given = {**GIVEN, "original": embedder(folder)[0].auto_model}
    needed = {each.name: given.get(each.name, []) for each in others if each.default is each.empty}
    with pytest.raises(
        UnsupportedModelError, match=r"inside a SentenceTransformer: pass model\[0\]\.auto_model, and go on"
    ):
        result = function(embedder(folder), **needed)
        if isinstance(result, AbstractContextManager):
            with result:
                pass


def test_other_wrappers_say_where_the_model_is(folder):
    model = embedder(folder)
    with pytest.raises(UnsupportedModelError, match=r"got Transformer; there is one inside: pass model.get_submodule"):
        collab_heads.swap_to_collaborative(model[0])
    cross = sentence_transformers.CrossEncoder(str(folder), device="cpu", num_labels=1)
    with pytest.raises(UnsupportedModelError, match=r"inside a CrossEncoder: pass model\.model, and go on"):
        collab_heads.compress(cross, [], 0.5)
    before = cross.predict([("w5 w9", "w7")])
    collab_heads.swap_to_collaborative(cross.model)
    assert cross.predict([("w5 w9", "w7")]) == pytest.approx(before, abs=LOSSLESS)


def test_files_modules_and_card_are_as_without_a_change(folder, tmp_path):
    """What is beside the transformer is not ours; and a card that was edited stays."""
    plain, changed = embedder(folder), embedder(folder)
    collab_heads.prune_heads(changed[0].auto_model, heads={"enc-self": [[0], [1]]})
    changed.model_card_data.add_tags("chemistry")
    for name, model in (("plain", plain), ("changed", changed)):
        model.save_pretrained(str(tmp_path / name), model_name=name)
    listed = [
        sorted(str(path.relative_to(tmp_path / name)) for path in (tmp_path / name).rglob("*"))
        for name in ("plain", "changed")
    ]
    assert sorted([*listed[0], "modeling_collab_heads.py"]) == listed[1]  # what `trust_remote_code` runs
    modules = [json.loads((tmp_path / name / "modules.json").read_text()) for name in ("plain", "changed")]
    assert modules[0] == modules[1]
    card = (tmp_path / "changed" / "README.md").read_text()
    assert "- sentence-transformers" in card and "- chemistry" in card
    again = sentence_transformers.SentenceTransformer(str(tmp_path / "changed"), device="cpu")
    torch.testing.assert_close(embeddings(again), embeddings(changed), rtol=0, atol=LOSSLESS)
    again.save_pretrained(str(tmp_path / "again"))
    assert "- chemistry" in (tmp_path / "again" / "README.md").read_text()


@pytest.mark.slow
def test_a_cross_encoder_runs_an_exported_classifier(folder, tmp_path):
    pytest.importorskip("transformers.exporters.runners", reason="exports of graphs need transformers 5.23")
    torch.manual_seed(0)
    ranker = sentence_transformers.CrossEncoder(str(folder), device="cpu", num_labels=1)
    model, pairs = ranker.model.eval(), list(zip(SENTENCES, reversed(SENTENCES), strict=True))
    before = ranker.predict(pairs, show_progress_bar=False)
    collab_heads.swap_to_collaborative(model, dim_shared_query_key=16)
    expected = ranker.predict(pairs, show_progress_bar=False)
    assert abs(before - expected).max() > 1e-4
    collab_heads.export(model, tmp_path / "served", batches=[ranker.preprocess(pairs)])
    ranker[0].model = collab_heads.load_exported(tmp_path / "served", threads=1)
    assert ranker.predict(pairs, show_progress_bar=False) == pytest.approx(expected, abs=LOSSLESS)
