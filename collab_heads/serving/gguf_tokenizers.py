"""The tokenizer in a GGUF file: which ones llama.cpp has, how they are written, and whether texts are cut alike."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from collab_heads.contract.model_forms import GgufForm
from collab_heads.errors import ArgumentError, UnsupportedModelError
from collab_heads.serving.gguf_engines import Loaded
from collab_heads.serving.gguf_file import NO_TOKENS, repeated
from collab_heads.serving.gguf_sentencepiece import BYTES, SENTENCEPIECE, Merges, is_sentencepiece, prefix_of, why_not

IDS_ONLY = "Pass tokenizer=None for a file that takes ids only"
NORMALIZED = "NFC"  # which llama.cpp leaves out: most texts are in that form
PROBES = (  # what tokenizers cut in many ways
    "I'm: 3 or 12345 caf\u00e9s\u2026 \n\n\t(\u4f60\u597d, \u043c\u0438\u0440)  don't! x = y[0] + 7.5; \U0001f600",
    "",
    "\n",
    "two  three   spaces at the end  ",
    "\ttab\t\ttabs\r\n\n\nlines\n",
    "e\u0301 n\u0303o\u0308 \u0e01\u0e33 \u0645\u0631\u062d\u0628\u0627",
    "\U00010348\U0001f468\u200d\U0001f469\u200d\U0001f467 \u2581 \u00a0\u3000\u200b <0x41> \x01\x7f",
    "aaaaaaaaaaaaa --------------------- ==== 00000000 ababababab",
)
SYLLABLES = (
    "\u0939\u093f\u0928\u094d\u0926\u0940 \uac00\ub098"  # which lose parts with their accents, in llama.cpp alone
)
LEADING = " one space before", "   three spaces before"
SPECIAL = {"BPE": {"bos": "bos", "eos": "eos", "unk": "unk", "pad": "pad"}}  # name in llama.cpp -> in transformers
SPECIAL[SENTENCEPIECE] = SPECIAL["BPE"]
SPECIAL["WordPiece"] = {"bos": "cls", "sep": "sep", "unk": "unk", "pad": "pad", "mask": "mask"}
INSIDE, WORD = "##", "\u2581"  # begin a piece within a word in WordPiece, and one at its begin in llama.cpp


def check_tokenizer(tokenizer: Any, form: GgufForm, size: int) -> None:
    """Raise an error if llama.cpp cuts texts into other tokens than a tokenizer, or a model has fewer (`size`)."""
    name, parts = type(tokenizer).__name__, parts_of(tokenizer)
    kind = kind_of(parts["model"])
    wrong = CHECKS[kind](parts, form) if kind in form.tokenizers else those_of(form)
    if not wrong and not form.embeds:
        wrong = why_not_around(tokenizer)
    if wrong:
        raise UnsupportedModelError(f"{name} is none that is written for llama.cpp: {wrong}. {IDS_ONLY}")
    count = max(tokenizer.get_vocab().values(), default=0) + 1
    if count > size:
        raise ArgumentError(f"{name} has {count} tokens, the model {size}: pass the tokenizer of the model")


def parts_of(tokenizer: Any) -> dict[str, Any]:
    """Return the content of the `tokenizer.json` of a tokenizer; one without a type for a tokenizer that has none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return {"model": {"type": ""}} if backend is None else json.loads(backend.to_str())


def kind_of(model: Mapping[str, Any]) -> str:
    """Return how forms call the kind of a tokenizer with this entry `model`."""
    return SENTENCEPIECE if is_sentencepiece(model) else model["type"]


def those_of(form: GgufForm) -> str:
    """Return the tokenizers that are written for a model type, in words."""
    if "BPE" in form.tokenizers:
        cut = ", ".join(form.pre_tokenizers)
        return f"these are byte-level BPE whose words are cut as it calls {cut}, and the BPE of {SENTENCEPIECE}"
    steps = form.normalizer["type"], *form.pre_tokenizers
    return f"these are {', '.join(form.tokenizers)} with the steps {', '.join(steps)}"


def why_not_around(tokenizer: Any) -> str:
    """Return why llama.cpp does not put the same tokens around a text, or takes another one for its end; "" if not."""
    alone, whole = (tokenizer("a b", add_special_tokens=each)["input_ids"] for each in (False, True))
    begin, end = added_around(tokenizer)
    if whole != [tokenizer.bos_token_id] * begin + alone + [tokenizer.eos_token_id] * end:
        return "it puts other tokens around a text than bos_token and eos_token"
    return "" if tokenizer.eos_token_id is not None else "it has no eos_token, for which llama.cpp takes another token"


def added_around(tokenizer: Any) -> tuple[bool, bool]:
    """Return whether a tokenizer puts bos_token before a text, and eos_token after it."""
    first, *_, last = tokenizer("a b")["input_ids"]
    return first == tokenizer.bos_token_id, last == tokenizer.eos_token_id


def is_byte_level(parts: Mapping[str, Any], form: GgufForm) -> bool:
    """Return True if llama.cpp makes the merges of a `tokenizer.json`, in words that it cuts alike."""
    model, normalizer = parts["model"], (parts.get("normalizer") or {}).get("type")
    cut = cut_as(parts.get("pre_tokenizer"), form)
    if cut is None or any(model.get(each) for each in ("continuing_subword_prefix", "end_of_word_suffix", "dropout")):
        return False
    return normalizer in (None, NORMALIZED) and bool(model.get("ignore_merges")) == (cut in form.whole_words)


def has_word_pieces(parts: Mapping[str, Any], form: GgufForm) -> bool:
    """Return True if llama.cpp finds the pieces of words that a `tokenizer.json` says, and cleans texts alike."""
    is_alike = cut_as(parts.get("pre_tokenizer"), form) is not None
    is_alike &= form.normalizer.items() <= (parts.get("normalizer") or {}).items()
    return is_alike and parts["model"].get("continuing_subword_prefix") == INSIDE


# kind -> why llama.cpp cuts texts otherwise than the tokenizer of a `tokenizer.json`; "" if it does not
CHECKS: dict[str, Callable[[Mapping[str, Any], GgufForm], str]] = {
    "BPE": lambda parts, form: "" if is_byte_level(parts, form) else those_of(form),
    "WordPiece": lambda parts, form: "" if has_word_pieces(parts, form) else those_of(form),
    SENTENCEPIECE: lambda parts, form: why_not(parts),
}


def cut_as(pre_tokenizer: Mapping[str, Any] | None, form: GgufForm) -> str | None:
    """Return how llama.cpp calls the steps in which a tokenizer cuts texts into words; None where it has none such."""
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer or {}])
    for name, known in form.pre_tokenizers.items():
        if len(known) == len(steps) and all(a.items() <= b.items() for a, b in zip(known, steps, strict=True)):
            return name
    return None


def add_tokenizer(writer: Any, tokenizer: Any, form: GgufForm, size: int) -> Iterator[str]:
    """Add the tokens and the rules of a tokenizer, and its chat template, and yield notes."""
    from gguf import TokenType

    if tokenizer is None:
        writer.add_tokenizer_model(NO_TOKENS)
        yield "the file has no tokenizer, since none was given: it takes ids"
        return
    backend = parts_of(tokenizer)
    kind = kind_of(backend["model"])
    tokens, kinds = [f"[PAD{number}]" for number in range(size)], [TokenType.UNUSED] * size
    for token, number in tokenizer.get_vocab().items():
        tokens[number], kinds[number] = token, TokenType.NORMAL
    for number, token in tokenizer.added_tokens_decoder.items():
        kinds[number] = TokenType.CONTROL if token.special else TokenType.USER_DEFINED
        if token.lstrip or token.rstrip or token.single_word:
            yield f"llama.cpp cuts texts at {token.content!r} also within words, and keeps the spaces beside it"
    writer.add_tokenizer_model(form.tokenizers[kind])
    if kind == "BPE":
        yield from add_merges(writer, backend, form)
    elif kind == SENTENCEPIECE:
        yield from add_scores(writer, backend, tokens)
        for number, token in enumerate(tokens):
            if kinds[number] == TokenType.NORMAL and token in BYTES:
                kinds[number] = TokenType.BYTE
        if (unknown := tokenizer.unk_token_id) is not None:
            kinds[unknown] = TokenType.UNKNOWN
    else:
        tokens = [
            as_piece(token) if each == TokenType.NORMAL else token for token, each in zip(tokens, kinds, strict=True)
        ]
        yield from add_normalizer(writer, backend["normalizer"])
    if not form.embeds:
        for name, is_added in zip(("bos", "eos"), added_around(tokenizer), strict=True):
            getattr(writer, f"add_add_{name}_token")(is_added)
    if (twice := next(repeated(tokens), None)) is not None:
        raise UnsupportedModelError(f"two tokens are {twice!r} in llama.cpp, which ends the process then. {IDS_ONLY}")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    for name, own in SPECIAL[kind].items():
        if (number := getattr(tokenizer, f"{own}_token_id")) is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    if has_template(tokenizer):
        writer.add_chat_template(tokenizer.chat_template)
    elif not form.embeds:
        yield "the file has no chat template, since the tokenizer has none, or several"


def has_template(tokenizer: Any) -> bool:
    """Return True if a tokenizer has one chat template."""
    return isinstance(tokenizer.chat_template, str)


def add_merges(writer: Any, backend: Mapping[str, Any], form: GgufForm) -> Iterator[str]:
    """Add the rules of byte-level BPE, and yield notes."""
    if backend["normalizer"] is not None:
        yield f"texts should be in the form {NORMALIZED}, to which llama.cpp does not bring them"
    writer.add_tokenizer_pre(cut_as(backend["pre_tokenizer"], form))
    writer.add_token_merges([" ".join(each) for each in backend["model"]["merges"]])


def add_scores(writer: Any, backend: Mapping[str, Any], tokens: Sequence[str]) -> Iterator[str]:
    """Add the rules of SentencePiece, and yield notes."""
    merges, prefix = Merges(backend["model"]["merges"], backend["model"]["vocab"]), prefix_of(backend)
    assert prefix is not None
    writer.add_tokenizer_pre("default")
    writer.add_token_scores([-float(merges.first.get(token, len(merges.ranks))) for token in tokens])
    writer.add_add_space_prefix(prefix.is_there)
    writer.add_remove_extra_whitespaces(False)
    if prefix.is_there and not prefix.before_spaces:
        yield "llama.cpp puts a space before every text, the tokenizer before those that begin with none"
    if prefix.is_there and not prefix.after_special:
        yield "llama.cpp puts a space after a special token, the tokenizer before the whole text alone"


def as_piece(token: str) -> str:
    """Return a piece of a word as llama.cpp has it: those that begin words are marked, and not the others."""
    return token.removeprefix(INSIDE) if token.startswith(INSIDE) else WORD + token


def add_normalizer(writer: Any, normalizer: Mapping[str, Any]) -> Iterator[str]:
    """Add what is done to texts before they are cut, and yield notes."""
    given = {"lowercase": normalizer["lowercase"], "strip_accents": strips_accents(normalizer)}
    for name, value in given.items():
        writer.add_bool(f"tokenizer.ggml.normalizer.{name}", value)
    if given["strip_accents"]:
        yield "llama.cpp takes off accents otherwise in Korean and in Indian scripts, and cuts such texts otherwise"


def strips_accents(normalizer: Mapping[str, Any]) -> bool:
    """Return True if accents go: where letters become small, unless a `tokenizer.json` says more."""
    accents = normalizer["strip_accents"]
    return normalizer["lowercase"] if accents is None else accents


def check_tokens(engine: Loaded, tokenizer: Any) -> None:
    """Raise UnsupportedModelError if llama.cpp cuts a text into other tokens than a tokenizer."""
    for text in probes_for(tokenizer):
        found = engine.engine.tokenize(text.encode(), special=True)
        expected = tokenizer(text, verbose=False)["input_ids"]
        if found != expected:
            raise UnsupportedModelError(
                f"llama.cpp cuts {text!r} into the tokens {found}, not {expected}: nothing was written. {IDS_ONLY}"
            )


def probes_for(tokenizer: Any) -> Iterator[str]:
    """Yield texts that llama.cpp should cut as a tokenizer does; `add_tokenizer` notes what it does otherwise."""
    yield from PROBES
    parts = parts_of(tokenizer)
    if kind_of(parts["model"]) != "WordPiece" or not strips_accents(parts["normalizer"]):
        yield SYLLABLES
    prefix = prefix_of(parts) if kind_of(parts["model"]) == SENTENCEPIECE else None
    before_spaces, after_special = (not prefix.is_there or each for each in prefix[1:]) if prefix else (True, True)
    if before_spaces:
        yield from LEADING
    for token in tokenizer.added_tokens_decoder.values() if after_special else ():
        if not (token.lstrip or token.rstrip or token.single_word):
            yield f"a{token.content}b {token.content}{' c' if before_spaces else 'c'}"
