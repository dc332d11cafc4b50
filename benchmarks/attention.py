"""Time the attention block after a swap, as a ratio to the original in the same run.

python benchmarks/attention.py [--rounds N]

The first table is the whole block of a BERT layer (self-attention, output projection, LayerNorm) of all-MiniLM-L6-v2
(width 384, 12 heads), batch 4, sdpa, evaluation mode, no mask, one thread. Every variant takes its turn in every round,
in changing orders: in one fixed order a busy machine's time slices fall on the same variants. The bar: `per_head` at
width 144 takes at most 0.95 of the original's time at every length. The second table decodes one token with a dynamic
cache that holds the given number of tokens (BERT as decoder, same weights).
"""

import argparse
import random
import statistics
from collections.abc import Callable

import torch
from transformers import BertModel, DynamicCache
from transformers.utils import logging

from collab_heads import swap_to_collaborative
from common import interleaved, minilm, table, write

LENGTHS = (32, 128, 512)
ROUNDS = {32: 20, 128: 10, 512: 4}  # in each of SHUFFLES orders
SHUFFLES = 10
WIDTHS = (384, 192, 128, 64)  # D, D/2, D/3, D/6
BATCH, SEED = 4, 0
BAR, BAR_WIDTH = 0.95, 144  # D/3, rounded up by per_head to 12 per head
SITE = "encoder.layer.0.attention.self"
COLUMNS = {"mixing": "", "width": ""} | {str(length): ".3f" for length in LENGTHS}
DECODE_COLUMNS = COLUMNS | {"cache": "", "cache_share": ".3f"}

Variants = dict[tuple[str, int], torch.nn.Module]


def variants(**options) -> Variants:
    """Return the first attention block of the original and of every swap: (mixing, width) -> block."""

    def load() -> BertModel:
        return BertModel.from_pretrained(minilm(), attn_implementation="sdpa", **options)

    blocks = {("original", 384): first_block(load())}
    for mixing in ("shared", "per_head"):
        for width in WIDTHS:
            model = load()
            # the time does not depend on how good the decomposition is
            report = swap_to_collaborative(model, dim_shared_query_key=width, kind=mixing, sites=[SITE], tol=1e-2)
            blocks[mixing, report.sites[0].dim] = first_block(model)
    return blocks


def first_block(model: torch.nn.Module) -> torch.nn.Module:
    """Return the attention block of layer 0: self-attention, output projection and LayerNorm."""
    return model.eval().base_model.encoder.layer[0].attention


def whole_sequences(blocks: Variants, length: int) -> dict[tuple[str, int], Callable]:
    """Return calls that run each block over sequences of this length."""
    states = torch.randn(BATCH, length, 384, generator=torch.Generator().manual_seed(SEED))
    return {name: lambda block=block: block(states) for name, block in blocks.items()}


def one_token(blocks: Variants, length: int) -> dict[tuple[str, int], Callable]:
    """Return calls that run each block over one token with a cache of this length, which each call restores first."""
    generator = torch.Generator().manual_seed(SEED)
    prompt = torch.randn(BATCH, length, 384, generator=generator)
    token = torch.randn(BATCH, 1, 384, generator=generator)

    def call(block, cache, keys, values):
        cache.layers[0].keys, cache.layers[0].values = keys, values
        return block(token, past_key_values=cache)

    calls = {}
    for name, block in blocks.items():
        cache = DynamicCache()
        block(prompt, past_key_values=cache)
        layer = cache.layers[0]
        calls[name] = lambda args=(block, cache, layer.keys, layer.values): call(*args)
    return calls


def shuffled(calls: dict, rounds: int) -> dict[tuple[str, int], float]:
    """Return the median seconds of each call over several shuffled orders."""
    chance, seconds = random.Random(SEED), []
    for _ in range(SHUFFLES):
        order = chance.sample(list(calls), len(calls))
        seconds.append(interleaved({name: calls[name] for name in order}, rounds))
    return {name: statistics.median(found[name] for found in seconds) for name in calls}


def measure(blocks: Variants, calls_of: Callable, rounds: int | None) -> list[dict]:
    """Return one row per variant, with the ratio to the original and the milliseconds at every length."""
    rows = [{"mixing": mixing, "width": width, "milliseconds": {}} for mixing, width in blocks]
    for length in LENGTHS:
        seconds = shuffled(calls_of(blocks, length), rounds or ROUNDS[length])
        for row in rows:
            mine = seconds[row["mixing"], row["width"]]
            row[str(length)] = mine / seconds["original", 384]
            row["milliseconds"][str(length)] = mine * 1000
    return rows


def add_cache(rows: list[dict], blocks: Variants) -> None:
    """Add the number of elements that each variant caches per token, and its share of the original's."""
    for row, block in zip(rows, blocks.values(), strict=True):
        cache = DynamicCache()
        block(torch.zeros(1, 1, 384), past_key_values=cache)
        row["cache"] = cache.layers[0].keys.numel() + cache.layers[0].values.numel()
        row["cache_share"] = row["cache"] / rows[0]["cache"]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="per order, instead of 20, 10 and 4 by length")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    blocks = variants()
    rows = measure(blocks, whole_sequences, arguments.rounds)
    print(f"Attention block, batch {BATCH}: time as a share of the original, per sequence length\n")
    print(table(rows, COLUMNS), end="\n\n")
    row = next(row for row in rows if (row["mixing"], row["width"]) == ("per_head", BAR_WIDTH))
    passed = {str(length): row[str(length)] <= BAR for length in LENGTHS}
    for length, fine in passed.items():
        verdict = "PASS" if fine else "FAIL"
        print(f"{verdict}: per_head {BAR_WIDTH}, length {length}: {row[length]:.3f} of the original (bar {BAR})")
    blocks = variants(is_decoder=True)
    decoding = measure(blocks, one_token, arguments.rounds)
    add_cache(decoding, blocks)
    print(
        f"\nOne token, batch {BATCH}: time as a share of the original, per cached tokens; cached elements per token\n"
    )
    print(table(decoding, DECODE_COLUMNS))
    write("attention", rows, decoding=decoding, bar=BAR, passed=passed, batch=BATCH, rounds=arguments.rounds or ROUNDS)


if __name__ == "__main__":
    main()
