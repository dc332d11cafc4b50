"""Stored weights are tied to their vocabulary: the tokenizer of another is replaced, refused or warned of."""

import json
import logging

import pytest
import torch
from killed_saves import stopped_at
from known_heads import word_pieces
from model_runs import aligned
from tokenizers_made import FEW, TEXTS, fast, marian, pairs
from transformers import AutoTokenizer, BertModel, MarianConfig, MarianMTModel
from trimming import bert, states

from collab_heads import analyze_heads, export, inspect, prune_heads, trim_vocabulary
from collab_heads.analysis import head_roles
from collab_heads.errors import ArgumentError, ConfigError
from collab_heads.saving.loading import load_or_explain
from collab_heads.saving.source_files import stored_digest
from collab_heads.saving.vocabularies import check_words, digest, is_same, read_vocabularies, vocabularies_of

HEADS = {"enc-self": [[0]]}
TOKENS = len(fast("WordPiece"))
VOCABULARY = {"a": 0, "b": 1, "c": 2}


@pytest.fixture
def original(tmp_path):
    """A stock model with its tokenizer."""
    tokenizer = fast("WordPiece")
    bert(tokenizer).save_pretrained(tmp_path / "original")
    tokenizer.save_pretrained(tmp_path / "original")
    return tmp_path / "original"


def pruned(folder):
    model = BertModel.from_pretrained(folder)
    prune_heads(model, heads=HEADS)
    return model


def trimmed(folder, texts=FEW, **more):
    """A model of the folder with fewer tokens, and its tokenizer."""
    model, tokenizer = BertModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    return model, trim_vocabulary(model, tokenizer, texts, **more)[0]


def save_trimmed(original, folder, change=True):
    model, tokenizer = trimmed(original)
    if change:
        prune_heads(model, heads=HEADS)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def warnings(caplog):
    ours = (record for record in caplog.records if record.name.startswith("collab_heads"))
    return [record.getMessage() for record in ours if record.levelno >= logging.WARNING]


def test_a_digest_allows_more_tokens_behind_and_no_other_change():
    said = digest([VOCABULARY])
    assert said.startswith("3:") and is_same(said, [VOCABULARY]) and is_same(said, [{**VOCABULARY, "d": 3}])
    others = {"a": 0, "b": 1}, {**VOCABULARY, "d": 1}, {"a": 0, "b": 2, "c": 1}, {"A": 0, "b": 1, "c": 2}
    assert not any(is_same(said, [other]) for other in others)
    assert not is_same(said, [VOCABULARY, VOCABULARY]) and is_same(digest([VOCABULARY] * 2), [VOCABULARY] * 2)
    for damaged in (None, 3, "3", said[:-1], said.replace("3:", "2:"), f"99999999999999999999{said}", [said]):
        assert not is_same(damaged, [VOCABULARY])


def test_files_of_every_form_give_what_the_tokenizer_has(tmp_path):
    made = {name: fast(name) for name in ("WordPiece", "byte-level BPE", "Unigram")}
    made |= {"marian": marian(tmp_path / "m1"), "separate": marian(tmp_path / "m2", separate=True)}
    for name, tokenizer in made.items():
        if hasattr(tokenizer, "backend_tokenizer"):
            tokenizer.add_tokens(["zzz"])
        tokenizer.save_pretrained(tmp_path / name)
        assert is_same(digest(vocabularies_of(tokenizer)), read_vocabularies(tmp_path / name))
    old = tmp_path / "old"
    old.mkdir()
    assert read_vocabularies(old) is None
    (old / "vocab.txt").write_text("a\nb\nc\n")
    (old / "added_tokens.json").write_text('{"d": 3}')
    (old / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"4": {"content": "e"}}}')
    assert read_vocabularies(old) == [{**VOCABULARY, "d": 3, "e": 4}]
    (old / "vocab.json").write_text('{"x": 0}')
    assert read_vocabularies(old) == [{"x": 0, "d": 3, "e": 4}]
    for damaged in ("{", "[]", '{"model": {"vocab": {"a": "b"}}}', '{"model": {"vocab": [3]}}', "[" * 100_000):
        (old / "tokenizer.json").write_text(damaged)
        assert read_vocabularies(old) is None


@pytest.mark.parametrize("is_changed", [True, False], ids=["changed", "stock"])
def test_a_model_saved_over_a_trimmed_one_brings_its_tokenizer(original, tmp_path, is_changed, caplog):
    save_trimmed(original, tmp_path / "out", is_changed)
    (tmp_path / "out" / "special_tokens_map.json").write_text("{}")  # would be read with the new one
    model = pruned(original)
    model.save_pretrained(tmp_path / "out")
    loaded, tokenizer = BertModel.from_pretrained(tmp_path / "out"), AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(original).get_vocab()
    assert torch.equal(*(states(aligned(each.eval()), tokenizer, FEW) for each in (loaded, model)))
    assert not (tmp_path / "out" / "special_tokens_map.json").exists() and not warnings(caplog)


@pytest.mark.slow
def test_a_save_that_dies_leaves_no_model_with_the_tokenizer_of_another(original, tmp_path):
    small, model = tmp_path / "out", pruned(original)
    tokenizer, deaths = AutoTokenizer.from_pretrained(original), 0
    expected = states(aligned(model.eval()), tokenizer, FEW)
    for number in range(500):
        before, old = save_trimmed(original, small) if number == 0 or found == "new" else (before, old)  # noqa: F821
        if not stopped_at(number, lambda: model.save_pretrained(small)):
            break
        deaths += 1
        try:
            loaded = aligned(BertModel.from_pretrained(small).eval())
        except (ConfigError, OSError, ValueError):
            found = "none"
            save_trimmed(original, small)
            continue
        theirs = AutoTokenizer.from_pretrained(small)
        found = "new" if len(theirs) == len(tokenizer) else "old"
        right = expected if found == "new" else states(aligned(before.eval()), old, FEW)
        assert torch.equal(states(loaded, theirs, FEW), right)
    assert deaths > 20


def test_a_trimmed_model_does_not_load_beside_another_tokenizer(original, tmp_path, caplog):
    model, tokenizer = trimmed(original)
    AutoTokenizer.from_pretrained(original).save_pretrained(tmp_path / "out")
    model.save_pretrained(tmp_path / "out")  # here the process may be killed
    assert "does not load" in warnings(caplog)[0] and f"{len(tokenizer)} tokens" in warnings(caplog)[0]
    message = rf"in .*out \({TOKENS} tokens\) is not that .* to {len(tokenizer)} tokens.* that trim_vocabulary returned"
    with pytest.raises(ConfigError, match=message):
        BertModel.from_pretrained(tmp_path / "out")
    with pytest.raises(ConfigError, match="is not that of the model"):
        inspect(tmp_path / "out")
    tokenizer.save_pretrained(tmp_path / "out")
    BertModel.from_pretrained(tmp_path / "out")
    inspect(tmp_path / "out")
    other = trimmed(original, FEW[:5], keep=len(tokenizer))[1]  # as many tokens, others
    assert len(other) == len(tokenizer)
    other.save_pretrained(tmp_path / "out")
    with pytest.raises(ConfigError, match="is not that of the model"):
        BertModel.from_pretrained(tmp_path / "out")
    tokenizer.save_pretrained(tmp_path / "out")
    tokenizer.add_tokens(["zzz"])  # as users do
    tokenizer.save_pretrained(tmp_path / "out")
    loaded = BertModel.from_pretrained(tmp_path / "out")
    loaded.resize_token_embeddings(len(tokenizer))
    loaded.save_pretrained(tmp_path / "out")
    BertModel.from_pretrained(tmp_path / "out")
    assert len(warnings(caplog)) == 1


def test_a_tokenizer_saved_first_is_left_alone(original, tmp_path, caplog):
    model, tokenizer = trimmed(original)
    prune_heads(model, heads=HEADS)
    tokenizer.save_pretrained(tmp_path / "out")
    with pytest.raises(OSError):
        BertModel.from_pretrained(tmp_path / "out")
    model.save_pretrained(tmp_path / "out")
    again = BertModel.from_pretrained(tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() == tokenizer.get_vocab()
    again.save_pretrained(tmp_path / "again")  # its source has the right one
    assert AutoTokenizer.from_pretrained(tmp_path / "again").get_vocab() == tokenizer.get_vocab()
    assert not warnings(caplog)


def test_the_tokenizer_of_a_trimmed_model_saved_beside_a_whole_one_is_warned_of(original, tmp_path, caplog):
    pruned(original).save_pretrained(tmp_path / "out")
    assert is_same(stored_digest(tmp_path / "out"), read_vocabularies(original)) and not warnings(caplog)
    trimmed(original)[1].save_pretrained(tmp_path / "out")  # here the process may be killed
    loaded = BertModel.from_pretrained(tmp_path / "out")
    assert "is not the one that the model was loaded with" in warnings(caplog)[0]
    loaded.save_pretrained(tmp_path / "second")  # and it does not spread
    assert read_vocabularies(tmp_path / "second") is None
    AutoTokenizer.from_pretrained(original).save_pretrained(tmp_path / "out")
    caplog.clear()
    BertModel.from_pretrained(tmp_path / "out")
    assert not warnings(caplog)


def test_a_tokenizer_that_nobody_knows_of_stays_with_a_warning(original, tmp_path, caplog):
    out, model, others = tmp_path / "out", pruned(original), word_pieces()
    others.add_tokens([f"word{number}" for number in range(TOKENS - len(others))])  # as many as rows
    others.save_pretrained(out)
    model.save_pretrained(out)
    assert f"is not that of the model which was saved there ({TOKENS} tokens)" in warnings(caplog)[0]
    assert AutoTokenizer.from_pretrained(out).get_vocab() == others.get_vocab()
    caplog.clear()
    model.config._name_or_path = ""  # from nowhere: nothing is known
    model.save_pretrained(out)
    BertModel.from_pretrained(out)
    assert not warnings(caplog) and stored_digest(out) is None


def test_stock_models_are_neither_marked_nor_checked(original, tmp_path, caplog):
    model = BertModel.from_pretrained(original)
    word_pieces().save_pretrained(tmp_path / "out")
    model.save_pretrained(tmp_path / "out")
    BertModel.from_pretrained(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (original / "model.safetensors").read_bytes()
    assert (tmp_path / "out" / "config.json").read_bytes() == (original / "config.json").read_bytes()
    assert not warnings(caplog) and len(AutoTokenizer.from_pretrained(tmp_path / "out")) == len(word_pieces())


def test_two_vocabularies_are_tied_together(tmp_path):
    tokenizer = marian(tmp_path / "tokenizer", separate=True)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": 0, "decoder_start_token_id": tokenizer.pad_token_id}
    apart = {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}
    rows = {"vocab_size": len(tokenizer.encoder), "decoder_vocab_size": len(tokenizer.target_encoder)}
    model = MarianMTModel(MarianConfig(**rows, **sizes, **heads, **ids, **apart))
    made, _ = trim_vocabulary(model, tokenizer, pairs(FEW))
    model.save_pretrained(tmp_path / "out")
    made.save_pretrained(tmp_path / "out")
    MarianMTModel.from_pretrained(tmp_path / "out")
    file = tmp_path / "out" / "target_vocab.json"
    stored = json.loads(file.read_text())
    first, second = [token for token, number in stored.items() if number in (5, 6)]
    file.write_text(json.dumps(stored | {first: stored[second], second: stored[first]}))
    with pytest.raises(ConfigError, match=r"is not that of the model .* trimmed to \d+ and \d+ tokens"):
        MarianMTModel.from_pretrained(tmp_path / "out")


def test_a_folder_without_a_tokenizer_is_refused(original, tmp_path):
    BertModel.from_pretrained(original).save_pretrained(tmp_path / "alone")
    with pytest.raises(ArgumentError, match=r"'.*alone' has no tokenizer: .* of 5 special tokens.* copy its files"):
        load_or_explain(AutoTokenizer, tmp_path / "alone")
    made_up = AutoTokenizer.from_pretrained(tmp_path / "alone")
    assert len(load_or_explain(AutoTokenizer, original)) == TOKENS
    (tmp_path / "alone" / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(ArgumentError, match="has no tokenizer"):  # made with a token for spaces
        load_or_explain(AutoTokenizer, tmp_path / "alone")
    model = BertModel.from_pretrained(original)
    with pytest.raises(ArgumentError, match="has no tokenizer"):
        trim_vocabulary(model, made_up, TEXTS)
    with pytest.raises(ArgumentError, match="has no tokenizer"):
        export(model, tmp_path / "out", "transformers", tokenizer=made_up)
    batches = [{"input_ids": torch.tensor([[1, 2]])}]
    for measure in (analyze_heads, head_roles):
        with pytest.raises(ArgumentError, match="has no tokenizer"):
            measure(model, batches, tokenizer=made_up)
    check_words(None)
