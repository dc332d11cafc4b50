"""Narrower heads beside rotary positions: which frequency pairs a key head keeps, and what that costs in perplexity.

    python benchmarks/lm_train.py          # once: makes the model, a small Llama trained on Multi30k's English side
    python benchmarks/rotary_widths.py [--draws 3] [--table]

Shares of the query/key width, with pairs chosen at random, by the weights, and by calibration sentences: by how what
they give to scores varies over keys ("scores"), and by the same over the keys as they are attended ("attention", what
the package does), with and without the factors by which kept pairs stand in for the others. Then with the fit of the
kept rows to what each site put out. A draw is 256 sentences, or a random choice. Last `compress`, to shares of the
cache, with the widths of queries and keys among what may change and without.
Every row is stored as it comes, in WORK/rotary_widths.jsonl, and not measured again.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lm import Text, attention_parameters, cache_bytes, decoding, perplexity
from lm_train import LLAMA
from transformers import LlamaForCausalLM
from transformers.utils import logging

from collab_heads import compress, swap_to_collaborative
from collab_heads.fitting import frequency_pairs, kinds
from common import RowStore, table

SHARES = (0.75, 0.5, 0.33)  # of the query/key width, 32 per head; the last is rounded up to 12
CACHES = (0.75, 0.5)
PARTS = (("heads", "values"), ("heads", "query_key", "values"))
STEPS = 120  # of the fit
COLUMNS = {
    "method": "",
    "width": ".2f",
    "fit": "",
    "val": ".2f",
    "least": ".2f",
    "most": ".2f",
    "attention": ".2f",
    "cache": ",.0f",
    "time": ".2f",
    "draws": "",
}


@contextmanager
def replaced(owner: Any, name: str, other: Callable) -> Iterator[None]:
    """Replace an attribute while the context is open."""
    stock = getattr(owner, name)
    setattr(owner, name, other)
    try:
        yield
    finally:
        setattr(owner, name, stock)


def at_random(seed: int) -> Callable:
    """Return a function that chooses frequency pairs at random."""
    generator = torch.Generator().manual_seed(seed)

    def choose(grams: torch.Tensor, count: int) -> torch.Tensor:
        return torch.stack([torch.randperm(len(gram), generator=generator)[:count].sort().values for gram in grams])

    return choose


def alike(query, key, bias, used, scale) -> torch.Tensor:
    """Compute `frequency_pairs.gram` for uniform attention: queries and keys are scaled down until scores vanish."""
    return frequency_pairs_gram(query * 1e-3, key * 1e-3, bias, used, scale) * 1e12


frequency_pairs_gram = frequency_pairs.gram
BY_WEIGHTS = (kinds, "pair_grams", lambda weights, calls: frequency_pairs.grams_by_weights(weights))
ONES = (kinds, "factors_of", lambda grams, pairs: torch.ones(pairs.shape, dtype=grams.dtype))
METHODS: dict[str, Callable[[int], list[tuple[Any, str, Callable]]]] = {
    "attention": lambda draw: [],
    "attention, without factors": lambda draw: [ONES],
    "scores": lambda draw: [(frequency_pairs, "gram", alike)],
    "weights": lambda draw: [BY_WEIGHTS],
    "random": lambda draw: [BY_WEIGHTS, (kinds, "choose_pairs", at_random(draw))],
}
FITTED = ("attention", "weights", "random")


def narrowed(text: Text, method: str, share: float, fit: int, draw: int) -> LlamaForCausalLM:
    """Return a model with narrower queries and keys."""
    model = load()
    with ExitStack() as stack:
        for change in METHODS[method](draw):
            stack.enter_context(replaced(*change))
        swap_to_collaborative(
            model,
            dim_shared_query_key=share,
            kind="per_head",
            batches=text.calibration(draw),
            refine_steps=fit,
            seed=draw,
        )
    return model


def load() -> LlamaForCausalLM:
    """Load the trained model."""
    return LlamaForCausalLM.from_pretrained(LLAMA).eval()


def wanted(draws: int) -> Iterator[dict]:
    """Yield the beginnings of the rows to measure."""
    yield {"method": "stock", "width": 1.0, "fit": None, "draws": None}
    for share, parts in itertools.product(CACHES, PARTS):
        method = f"compress {share} of cache: {', '.join(parts)}"
        yield {"method": method, "width": None, "fit": STEPS, "draws": draws}
    for fit in (None, STEPS):
        for method in METHODS if fit is None else FITTED:
            is_certain = method == "weights" and fit is None
            for share in SHARES:
                yield {"method": method, "width": share, "fit": fit, "draws": 1 if is_certain else draws}


def measured(row: Mapping, text: Text, original: LlamaForCausalLM) -> dict:
    """Add the numbers to a row."""
    method, models = row["method"], [original]
    if method in METHODS:
        models = [narrowed(text, method, row["width"], row["fit"] or 0, draw) for draw in range(row["draws"])]
    elif method != "stock":
        share, parts = method.removeprefix("compress ").split(" of cache: ")
        models = [load() for _ in range(row["draws"])]
        for draw, model in enumerate(models):
            batches = text.calibration(draw)
            compress(model, batches, float(share), of="cache", parts=parts.split(", "), seed=draw)
    values = [perplexity(model, text.test("val")) for model in models]
    stored = original.dtype.itemsize
    sizes = {
        "attention": attention_parameters(models[0]) / attention_parameters(original),
        "cache": cache_bytes(models[0]) / stored,
    }
    spread = {"least": min(values), "most": max(values)} if len(values) > 1 else {}
    timed = row["fit"] and method not in ("random", "weights")
    time = decoding(models[0], original)["time"] if timed else None
    return {**row, "val": statistics.mean(values), **spread, **sizes, "time": time, "each": values}


def key(row: Mapping) -> tuple:
    """Return what identifies a row."""
    return tuple(row[name] for name in ("method", "width", "fit", "draws"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=3, help="of calibration sentences and of random choices")
    parser.add_argument("--table", action="store_true", help="only store what is there")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    store, text, original = RowStore("rotary_widths"), Text("qwen3"), load()
    known, asked = {key(row) for row in store.rows}, list(wanted(arguments.draws))
    for row in [] if arguments.table else asked:
        if key(row) not in known:
            store.add(measured(row, text, original))
            print(table(store.rows[-1:], COLUMNS).splitlines()[-1], flush=True)
    found = {key(row): row for row in store.newest(key)}
    done = [found[key(row)] for row in asked if key(row) in found]
    print(table(done, COLUMNS))
    store.save(done)


if __name__ == "__main__":
    main()
