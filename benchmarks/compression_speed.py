"""Time attention with narrower queries, keys and values, and with fewer heads, against stock in the same run.

python benchmarks/compression_speed.py [--seconds N] [--threads 1 2]

The attention block of one layer of all-MiniLM-L6-v2 (384 wide, 12 heads; self-attention, output projection, LayerNorm)
and the whole encoder, at several lengths and batches; and greedy and beam search of the shared Marian (256 wide, 8
heads), whose number of new tokens is fixed, so that all variants take the same steps. A variant is named by the widths
of queries and keys and of values over all heads ("per_head"), or by the heads that are left. What the weights are does
not matter for time.

Every variant takes its turn in every round, in an order that is shuffled every round. Rounds are cut into blocks; a
figure is the smallest of the blocks' medians. With one thread it is processor time, which a busy machine does not
stretch; with two it is time on the clock, which means something only where both cores are free.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModel, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.utils import logging

from collab_heads import get_adapter, prune_heads, swap_to_collaborative
from common import minilm, shared, table, write

Widths = tuple[int, int]  # of queries and keys, of values, over all heads
ENCODER: tuple[Widths, ...] = (
    *((192, 192), (144, 192), (96, 192), (192, 96), (96, 96), (48, 48)),
    *((288, 288), (384, 192), (192, 384), (144, 384)),
)
WHOLE = ("stock", "192/192", "144/192", "96/96", "192/384", "144/384", "6 heads")  # all would take too long
DECODER: tuple[Widths, ...] = ((128, 128), (96, 128), (64, 128), (128, 64), (64, 64), (256, 128), (128, 256))
MARIAN, SEED = "models/marian-multi30k-de-en", 0
LENGTHS, BATCHES = (32, 128, 512), (1, 32)
SOURCE, NEW, BEAMS = 20, 20, 5
BLOCKS, LEAST_ROUNDS = 5, 3
BAR, HALF = 0.60, ("192/192", "144/192")  # of stock's time, for these blocks
CLOCKS = {1: time.thread_time, 2: time.perf_counter}

Variants = dict[str, PreTrainedModel]


def variants(load: Callable[[], PreTrainedModel], full: int, widths: tuple[Widths, ...], counts: list[int]) -> Variants:
    """Return the stock model, one model per pair of widths, and one per number of heads in every site."""
    models = {"stock": load()}
    for query_key, value in widths:
        model = models[f"{query_key}/{value}"] = load()
        asked = {"dim_shared_query_key": query_key, "dim_value": value}
        swap_to_collaborative(model, kind="per_head", **{name: dim for name, dim in asked.items() if dim < full})
    for count in counts:
        model = models[f"{count} heads"] = load()
        sites = get_adapter(model).sites(model)
        prune_heads(model, heads={site.path: list(range(count, site.num_heads)) for site in sites})
    return {name: model.eval() for name, model in models.items()}


def encoding(models: Mapping[str, nn.Module], states: torch.Tensor) -> dict[str, Callable]:
    """Return calls that run each module over the same tensor."""
    return {name: lambda model=model: model(states) for name, model in models.items()}


def generation(models: Variants, batch: int, beams: int) -> dict[str, Callable]:
    """Return calls that generate exactly NEW tokens for every sentence of a batch."""
    ids = torch.randint(10, 4000, (batch, SOURCE), generator=torch.Generator().manual_seed(SEED))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    settings = {"num_beams": beams, "do_sample": False, "min_new_tokens": NEW, "max_new_tokens": NEW}
    return {name: lambda model=model: model.generate(**inputs, **settings) for name, model in models.items()}


def steady(calls: Mapping[str, Callable], threads: int, seconds: float) -> dict[str, float]:
    """Return the seconds of each call, undisturbed by slow spells of the machine.

    All calls are timed in rounds until the time is up, for LEAST_ROUNDS rounds at least. The rounds are divided into
    blocks, and the smallest median of a block counts.
    """
    clock, chance, order = CLOCKS[threads], random.Random(SEED), list(calls)
    times: dict[str, list[float]] = {name: [] for name in calls}
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < LEAST_ROUNDS or time.perf_counter() < end:
        chance.shuffle(order)
        for name in order:
            begun = clock()
            calls[name]()
            times[name].append(clock() - begun)
        rounds += 1
    size = max(1, rounds // BLOCKS)
    return {
        name: min(statistics.median(found[at : at + size]) for at in range(0, rounds - size + 1, size))
        for name, found in times.items()
    }


def measured(what: str, settings: Mapping[str, Mapping[str, Callable]], threads: int, seconds: float) -> list[dict]:
    """Return one row per variant, with the ratio to stock and the milliseconds in every setting."""
    torch.set_num_threads(threads)
    found = {setting: steady(calls, threads, seconds) for setting, calls in settings.items()}
    rows = []
    for variant in next(iter(found.values())):
        row = {"what": what, "threads": threads, "variant": variant}
        row |= {setting: times[variant] / times["stock"] for setting, times in found.items()}
        rows.append(row | {"milliseconds": {setting: times[variant] * 1000 for setting, times in found.items()}})
    columns = {"variant": "", **dict.fromkeys(settings, ".3f")}
    print(f"\n{what}, threads: {threads}; share of stock's time\n\n{table(rows, columns)}", flush=True)
    return rows


def encoder_rows(threads: list[int], seconds: float) -> list[dict]:
    """Measure the attention block and the whole of MiniLM; a setting is batch x tokens."""
    models = variants(lambda: AutoModel.from_pretrained(minilm()), 384, ENCODER, [6, 3])
    blocks = {name: model.get_submodule("encoder.layer.0.attention") for name, model in models.items()}
    sizes = [(batch, length) for batch in BATCHES for length in LENGTHS]
    chance = torch.Generator().manual_seed(SEED)
    states = {f"{b} x {t}": torch.randn(b, t, 384, generator=chance) for b, t in sizes}
    tokens = {f"{b} x {t}": torch.randint(1000, 20000, (b, t), generator=chance) for b, t in sizes}
    whole = {name: models[name] for name in WHOLE}
    tokens.popitem()  # a round of the largest takes a minute
    rows = []
    for count in threads:
        rows += measured("block", {name: encoding(blocks, x) for name, x in states.items()}, count, seconds)
        rows += measured("encoder", {name: encoding(whole, x) for name, x in tokens.items()}, count, seconds)
    return rows


def decoder_rows(seconds: float) -> list[dict]:
    """Measure greedy and beam search of Marian; a setting is the number of sentences in a batch."""
    path: Path = shared(MARIAN)
    models = variants(lambda: AutoModelForSeq2SeqLM.from_pretrained(path), 256, DECODER, [4])
    rows = []
    for beams, what in ((1, "greedy"), (BEAMS, "beam")):
        rows += measured(what, {str(n): generation(models, n, beams) for n in BATCHES}, 1, 2 * seconds)
    return rows


@torch.no_grad()
def main() -> None:
    """Measure, print and store; times above the bars are listed as misses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="for each size; three rounds may take longer")
    parser.add_argument("--threads", type=int, nargs="+", choices=CLOCKS, default=list(CLOCKS), help="of the encoder")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    rows = decoder_rows(arguments.seconds) + encoder_rows(arguments.threads, arguments.seconds)
    misses = []
    for row in rows:
        bar = BAR if row["what"] == "block" and row["variant"] in HALF else 1.0
        for setting in row["milliseconds"]:
            if row["variant"] != "stock" and row[setting] > bar:
                name = f"{row['what']} {row['variant']}, {setting}, threads {row['threads']}"
                misses.append(f"{name}: {row[setting]:.3f} (bar {bar:.2f})")
    print("\n" + "\n".join([*(f"MISS: {miss}" for miss in misses), f"{len(misses)} misses"]))
    write("compression_speed", rows, bar=BAR, half=HALF, misses=misses, seconds=arguments.seconds, new_tokens=NEW)


if __name__ == "__main__":
    main()
