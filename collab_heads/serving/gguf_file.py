"""Read what a GGUF file says of itself, and check it before llama.cpp reads it, which ends the process on some faults.

A file comes from anywhere. Numbers in it are never trusted for the room they ask for: what is read lies in the file.
"""

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from collab_heads.base.checks import MAX_SIZE, is_index, is_number
from collab_heads.contract.model_forms import GgufForm
from collab_heads.contract.registry import gguf_forms
from collab_heads.serving.gguf_sentencepiece import BYTES, SENTENCEPIECE
from collab_heads.sites.state import expect

MAGIC, VERSIONS, MOST_DIMENSIONS = b"GGUF", (2, 3), 4
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # as struct does
TEXT, ARRAY = 8, 9
TOKENS = "tokenizer.ggml."
NO_TOKENS = "no_vocab"  # the tokenizer of a file that takes ids only
# what the architecture says, beside `general.*` and `tokenizer.*`
SIZES = {"block_count": 513, "embedding_length": MAX_SIZE, "context_length": MAX_SIZE}  # name -> more than it may be
OF_BLOCKS = "attention.head_count", "attention.head_count_kv", "feed_forward_length"
WIDTHS = "attention.key_length", "attention.value_length", "rope.dimension_count"
EPSILONS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
POOLING = "pooling_type"
KNOWN = {*SIZES, *OF_BLOCKS, *WIDTHS, *EPSILONS, POOLING, "vocab_size", "rope.freq_base", "attention.causal"}
BYTE_TYPE = 6
NORMALIZE = "collab_heads.normalize"  # whether embeddings have length 1 in the original


class GgufFacts(NamedTuple):
    """The facts of a GGUF file.

    Attributes:
        architecture: as llama.cpp calls it.
        form: how the family is written.
        size: of the vocabulary, V.
        width: of the states, D.
        positions: the most tokens of a text.
        pools: whether an encoder puts out one embedding of a text, and not its states.
        normalizes: whether the original's embeddings have length 1.
    """

    architecture: str
    form: GgufForm
    size: int
    width: int
    positions: int
    pools: bool
    normalizes: bool


class Reader:
    """A reader of the numbers and texts in a file, which never reads past its end."""

    def __init__(self, file: BinaryIO, size: int):
        self.file, self.size = file, size

    def read(self, count: int) -> bytes:
        expect(count <= self.size - self.file.tell(), "a length", count, "one within the file")
        return self.file.read(count)

    def number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self.read(struct.calcsize(f"<{kind}")))[0]

    def text(self) -> str:
        return self.read(self.number("Q")).decode("utf-8", "surrogateescape")  # tokens may be parts of characters

    def value(self, kind: int, *, in_array: bool = False) -> Any:
        if kind == TEXT:
            return self.text()
        if kind == ARRAY and not in_array:
            kind, count = self.number("I"), self.number("Q")
            if kind in NUMBERS:
                letter = NUMBERS[kind]
                content = self.read(count * struct.calcsize(f"<{letter}"))
                return [each for (each,) in struct.iter_unpack(f"<{letter}", content)]
            expect(count <= self.size, "a length", count, "one within the file")
            return [self.value(kind, in_array=True) for _ in range(count)]
        expect(kind in NUMBERS, "a type", kind, f"one of {', '.join(map(str, (*NUMBERS, TEXT, ARRAY)))}")
        return self.number(NUMBERS[kind])


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Return the entries of a file by name, and the shapes of its tensors, the longest stride last.

    Raises:
        ValueError: if it is none, or reaches past its end.
    """
    with path.open("rb") as file:
        reader = Reader(file, path.stat().st_size)
        expect((magic := reader.read(4)) == MAGIC, "its first bytes", magic, repr(MAGIC))
        expect((version := reader.number("I")) in VERSIONS, "version", version, "2 or 3")
        tensors, entries = reader.number("Q"), dict[str, Any]()
        for _ in range(reader.number("Q")):
            name = reader.text()
            expect(name not in entries, "an entry", name, "there once")
            entries[name] = reader.value(reader.number("I"))
        shapes = dict[str, list[int]]()
        for _ in range(tensors):
            name, rank = reader.text(), reader.number("I")
            expect(0 < rank <= MOST_DIMENSIONS, f"the dimensions of {name}", rank, f"1 to {MOST_DIMENSIONS}")
            expect(name not in shapes, "a tensor", name, "there once")
            shapes[name] = [reader.number("Q") for _ in range(rank)]
            reader.read(12)  # type and place, which llama.cpp checks
        return entries, shapes


def checked_facts(entries: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> GgufFacts:
    """Return the facts of a file.

    Raises:
        ValueError: if it has no valid value for one, or something that exports never have.
    """
    architecture: Any = entries.get("general.architecture")
    forms = {name: form for form in gguf_forms() for name in (form.even, form.uneven) if name is not None}
    expect(
        isinstance(architecture, str) and architecture in forms, "general.architecture", architecture, ", ".join(forms)
    )
    form, prefix = forms[architecture], f"{architecture}."
    own = {name.removeprefix(prefix): value for name, value in entries.items() if name.startswith(prefix)}
    others = [name for name in entries if not name.startswith((prefix, "general.", "tokenizer.", "collab_heads."))]
    others += sorted(prefix + name for name in own.keys() - KNOWN)
    expect(not others, "an entry", next(iter(others), None), "one that exports have")
    for name, most in SIZES.items():
        expect(is_index(own.get(name), most) and own[name] > 0, prefix + name, own.get(name), f"a size below {most}")
    check_blocks(own, prefix, form)
    size = shapes.get("token_embd.weight", [0, 0])[-1]
    expect(
        shapes.get("token_embd.weight") == [own["embedding_length"], size],
        "embedding_length",
        own["embedding_length"],
        "that of token_embd.weight",
    )
    expect(own.get("vocab_size", size) == size, f"{prefix}vocab_size", own.get("vocab_size"), f"{size}, as embeddings")
    check_tokens_of(entries, size, form)
    pooling = own.get(POOLING, 0)
    expect(pooling in (0, 1, 2, 3) and (form.embeds or not pooling), prefix + POOLING, pooling, "0 to 3, of an encoder")
    normalizes = entries.get(NORMALIZE, False)
    expect(isinstance(normalizes, bool), NORMALIZE, normalizes, "true or false")
    expect(
        own.get("attention.causal", True) is not form.embeds,
        prefix + "attention.causal",
        own.get("attention.causal"),
        str(not form.embeds),
    )
    return GgufFacts(
        architecture, form, size, own["embedding_length"], own["context_length"], bool(pooling), normalizes
    )


def check_blocks(own: Mapping[str, Any], prefix: str, form: GgufForm) -> None:
    """Raise ValueError unless the sizes of the blocks are some with which llama.cpp computes."""
    counts = []
    for name in OF_BLOCKS:
        value = own.get(name, own.get("attention.head_count"))
        each = value if isinstance(value, list) else [value] * own["block_count"]
        valid = len(each) == own["block_count"] and all(is_index(count, MAX_SIZE) for count in each)
        expect(valid, prefix + name, value, f"a size, or one for each of {own['block_count']} blocks")
        counts.append(each)
    for heads, key_heads, _ in zip(*counts, strict=True):
        valid = heads % key_heads == 0 if key_heads else not heads
        expect(valid, prefix + OF_BLOCKS[1], key_heads, f"one that divides the {heads} heads")
    expect(counts[0][0] > 0, prefix + OF_BLOCKS[0], counts[0][0], "more than 0 in the first block")
    default = own["embedding_length"] // counts[0][0]
    key, value, turned = (own.get(name, default) for name in WIDTHS)
    for name, width in zip(WIDTHS, (key, value, turned), strict=True):
        expect(is_index(width, MAX_SIZE) and width > 0, prefix + name, width, "a width")
    if form.rotations is not None:
        expect(turned % 2 == 0 and turned <= key, prefix + WIDTHS[2], turned, f"even, and at most {key}")
    for name in (*EPSILONS, "rope.freq_base"):
        number = own.get(name, 1.0)
        expect(is_number(number) and math.isfinite(number) and number > 0, prefix + name, number, "a positive number")


def check_tokens_of(entries: Mapping[str, Any], size: int, form: GgufForm) -> None:
    """Raise ValueError unless llama.cpp can read the tokens: it ends the process where two are the same."""
    tokens: Any = entries.get(f"{TOKENS}tokens")
    kind = entries.get(f"{TOKENS}model")
    known = NO_TOKENS, *form.tokenizers.values()
    expect(kind in known, f"{TOKENS}model", kind, f"one of {', '.join(known)}")
    if kind == NO_TOKENS:
        expect(tokens is None, f"{TOKENS}tokens", len(tokens or ()), "not there, without a tokenizer")
        return
    expect(
        isinstance(tokens, list) and len(tokens) == size, f"{TOKENS}tokens", len(tokens or ()), f"{size}, as embeddings"
    )
    expect(all(isinstance(token, str) for token in tokens), f"{TOKENS}tokens", "numbers", "texts")
    twice = next(repeated(tokens), None)
    expect(twice is None, "a token", twice, "there once")
    types: Any = entries.get(f"{TOKENS}token_type", ())
    of_bytes = {token for token, each in zip(tokens, types, strict=False) if each == BYTE_TYPE}
    expect(of_bytes <= set(BYTES), "a token of a byte", next(iter(of_bytes - set(BYTES)), None), "written as <0x41>")
    if kind == form.tokenizers.get(SENTENCEPIECE):
        missing = next(iter(set(BYTES) - set(tokens)), None)
        expect(missing is None, f"{TOKENS}tokens", f"without {missing!r}", "with a token for each byte")
    for name, value in entries.items():
        if name.startswith(TOKENS) and name.endswith("_token_id"):
            expect(is_index(value, size), name, value, f"below {size}")


def repeated(tokens: Sequence[str]) -> Iterator[str]:
    """Yield the tokens that are there already, for which llama.cpp ends the process."""
    seen = set[str]()
    for token in tokens:
        if token in seen:
            yield token
        seen.add(token)
