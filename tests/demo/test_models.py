"""The model of the notebooks on translation: trained once, from the same sentences to the same weights."""

import pytest
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from collab_heads.demo import corpus, translation_model
from collab_heads.errors import OutputError

pytest.importorskip("sentencepiece")


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_it_is_trained_once_and_repeatable(tmp_path):
    folder = translation_model(tmp_path / "one", steps=2)
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    pairs = [(folder / name).read_text(encoding="utf-8").splitlines() for name in ("pairs.en", "pairs.xx")]
    assert pairs == list(corpus(64, 1)) and len(tokenizer) == model.config.vocab_size
    assert tokenizer.decode(tokenizer(pairs[1][0])["input_ids"], skip_special_tokens=True) == pairs[1][0]
    before = weights(folder)
    assert (
        weights(translation_model(folder, steps=3)) == before == weights(translation_model(tmp_path / "two", steps=2))
    )
    assert weights(translation_model(tmp_path / "three", steps=3)) != before


def test_another_folder_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(OutputError, match="is not empty and holds no model"):
        translation_model(tmp_path, steps=1)
    assert (tmp_path / "mine").read_text() == "mine"
