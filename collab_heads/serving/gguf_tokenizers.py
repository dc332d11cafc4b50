"""The tokenizer in a GGUF file: which ones llama.cpp has, how they are written, and whether texts are cut alike."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from collab_heads.contract.model_forms import GgufForm
from collab_heads.errors import ArgumentError, UnsupportedModelError
from collab_heads.serving.gguf_engines import Loaded

IDS_ONLY = "Pass tokenizer=None for a file that takes ids only"
NORMALIZED = "NFC"  # which llama.cpp leaves out: most texts are in that form
PROBE = "I'm: 3 or 12345 caf\u00e9s\u2026 \n\n\t(\u4f60\u597d, \u043c\u0438\u0440)  don't! x = y[0] + 7.5; \U0001f600"
SPECIAL = {"BPE": {"bos": "bos", "eos": "eos", "unk": "unk", "pad": "pad"}}  # name in llama.cpp -> in transformers
SPECIAL["WordPiece"] = {"bos": "cls", "sep": "sep", "unk": "unk", "pad": "pad", "mask": "mask"}
INSIDE, WORD = "##", "\u2581"  # begin a piece within a word in WordPiece, and one at its begin in llama.cpp


def check_tokenizer(tokenizer: Any, form: GgufForm, size: int) -> None:
    """Raise an error if llama.cpp cuts texts into other tokens than a tokenizer, or a model has fewer (`size`)."""
    name, backend = type(tokenizer).__name__, getattr(tokenizer, "backend_tokenizer", None)
    parts = {"model": {"type": ""}} if backend is None else json.loads(backend.to_str())
    kind = parts["model"]["type"]
    if kind not in form.tokenizers or not CHECKS[kind](parts, form):
        raise UnsupportedModelError(f"{name} is none that is written for llama.cpp: {those_of(form)}. {IDS_ONLY}")
    count = max(tokenizer.get_vocab().values(), default=0) + 1
    if count > size:
        raise ArgumentError(f"{name} has {count} tokens, the model {size}: pass the tokenizer of the model")


def those_of(form: GgufForm) -> str:
    """Return the tokenizers that are written for a model type, in words."""
    if "BPE" in form.tokenizers:
        return f"these are byte-level BPE whose words are cut as it calls {', '.join(form.pre_tokenizers)}"
    steps = form.normalizer["type"], *form.pre_tokenizers
    return f"these are {', '.join(form.tokenizers)} with the steps {', '.join(steps)}"


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


CHECKS: dict[str, Callable[[Mapping[str, Any], GgufForm], bool]] = {"BPE": is_byte_level, "WordPiece": has_word_pieces}


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
        writer.add_tokenizer_model("no_vocab")
        yield "the file has no tokenizer, since none was given: it takes ids"
        return
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    kind = backend["model"]["type"]
    tokens, kinds = [f"[PAD{number}]" for number in range(size)], [TokenType.UNUSED] * size
    for token, number in tokenizer.get_vocab().items():
        tokens[number], kinds[number] = token, TokenType.NORMAL
    for number, token in tokenizer.added_tokens_decoder.items():
        kinds[number] = TokenType.CONTROL if token.special else TokenType.USER_DEFINED
        if token.lstrip or token.rstrip or token.single_word:
            yield f"llama.cpp cuts texts at {token.content!r} also within words, and keeps the spaces beside it"
    writer.add_tokenizer_model(form.tokenizers[kind])
    if kind == "BPE":
        yield from add_merges(writer, tokenizer, backend, form)
    else:
        tokens = [
            as_piece(token) if each == TokenType.NORMAL else token for token, each in zip(tokens, kinds, strict=True)
        ]
        add_normalizer(writer, backend["normalizer"])
    if len(set(tokens)) < size:
        twice = Counter(tokens).most_common(1)[0][0]
        raise UnsupportedModelError(f"two tokens are {twice!r} in llama.cpp, which ends the process then. {IDS_ONLY}")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    for name, own in SPECIAL[kind].items():
        if (number := getattr(tokenizer, f"{own}_token_id")) is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)
    elif not form.embeds:
        yield "the file has no chat template, since the tokenizer has none, or several"


def add_merges(writer: Any, tokenizer: Any, backend: Mapping[str, Any], form: GgufForm) -> Iterator[str]:
    """Add the rules of byte-level BPE, and yield notes."""
    if backend["normalizer"] is not None:
        yield f"texts should be in the form {NORMALIZED}, to which llama.cpp does not bring them"
    writer.add_tokenizer_pre(cut_as(backend["pre_tokenizer"], form))
    writer.add_token_merges([" ".join(each) for each in backend["model"]["merges"]])
    first, *_, last = tokenizer("a b")["input_ids"]
    writer.add_add_bos_token(first == tokenizer.bos_token_id)
    writer.add_add_eos_token(last == tokenizer.eos_token_id)


def as_piece(token: str) -> str:
    """Return a piece of a word as llama.cpp has it: those that begin words are marked, and not the others."""
    return token.removeprefix(INSIDE) if token.startswith(INSIDE) else WORD + token


def add_normalizer(writer: Any, normalizer: Mapping[str, Any]) -> None:
    """Add what is done to texts before they are cut; accents go where letters become small, unless they say more."""
    accents = normalizer["strip_accents"]
    given = {"lowercase": normalizer["lowercase"]}
    given["strip_accents"] = normalizer["lowercase"] if accents is None else accents
    for name, value in given.items():
        writer.add_bool(f"tokenizer.ggml.normalizer.{name}", value)


def check_tokens(engine: Loaded, tokenizer: Any) -> None:
    found, expected = engine.engine.tokenize(PROBE.encode()), tokenizer(PROBE)["input_ids"]
    if found != expected:
        raise UnsupportedModelError(
            f"llama.cpp cuts {PROBE!r} into the tokens {found}, not {expected}: nothing was written. {IDS_ONLY}"
        )
