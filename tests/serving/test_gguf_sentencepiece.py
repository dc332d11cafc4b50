"""SentencePiece tokenizers in llama.cpp: scores say the order of merges, and texts are cut alike, or it is refused."""

import gzip
import json
import os
import random
from pathlib import Path

import pytest
import sentencepiece
from gguf_models import entry, llama_for, runs, written
from tokenizers import AddedToken, Tokenizer
from tokenizers_made import FEW, TEXTS, llama
from transformers import LlamaTokenizer, PreTrainedTokenizerFast

from collab_heads import export, trim_vocabulary
from collab_heads.adapters.llama import LlamaAdapter
from collab_heads.errors import UnsupportedModelError
from collab_heads.files.folders import GGUF
from collab_heads.serving import gguf_tokenizers
from collab_heads.serving.gguf_sentencepiece import PREPENDS, REPLACES, Merges, cut
from collab_heads.serving.gguf_tokenizers import check_tokenizer

pytest.importorskip("gguf", reason="pip install gguf")

FORM = LlamaAdapter.gguf["llama"]
PIECES = [
    " ",
    "  ",
    "\n",
    "\t",
    "\u2581",
    "\u00e9",
    "e\u0301",
    "\u4f60",
    "\U0001f600",
    "\u200d",
    "\u0e01\u0e33",
    "\x00",
]
PIECES += ["a", "b", "ab", "abc", "<s", ">", "</s", "<0x41>", "-", "--", ".", "\r\n", "0", "x"]
CAPTIONS = Path(os.environ.get("COLLAB_HEADS_SHARED", Path(__file__).resolve().parents[3] / "shared")) / "data/multi30k"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("llama")
    llama(place)
    return place


def loaded(folder, scheme):
    """A tokenizer that puts a space before texts in one of four ways."""
    if scheme == "prepended":
        return rebuilt(loaded(folder, "always"), normalizer=two_steps(), pre_tokenizer=None)
    options = {"never": {"add_prefix_space": False}, "always": {"legacy": True}, "first": {}}[scheme]
    return LlamaTokenizer.from_pretrained(folder, add_bos_token=True, **options)


def two_steps():
    return {"type": "Sequence", "normalizers": [PREPENDS, REPLACES]}


def rebuilt(tokenizer, **entries):
    """The tokenizer with other entries in its `tokenizer.json`; those of `model` are changed one by one."""
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    model = parts["model"] | entries.pop("model", {})
    made = Tokenizer.from_str(json.dumps(parts | entries | {"model": model}))
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def hostile(count):
    chance = random.Random(0)
    return ["".join(chance.choices(PIECES, k=chance.randint(0, 12))) for _ in range(count)]


def test_scores_have_the_order_of_the_sentencepiece_model(folder, tmp_path):
    tokenizer = loaded(folder, "first")
    tokenizer.chat_template = TEMPLATE
    reader, _ = written(llama_for(tokenizer), tmp_path, tokenizer=tokenizer)
    tokens, scores = entry(reader, "ggml.tokens"), entry(reader, "ggml.scores")
    original = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
    numbers = [number for number in range(len(original)) if len(original.id_to_piece(number)) > 1]
    numbers = [number for number in numbers if original.get_score(number)]
    assert len(numbers) > 100
    assert sorted(numbers, key=scores.__getitem__) == sorted(numbers, key=original.get_score)
    assert tokens[: len(original)] == [original.id_to_piece(number) for number in range(len(original))]
    assert entry(reader, "token_type") == [2, 3, 3] + [6] * 256 + [1] * (len(tokenizer) - 259) + [5] * 3
    assert entry(reader, "chat_template") == TEMPLATE
    expected = {"ggml.model": "llama", "ggml.pre": "default", "bos_token_id": 1, "eos_token_id": 2}
    expected |= {"unknown_token_id": 0, "add_bos_token": True, "add_eos_token": False, "add_space_prefix": True}
    assert {name: entry(reader, name) for name in expected} == expected
    assert entry(reader, "remove_extra_whitespaces") is False


NOTES = {  # of the texts that begin with a space, and of those after special tokens
    "never": (False, False),
    "always": (True, False),
    "first": (True, True),
    "prepended": (False, False),
}


@pytest.mark.parametrize("scheme", NOTES)
def test_what_stands_before_texts_is_written_or_noted(scheme, folder, tmp_path):
    tokenizer = loaded(folder, scheme)
    tokenizer.chat_template = TEMPLATE
    reader, notes = written(llama_for(tokenizer), tmp_path, tokenizer=tokenizer)
    assert entry(reader, "add_space_prefix") == (scheme != "never")
    said = tuple(any(each in note for note in notes) for each in ("before every text", "after a special token"))
    assert (said, len(notes)) == (NOTES[scheme], sum(said))


@runs
@pytest.mark.parametrize("scheme", NOTES)
def test_the_engine_cuts_texts_into_the_same_tokens(scheme, folder, tmp_path):
    import llama_cpp

    tokenizer, (not_before_spaces, not_after_special) = loaded(folder, scheme), NOTES[scheme]
    export(llama_for(tokenizer), tmp_path / "out", to="gguf", tokenizer=tokenizer)
    engine = llama_cpp.Llama(str(tmp_path / "out" / GGUF), vocab_only=True, verbose=False)
    given = [text for text in (*TEXTS[:50], *hostile(500)) if not (not_before_spaces and text[:1] in (" ", "\u2581"))]
    assert len(given) > 400
    for text in given:
        assert engine.tokenize(text.encode()) == tokenizer(text, split_special_tokens=True)["input_ids"], repr(text)
    for text in () if not_after_special else ("a</s>b<s><unk>ab", "</s>", "a</s></s>b"):
        assert engine.tokenize(text.encode(), special=True) == tokenizer(text)["input_ids"], repr(text)


@runs
@pytest.mark.parametrize("change", ("end added", "tokens added", "trimmed"))
def test_changed_tokenizers(change, folder, tmp_path):
    """An end after each text, a token that users add, and fewer tokens."""
    tokenizer = loaded(folder, "prepended")
    if change == "end added":
        tokenizer = LlamaTokenizer.from_pretrained(folder, add_bos_token=False, add_eos_token=True)
    if change == "tokens added":
        tokenizer.add_tokens([AddedToken("<x>", normalized=False)])
        tokenizer.add_special_tokens({"additional_special_tokens": ["[INST]"]})
    model = llama_for(tokenizer)
    if change == "trimmed":
        tokenizer, _ = trim_vocabulary(model, tokenizer, FEW)
        assert len(tokenizer) < 400
    export(model, tmp_path / "out", to="gguf", tokenizer=tokenizer)
    import gguf

    reader = gguf.GGUFReader(tmp_path / "out" / GGUF)
    assert entry(reader, "add_eos_token") == (change == "end added")
    types = [entry(reader, "token_type")[number] for number in range(420, len(tokenizer))]
    assert types == ([4, 3] if change == "tokens added" else [])


@runs
def test_other_tokens_in_the_engine_are_an_error(folder, monkeypatch, tmp_path):
    class Reversed(Merges):
        def __init__(self, *given):
            super().__init__(*given)
            self.first = {token: -place for token, place in self.first.items()}

    monkeypatch.setattr(gguf_tokenizers, "Merges", Reversed)
    tokenizer = loaded(folder, "first")
    with pytest.raises(UnsupportedModelError, match=r"llama\.cpp cuts"):
        export(llama_for(tokenizer), tmp_path / "out", to="gguf", tokenizer=tokenizer)
    assert not (tmp_path / "out").exists()


def without_byte(tokenizer):
    vocab = dict(json.loads(tokenizer.backend_tokenizer.to_str())["model"]["vocab"])
    del vocab["<0x41>"]
    return rebuilt(tokenizer, model={"vocab": vocab})


def with_step(**step):
    return lambda tokenizer: rebuilt(tokenizer, **step)


def one_merge_less(tokenizer):
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    return rebuilt(tokenizer, model={"merges": merges[1:]})


def other_order(tokenizer):
    """The merges of a token do not stand beside each other."""
    merges = [tuple(each) for each in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]]
    random.Random(0).shuffle(merges)
    return rebuilt(tokenizer, model={"merges": merges})


def without_end(tokenizer):
    tokenizer.eos_token = None
    return tokenizer


def something_else_around(tokenizer):
    around = {"type": "TemplateProcessing", "special_tokens": {}}
    around["special_tokens"]["<unk>"] = {"id": "<unk>", "ids": [0], "tokens": ["<unk>"]}
    single = [{"SpecialToken": {"id": "<unk>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return rebuilt(tokenizer, post_processor=around | {"single": single, "pair": [*single, *single[1:]]})


def found_with_spaces(tokenizer):
    made = rebuilt(tokenizer, normalizer=two_steps(), pre_tokenizer=None)
    made.add_tokens([AddedToken("<x>", normalized=True)])
    return made


METASPACE = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "first", "split": False}
REFUSED = [
    (lambda tokenizer: rebuilt(tokenizer, model={"dropout": 0.5}), "its model has dropout=0.5"),
    (without_byte, "it has no token '<0x41>', and llama.cpp ends the process"),
    (with_step(normalizer={"type": "Lowercase"}), "it has the steps Lowercase and Metaspace: "),
    (with_step(normalizer={"type": "Sequence", "normalizers": [PREPENDS]}), "the steps Prepend and Metaspace: "),
    (with_step(pre_tokenizer=None), "it has the steps none and none: "),
    (with_step(pre_tokenizer=METASPACE), "it has the steps none and Metaspace: "),
    (one_merge_less, "it cuts .* into . ., and llama.cpp, which has a score for each token, into "),
    (other_order, "it cuts .* into .*, and llama.cpp, which has a score"),
    (without_end, "it has no eos_token, for which llama.cpp takes another token"),
    (something_else_around, "it puts other tokens around a text than bos_token and eos_token"),
    (found_with_spaces, "it finds its token '<x>' in texts that have their space"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_tokenizers_that_it_cannot_say_are_refused(change, message, folder):
    tokenizer = loaded(folder, "first")
    check_tokenizer(tokenizer, FORM, 1000)
    with pytest.raises(UnsupportedModelError, match=message):
        check_tokenizer(change(tokenizer), FORM, 1000)


def test_words_that_the_tokenizer_keeps_apart_are_refused_where_tokens_cross_them(tmp_path):
    tokenizer = llama(tmp_path, size=900, split_by_whitespace=False)
    assert any("\u2581" in token[1:] for token in tokenizer.get_vocab())
    check_tokenizer(tokenizer, FORM, 1000)
    apart = METASPACE | {"replacement": "\u2581", "split": True}
    with pytest.raises(UnsupportedModelError, match="it has the steps none and Metaspace: "):
        check_tokenizer(rebuilt(tokenizer, pre_tokenizer=apart), FORM, 1000)


@pytest.mark.parametrize(
    ("pairs", "text"),
    [
        ("a+b ab+c", None),
        ("b+c a+b ab+c", "abc"),  # a and bc are left, which are a token together
        ("b+c a+b ab+c bc+d a+bc", "abcd"),  # abc before bcd by its score, and after it by the list
        ("b+c a+b ab+c a+bc bc+d", None),
    ],
)
def test_a_text_is_found_that_scores_cut_otherwise(pairs, text):
    given = [tuple(pair.split("+")) for pair in pairs.split()]
    merges = Merges(given, dict.fromkeys([*"abcd", *map("".join, given)]))
    assert merges.differing_text(()) == text


def test_random_merges_are_cut_alike_or_refused():
    """Merges of a few letters, in the order in which a tokenizer learns them."""
    chance, count = random.Random(0), {True: 0, False: 0}
    for _ in range(300):
        tokens, pairs = dict.fromkeys("abc"), dict[tuple[str, str], None]()
        for _ in range(chance.randint(2, 12)):
            pair = chance.choice([*tokens]), chance.choice([*tokens])
            if len(pair[0] + pair[1]) < 7:
                pairs[pair] = tokens[pair[0] + pair[1]] = None
        merges = Merges([*pairs], tokens)
        differing = merges.differing_text(())
        count[differing is None] += 1
        for text in ("".join(chance.choices("abc", k=12)) for _ in range(60) if differing is None):
            assert cut(text, merges.rank) == cut(text, merges.score)
    assert min(count.values()) > 30


@runs
@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.skipif(not CAPTIONS.is_dir(), reason="needs ../shared")
@pytest.mark.parametrize("crosses", (False, True))
def test_thousands_of_tokens_of_real_text(crosses, tmp_path):
    import llama_cpp

    lines = [gzip.open(file, "rt", encoding="utf-8").read().splitlines()[:4000] for file in CAPTIONS.glob("train.*.gz")]
    given = [line.strip() for each in lines for line in each]  # see the notes on spaces before
    tokenizer = llama(tmp_path, given, 6000, split_by_whitespace=not crosses)
    written(llama_for(tokenizer), tmp_path, tokenizer=tokenizer)
    engine = llama_cpp.Llama(str(tmp_path / GGUF), vocab_only=True, verbose=False)
    for text in given[::10]:
        assert engine.tokenize(text.encode()) == tokenizer(text)["input_ids"], text
