"""A trimmed model keeps more than its rows: two sets of ids, frozen weights, the loss, scores, padding."""

import copy
import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers_made import FEW, fast, marian, pairs
from transformers import (
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerFast,
)
from trimming import ROUNDING, bert, tokens_of

from collab_heads import trim_vocabulary
from collab_heads.errors import ArgumentError
from collab_heads.vocabulary.token_tables import check_rows, keep_rows, token_tables

SIZES = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
SIZES |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
APART = {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}


@pytest.mark.parametrize("few_sources", [True, False], ids=["few sources", "few targets"])
@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_each_of_two_vocabularies_keeps_what_its_side_needs(kind, few_sources, tmp_path):
    tokenizer = marian(tmp_path / "tokenizer", kind, separate=True, size={"unigram": 140, "bpe": 220}[kind])
    padding, few, many = tokenizer.pad_token_id, FEW[:1] * len(FEW), FEW
    sources, targets = (few, many) if few_sources else (many, few)
    texts = list(zip(sources, [target for _, target in pairs(targets)], strict=True))
    used = sorted({each for _, target in texts for each in tokenizer(text_target=target)["input_ids"]})
    torch.manual_seed(0)
    rows = {"vocab_size": len(tokenizer.encoder), "decoder_vocab_size": len(tokenizer.target_encoder)}
    ids = {"pad_token_id": padding, "eos_token_id": 0, "decoder_start_token_id": padding}
    model = MarianMTModel(MarianConfig(**rows, **SIZES, **APART, **ids, init_std=0.3)).double().eval()
    model.final_logits_bias.copy_(torch.randn_like(model.final_logits_bias))
    model.generation_config.suppress_tokens = [used[3], used[-2]]
    model.generation_config.bad_words_ids = [[used[4]], [padding]]
    original = copy.deepcopy(model)
    made, _ = trim_vocabulary(model, tokenizer, texts, show_progress=False)
    encoder, decoder = (
        {number: new[token] for token, number in old.items() if token in new}
        for old, new in ((tokenizer.encoder, made.encoder), (tokenizer.target_encoder, made.target_encoder))
    )
    assert len(encoder) < 0.7 * len(tokenizer.encoder) and len(decoder) < 0.7 * len(tokenizer.target_encoder)
    assert encoder.keys() != decoder.keys()  # though as many, since the padding is the last of both
    assert {encoder[padding], decoder[padding], made.pad_token_id} == {model.config.pad_token_id}
    assert model.config.decoder_start_token_id == model.config.pad_token_id
    assert model.generation_config.suppress_tokens == [decoder[used[3]], decoder[used[-2]]]
    assert model.generation_config.bad_words_ids == [[decoder[used[4]]], [decoder[padding]]]

    @torch.no_grad()
    def run(model, tokenizer):
        written = [target for _, target in texts[:6]]
        batch = tokenizer(sources[:6], text_target=written, padding=True, return_tensors="pt")
        read = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        return batch["input_ids"], model(**read, decoder_input_ids=batch["labels"]).logits

    (old_ids, expected), (new_ids, found) = run(original, tokenizer), run(model, made)
    assert [[encoder[int(each)] for each in row] for row in old_ids] == new_ids.tolist()
    torch.testing.assert_close(found, expected[..., sorted(decoder)], rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("separate", (False, True))
def test_bytes_and_defined_symbols_of_two_models_stay(separate, tmp_path):
    """Pieces that no text needs to show."""
    more = {"byte_fallback": True, "user_defined_symbols": ["<ent>", "§§"]}
    tokenizer = marian(tmp_path / "tokenizer", separate=separate, size=400, hard_vocab_limit=False, **more)
    last = tokenizer.pad_token_id
    rows = {"vocab_size": len(tokenizer.encoder)}
    rows |= {"decoder_vocab_size": len(tokenizer.target_encoder), **APART} if separate else {}
    ids = {"pad_token_id": last, "eos_token_id": 0, "decoder_start_token_id": last}
    model = MarianMTModel(MarianConfig(**rows, **SIZES, **ids))
    made, report = trim_vocabulary(model, tokenizer, pairs(FEW))
    texts = ["<ent> " + FEW[0], "§§", "漢 é " + FEW[1]]
    assert report.tokens_after < report.tokens_before
    for name, vocabulary in (("text", "encoder"), ("text_target", "target_encoder" if separate else "encoder")):
        found = []
        for each in (tokenizer, made):
            token_of = {number: token for token, number in getattr(each, vocabulary).items()}
            found.append([[token_of[number] for number in row] for row in each(**{name: texts})["input_ids"]])
        assert found[0] == found[1] and not any("<unk>" in row for row in found[1])


@pytest.mark.parametrize("place", ("behind all tokens", "between them"))
def test_padding_that_is_no_token_keeps_its_row(place, tmp_path):
    words = ["<unk>", *"abcde", *(f"##{each}" for each in "abcde"), "abc", "bad", "cab"]
    gap = len(words) if place == "behind all tokens" else 3
    vocabulary = {word: number + (number >= gap) for number, word in enumerate(words)}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = LlamaConfig(vocab_size=len(words) + 1, pad_token_id=gap, bos_token_id=0, eos_token_id=0, **sizes)
    model = LlamaForSequenceClassification(config).eval()
    row = model.get_input_embeddings().weight[gap].clone()
    text = tokenizer("abc bad d", return_tensors="pt", return_token_type_ids=False)
    expected = model(**text).logits
    made, report = trim_vocabulary(model, tokenizer, ["abc bad d"])
    assert torch.equal(model(**made("abc bad d", return_tensors="pt", return_token_type_ids=False)).logits, expected)
    padding = model.config.pad_token_id
    assert padding not in made.get_vocab().values() and torch.equal(model.get_input_embeddings().weight[padding], row)
    assert report.tokens_after == len(made) == len(words) - 1 and model.config.vocab_size == len(words)
    model.save_pretrained(tmp_path)
    loaded = LlamaForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(loaded.get_input_embeddings().weight, model.get_input_embeddings().weight)


def test_what_was_frozen_stays_frozen():
    tokenizer = fast("WordPiece")
    model = bert(tokenizer, BertForMaskedLM)
    model.bert.embeddings.word_embeddings.weight.requires_grad_(False)
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert set(before.values()) == {True, False}
    trim_vocabulary(model, tokenizer, FEW)
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before


def test_the_loss_counts_the_tokens_that_are_left():
    tokenizer = fast("byte-level BPE")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **ids)).eval()
    made, _ = trim_vocabulary(model, tokenizer, FEW)
    assert {part.vocab_size for part in (model, model.model)} == {len(made)}
    read = made(FEW[:1], return_tensors="pt", return_token_type_ids=False)
    found = model(**read, labels=read["input_ids"])
    expected = torch.nn.functional.cross_entropy(found.logits[0, :-1], read["input_ids"][0, 1:])
    torch.testing.assert_close(found.loss, expected, rtol=ROUNDING, atol=ROUNDING)


def test_an_unknown_character_keeps_its_score():
    # Q is unknown: it scores ten less than the lowest piece, so that "xQy" is cheaper than "x", Q, "yw"
    scores = [("<unk>", 0.0), ("<pad>", 0.0), ("x", -1.0), ("y", -20.0), ("w", -20.0), ("yw", -1.0), ("xQy", -20.0)]
    core = Tokenizer(models.Unigram([*scores, ("zzzz", -30.0), *((each, -2.0) for each in "abz")], unk_id=0))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", pad_token="<pad>")
    assert tokens_of(tokenizer, ["xQyw"]) == [["xQy", "w"]]
    made, _ = trim_vocabulary(bert(tokenizer), tokenizer, ["yw"])
    assert tokens_of(made, ["xQyw"]) == [["xQy", "w"]]


def test_padding_and_truncation_in_the_file_stay_with_their_ids(tmp_path):
    tokenizer = fast("WordPiece")
    last = max(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    tokenizer.backend_tokenizer.enable_padding(pad_id=len(tokenizer) - 1, pad_token=last, length=20)
    tokenizer.backend_tokenizer.enable_truncation(20)
    before = tokenizer.backend_tokenizer.to_str()
    made, _ = trim_vocabulary(bert(tokenizer), tokenizer, FEW[:3])
    assert tokenizer.backend_tokenizer.to_str() == before
    made.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    assert stored["padding"]["pad_id"] == made.get_vocab()[last] == len(made) - 1 and stored["truncation"]
    alone = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))  # as programs without transformers read it
    assert alone.encode(FEW[0]).tokens == Tokenizer.from_str(before).encode(FEW[0]).tokens
    assert alone.encode(FEW[0]).ids[-1] == len(made) - 1


def test_two_vocabularies_may_become_of_two_sizes():
    model = MarianMTModel(MarianConfig(vocab_size=30, decoder_vocab_size=30, pad_token_id=0, **SIZES, **APART))
    keep_rows(model, token_tables(model, 2), [range(20), range(10)])
    assert (model.config.vocab_size, model.config.decoder_vocab_size) == (20, 10)
    tables = model.model.encoder.embed_tokens, model.model.decoder.embed_tokens, model.lm_head
    assert [len(table.weight) for table in tables] == [20, 10, 10] and model.final_logits_bias.shape == (1, 10)


def test_of_two_vocabularies_the_tokenizer_is_wrong_before_the_output_layer_is():
    model = MarianMTModel(MarianConfig(vocab_size=30, decoder_vocab_size=3000, pad_token_id=0, **SIZES, **APART))
    ids = {str(number): number for number in range(30)}
    with pytest.raises(ArgumentError, match="the tokenizer has 30 tokens, and the model has rows for 3,000"):
        check_rows(token_tables(model, 2), [ids, ids])
