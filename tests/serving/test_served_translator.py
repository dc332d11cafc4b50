"""Exports for CTranslate2 translate as PyTorch does, in `evaluate`; a folder of others is checked."""

import copy
import json
import shutil

import pytest
import torch
import translation_models
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, BertConfig, BertModel

from collab_heads import evaluate, export, load_exported
from collab_heads.errors import ArgumentError, DataError, ModelStateError, UnsupportedModelError
from collab_heads.saving.source_files import files_in
from collab_heads.serving.converted import is_converted
from collab_heads.serving.served_translator import ServedTranslator

pytest.importorskip("ctranslate2")
ENGINE_NOISE = 1e-5  # of states in another engine, float32; seen: 4e-7


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """The folder of a tiny Marian, which searches with beams."""
    folder = tmp_path_factory.mktemp("original")
    translation_models.tokenizer("marian", folder).save_pretrained(folder)
    model = translation_models.model("marian")
    model.generation_config.num_beams = 2
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def served(original, tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("new") / "served", AutoTokenizer.from_pretrained(original)
    export(AutoModelForSeq2SeqLM.from_pretrained(original), folder, "ctranslate2", tokenizer=tokenizer)
    return folder


@torch.no_grad()
def test_it_searches_as_pytorch_does(original, served):
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(original).eval(), AutoTokenizer.from_pretrained(original)
    translator = ServedTranslator(served, tokenizer)
    assert translator.generation_config.num_beams == 2
    batch, found = tokenizer(["w1 w2 w3", "w4 w5 w6 w7 w1"], padding=True, return_tensors="pt"), []
    for changes in ({"num_beams": 1}, {"num_beams": 3}, {"no_repeat_ngram_size": 2}, {"max_length": 9}):
        config = copy.deepcopy(model.generation_config)
        config.update(**{"max_length": 16, "num_beams": 1} | changes)
        expected = tokenizer.batch_decode(model.generate(**batch, generation_config=config), skip_special_tokens=True)
        ids = translator.generate(**batch, generation_config=config)
        assert tokenizer.batch_decode(ids, skip_special_tokens=True) == expected, changes
        found.append(tuple(expected))
    assert len(set(found)) == 4
    config = translator.generation_config
    for settings in ({}, {"max_new_tokens": 3}, {"num_beams": 3, "max_new_tokens": 12}):
        expected = tokenizer.batch_decode(model.generate(**batch, **settings), skip_special_tokens=True)
        assert tokenizer.batch_decode(translator.generate(**batch, **settings), skip_special_tokens=True) == expected
        assert torch.equal(
            translator.generate(batch["input_ids"], **settings), translator.generate(**batch, **settings)
        )
    assert config.num_beams == 2 and config.max_new_tokens is None
    for wrong in (batch["input_ids"][:0], torch.cat([batch["input_ids"]] * 2)):
        with pytest.raises(ArgumentError, match="a text of no tokens"):
            translator.generate(input_ids=wrong, attention_mask=(torch.arange(len(wrong)) < 3)[:, None] * (wrong >= 0))
    config = copy.deepcopy(model.generation_config)
    config.max_length = 200
    with pytest.raises(ModelStateError, match=r"CTranslate2 fails on these texts: No position .*: cut them"):
        translator.generate(torch.full((1, 80), 5), config)


@pytest.mark.slow
def test_it_is_scored_beside_its_original(original, served):
    pairs = translation_models.pairs(6, 1)
    data = [{"source": a, "target": b} for a, b in zip(*pairs.values(), strict=True)]
    after = evaluate(original, served, task="translation", data=data).models[1]
    assert after.scores.keys() == {"BLEU", "chrF"} and after.flips < 0.5
    assert after.megabytes == pytest.approx((served / "model.bin").stat().st_size / 1e6)
    assert ServedTranslator(served, AutoTokenizer.from_pretrained(original)).config.max_position_embeddings == 64
    long = [{"source": " ".join(row["source"] for row in data), "target": "w1"}] * 2  # more tokens than positions
    assert evaluate(original, served, task="translation", data=long).models[1].flips < 1
    with pytest.raises(UnsupportedModelError, match="ServedTranslator is no language model"):
        evaluate(served, served, task="perplexity", data=[{"text": "w1 w2"}])


def test_a_tokenizer_is_in_the_folder_itself(served, tmp_path):
    folder = shutil.copytree(served, tmp_path / "linked")
    shutil.move(folder / "vocab.json", tmp_path / "vocab.json")
    (folder / "vocab.json").symlink_to(tmp_path / "vocab.json")
    with pytest.raises(DataError, match=r"vocab\.json leads out of the folder"):
        load_exported(folder)


def test_a_folder_is_checked_before_the_engine_reads_it(original, served, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(original)
    assert is_converted(served) and not is_converted(original)
    for name, content, said in (
        ("model.bin", b"no model", "model.bin"),
        ("config.json", b'{"max_position_embeddings": -1}', "config.json"),
        ("generation_config.json", b"{", "generation_config.json"),
        ("generation_config.json", b'{"num_beams": 1000000000}', "generation_config.json .*num_beams is 1000000000"),
        ("generation_config.json", b'{"forced_bos_token_id": 99999}', "generation_config.json .*forced_bos_token_id"),
    ):
        damaged = shutil.copytree(served, tmp_path / f"{len(list(tmp_path.iterdir()))}")
        (damaged / name).write_bytes(content)
        with pytest.raises(DataError, match=name):
            ServedTranslator(damaged, tokenizer)
        (damaged / "manifest.json").unlink()  # as of a folder of other origin
        with pytest.raises((DataError, UnsupportedModelError), match=said if "json" in name else "no translation"):
            ServedTranslator(damaged, tokenizer)
    model = BertModel(BertConfig(vocab_size=40, hidden_size=32, num_attention_heads=4, num_hidden_layers=1))
    export(model, tmp_path / "encoder", "ctranslate2")
    assert "add_source_bos" not in json.loads((tmp_path / "encoder/config.json").read_text())
    with pytest.raises(UnsupportedModelError, match="encoder is no translation model of CTranslate2"):
        ServedTranslator(tmp_path / "encoder", tokenizer)


def test_a_call_without_texts_is_an_error(original, served):
    translator = ServedTranslator(served, AutoTokenizer.from_pretrained(original))
    with pytest.raises(ArgumentError, match="pass the ids of the texts, as inputs or as input_ids="):
        translator.generate(num_beams=2)


@pytest.mark.slow
def test_load_exported_takes_the_tokenizer_of_the_folder(original, served, tmp_path):
    tokenizer, translator = AutoTokenizer.from_pretrained(original), load_exported(served, threads=2)
    batch, config = tokenizer(["w1 w2 w3"], return_tensors="pt"), copy.deepcopy(translator.generation_config)
    config.max_length = 16
    expected = ServedTranslator(served, tokenizer).generate(**batch, generation_config=config)
    torch.testing.assert_close(translator.generate(**batch, generation_config=config), expected)
    with pytest.raises(ModelStateError, match="puts out no sentence_embedding"):
        translator.encode(["w1"])
    bare = shutil.copytree(served, tmp_path / "bare")
    for file in files_in(bare):
        file.unlink()
    with pytest.raises(ModelStateError, match="has no tokenizer: export with tokenizer="):
        load_exported(bare, check=False)


def test_an_encoder_is_checked_and_a_decoder_refused(tmp_path):
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
    export(model := BertModel(BertConfig(**sizes)).eval(), folder := tmp_path / "encoder", "ctranslate2")
    encoder, ids = load_exported(folder), torch.tensor([[5, 6, 7, 8], [9, 1, 0, 0], [0, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
    types = torch.tensor([[0, 0, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]])
    states = encoder(ids, mask, types).last_hidden_state
    with torch.no_grad():
        expected = model(ids[:2], mask[:2], types[:2]).last_hidden_state
    torch.testing.assert_close(states[mask == 1], expected[mask[:2] == 1], rtol=0, atol=ENGINE_NOISE)
    assert not states[mask == 0].any() and states.shape == (3, 4, 32) and encoder(ids[2:], mask[2:]).keys()
    with pytest.raises(ModelStateError, match="puts out no sentence_embedding"):
        encoder.encode(["w1"])
    with pytest.raises(ModelStateError, match=r"CTranslate2 fails on these texts: .*: cut them"):
        encoder(torch.full((1, 600), 5))
    for bad, said in (([[5, 40]], "hold 40: the model has 40 tokens"), ([[-1, 5]], "hold -1")):
        with pytest.raises(ArgumentError, match=f"input_ids {said}"):
            encoder(torch.tensor(bad))
    with pytest.raises(ArgumentError, match="token_type_ids hold 2: the model has 2 types of tokens"):
        encoder(ids, mask, types * 2)
    (folder / "model.bin").write_bytes((folder / "model.bin").read_bytes()[:-1])
    with pytest.raises(DataError, match=r"model\.bin"):
        load_exported(folder)
    with pytest.raises(UnsupportedModelError, match=r"is no encoder of CTranslate2 .*: load it with ctr"):
        load_exported(folder, check=False)
