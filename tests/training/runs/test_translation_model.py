"""Language codes, frozen parameters and limits of translation models."""

import re
from argparse import Namespace

import pytest
import torch
import translation_models as tiny
from transformers import AutoModelForSeq2SeqLM, NllbTokenizer

from collab_heads import swap_to_collaborative
from collab_heads.data.batches import Collate
from collab_heads.data.translation import Objective, encode
from collab_heads.errors import ArgumentError
from collab_heads.training.runs.translation_model import check_fits, freeze, freeze_unsaved, set_languages

LANGUAGES = {"mbart": ("de_DE", "en_XX"), "mbart50": ("de_DE", "en_XX"), "m2m_100": ("de", "en")}


@pytest.fixture(params=LANGUAGES)
def kind(request):
    return request.param


@pytest.fixture
def model_and_tokenizer(kind, tmp_path):
    tokenizer = tiny.multilingual(kind, tmp_path)
    more = {"decoder_start_token_id": 2} if kind == "mbart50" else {}
    return tiny.model(kind.removesuffix("50"), size=400, **more), tokenizer


@pytest.mark.slow
def test_language_codes(kind, model_and_tokenizer, tmp_path):
    """Encoded on both sides; the decoder starts as it was trained to; what is saved translates into the language."""
    (model, tokenizer), (source, target) = model_and_tokenizer, LANGUAGES[kind]
    name = "decoder_start_token_id" if kind == "mbart" else "forced_bos_token_id"
    codes = [tokenizer.lang_code_to_id[language] for language in (source, target)]
    assert codes[0] != codes[1]
    set_languages(model, tokenizer, source, target)
    assert getattr(model.generation_config, name) == codes[1]
    corpus = tiny.data(train=3)
    rows = list(encode(corpus, tokenizer, "", 64, 64)["train"])
    for row, target_text in zip(rows, corpus.splits["train"]["target"], strict=True):
        for ids, code in zip((row["input_ids"], row["labels"]), codes, strict=True):
            assert tokenizer.unk_token_id not in ids
            assert (ids[-1] if kind == "mbart" else ids[0]) == code
            assert ids.count(code) == 1
        assert tokenizer.decode(row["labels"], skip_special_tokens=True).strip() == target_text
    batch = Collate(model, model.config.pad_token_id)(rows)
    start = codes[1] if kind == "mbart" else 2
    assert batch["decoder_input_ids"][:, 0].tolist() == [start] * 3
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = Objective()(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 0.1
    model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "saved").eval()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    for net in (model.eval(), loaded):
        found = tokenizer.batch_decode(net.generate(**inputs, max_length=40), skip_special_tokens=True)
        assert [line.strip() for line in found] == corpus.splits["train"]["target"]


@pytest.mark.parametrize("side", (0, 1))
@pytest.mark.parametrize("language", (None, "xx_YY"))
def test_an_unknown_or_missing_language_is_refused(side, language, kind, model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    languages = list(LANGUAGES[kind])
    languages[side] = language
    flag = ("source_lang", "target_lang")[side]
    number = len(tokenizer.lang_code_to_id)
    with pytest.raises(ArgumentError, match=f"--{flag} {language!r} is not one of the model's {number} languages"):
        set_languages(model, tokenizer, *languages)


def test_languages_of_nllb():
    """Its codes are special tokens, not a table."""
    tokenizer, model = NllbTokenizer(), tiny.model("m2m_100", size=400)
    with pytest.raises(ArgumentError, match=r"--target_lang 'en' is not one of the model's 202 languages"):
        set_languages(model, tokenizer, "deu_Latn", "en")
    set_languages(model, tokenizer, "deu_Latn", "fra_Latn")
    source, target = (tokenizer.convert_tokens_to_ids(name) for name in ("deu_Latn", "fra_Latn"))
    assert tokenizer("")["input_ids"][0] == source != target == tokenizer(text_target="")["input_ids"][0]
    assert model.generation_config.forced_bos_token_id == target


def test_other_models_need_no_languages(tmp_path):
    model, tokenizer = tiny.model("marian"), tiny.tokenizer("marian", tmp_path)
    before = model.generation_config.to_dict()
    set_languages(model, tokenizer, "xx", "en")
    set_languages(model, tokenizer, None, None)
    assert model.generation_config.to_dict() == before


def trainable(model) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_only_what_is_named_is_trained():
    model = tiny.model("marian")
    stock = trainable(model)
    freeze(model, [r"encoder\.layers", r"decoder.*fc1\.bias$"])
    wanted = {name for name in stock if "encoder.layers" in name} | {"model.decoder.layers.0.fc1.bias"}
    assert trainable(model) == wanted
    assert 1 < len(wanted) < len(stock)


def test_what_the_model_keeps_frozen_stays_frozen():
    """Marian's sinusoidal positions."""
    model = tiny.model("marian")
    stock = trainable(model)
    assert len(stock) < len(list(model.named_parameters()))
    freeze(model, ["."])
    assert trainable(model) == stock


def test_what_is_not_saved_is_not_trained(tmp_path):
    """A loaded Marian must have the optimizer of a new one, or a run from scratch cannot be gone on with."""
    for family in tiny.CONFIGS:
        model = tiny.model(family)
        before = trainable(model)
        model.save_pretrained(tmp_path / family)
        loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / family)
        freeze_unsaved(loaded)
        freeze_unsaved(model)
        assert trainable(loaded) == trainable(model) == before
        assert trainable(model)


def test_a_checkpoint_says_what_is_frozen():
    """After the swap the pattern would match nothing."""
    model = tiny.model("marian")
    swap_to_collaborative(model)
    frozen = {name for name in trainable(model) if "decoder" in name}
    wanted = trainable(model) - frozen
    freeze(model, [r"q_proj"], frozen)
    assert trainable(model) == wanted


@pytest.mark.parametrize(
    "pattern, message",
    (
        ("encodr", "--trainable_parameters 'encodr' matches no parameter; they are named like 'model."),
        ("*encoder", "--trainable_parameters '*encoder' is not a regular expression: nothing to repeat"),
    ),
)
def test_a_pattern_that_cannot_be_meant_is_refused(pattern, message):
    model = tiny.model("marian")
    before = trainable(model)
    with pytest.raises(ArgumentError, match=re.escape(message)):
        freeze(model, ["encoder", pattern])
    assert trainable(model) == before


def limits(**more) -> Namespace:
    found = {"max_source_length": 64, "max_target_length": 64, "val_max_target_length": None, "word_dropout": 0.0}
    found["word_dropout_with"] = "unknown"
    return Namespace(**{**found, **more})


@pytest.mark.parametrize("flag", ("max_source_length", "max_target_length", "val_max_target_length"))
def test_sentences_longer_than_the_positions_are_refused(flag, tmp_path):
    model, tokenizer = tiny.model("marian"), tiny.tokenizer("marian", tmp_path)
    check_fits(limits(**{flag: 64}), model, tokenizer)
    with pytest.raises(ArgumentError, match=f"--{flag} 65: the model has 64 positions"):
        check_fits(limits(**{flag: 65}), model, tokenizer)
    with pytest.raises(IndexError):  # what it would end in
        model(input_ids=torch.zeros(1, 65, dtype=torch.long), decoder_input_ids=torch.zeros(1, 1, dtype=torch.long))
    check_fits(limits(**{flag: 65}), tiny.model("t5"), tokenizer)


def test_word_dropout_needs_an_unknown_piece(tmp_path):
    tokenizer = tiny.tokenizer("t5", tmp_path)
    check_fits(limits(word_dropout=0.1), tiny.model("t5"), tokenizer)
    tokenizer.unk_token = None
    with pytest.raises(ArgumentError, match="no token for unknown words"):
        check_fits(limits(word_dropout=0.1), tiny.model("t5"), tokenizer)
    check_fits(limits(), tiny.model("t5"), tokenizer)
    check_fits(limits(word_dropout=0.1, word_dropout_with="random"), tiny.model("t5"), tokenizer)
