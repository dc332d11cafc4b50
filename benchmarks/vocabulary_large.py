"""Trim a vocabulary of the size of mT5's in this process: seconds, and memory at its peak beyond the model's own.

python benchmarks/vocabulary_large.py [--pieces 250000] [--sentences 20000]

The model is a random mT5-small in float32. Its tokenizer is a Unigram of random pieces in the alphabets of many
languages, about as long as real ones, with bytes and single characters. The texts are sentences in Latin letters that
use a part of its pieces. The peak is what the process holds at most while it trims, beyond what it held when only the
model was there: the tokenizer, the texts and all copies of both, and the new embeddings. The line of JSON also says
whether the encoder's states for the first texts are the same before and after, bit by bit.
"""

import argparse
import json
import random
import time

import torch
from transformers import MT5Config, MT5ForConditionalGeneration, PreTrainedTokenizerBase, T5Tokenizer
from transformers.utils import logging

from collab_heads import trim_vocabulary
from common import memory_bytes, reset_peak

BYTES, SPARE = 256, 12  # tokens; rows without a token that the model has, as mT5
# first code point, characters, share of the pieces: Latin first, since its pieces make the texts
SCRIPTS = (
    (0x61, 26, 0.3),  # Latin
    (0xC0, 180, 0.1),  # with accents
    (0x430, 60, 0.15),  # Cyrillic
    (0x3B1, 24, 0.03),  # Greek
    (0x5D0, 27, 0.03),  # Hebrew
    (0x620, 42, 0.07),  # Arabic
    (0x905, 53, 0.07),  # Devanagari
    (0xE01, 46, 0.05),  # Thai
    (0xAC00, 2000, 0.06),  # Hangul
    (0x4E00, 8000, 0.14),  # Chinese and Japanese: all that is left
)


def made_pieces(count: int, chance: random.Random) -> tuple[list[str], list[str]]:
    """Return pieces, most probable first, and those among them that begin a word in Latin letters."""
    found: dict[str, None] = {}
    for first, letters, share in SCRIPTS:
        alphabet = [chr(first + number) for number in range(min(letters, max(20, int(share * count))))]
        last = first == SCRIPTS[-1][0]
        wanted = max(count, len(found)) if last else len(found) + max(len(alphabet), int(share * count))
        found |= dict.fromkeys(alphabet)
        while len(found) < wanted:
            length = min(12, 2 + int(chance.expovariate(1 / (4 if letters < 1000 else 1))))
            found["▁" * (chance.random() < 0.6) + "".join(chance.choices(alphabet, k=length))] = None
    pieces = list(found)[:count]
    chance.shuffle(pieces)
    return pieces, [each for each in pieces if each[0] == "▁" and each[1:].isascii()]


def tokenizer_of(pieces: list[str]) -> PreTrainedTokenizerBase:
    """Return mT5's tokenizer with these pieces, of which each is less probable than the one before."""
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    vocabulary += [(f"<0x{byte:02X}>", 0.0) for byte in range(BYTES)] + [("▁", -2.0)]
    vocabulary += [(piece, -5 - 10 * place / len(pieces)) for place, piece in enumerate(pieces)]
    return T5Tokenizer(vocab=vocabulary, extra_ids=0)


def measured(pieces: int, sentences: int) -> dict:
    """Build model, tokenizer and texts, trim, and return the row."""
    chance = random.Random(0)
    torch.manual_seed(0)
    special = 3 + BYTES + 1
    config = MT5Config(vocab_size=pieces + SPARE, decoder_start_token_id=0)
    model = MT5ForConditionalGeneration(config).eval()
    size, before = sum(each.nbytes for each in model.parameters()), memory_bytes("VmRSS")
    names, words = made_pieces(pieces - special, chance)
    tokenizer = tokenizer_of(names)
    weights = [1 / (place + 10) for place in range(len(words))]  # few words are frequent, most are rare
    drawn = chance.choices([word[1:] for word in words], weights, k=12 * sentences)
    texts = [" ".join(drawn[place : place + 12]) for place in range(0, len(drawn), 12)]
    encode = model.get_encoder()
    with torch.no_grad():
        expected = encode(**tokenizer(texts[:4], return_tensors="pt", padding=True)).last_hidden_state
    reset_peak()
    started, used = time.perf_counter(), time.process_time()
    trimmed, report = trim_vocabulary(model, tokenizer, texts, show_progress=False)
    taken = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - used}
    peak = memory_bytes("VmHWM")
    with torch.no_grad():
        found = encode(**trimmed(texts[:4], return_tensors="pt", padding=True)).last_hidden_state
    return {
        "model": "mT5-small, random",
        "pieces": report.tokens_before,
        "sentences": sentences,
        "tokens": report.tokens_after,
        "parameters_before": report.model_parameters,
        "parameters": model.num_parameters(),
        "model_mb": size / 1e6,
        "beyond_mb": (peak - before) / 1e6,
        "equal": torch.equal(found, expected),
        **taken,
    }


def main() -> None:
    """Print the row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pieces", type=int, default=250_000)
    parser.add_argument("--sentences", type=int, default=20_000)
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    print(json.dumps(measured(arguments.pieces, arguments.sentences)))


if __name__ == "__main__":
    main()
