"""Exports for CTranslate2 translate as PyTorch does, in `evaluate`; a folder of others is checked."""

import copy
import json
import shutil

import pytest
import torch
import translation_models
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, BertConfig, BertModel

from collab_heads import evaluate, export
from collab_heads.errors import DataError, ModelStateError, UnsupportedModelError
from collab_heads.serving.converted import is_converted
from collab_heads.serving.served_translator import ServedTranslator

pytest.importorskip("ctranslate2")


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
    config.max_length = 200
    with pytest.raises(ModelStateError, match=r"CTranslate2 fails on these texts: No position .*: cut them"):
        translator.generate(config, input_ids=torch.full((1, 80), 5), attention_mask=torch.ones(1, 80))


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


def test_a_folder_is_checked_before_the_engine_reads_it(original, served, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(original)
    assert is_converted(served) and not is_converted(original)
    for name, content, said in (
        ("model.bin", b"no model", "model.bin"),
        ("config.json", b'{"max_position_embeddings": -1}', "config.json"),
        ("generation_config.json", b"{", "generation_config.json"),
        ("generation_config.json", b'{"num_beams": 1000000000}', "generation_config.json .*num_beams is 1000000000"),
        ("generation_config.json", b'{"num_beams": "many"}', "generation_config.json .*num_beams is 'many'"),
        ("generation_config.json", b'{"length_penalty": "x"}', "generation_config.json .*length_penalty is 'x'"),
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
