"""trim_vocabulary: what texts of kept tokens give, what stays, ids, checkpoints, bad input."""

import copy
import json
import subprocess
import sys
import tempfile

import pytest
import torch
from model_runs import aligned
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers_made import FEW, MADE, TEXTS, fast, marian, pairs
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    ByT5Tokenizer,
    DebertaV2Config,
    DebertaV2ForMaskedLM,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MarianConfig,
    MarianMTModel,
    MobileBertConfig,
    MobileBertForMaskedLM,
    MPNetForMaskedLM,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)
from trimming import ROUNDING, SIZES, bert, states, tokens_of
from unchanged import assert_unchanged, snapshot

from collab_heads import compress, inspect, trim_vocabulary
from collab_heads.errors import ArgumentError, CalibrationError, ModelStateError, UnsupportedModelError
from collab_heads.fitting.weight_grid import nearest_on_grid
from collab_heads.layers.weight_grid import WEIGHT_BITS, on_grid
from collab_heads.vocabulary import trim
from collab_heads.vocabulary.token_tables import keep_rows, token_tables

STACKS = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4}
STACKS |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 64}


def translator(tokenizer, *, separate=False):
    torch.manual_seed(0)
    last = len(tokenizer.encoder) - 1
    config = MarianConfig(
        vocab_size=len(tokenizer.encoder),
        decoder_vocab_size=len(tokenizer.target_encoder) if separate else None,
        pad_token_id=last,
        decoder_start_token_id=last,
        eos_token_id=0,
        share_encoder_decoder_embeddings=not separate,
        tie_word_embeddings=not separate,
        **STACKS,
    )
    model = MarianMTModel(config).eval()
    model.generation_config.bad_words_ids = [[last], [5]]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:  # positions are not stored
                parameter *= 3
        model.final_logits_bias.normal_()
    return model


@pytest.mark.parametrize("name", MADE)
def test_kept_texts_give_the_same_and_nothing_becomes_unknown(name, tmp_path):
    tokenizer = fast(name)
    model = bert(tokenizer)
    expected, before = states(model, tokenizer, FEW), tokens_of(tokenizer, TEXTS)
    made, report = trim_vocabulary(model, tokenizer, FEW)
    assert len(made) == report.tokens_after < 0.9 * report.tokens_before and report.changed_tokens == 0
    assert tokens_of(made, FEW) == tokens_of(tokenizer, FEW)
    assert torch.equal(states(model, made, FEW), expected)
    after = tokens_of(made, TEXTS)
    assert after != before and not any("<unk>" in row for row in after)
    assert model.config.vocab_size == len(made) == model.embeddings.word_embeddings.num_embeddings
    model.save_pretrained(tmp_path / "out")
    made.save_pretrained(tmp_path / "out")
    stored = AutoTokenizer.from_pretrained(tmp_path / "out")
    loaded = aligned(BertModel.from_pretrained(tmp_path / "out").eval())
    assert stored.get_vocab() == made.get_vocab()
    assert torch.equal(states(loaded, stored, FEW), expected)


@pytest.mark.parametrize("name", MADE)
def test_a_character_that_no_text_has_is_as_unknown_as_before(name):
    tokenizer = fast(name)
    text = "Ünbekannt " + TEXTS[0]
    expected = tokens_of(tokenizer, [text])[0].count("<unk>")
    made, _ = trim_vocabulary(bert(tokenizer), tokenizer, FEW)
    assert tokens_of(made, [text])[0].count("<unk>") == expected


def test_tied_output_layers_and_their_biases_are_trimmed():
    tokenizer = fast("WordPiece")
    model = bert(tokenizer, BertForMaskedLM)
    with torch.no_grad():
        model.cls.predictions.bias.normal_()
    expected = states(model, tokenizer, FEW)
    made, _ = trim_vocabulary(model, tokenizer, FEW)
    ids = [tokenizer.get_vocab()[token] for token, _ in sorted(made.get_vocab().items(), key=lambda pair: pair[1])]
    assert torch.allclose(states(model, made, FEW), expected[..., ids], atol=ROUNDING)
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    assert model.cls.predictions.decoder.out_features == len(made) == len(model.cls.predictions.decoder.bias)


def test_untied_output_layers_are_trimmed():
    tokenizer = fast("byte-level BPE")
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=1, n_head=4, tie_word_embeddings=False)
    model = GPT2LMHeadModel(config).eval()
    expected = states(model, tokenizer, FEW)
    made, report = trim_vocabulary(model, tokenizer, FEW)
    ids = [tokenizer.get_vocab()[token] for token, _ in sorted(made.get_vocab().items(), key=lambda pair: pair[1])]
    assert torch.allclose(states(model, made, FEW), expected[..., ids], atol=ROUNDING)
    assert report.parameters_after == 2 * 32 * len(ids)


def test_spare_rows_go():
    tokenizer = fast("Unigram")
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4}
    ids = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
    model = T5ForConditionalGeneration(T5Config(vocab_size=len(tokenizer) + 28, **sizes, **ids)).eval()
    made, _ = trim_vocabulary(model, tokenizer, FEW)
    assert model.shared.weight.shape[0] == model.lm_head.weight.shape[0] == len(made)
    assert {config.vocab_size for config in (model.config, model.encoder.config, model.decoder.config)} == {len(made)}


def test_a_padding_that_becomes_the_first_token():
    model = MarianMTModel(MarianConfig(vocab_size=20, pad_token_id=5, decoder_start_token_id=5, **STACKS))
    keep_rows(model, token_tables(model, 1), [range(5, 20)])
    assert {each.padding_idx for each in model.modules() if getattr(each, "padding_idx", None) is not None} == {0}


@pytest.mark.parametrize("cls", [RobertaForMaskedLM, MPNetForMaskedLM])
def test_positions_are_counted_from_a_padding_that_stays(cls):
    """MPNet counts from 1, which is another token here."""
    tokenizer = fast("byte-level BPE")
    torch.manual_seed(0)
    config = cls.config_class(vocab_size=len(tokenizer), pad_token_id=0, max_position_embeddings=64, **SIZES)
    model = cls(config).eval()
    expected = states(model, tokenizer, FEW)
    made, _ = trim_vocabulary(model, tokenizer, FEW)
    ids = [tokenizer.get_vocab()[token] for token, _ in sorted(made.get_vocab().items(), key=lambda pair: pair[1])]
    assert torch.allclose(states(model, made, FEW), expected[..., ids], atol=ROUNDING)


def test_positions_that_would_move_are_refused():
    tokenizer = fast("byte-level BPE")
    tokenizer.pad_token = max(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    last = tokenizer.pad_token_id
    config = RobertaConfig(vocab_size=len(tokenizer), pad_token_id=last, max_position_embeddings=last + 64, **SIZES)
    model = RobertaForMaskedLM(config)
    before = snapshot(model)
    with pytest.raises(UnsupportedModelError, match=f"counts positions from the id of its padding, {last}"):
        trim_vocabulary(model, tokenizer, FEW)
    assert_unchanged(model, before)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize("separate", [False, True], ids=["shared", "separate"])
def test_marian(kind, separate, tmp_path, monkeypatch):
    tokenizer = marian(tmp_path / "tokenizer", kind, separate=separate)
    model, texts = translator(tokenizer, separate=separate), pairs(FEW)

    @torch.no_grad()
    def logits(model, tokenizer):
        batch = tokenizer([a for a, _ in texts], text_target=[b for _, b in texts], padding=True, return_tensors="pt")
        ids = batch["input_ids"], batch["attention_mask"], batch["labels"]
        return model(input_ids=ids[0], attention_mask=ids[1], decoder_input_ids=ids[2]).logits

    expected, unknown = logits(model, tokenizer), tokens_of(tokenizer, TEXTS)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    made, report = trim_vocabulary(model, tokenizer, texts)
    assert not any((tmp_path / "temporary").iterdir())  # what it saves later it has in memory
    sides = ("target_encoder" if separate else "encoder", "encoder")
    old, new = (getattr(each, sides[0]) for each in (tokenizer, made))
    assert len(made.encoder) < len(tokenizer.encoder) and report.tokens_after < report.tokens_before
    kept = [old[token] for token, _ in sorted(new.items(), key=lambda pair: pair[1])]
    assert torch.allclose(logits(model, made), expected[..., kept], atol=ROUNDING)
    padding = new["<pad>"]
    assert padding == made.encoder["<pad>"] == model.config.pad_token_id == model.config.decoder_start_token_id
    assert [padding] in model.generation_config.bad_words_ids
    assert not any("<unk>" in row for row in tokens_of(made, TEXTS)) and tokens_of(made, TEXTS) != unknown
    model.save_pretrained(tmp_path / "out")
    made.save_pretrained(tmp_path / "out")
    stored = AutoTokenizer.from_pretrained(tmp_path / "out")
    loaded = aligned(MarianMTModel.from_pretrained(tmp_path / "out").eval())
    assert torch.equal(logits(loaded, stored), logits(model, made))
    if not separate:  # else it decodes what the decoder wrote
        assert stored.decode(stored(FEW[0])["input_ids"], skip_special_tokens=True) == FEW[0]


def test_pairs_and_single_texts_keep_what_each_side_needs(tmp_path):
    tokenizer = marian(tmp_path / "tokenizer", separate=True)
    of_pairs, _ = trim_vocabulary(translator(tokenizer, separate=True), tokenizer, pairs(FEW))
    of_sources, _ = trim_vocabulary(translator(tokenizer, separate=True), tokenizer, FEW)
    targets = [target for _, target in pairs(FEW)]
    expected, found, other = (
        [each.convert_ids_to_tokens(row) for row in each(text_target=targets)["input_ids"]]
        for each in (tokenizer, of_pairs, of_sources)
    )
    assert expected == found != other


def test_keep_and_min_count():
    tokenizer = fast("WordPiece")
    _, used = trim_vocabulary(bert(tokenizer), tokenizer, FEW)
    _, fewer = trim_vocabulary(bert(tokenizer), tokenizer, FEW, keep=used.tokens_after - 5)
    assert fewer.tokens_after == used.tokens_after - 5 and 0 < fewer.changed_tokens < 0.2 * fewer.text_tokens
    _, more = trim_vocabulary(bert(tokenizer), tokenizer, FEW, keep=0.8)
    assert more.tokens_after == int(0.8 * used.tokens_before) > used.tokens_after and more.changed_tokens == 0
    _, often = trim_vocabulary(bert(tokenizer), tokenizer, FEW, min_count=5)
    assert often.tokens_after < used.tokens_after and "become other ones" in str(often)
    assert often.to_dict()["changed_tokens"] == often.changed_tokens > 0


def test_ids_of_configs_are_renumbered():
    tokenizer = fast("byte-level BPE")
    tokenizer.pad_token = tokenizer.eos_token = max(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    last, gone = len(tokenizer) - 1, tokenizer.get_vocab()[tokens_of(tokenizer, TEXTS)[0][2]]
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=1, n_head=4, eos_token_id=last))
    generation = model.generation_config
    generation.eos_token_id, generation.suppress_tokens, generation.bos_token_id = [last, 2], [last, gone], 60_000
    generation.forced_decoder_ids, generation.lang_to_id = [[1, last]], {"<|de|>": last}
    made, _ = trim_vocabulary(model, tokenizer, ["a"])
    new, generation = len(made) - 1, model.generation_config
    assert gone < last and new < last and model.config.eos_token_id == new
    assert generation.eos_token_id == [new, 2] and generation.suppress_tokens == [new]
    assert generation.bos_token_id == 60_000  # of no token
    assert generation.forced_decoder_ids == [[1, new]] and generation.lang_to_id == {"<|de|>": new}


@pytest.mark.slow
def test_compressed_models_are_trimmed_before_or_after(tmp_path):
    tokenizer = fast("WordPiece")
    tokenizer.save_pretrained(tmp_path / "source")
    bert(tokenizer).save_pretrained(tmp_path / "source")

    def batches(tokenizer):
        return [dict(tokenizer(FEW, padding=True, return_tensors="pt", return_token_type_ids=False))]

    first, second = (aligned(BertModel.from_pretrained(tmp_path / "source").eval()) for _ in range(2))
    compress(first, batches(tokenizer), 0.6, refine_steps=0)
    made, _ = trim_vocabulary(first, tokenizer, FEW)
    trim_vocabulary(second, tokenizer, FEW)
    compress(second, batches(made), 0.6, refine_steps=0)
    assert torch.allclose(states(first, made, FEW), states(second, made, FEW), atol=1e-4)  # two fits, summed alike
    first.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out" / "tokenizer.json").exists()  # that of the source has other ids
    loaded = aligned(BertModel.from_pretrained(tmp_path / "out").eval())
    assert torch.equal(states(loaded, made, FEW), states(first, made, FEW))
    assert f"to {len(made)} tokens" in (tmp_path / "out" / "README.md").read_text()
    facts = inspect(tmp_path / "out")
    assert facts.vocabulary == {"before": len(tokenizer), "after": len(made)} and f"{len(made)} of" in str(facts)


@pytest.mark.slow
def test_plain_transformers_loads_it(tmp_path):
    tokenizer = marian(tmp_path / "tokenizer")
    model = translator(tokenizer)
    made, _ = trim_vocabulary(model, tokenizer, pairs(FEW))
    model.save_pretrained(tmp_path / "out")
    made.save_pretrained(tmp_path / "out")
    code = (
        "import sys; sys.modules['collab_heads'] = None\n"
        "from transformers import AutoModelForSeq2SeqLM, AutoTokenizer\n"
        f"model, tokenizer = (each.from_pretrained({str(tmp_path / 'out')!r})\n"
        "                    for each in (AutoModelForSeq2SeqLM, AutoTokenizer))\n"
        f"ids = model.generate(**tokenizer([{FEW[0]!r}], return_tensors='pt'), max_new_tokens=5, num_beams=2)\n"
        "print('ids', ids.tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    batch = made([FEW[0]], return_tensors="pt")
    expected = model.generate(**batch, max_new_tokens=5, num_beams=2).tolist()
    assert f"ids {expected}" in done.stdout


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"texts": []}, CalibrationError, "there are no texts"),
        ({"texts": ["", ""]}, CalibrationError, "there are no texts"),
        ({"texts": {"a": 1}}, ArgumentError, "texts is a dict: pass a list"),
        ({"keep": 60, "min_count": 2}, ArgumentError, "keep and min_count exclude each other"),
        ({"texts": [3]}, ArgumentError, "texts must be a list"),
        ({"texts": [("a", "b", "c")]}, ArgumentError, r"texts\[0\] must be a text"),
        ({"keep": 3}, ArgumentError, "keep 3 is less than the .* that must stay"),
        ({"keep": 1.5}, ArgumentError, "keep 1.5 must be a number of tokens, or a share"),
        ({"keep": True}, ArgumentError, "keep True must be"),
        ({"min_count": 0}, ArgumentError, "min_count 0 must be"),
        ({"tokenizer": ByT5Tokenizer()}, ArgumentError, "ByT5Tokenizer is a slow tokenizer"),
        ({"tokenizer": fast("byte-level BPE")}, ArgumentError, "the model has rows for .* that the model was trained"),
        ({"model": ViTModel(ViTConfig(image_size=8, patch_size=4, **SIZES))}, UnsupportedModelError, "reads no tokens"),
    ],
)
def test_bad_input_changes_nothing(given, error, message):
    tokenizer = fast("WordPiece")
    model = given.get("model", bert(tokenizer))
    before = snapshot(model)
    with pytest.raises(error, match=message):
        trim_vocabulary(**{"model": model, "tokenizer": tokenizer, "texts": FEW, **given})
    assert_unchanged(model, before)


def test_a_tokenizer_with_added_tokens_needs_rows_for_them():
    tokenizer = fast("WordPiece")
    model = bert(tokenizer)
    tokenizer.add_tokens(["zzz"])
    before, needed = snapshot(model), len(tokenizer)
    with pytest.raises(ArgumentError, match=rf"rows for {needed - 1}: if .* model.resize_token_embeddings\({needed}\)"):
        trim_vocabulary(model, tokenizer, FEW)
    assert_unchanged(model, before)
    model.resize_token_embeddings(needed)
    assert "zzz" in trim_vocabulary(model, tokenizer, FEW)[0].get_vocab()


def test_a_much_smaller_tokenizer_is_refused():
    tokenizer = fast("WordPiece")
    model = BertModel(BertConfig(vocab_size=5000, **SIZES))
    with pytest.raises(
        ArgumentError, match=rf"the tokenizer has {len(tokenizer)} tokens, .* rows for 5,000: if the others are spare, "
    ):
        trim_vocabulary(model, tokenizer, FEW)
    model.resize_token_embeddings(len(tokenizer))
    trim_vocabulary(model, tokenizer, FEW)


def test_a_model_with_another_table_of_tokens_is_refused():
    """One that reads ids in every layer, and one whose logits come from a second matrix."""
    tokenizer = fast("WordPiece")
    per_layer = {"vocab_size_per_layer_input": len(tokenizer), "hidden_size_per_layer_input": 8, "laurel_rank": 4}
    per_layer |= {"num_kv_shared_layers": 0, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0]}
    sizes = SIZES | {"num_key_value_heads": 1, "head_dim": 8, "layer_types": ["full_attention"]}
    small = {"hidden_size": 32, "embedding_size": 16, "intra_bottleneck_size": 16, "num_hidden_layers": 1}
    models = {
        "embed_tokens_per_layer": Gemma3nForCausalLM(
            Gemma3nTextConfig(vocab_size=len(tokenizer), **sizes, **per_layer)
        ),
        r"predictions\.dense": MobileBertForMaskedLM(MobileBertConfig(vocab_size=len(tokenizer), **small)),
    }
    for path, model in models.items():
        before = snapshot(model)
        with pytest.raises(UnsupportedModelError, match=rf"another table of tokens, .*{path}: its vocabulary cannot"):
            trim_vocabulary(model, tokenizer, FEW)
        assert_unchanged(model, before)


def test_an_output_layer_that_is_none_is_refused():
    """Without `legacy` DeBERTa-v2 calls the layer before its logits so; no other tokenizer would help."""
    tokenizer = fast("WordPiece")
    model = DebertaV2ForMaskedLM(DebertaV2Config(vocab_size=len(tokenizer), legacy=False, **SIZES))
    before = snapshot(model)
    with pytest.raises(UnsupportedModelError, match=f"calls its output layer has {SIZES['hidden_size']} rows, and its"):
        trim_vocabulary(model, tokenizer, FEW)
    assert_unchanged(model, before)


def test_one_tokenizer_for_two_vocabularies_is_refused():
    tokenizer = fast("WordPiece")
    parts = [BertConfig(vocab_size=len(tokenizer) + more, **SIZES) for more in (0, 2)]
    model = EncoderDecoderModel(EncoderDecoderConfig.from_encoder_decoder_configs(*parts))
    before, needed = snapshot(model), len(tokenizer)
    with pytest.raises(UnsupportedModelError, match=f"rows for {needed} and {needed + 2} tokens: its encoder and its"):
        trim_vocabulary(model, tokenizer, FEW)
    assert_unchanged(model, before)


def test_a_piece_twice_is_refused_by_name():
    tokenizer = fast("Unigram")
    data = json.loads(tokenizer.backend_tokenizer.to_str())
    data["model"]["vocab"].append(data["model"]["vocab"][20])
    backend = Tokenizer.from_str(json.dumps(data))
    twice = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>")
    model = BertModel(BertConfig(vocab_size=len(data["model"]["vocab"]), **SIZES))
    with pytest.raises(ArgumentError, match=f"has the token {data['model']['vocab'][20][0]!r} twice"):
        trim_vocabulary(model, twice, FEW)


def test_nothing_of_how_it_was_loaded_is_stored(tmp_path):
    fast("WordPiece").save_pretrained(tmp_path / "stored")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "stored")
    tokenizer.init_kwargs["local_files_only"] = False  # as on a machine with a network
    made, _ = trim_vocabulary(bert(tokenizer), tokenizer, FEW)
    for each, name in ((tokenizer, "before"), (made, "after")):
        each.save_pretrained(tmp_path / name)
    before, after = (
        json.loads((tmp_path / name / "tokenizer_config.json").read_text()) for name in ("before", "after")
    )
    assert before == after


def test_a_tokenizer_that_divides_otherwise_changes_nothing(monkeypatch):
    tokenizer = fast("WordPiece")
    model = bert(tokenizer)
    before, stock = snapshot(model), trim.files_of

    def broken(given):
        files = stock(given)
        made = copy.deepcopy(given)
        made.backend_tokenizer.pre_tokenizer = fast("byte-level BPE").backend_tokenizer.pre_tokenizer
        monkeypatch.setattr(files, "trimmed", lambda kept: made)
        return files

    monkeypatch.setattr(trim, "files_of", broken)
    with pytest.raises(ModelStateError, match="divides a text of kept tokens in another way"):
        trim_vocabulary(model, tokenizer, FEW)
    assert_unchanged(model, before)


def test_what_is_trimmed_loads_as_an_auto_model(tmp_path):
    tokenizer = fast("Unigram")
    model = bert(tokenizer)
    made, _ = trim_vocabulary(model, tokenizer, FEW)
    _, again = trim_vocabulary(model, made, FEW[:5])
    assert again.tokens_after < again.tokens_before == len(made)
    model.save_pretrained(tmp_path)
    assert AutoModel.from_pretrained(tmp_path).config.trimmed_vocabulary["after"] == again.tokens_after


def test_an_encoder_and_a_decoder_of_one_vocabulary_put_together(tmp_path):
    tokenizer = fast("WordPiece")
    torch.manual_seed(0)
    stack = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, **SIZES}
    decoder = BertConfig(**stack, is_decoder=True, add_cross_attention=True)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(BertConfig(**stack), decoder)
    config.decoder_start_token_id, config.pad_token_id = tokenizer.bos_token_id, tokenizer.pad_token_id
    original = EncoderDecoderModel(config).eval()
    model = copy.deepcopy(original)
    small, report = trim_vocabulary(model, tokenizer, FEW, show_progress=False)
    assert model.encoder.config.vocab_size == model.decoder.config.vocab_size == report.tokens_after
    made = small.get_vocab()
    ids = [tokenizer.get_vocab()[token] for token in sorted(made, key=made.get)]

    def logits(model, tokenizer):
        inputs = tokenizer(FEW[:4], padding=True, return_tensors="pt")
        read = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
        with torch.no_grad():
            return model(**read, decoder_input_ids=inputs["input_ids"]).logits

    found = logits(model, small)
    torch.testing.assert_close(found, logits(original, tokenizer)[..., ids], rtol=ROUNDING, atol=ROUNDING)
    model.save_pretrained(tmp_path)
    loaded = aligned(EncoderDecoderModel.from_pretrained(tmp_path).eval())
    assert torch.equal(logits(loaded, small), found)


@pytest.mark.parametrize("bits", [8, 3])
def test_a_table_of_few_bits_stays_on_its_grid(bits, tmp_path):
    tokenizer = fast("WordPiece")
    model = bert(tokenizer)
    table = model.get_input_embeddings()
    table.weight.data = nearest_on_grid(table.weight.data, bits).weight()
    setattr(table, WEIGHT_BITS, bits)
    trimmed, _ = trim_vocabulary(model, tokenizer, FEW)
    assert dict((name, grid.bits) for name, _, grid in on_grid(model)) == {"embeddings.word_embeddings": bits}
    model.save_pretrained(tmp_path)
    trimmed.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert len(stored["embeddings.word_embeddings.weight_codes"]) == len(trimmed)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(loaded.get_input_embeddings().weight, model.get_input_embeddings().weight)
