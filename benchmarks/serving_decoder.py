"""Serve SmolLM2-135M-Instruct, and smaller ones: perplexity, size, and tokens per second on one thread.

    python benchmarks/serving_decoder.py MODEL [--budgets 0.9 0.8]
    python benchmarks/serving_decoder.py MODEL --table

MODEL is the folder that `real_models.py` of the shared folder makes. It is compressed with `shape="gguf"` and
`multiple_of=32`, on 64 pieces of 128 tokens of news and as many texts of its own (draw 0 of real_decoder.py), and
exported with `export(to="gguf")` and `to="onnx"`: in float16 and float32, with all weights rounded to 8 bits
(`int8=True`), and in 4 bits by GPTQ on the same pieces, with the table of tokens in 8. In PyTorch it is in float32.
"Its own" is ONNX Runtime's quantisation of the original's graph as it ships, not timed: dynamic in 8 bits, with a scale
per column, and by rounding in 4, in blocks of 32 whose products are computed in 8.

Perplexity per token, by the engine itself, over 48 pieces of 128 tokens of news and of web pages, as in
real_decoder.py. "prompt" reads 512 tokens of news, "generation" 32 more, one at a time, with the cache that the engine
has by default. The graph in ONNX Runtime puts out logits after every token of the prompt, the others after the last.
The models of an engine and a type are timed in turns, 7 of them: tokens per second of the processor, on one thread,
from the medians. "KL" is the mean divergence in nats from what PyTorch predicts, for 8 pieces of news: in floating
point and in 4 bits on the same weights, and in 8 bits on those that were not yet rounded.
Plans, models, files and rows are kept in WORK/serving_decoder, and rows in WORK/serving_decoder.jsonl.
"""

import argparse
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bits_alone import TABLE_BITS, on_grid
from bits_of_peers import to_4_bits, to_int8
from real_decoder import LENGTH, PIECES, Decoder, Draw
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from collab_heads import export, generate_batches, load_exported, plan
from collab_heads.layers.attention import CACHE
from collab_heads.layers.weight_grid import WEIGHT_BITS
from common import WORK, RowStore, compressed_copy, interleaved

PLACE = WORK / "serving_decoder"
TORCH, ONNX, LLAMA = "PyTorch", "ONNX Runtime", "llama.cpp"
TYPES: dict[tuple[str, str], dict[str, Any]] = {(TORCH, "float32"): {}}
for engine, floats in ((ONNX, "float32"), (LLAMA, "float16")):
    TYPES |= {(engine, floats): {}, (engine, "8 bits"): {"int8": True}, (engine, "4 bits"): {}}
TARGETS = {ONNX: "onnx", LLAMA: "gguf"}
ITS_OWN = {
    "8 bits, its own": partial(to_int8, by_column=True),
    "4 bits, its own": partial(to_4_bits, accuracy_level=4),
}
DOMAINS = ("news", "web")
PROMPT, NEW, ROUNDS, COMPARED = 512, 32, 7, 8
COLUMNS = {"engine": "", "weights": "", "kept": "", "MB": ",.0f", "news": ".1f", "web": ".1f", "KL": ".1e"}
COLUMNS |= {"prompt": ",.0f", "generation": ",.0f", "times prompt": ".2f", "times generation": ".2f"}


class InTorch:
    """A model in PyTorch that reads tokens one text after another."""

    def __init__(self, model: PreTrainedModel):
        self.model, self.cache = model, None

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """Return the logits after every token of a text: [T, V]."""
        return self.model(input_ids=ids[None], use_cache=False).logits[0]

    @torch.no_grad()
    def read(self, ids: Tensor) -> None:
        """Read a text from its begin."""
        self.cache = self.model(input_ids=ids[None], use_cache=True, logits_to_keep=1).past_key_values

    @torch.no_grad()
    def go_on(self, ids: Tensor) -> None:
        """Read more tokens one at a time, and forget them again."""
        length = self.cache.get_seq_length()
        for token in ids:
            self.model(input_ids=token.view(1, 1), past_key_values=self.cache, use_cache=True)
        self.cache.crop(length - self.cache.get_seq_length())  # fewer than nothing: so many go


class InOnnxRuntime(InTorch):
    """The same in ONNX Runtime."""

    def __init__(self, folder: Path, *, check: bool):
        super().__init__(load_exported(folder, threads=1, check=check))

    def logits(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids[None]).logits[0]

    def read(self, ids: Tensor) -> None:
        self.cache = self.model(input_ids=ids[None])[CACHE]

    def go_on(self, ids: Tensor) -> None:
        cache = self.cache
        for token in ids:
            cache = self.model(input_ids=token.view(1, 1), **{CACHE: cache})[CACHE]


class InLlamaCpp:
    """The same in llama.cpp."""

    def __init__(self, folder: Path):
        import llama_cpp

        sizes = {"n_ctx": PROMPT + NEW, "n_batch": PROMPT, "n_threads": 1, "n_threads_batch": 1}
        self.open = partial(llama_cpp.Llama, str(folder / "model.gguf"), verbose=False, **sizes)
        self.engine, self.scorer = self.open(), None

    def logits(self, ids: Tensor) -> Tensor:
        if self.scorer is None:  # it copies the logits of every token, which takes time
            self.scorer = self.open(logits_all=True)
        self.scorer.reset()
        self.scorer.eval(ids.tolist())
        return torch.from_numpy(self.scorer.scores[: len(ids)].copy())

    def read(self, ids: Tensor) -> None:
        self.engine.reset()
        self.engine.eval(ids.tolist())

    def go_on(self, ids: Tensor) -> None:
        length = self.engine.n_tokens
        for token in ids.tolist():
            self.engine.eval([token])
        self.engine.n_tokens = length


Served = InTorch | InLlamaCpp


class Smaller:
    """A decoder at some sizes, and the files of its exports; both are made once."""

    def __init__(self, folder: str):
        self.decoder = Decoder(folder)
        self.draw = Draw(self.decoder, 0)

    def batches(self) -> list[dict[str, Tensor]]:
        """Return news and texts that the original writes itself."""
        made, _ = self.draw.once("own", lambda: generate_batches(self.decoder.load(), PIECES, LENGTH, seed=0))
        return self.draw.news() + made

    def planned(self):
        """Return the plan, from what was measured before where there is something."""
        options: dict[str, Any] = {"shape": "gguf", "multiple_of": 32, "seed": 0}
        return plan(self.decoder.load(), self.batches(), measurements=PLACE / "measurements.json", **options)

    def model(self, budget: float, weights: str = "float32") -> PreTrainedModel:
        """Return the model of a size, with weights of a type."""
        folder = PLACE / f"model-{budget}-4" if weights == "4 bits" else PLACE / f"model-{budget}"
        if budget == 1 and weights != "4 bits":
            folder = Path(self.decoder.folder)
        if not folder.exists():
            if weights == "4 bits":
                made = self.model(budget)
                in_four_bits(made, self.batches())
            else:
                made, _ = compressed_copy(self.draw.once("plan", self.planned)[0], budget)
            made.save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        return model.half() if weights == "float16" else name_bits(model) if weights == "4 bits" else model

    def in_engine(self, budget: float, engine: str, weights: str) -> Served:
        """Return a model in an engine."""
        if engine == TORCH:
            return InTorch(self.model(budget))
        folder, to = self.folder(budget, engine, weights), TARGETS[engine]
        if weights in ITS_OWN and not folder.exists():
            self.in_engine(budget, engine, "float32")
            source = self.folder(budget, engine, "float32")
            shutil.copytree(source, folder, ignore=shutil.ignore_patterns("model.onnx*"))
            ITS_OWN[weights](source / "model.onnx", folder / "model.onnx")
        if not folder.exists():
            given = {"tokenizer": self.decoder.tokenizer, "batches": [{"input_ids": self.prompt()[None, :32]}]}
            print(export(self.model(budget, weights), folder, to, **given, **TYPES[engine, weights]), flush=True)
        return InOnnxRuntime(folder, check=weights not in ITS_OWN) if engine == ONNX else InLlamaCpp(folder)

    def folder(self, budget: float, engine: str, weights: str) -> Path:
        """Return the folder of an export."""
        return PLACE / f"{TARGETS[engine]}-{budget}-{weights.replace(' ', '-')}"

    def megabytes(self, budget: float, engine: str, weights: str) -> float:
        """Return the size of the weights, or of the files of the engine."""
        if engine == TORCH:
            return sum(each.nbytes for each in self.model(budget).parameters()) / 1e6
        return sum(file.stat().st_size for file in self.folder(budget, engine, weights).glob("model.*")) / 1e6

    def prompt(self) -> Tensor:
        """Return what is read, and what follows."""
        rows = torch.cat([batch["input_ids"] for batch in self.decoder.tests["news"]])
        return rows.flatten()[: PROMPT + NEW]


def in_four_bits(model: PreTrainedModel, batches: list[dict[str, Tensor]]) -> None:
    """Put the weights of a model on a grid of four bits, in place, and its table of tokens on one of eight."""
    on_grid(model, batches, 4)


def name_bits(model: PreTrainedModel) -> PreTrainedModel:
    """Name the grids of `in_four_bits` in the modules whose weights lie there, in place."""
    table = model.get_input_embeddings().weight
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            setattr(module, WEIGHT_BITS, TABLE_BITS if module.weight is table else 4)
    return model


def pieces(smaller: Smaller, domain: str) -> Iterator[Tensor]:
    """Yield the texts of a domain."""
    for batch in smaller.decoder.tests[domain]:
        yield from batch["input_ids"]


def perplexity(smaller: Smaller, model: Served, domain: str) -> float:
    """Return the perplexity of a domain, as `Decoder.perplexities`."""
    losses = [float(cross_entropy(model.logits(row)[:-1].float(), row[1:])) for row in pieces(smaller, domain)]
    return math.exp(sum(losses) / len(losses))


def divergence(smaller: Smaller, model: Served, own: PreTrainedModel) -> float:
    """Return the mean divergence of an engine from PyTorch on the same weights."""
    found, torch_model = [], InTorch(own)
    for row in list(pieces(smaller, "news"))[:COMPARED]:
        own_log, other = (each.logits(row).float().log_softmax(-1) for each in (torch_model, model))
        found.append(float(kl_div(other, own_log, log_target=True, reduction="batchmean")))
    return sum(found) / len(found)


def measure(smaller: Smaller, budgets: list[float], store: RowStore) -> None:
    """Measure the rows that are not there: scores and sizes, and then the times of each engine and type, in turns."""
    there = {(row["engine"], row["weights"], row["budget"]) for row in store.rows if "MB" in row}
    wanted = [(*key, budget) for key in TYPES for budget in budgets] + [(ONNX, weights, 1.0) for weights in ITS_OWN]
    for engine, weights, budget in wanted:
        if (engine, weights, budget) not in there:
            model = smaller.in_engine(budget, engine, weights)
            row = {"engine": engine, "weights": weights, "budget": budget}
            row |= {domain: perplexity(smaller, model, domain) for domain in DOMAINS}
            row["MB"] = smaller.megabytes(budget, engine, weights)
            if engine != TORCH:
                row["KL"] = divergence(smaller, model, smaller.model(budget, weights).float())
            store.add(row)
            print(row, flush=True)
    timed = {(row["engine"], row["weights"]) for row in store.rows if "times" in row}
    for engine, weights in TYPES:
        if (engine, weights) in timed:
            continue
        models = {budget: smaller.in_engine(budget, engine, weights) for budget in budgets}
        store.add({"engine": engine, "weights": weights, "times": times(smaller, models)})
        print(store.rows[-1], flush=True)


def times(smaller: Smaller, models: Mapping[float, Served]) -> dict[str, dict[str, float]]:
    """Return the seconds of the processor for a prompt, and for the tokens after it: budget -> seconds."""
    torch.set_num_threads(1)
    ids = smaller.prompt()
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    for budget, model in models.items():
        calls["prompt", str(budget)] = partial(model.read, ids[:PROMPT])
        calls["generation", str(budget)] = partial(model.go_on, ids[PROMPT:])  # after the prompt of its turn
    found = interleaved(calls, ROUNDS, time.process_time)
    return {what: {budget: found[each, budget] for each, budget in found if each == what} for what, _ in calls}


def shown(rows: list[dict]) -> list[dict]:
    """Return the rows with their tokens per second, and with those as multiples of the original's."""
    timed, found = {(row["engine"], row["weights"]): row["times"] for row in rows if "times" in row}, []
    for row in (each for each in rows if "MB" in each):
        new = row | {"kept": f"{row['budget']:.2g}"}
        for what, tokens in (("prompt", PROMPT), ("generation", NEW)):
            seconds = timed.get((row["engine"], row["weights"]), {}).get(what)
            if seconds:
                own = seconds[str(row["budget"])]
                new |= {what: tokens / own, f"times {what}": seconds["1.0"] / own}
        found.append(new)
    order = [*TYPES, *((ONNX, weights) for weights in ITS_OWN)]
    return sorted(found, key=lambda row: (order.index((row["engine"], row["weights"])), -row["budget"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the folder of SmolLM2-135M-Instruct")
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.9, 0.8], help="shares of the layers' parameters")
    parser.add_argument("--table", action="store_true", help="only collect the rows that are there")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    store = RowStore("serving_decoder")
    if not arguments.table:
        PLACE.mkdir(exist_ok=True)
        measure(Smaller(arguments.model), [1.0, *arguments.budgets], store)
    store.write(shown(store.rows), COLUMNS)


if __name__ == "__main__":
    main()
