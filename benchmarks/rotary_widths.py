"""Narrower heads beside rotary positions: which frequency pairs a key head keeps, and what that costs in perplexity.

    python benchmarks/lm_train.py          # once: makes the model, a small Llama trained on Multi30k's English side
    python benchmarks/rotary_widths.py [--draws 3] [--sentences N]

Shares of the query/key width, with pairs chosen at random, by the weights, and by calibration sentences: by how what
they give to scores varies over keys ("score"), by the same over the keys as they are attended ("attention", what
the package does), and by that with the best factor for every kept pair, by least squares. Then with the fit of the kept
rows to what each site put out. A draw is 256 sentences, or a random choice. Last `compress`, to shares of the cache,
with the widths of queries and keys among what may change and without.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lm import Text, attention_parameters, cache_bytes, decoding, perplexity
from lm_train import LLAMA
from transformers import LlamaForCausalLM
from transformers.utils import logging

from collab_heads import compress, swap_to_collaborative
from collab_heads.collaborative import frequency_pairs, kinds
from common import table, write

SHARES = (0.75, 0.5, 0.375, 0.25)  # of the query/key width, 32 a head; a third is not a multiple of 4
CACHES = (0.75, 0.5, 0.33)
COLUMNS = {
    "method": "",
    "width": ".3f",
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
    """Another function in the place of one, for comparison."""
    stock = getattr(owner, name)
    setattr(owner, name, other)
    try:
        yield
    finally:
        setattr(owner, name, stock)


def at_random(seed: int) -> Callable:
    """Chooses without looking."""
    generator = torch.Generator().manual_seed(seed)

    def choose(grams: torch.Tensor, count: int) -> torch.Tensor:
        return torch.stack([torch.randperm(len(gram), generator=generator)[:count].sort().values for gram in grams])

    return choose


def alike(query, key, bias, used, scale) -> torch.Tensor:
    """`frequency_pairs.gram` with all keys that may be attended alike: queries and keys, but scores of zero."""
    return frequency_pairs_gram(query * 1e-3, key * 1e-3, bias, used, scale) * 1e12


frequency_pairs_gram = frequency_pairs.gram
decompose = kinds.RotaryFit.decompose


def with_factors(fit: kinds.RotaryFit, dim: int, options) -> kinds.Decomposition:
    """The kept pairs times what makes them best stand in for all, by least squares."""
    found = decompose(fit, dim, options)
    if found.pairs is None:
        return found
    factors = []
    for gram, kept in zip(fit.grams, found.pairs, strict=True):
        ridge = 1e-6 * gram.diagonal().mean() * torch.eye(len(kept), dtype=gram.dtype)
        factors.append(torch.linalg.solve(gram[kept][:, kept] + ridge, gram[kept].sum(1)))
    of_heads = torch.stack(factors)[frequency_pairs.groups_of(fit.weights)].repeat(1, 2).flatten()
    found.query.mul_(of_heads[:, None])
    return found


METHODS: dict[str, Callable[[int], list[tuple[Any, str, Callable]]]] = {
    "random": lambda draw: [(kinds, "choose_pairs", at_random(draw))],
    "weights": lambda draw: [(kinds, "pair_grams", lambda weights, calls: frequency_pairs.grams_by_weights(weights))],
    "score": lambda draw: [(frequency_pairs, "gram", alike)],
    "attention": lambda draw: [],
    "attention, factors": lambda draw: [(kinds.RotaryFit, "decompose", with_factors)],
}


def narrowed(text: Text, method: str, share: float, fit: int, draw: int) -> LlamaForCausalLM:
    """A model with narrower queries and keys."""
    model = load()
    (changes,) = [METHODS[method](draw)]
    with contexts(changes):
        swap_to_collaborative(
            model,
            dim_shared_query_key=share,
            mixing="per_head",
            calibration=text.calibration(draw),
            refine_steps=fit,
            seed=draw,
        )
    return model


@contextmanager
def contexts(changes: Sequence[tuple[Any, str, Callable]]) -> Iterator[None]:
    """All of some replacements; there is one at most."""
    if not changes:
        yield
        return
    with replaced(*changes[0]):
        yield


def load() -> LlamaForCausalLM:
    """The trained model."""
    return LlamaForCausalLM.from_pretrained(LLAMA).eval()


def rows(draws: int, sentences: int | None) -> Iterator[dict]:
    """One row after the other."""
    text, original = Text("qwen3", sentences), load()
    test, whole = text.test("val"), attention_parameters(original)
    stock = perplexity(original, test)
    yield {"method": "stock", "width": 1.0, "val": stock, "attention": 1.0, "cache": cache_bytes(original) / 4}

    def measured(models: Sequence[LlamaForCausalLM], **row) -> dict:
        values = [perplexity(model, test) for model in models]
        sizes = {"attention": attention_parameters(models[0]) / whole, "cache": cache_bytes(models[0]) / 4}
        spread = {"least": min(values), "most": max(values)} if len(values) > 1 else {}
        return row | {"val": statistics.mean(values), "draws": len(values)} | spread | sizes | {"each": values}

    for fit in (0, 120):
        for method in METHODS:
            for share in SHARES:
                models = [narrowed(text, method, share, fit, draw) for draw in range(draws)]
                row = measured(models, method=method, width=share, fit=fit or None)
                if method == "attention" and fit:
                    row["time"] = decoding(models[0], original)["time"]
                yield row
    for parts in (("heads", "values"), ("heads", "query_key", "values")):
        for share in CACHES:
            model = load()
            compress(model, text.calibration(0), share, of="cache", parts=parts)
            row = measured([model], method=f"compress {share} of cache: {', '.join(parts)}", fit=120)
            yield row | {"time": decoding(model, original)["time"]}


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=3, help="of calibration sentences and of random choices")
    parser.add_argument("--sentences", type=int, help="of the test set, to try the program; nothing is stored then")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    found = []
    for row in rows(arguments.draws, arguments.sentences):
        found.append(row)
        print(table([row], COLUMNS).splitlines()[-1], flush=True)
    print(table(found, COLUMNS))
    if arguments.sentences is None:
        write("rotary_widths", found)


if __name__ == "__main__":
    main()
