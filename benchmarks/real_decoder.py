"""Make SmolLM2-135M-Instruct smaller: perplexity on the kind of text that it was calibrated on, and on three others.

    python benchmarks/real_decoder.py MODEL [--draws 0 1 2] [--methods ...] [--budgets 0.9 0.8]
    python benchmarks/real_decoder.py MODEL --table

MODEL is the folder that `real_models.py` of the shared folder makes; it is read from four bits, so "the original" is
the model of four bits. Nothing is trained but in "distilled". A draw is 64 pieces of 128 tokens of news (RTE's training
sentences), and the seed of all that follows. "Twice as much news" has 128 pieces; "and its own" adds 64 texts that the
model writes itself (`generate_batches`), "four times as many of both" takes 256 and 256. "And its own, distilled"
trains the model of "and its own" for 200 steps on other texts of both kinds. Peers get the same pieces, and texts of
its own where the row says so. Blocks beside each other are dropped by angular distance (Gromov et al., 2024), or
anywhere by block influence (ShortGPT, Men et al., 2024); SliceGPT, ReplaceMe, FLAP, 2SSP and OSSCAR are in
`slicegpt.py`, `decoder_peers.py` and `osscar.py`. Budgets are shares of the parameters of the layers, with what a
method adds to them; "parameters" are those of the whole model. The original uses one matrix for its tokens and for its
output; SliceGPT needs two, which "parameters" shows and its budget does not. "Bits alone" changes no size: GPTQ on the
same pieces, in blocks of 32 with a half-precision scale each; embeddings are rounded, to 8 bits unless the row says
otherwise. In llama.cpp the weights are in types of its own quantiser, with an importance matrix from the same pieces
(the packages llama-cpp-python and gguf), and perplexity is that of the engine. "Compress, in N MB" spends megabytes on
width and on 8, 4 and 3 bits in one plan, with texts of its own. "MB" is the size of the weights, in float32 but for
these rows.

Perplexity per token, over 48 pieces of 128 tokens each: news (RTE's dev set), web pages and mail (UD English EWT),
Python's documentation (of the version that runs this), and reviews of films (SST-2's dev set). Rows are kept as they
come, in WORK/real_decoder.jsonl, and models in WORK/real_decoder/. Seconds are the processor's, of the whole method,
but those of "distilled" come on top; budgets share a plan, whose seconds count for each.
"""

import argparse
import functools
import math
import pydoc_data.topics
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from bits_alone import TABLE_BITS, on_grid
from decoder_peers import flap, replaced, two_stages
from llama_types import InLlama, in_type
from osscar import osscar
from slicegpt import sliced
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from collab_heads import distill, generate_batches, plan
from collab_heads.files.conllu import read_conllu
from collab_heads.model.site_size import num_bytes
from common import WORK, RowStore, compressed_copy, lines_of, shared

PIECES, LENGTH, TESTED, AT_ONCE = 64, 128, 48, 16
MANY = 4 * PIECES
STEPS, OWN, PER_STEP = 200, 512, 8  # of a distillation: steps, its own texts, pieces per step
KINDS = ("Q4_K_M", "IQ4_NL", "Q3_K_M")  # types of llama.cpp
SIZES = (110, 90, 76)  # megabytes of a plan with bits: 90 and 76 are those of four bits alone
RATE = 0.003  # twelve steps at 0.01 make the model worse, at 0.003 better
COLUMNS = {"method": "", "budget": "", "parameters": ",.0f", "MB": ",.0f", "draws": ""}
DOMAINS = ("news", "web", "python", "reviews")
COLUMNS |= dict.fromkeys(DOMAINS, ".1f") | {f"more {name}": "" for name in DOMAINS}
COLUMNS |= {"predicted": ".2f", "measured": ".2f", "seconds": ".0f"}
Batches = list[dict[str, torch.Tensor]]


def texts_of(domain: str, split: str) -> list[str]:
    """Return the texts of a domain; those of news and reviews are divided into "train" and "dev"."""
    if domain == "web":
        return [sentence.text for sentence in read_conllu(shared("data/ud_english_ewt/en_ewt-ud-dev.conllu"))]
    if domain == "python":
        return list(pydoc_data.topics.topics.values())
    column = {"news": ("RTE", 1), "reviews": ("SST-2", 0)}[domain]
    rows = [line.split("\t") for line in lines_of(f"data/glue/{column[0]}/{split}.tsv")[1:]]
    return list(dict.fromkeys(row[column[1]] for row in rows))


class Decoder:
    """A decoder with its tokenizer, and its texts as pieces of `LENGTH` tokens."""

    def __init__(self, folder: str):
        self.folder, self.tokenizer = folder, AutoTokenizer.from_pretrained(folder)
        self.tests = {name: self.pieces(texts_of(name, "dev"), TESTED, 0) for name in DOMAINS}

    def load(self) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(self.folder).eval()

    def pieces(self, texts: Sequence[str], count: int, seed: int) -> Batches:
        """Join texts in random order, and cut them into pieces."""
        shuffled = random.Random(seed).sample(list(texts), len(texts))
        ids: list[int] = []
        for text in shuffled:
            ids += self.tokenizer(text + "\n")["input_ids"]
            if len(ids) >= count * LENGTH:
                break
        count = min(count, len(ids) // LENGTH)
        rows = torch.tensor(ids[: count * LENGTH]).view(count, LENGTH)
        return [{"input_ids": part} for part in rows.split(AT_ONCE)]

    @torch.no_grad()
    def perplexities(self, model: PreTrainedModel | InLlama) -> dict[str, float]:
        """Return the perplexity of every domain."""
        found = {}
        for name, batches in self.tests.items():
            losses = [
                model(**each, labels=each["input_ids"], use_cache=False).loss * len(each["input_ids"])
                for each in batches
            ]
            found[name] = math.exp(float(sum(losses)) / sum(len(each["input_ids"]) for each in batches))
        return found


class Draw:
    """The calibration of one draw."""

    def __init__(self, decoder: Decoder, number: int):
        self.decoder, self.number, self.kept = decoder, number, {}

    def once(self, name: str, work: Callable[[], Any]) -> Any:
        """Return the result of work that several rows share, and its processor seconds."""
        if name not in self.kept:
            started = time.process_time()
            self.kept[name] = work(), time.process_time() - started
        return self.kept[name]

    def news(self, count: int = PIECES) -> Batches:
        return self.decoder.pieces(texts_of("news", "train"), count, self.number)

    def folder(self, method: str, budget: float) -> Path:
        """Return where a model is kept for the rows that begin with it."""
        return WORK / "real_decoder" / f"{method}-{budget}-{self.number}"


class Made(NamedTuple):
    """A smaller model, the processor seconds that it took, and more for its row."""

    model: PreTrainedModel | InLlama
    seconds: float
    more: Mapping[str, float] = MappingProxyType({})


def compressed(draw: Draw, budget: float, *, news: int, own: int) -> Made:
    """Take the steps of `compress`, on pieces of news and on texts that the model writes itself."""

    def planned():
        model = draw.decoder.load()
        batches = draw.news(news) + (generate_batches(model, own, LENGTH, seed=draw.number) if own else [])
        return plan(model, batches, seed=draw.number)

    made, before = draw.once(f"plan {news} {own}", planned)
    started = time.process_time()
    model, error = compressed_copy(made, budget)
    errors = {"predicted": made.predicted(made.choose(budget)), "measured": error}
    made = Made(model, before + time.process_time() - started, errors)
    model.save_pretrained(draw.folder(f"{news}-{own}", budget))
    return made


def in_megabytes(draw: Draw, budget: None, *, size: int) -> Made:
    """Spend megabytes on width and on bits."""

    def planned():
        model = draw.decoder.load()
        batches = draw.news() + generate_batches(model, PIECES, LENGTH, seed=draw.number)
        return plan(model, batches, bits=(8, 4, 3), seed=draw.number)

    made, before = draw.once("plan with bits", planned)
    started = time.process_time()
    model, error = compressed_copy(made, f"{size}MB")
    more = {"predicted": made.predicted(made.choose(f"{size}MB")), "measured": error, "MB": num_bytes(model) / 1e6}
    return Made(model, before + time.process_time() - started, more)


def distilled(draw: Draw, budget: float) -> Made:
    """Distill what "compress, and its own" made, on news and on more texts of its own."""
    folder = draw.folder(f"{PIECES}-{PIECES}", budget)
    if not folder.exists():
        compressed(draw, budget, news=PIECES, own=PIECES)
    model, original = AutoModelForCausalLM.from_pretrained(folder), draw.decoder.load()
    own, before = draw.once("more", lambda: generate_batches(original, OWN, LENGTH, seed=1000 + draw.number))
    started = time.process_time()
    batches = draw.news(STEPS * PER_STEP - OWN) + own
    rows = torch.cat([batch["input_ids"] for batch in batches])
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(draw.number))]
    batches = [{"input_ids": part} for part in rows.split(PER_STEP)]
    kept = draw.folder("distilled", budget)
    report = distill(model, original, batches, STEPS, learning_rate=RATE, seed=draw.number, output_dir=kept)
    print(report, flush=True)
    return Made(model, before + time.process_time() - started)


@torch.no_grad()
def without_blocks(draw: Draw, budget: float, *, adjacent: bool) -> Made:
    """Drop the blocks whose outputs resemble their inputs most."""
    started = time.process_time()
    model = draw.decoder.load()
    blocks = model.model.layers
    count = round((1 - budget) * len(blocks))
    similar = torch.zeros(len(blocks), dtype=torch.float64)
    for batch in draw.news():
        states = torch.stack(model(**batch, output_hidden_states=True, use_cache=False).hidden_states)
        # the last of them is normalized, which a block that is dropped would not be: the last block stays
        after = states[count:-1] if adjacent else states[1:-1]
        similarity = nn.functional.cosine_similarity(states[: len(after)], after, dim=-1).clamp(-1, 1)
        scores = -similarity.arccos().mean((1, 2)) if adjacent else similarity.mean((1, 2))
        similar[: len(scores)] += scores.double()
        similar[len(scores) :] = -torch.inf
    first = int(similar.argmax())
    gone = set(range(first, first + count)) if adjacent else set(similar.topk(count).indices.tolist())
    model.model.layers = nn.ModuleList(block for place, block in enumerate(blocks) if place not in gone)
    model.config.num_hidden_layers = len(model.model.layers)
    return Made(model, time.process_time() - started)


def peer(
    draw: Draw,
    budget: float,
    *,
    method: Callable[[PreTrainedModel, Batches, float], PreTrainedModel],
    news: int = PIECES,
    own: int = 0,
) -> Made:
    """Make the model smaller by the method of others, on the same pieces of news, and on texts of its own."""
    model = draw.decoder.load()
    batches = draw.news(news) + (generate_batches(model, own, LENGTH, seed=draw.number) if own else [])
    started = time.process_time()
    return Made(method(model, batches, budget), time.process_time() - started)


def bits_alone(draw: Draw, budget: float, *, bits: int, table_bits: int = TABLE_BITS, own: int = 0) -> Made:
    """Store all weights in few bits."""
    model = draw.decoder.load()
    batches = draw.news() + (generate_batches(model, own, LENGTH, seed=draw.number) if own else [])
    started = time.process_time()
    size = on_grid(model, batches, bits, table_bits)
    return Made(model, time.process_time() - started, {"MB": size / 1e6})


def in_llama(draw: Draw, budget: float, *, kind: str) -> Made:
    """Store all weights in a type of llama.cpp, by its own quantiser, and run them there."""
    model, started = draw.decoder.load(), time.process_time()
    served, size = in_type(model, draw.decoder.tokenizer, draw.news(), kind, LENGTH)
    return Made(served, time.process_time() - started, {"MB": size / 1e6})


METHODS: dict[str, Callable[[Draw, float], Made]] = {
    "compress": lambda draw, budget: compressed(draw, budget, news=PIECES, own=0),
    "compress, twice as much news": lambda draw, budget: compressed(draw, budget, news=2 * PIECES, own=0),
    "compress, and its own": lambda draw, budget: compressed(draw, budget, news=PIECES, own=PIECES),
    "compress, four times as many of both": lambda draw, budget: compressed(draw, budget, news=MANY, own=MANY),
    "compress, and its own, distilled": distilled,
    "blocks dropped, angular": lambda draw, budget: without_blocks(draw, budget, adjacent=True),
    "blocks dropped, ShortGPT": lambda draw, budget: without_blocks(draw, budget, adjacent=False),
    "SliceGPT": functools.partial(peer, method=sliced),
    "ReplaceMe": functools.partial(peer, method=replaced),
    "ReplaceMe, and its own": functools.partial(peer, method=replaced, own=PIECES),
    "ReplaceMe, four times as many of both": functools.partial(peer, method=replaced, news=MANY, own=MANY),
    "FLAP": functools.partial(peer, method=flap),
    "2SSP": functools.partial(peer, method=two_stages),
    "OSSCAR": functools.partial(peer, method=osscar),
    "8 bits alone": functools.partial(bits_alone, bits=8),
    "4 bits alone": functools.partial(bits_alone, bits=4),
    "4 bits alone, and its own": functools.partial(bits_alone, bits=4, own=PIECES),
    "4 bits alone, embeddings too": functools.partial(bits_alone, bits=4, table_bits=4),
    "3 bits alone": functools.partial(bits_alone, bits=3),
}
METHODS |= {f"{kind} alone, in llama.cpp": functools.partial(in_llama, kind=kind) for kind in KINDS}
METHODS |= {f"compress, in {size} MB": functools.partial(in_megabytes, size=size) for size in SIZES}
WITHOUT_BUDGET = {name: None if "MB" in name else 1.0 for name in METHODS if "alone" in name or "MB" in name}


def measure(arguments: argparse.Namespace, store: RowStore) -> None:
    """Measure the rows that are not there."""
    decoder = Decoder(arguments.model)
    there = {(row["method"], row["budget"], row["draw"]) for row in store.rows}
    if ("original", 1.0, 0) not in there:
        model = decoder.load()
        row = {"method": "original", "budget": 1.0, "draw": 0, "parameters": model.num_parameters()}
        store.add(row | decoder.perplexities(model))
    for number in arguments.draws:
        draw = Draw(decoder, number)
        for method in arguments.methods:
            for budget in (WITHOUT_BUDGET[method],) if method in WITHOUT_BUDGET else arguments.budgets:
                if (method, budget, number) in there:
                    continue
                made = METHODS[method](draw, budget)
                row = {"method": method, "budget": budget, "draw": number, "parameters": made.model.num_parameters()}
                store.add(row | decoder.perplexities(made.model) | {"seconds": made.seconds} | made.more)
                print(store.rows[-1], flush=True)


def averaged(rows: Sequence[dict]) -> list[dict]:
    """Return one row for each method and budget: geometric means of perplexities, and the range of their increase."""
    original = next(row for row in rows if row["method"] == "original")
    found, order = [], ["original", *METHODS]
    pairs = {(row["method"], row["budget"]) for row in rows}
    for method, budget in sorted(pairs, key=lambda pair: (order.index(pair[0]), -(pair[1] or 0))):
        same = [row for row in rows if (row["method"], row["budget"]) == (method, budget)]
        made = {"method": method, "budget": budget, "draws": len(same)}
        for name in ("parameters", "predicted", "measured", "seconds"):
            if known := [row[name] for row in same if name in row]:  # a plan that went on after a kill has no seconds
                made[name] = statistics.mean(known)
        made["MB"] = statistics.mean(row.get("MB", 4e-6 * row["parameters"]) for row in same)  # in float32
        for name in DOMAINS:
            made[name] = statistics.geometric_mean(row[name] for row in same)
            more = sorted(100 * (row[name] / original[name] - 1) for row in same)
            said = dict.fromkeys(f"{round(percent) + 0:+d}" for percent in (more[0], more[-1]))
            made[f"more {name}"] = "" if method == "original" else f"{' to '.join(said)} %"
        found.append(made)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the folder of SmolLM2-135M-Instruct")
    parser.add_argument("--draws", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.9, 0.8], help="shares of the layers' parameters")
    parser.add_argument("--table", action="store_true", help="only collect the rows that are there")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    store = RowStore("real_decoder")
    if not arguments.table:
        measure(arguments, store)
    store.write(averaged(store.rows), COLUMNS)


if __name__ == "__main__":
    main()
