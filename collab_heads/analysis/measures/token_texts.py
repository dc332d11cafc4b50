"""The tokens of a sentence as text, with the marks that the vocabulary puts on the pieces of words.

Byte-level vocabularies (GPT-2, RoBERTa, Llama 3, Qwen) spell every byte as a letter: ü becomes Ã¼, and a quotation mark
three letters. Their pieces are read back here, but for the marks of spaces and line ends, which say where words begin.
"""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # bytes that stand for themselves
LETTERS = dict(zip(PRINTED, map(chr, PRINTED), strict=True))
LETTERS |= {byte: chr(0x100 + number) for number, byte in enumerate(b for b in range(0x100) if b not in LETTERS)}
BYTES = {letter: byte for byte, letter in LETTERS.items()}
SPACE = 0x20  # the last of the bytes whose letters stay


def token_texts(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase | None) -> tuple[str, ...]:
    """Return tokens as text; without a tokenizer, their ids."""
    if tokenizer is None:
        return tuple(map(str, ids))
    names = map(str, tokenizer.convert_ids_to_tokens(list(ids)))
    return tuple(map(read_back, names) if is_byte_level(tokenizer) else names)


def is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()


def read_back(name: str) -> str:
    """Return what a piece of a byte-level vocabulary stands for; a part of a letter stays as it is spelled."""
    if not all(letter in BYTES for letter in name):  # a token that was added
        return name
    try:
        text = bytes(BYTES[letter] for letter in name).decode()
    except UnicodeDecodeError:
        return name
    return "".join(LETTERS[ord(letter)] if ord(letter) <= SPACE else letter for letter in text)
