"""The tokenizer in a GGUF file: what is written of it, that llama.cpp cuts texts alike, and which ones are refused."""

import pytest
from gguf_models import PIECES, bert, entry, llama_for, runs, texts, word_pieces, written
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers_made import FEW, TEXTS, fast
from transformers import BertConfig

from collab_heads import export, trim_vocabulary
from collab_heads.adapters.llama import LlamaAdapter
from collab_heads.contract.registry import gguf_form
from collab_heads.errors import ArgumentError, UnsupportedModelError
from collab_heads.files.folders import GGUF
from collab_heads.serving import gguf_tokenizers
from collab_heads.serving.for_gguf import Gguf
from collab_heads.serving.gguf_tokenizers import check_tokenizer

pytest.importorskip("gguf", reason="pip install gguf")

FORM = LlamaAdapter.gguf["llama"]
PARTS = ["\u1100", "##\u1161", "\u1102", "##\u1102", "\u0939", "##\u093f", "##\u0928", "##\u0926"]  # of syllables


def byte_level(*before, texts=TEXTS):
    """A byte-level tokenizer that cuts texts by other rules first."""
    made = fast("byte-level BPE", texts)
    if before:
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=isinstance(before[0], pre_tokenizers.Digits))
        made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, last])
    if any("{1,3}" in str(each) for each in before):  # as llama.cpp cuts with these words
        made.backend_tokenizer.model.ignore_merges = True
    made.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return made


WORDS = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"""
WORDS += r"|\s+(?!\S)|\s+"
CUT = {
    "gpt-2": (),
    "smollm": (pre_tokenizers.Digits(individual_digits=True),),
    "qwen2": (pre_tokenizers.Split(Regex(WORDS), "isolated"),),
    "llama-bpe": (pre_tokenizers.Split(Regex(WORDS.replace(r"\p{N}|", r"\p{N}{1,3}|")), "isolated"),),
}


@pytest.mark.parametrize("pre", CUT)
def test_tokens_merges_and_template_are_written(pre, tmp_path):
    tokenizer = byte_level(*CUT[pre])
    check_tokenizer(tokenizer, FORM, len(tokenizer))
    reader, notes = written(llama_for(tokenizer), tmp_path, tokenizer=tokenizer)
    assert not notes
    assert entry(reader, "ggml.pre") == pre
    assert entry(reader, "ggml.tokens")[: len(tokenizer)] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert entry(reader, "token_type") == [3] * 5 + [1] * (len(tokenizer) - 5) + [5] * 3
    assert entry(reader, "chat_template") == tokenizer.chat_template
    assert (entry(reader, "bos_token_id"), entry(reader, "add_bos_token")) == (1, True)


@runs
@pytest.mark.parametrize("pre", CUT)
def test_the_engine_cuts_texts_into_the_same_tokens(pre, tmp_path):
    import llama_cpp

    tokenizer, text = byte_level(*CUT[pre]), " abcabc 12345 " + " ".join(TEXTS[:20])
    export(llama_for(tokenizer), tmp_path / "out", to="gguf", tokenizer=tokenizer)
    engine = llama_cpp.Llama(str(tmp_path / "out" / GGUF), vocab_only=True, verbose=False)
    assert engine.tokenize(text.encode()) == tokenizer(text)["input_ids"]


@runs
def test_other_tokens_in_the_engine_are_an_error(monkeypatch, tmp_path):
    tokenizer = byte_level(texts=[*TEXTS, "12 123 12345 " * 20])
    monkeypatch.setattr(gguf_tokenizers, "cut_as", lambda given, form: "smollm")
    with pytest.raises(UnsupportedModelError, match=r"llama\.cpp cuts"):
        export(llama_for(tokenizer), tmp_path / "out", to="gguf", tokenizer=tokenizer)
    assert not (tmp_path / "out").exists()


@runs
def test_a_trimmed_vocabulary(tmp_path):
    tokenizer = byte_level()
    model = llama_for(tokenizer)
    small, _ = trim_vocabulary(model, tokenizer, FEW)
    assert len(small) < len(tokenizer)
    export(model, tmp_path / "out", to="gguf", tokenizer=small)


@pytest.mark.parametrize("pre", CUT)
def test_merges_that_it_makes_otherwise_are_refused(pre):
    tokenizer = byte_level(*CUT[pre])
    tokenizer.backend_tokenizer.model.ignore_merges ^= True
    with pytest.raises(UnsupportedModelError, match="byte-level BPE whose words are cut"):
        check_tokenizer(tokenizer, FORM, 1000)


def test_what_it_does_not_do_with_texts_is_noted(tmp_path):
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<x>", lstrip=True, normalized=False)])
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    _, notes = written(llama_for(tokenizer), tmp_path, tokenizer=tokenizer)
    assert [each.split(",")[0] for each in notes] == [
        "llama.cpp cuts texts at '<x>' also within words",
        "texts should be in the form NFC",
    ]


@pytest.mark.parametrize("kind", ("WordPiece", "BPE with ends", "Unigram"))
def test_tokenizers_that_it_does_not_know_are_refused(kind):
    with pytest.raises(UnsupportedModelError, match="byte-level BPE whose words are cut as it calls gpt-2, smollm"):
        check_tokenizer(fast(kind), FORM, 1000)


def test_a_tokenizer_of_more_tokens_is_refused():
    with pytest.raises(ArgumentError, match="pass the tokenizer of the model"):
        check_tokenizer(byte_level(), FORM, 100)


def test_a_tokenizer_without_a_template_is_noted_before_the_work_and_after_it(tmp_path, caplog):
    tokenizer = byte_level()
    model = llama_for(tokenizer)
    Gguf().check(model, False, tokenizer)
    assert not caplog.text
    tokenizer.chat_template = None
    Gguf().check(model, False, tokenizer)
    assert "the tokenizer has no chat template" in caplog.text
    _, notes = written(model, tmp_path, tokenizer=tokenizer)
    assert [note for note in notes if "no chat template" in note]


@runs
@pytest.mark.parametrize("lowercase", (True, False))
def test_the_engine_finds_the_same_pieces_of_words(lowercase, tmp_path):
    import llama_cpp

    tokenizer, text = word_pieces(lowercase), "Abba abb a.b \u00e9 E\u0301 A \u4f60a zz"
    model = bert()
    export(model, tmp_path / "out", to="gguf", tokenizer=tokenizer, batches=[texts()])
    engine = llama_cpp.Llama(str(tmp_path / "out" / GGUF), vocab_only=True, verbose=False)
    assert engine.tokenize(text.encode()) == tokenizer(text)["input_ids"]


@pytest.mark.parametrize(
    "tokenizer",
    [
        lambda: word_pieces(clean_text=False),
        lambda: word_pieces(handle_chinese_chars=False),
    ],
)
def test_pieces_of_words_that_it_finds_otherwise_are_refused(tokenizer):
    with pytest.raises(UnsupportedModelError, match="these are WordPiece with the steps BertNormalizer, "):
        check_tokenizer(tokenizer(), gguf_form(BertConfig()), 64)


def test_pieces_that_it_cannot_tell_apart_are_refused(tmp_path):
    """It would end the process: the piece that begins a word, and one within words that has the mark of a begin."""
    tokenizer = word_pieces(words=[*PIECES, "##\u2581a"])
    with pytest.raises(UnsupportedModelError, match=r"two tokens are '\u2581a' in llama\.cpp"):
        written(bert(), tmp_path, tokenizer=tokenizer)


@runs
@pytest.mark.parametrize("lowercase", (True, False))
def test_accents_that_it_takes_off_otherwise_are_noted(lowercase, tmp_path):
    import llama_cpp

    tokenizer, note = word_pieces(lowercase, words=[*PIECES, *PARTS]), "llama.cpp takes off accents otherwise in Korean"
    report = export(bert(), tmp_path / "out", to="gguf", tokenizer=tokenizer, batches=[texts()])
    assert any(each.startswith(note) for each in report.notes) == lowercase
    engine = llama_cpp.Llama(str(tmp_path / "out" / GGUF), vocab_only=True, verbose=False)
    text = gguf_tokenizers.SYLLABLES
    assert (engine.tokenize(text.encode()) == tokenizer(text)["input_ids"]) is not lowercase
