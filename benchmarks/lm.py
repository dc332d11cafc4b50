"""Smaller attention and layers in language models: perplexity, cache and speed of decoding, without labels.

    python benchmarks/lm.py gpt2 qwen3 [--draws 1] [--steps 1000] [--sentences N]
    python benchmarks/lm.py --table

The decoders of the shared folder, trained on Multi30k's English side: perplexity per piece, `</s>` included, on val and
test_2016_flickr, and on the first 1,000 sentences of UD English EWT, which is text of another kind: web pages and mail.
`compress` to shares of attention's parameters (GPT-2), of its cache (Qwen3), or of the parameters of
whole layers; a quarter of the query heads removed, W_O refitted; and what a user would take, key/value heads by mean
pooling (see `lm_peer`). Each as it is and after the same distillation, on training sentences without labels. A draw is
256 training sentences to calibrate on, or 2,048 for layers, and the seed of all that follows.

The cache is counted in a forward pass; where a peer's is not (GPT-2 knows no groups), it is what its groups would take.
Decoding is greedy, with a cache, 8 rows, and timed in turns with the original: processor time, one thread.
Every row is kept as it comes, in WORK/lm.jsonl, which begins with the stored rows. A row that is there is not
measured again: delete it there if it should be.
"""

import argparse
import gzip
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from calibration import sentences
from lm_peer import distil, mean_pooled
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from collab_heads import compress, distill, prune_heads
from collab_heads.analysis import head_importance, most_important
from collab_heads.errors import CollabHeadsError
from collab_heads.heads.criteria import Reconstruction
from common import ATTENTION, RowStore, shared

FOLDERS = {"gpt2": "models/gpt2-multi30k-en", "qwen3": "models/qwen3-multi30k-en"}
OF = {"gpt2": "parameters", "qwen3": "cache"}  # what budgets are of
BUDGETS = {"gpt2": (0.75, 0.5, 0.33), "qwen3": (0.75, 0.6, 0.5)}  # of attention
LAYERS = (0.5, 0.33, 0.25, 0.15, 0.1)  # of the parameters of layers
GROUPS = {"gpt2": (4, 1), "qwen3": (2, 1)}  # of the peer
START, END, PADDING = 0, 1, 2  # pieces
CALIBRATION, MORE, UNLABELLED = 256, 2048, 10_000  # sentences
ELSEWHERE, LONGEST = 1000, 126  # sentences of another kind, and their pieces at most: GPT-2 has 128 positions
PROMPT, NEW, ROWS, ROUNDS = 4, 100, 8, 7  # of decoding
COLUMNS = {
    "model": "",
    "method": "",
    "distilled": "",
    "parameters": ",",
    "attention": ".2f",
    "cache": ",.0f",
    "val": ".2f",
    "more": "+.1f",
    "test_2016_flickr": ".2f",
    "elsewhere": ".1f",
    "more elsewhere": "+.1f",
    "tokens/s": ".0f",
    "time": ".2f",
    "seconds": ".0f",
    "note": "",
}


class Text:
    """The English side of Multi30k, tokenized.

    Args:
        name: of the model whose tokenizer is used.
        count: the largest number of sentences of a test set; None for all.
    """

    def __init__(self, name: str, count: int | None = None):
        self.tokenizer, self.count = AutoTokenizer.from_pretrained(shared(FOLDERS[name])), count

    def sentences(self, name: str, count: int | None = None, seed: int | None = None) -> list[list[int]]:
        """Return the sentences of a set between start and end tokens; with a seed, in random order."""
        with gzip.open(shared(f"data/multi30k/{name}.en.gz"), "rt", encoding="utf-8") as file:
            lines = [line.rstrip("\n") for line in file]
        if seed is not None:
            order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(seed)).tolist()
            lines = [lines[place] for place in order]
        return [[START, *ids, END] for ids in self.tokenizer(lines[:count]).input_ids]

    def batches(self, sentences: list[list[int]], rows: int = 32) -> list[dict[str, torch.Tensor]]:
        """Return padded batches, in the given order."""
        found = []
        for start in range(0, len(sentences), rows):
            chosen = [torch.tensor(ids) for ids in sentences[start : start + rows]]
            ids = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True, padding_value=PADDING)
            lengths = torch.tensor([len(each) for each in chosen])
            mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
            found.append({"input_ids": ids, "attention_mask": mask})
        return found

    def test(self, name: str) -> list[dict[str, torch.Tensor]]:
        """Return the batches of a test set, with sentences of similar length together."""
        return self.batches(sorted(self.sentences(name, self.count), key=len), rows=64)

    def elsewhere(self) -> list[dict[str, torch.Tensor]]:
        """Return the batches of web text, which these models have never seen; longer sentences are cut."""
        ids = self.tokenizer(sentences("web")[: min(self.count or ELSEWHERE, ELSEWHERE)]).input_ids
        return self.batches(sorted([[START, *each[:LONGEST], END] for each in ids], key=len), rows=64)

    def calibration(self, draw: int, count: int = CALIBRATION) -> list[dict[str, torch.Tensor]]:
        """Return a draw of calibration batches."""
        return self.batches(self.sentences("train", count, seed=draw))

    def unlabelled(self, draw: int) -> list[dict[str, torch.Tensor]]:
        """Return a draw of batches for distillation."""
        return self.batches(self.sentences("train", UNLABELLED, seed=1000 + draw))


@torch.no_grad()
def perplexity(model: PreTrainedModel, batches: Sequence[Mapping]) -> float:
    """Return the perplexity per token, the end token included."""
    total, count = 0.0, 0
    for batch in batches:
        logits = model(**batch).logits[:, :-1].float().log_softmax(-1)
        wanted, counts = batch["input_ids"][:, 1:], batch["attention_mask"][:, 1:] != 0
        total -= float(logits.gather(-1, wanted[..., None])[..., 0][counts].double().sum())
        count += int(counts.sum())
    return math.exp(total / count)


@torch.no_grad()
def cache_bytes(model: PreTrainedModel) -> float:
    """Return the bytes cached per token."""
    tokens = 16
    cache = model(input_ids=torch.full((1, tokens), 5), use_cache=True).past_key_values
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) / tokens


def attention_parameters(model: PreTrainedModel) -> int:
    return sum(p.numel() for name, p in model.named_parameters() if ".attn." in name or ".self_attn." in name)


def decoding(model: PreTrainedModel, original: PreTrainedModel) -> dict[str, float]:
    """Return the tokens per second of greedy decoding, and its time as a share of the original's, measured in turns."""
    prompt = {"input_ids": torch.full((ROWS, PROMPT), 5), "attention_mask": torch.ones(ROWS, PROMPT, dtype=torch.long)}
    length = {"min_new_tokens": NEW, "max_new_tokens": NEW, "do_sample": False, "num_beams": 1}
    seconds: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(ROUNDS + 1):
        for number, each in enumerate((model, original)):
            started = time.process_time()
            with torch.no_grad():
                each.generate(**prompt, **length, pad_token_id=PADDING)
            seconds[number].append(time.process_time() - started)
    ours, theirs = (statistics.median(seconds[number][1:]) for number in (0, 1))
    return {"tokens/s": ROWS * NEW / ours, "time": ours / theirs}


class Method:
    """A method that makes a model smaller.

    Attributes:
        name: its name in the tables.
        make: (text, draw) -> a smaller model, and numbers for its row.
        train: the function that distils the model.
    """

    def __init__(
        self, name: str, make: Callable[..., tuple[PreTrainedModel, dict]], train: Callable[..., Any] = distill
    ):
        self.name, self.make, self.train = name, make, train


def methods(name: str) -> list[Method]:
    """Return all methods to measure with a model."""

    def compressed(budget: float, count: int, **options: Any) -> Callable[..., tuple[PreTrainedModel, dict]]:
        def make(text: Text, draw: int) -> tuple[PreTrainedModel, dict]:
            model = load(name)
            report = compress(model, text.calibration(draw, count), budget, seed=draw, **options)
            return model, {"error": report.measured_error, "predicted": report.predicted_error}

        return make

    def with_groups(groups: int) -> Callable[..., tuple[PreTrainedModel, dict]]:
        def make(text: Text, draw: int) -> tuple[PreTrainedModel, dict]:
            original = load(name)
            model, config = mean_pooled(original, groups), original.config
            counted = cache_bytes(original) * groups / config.n_head if name == "gpt2" else None
            return model, {"cache": counted, "time": None, "tokens/s": None} if counted else {}

        return make

    peers = [Method(f"mean-pooled key/value heads: {groups}", with_groups(groups), distil) for groups in GROUPS[name]]
    attention = {"of": OF[name], "parts": ATTENTION}
    ours = [
        *(Method(f"compress {b} of {OF[name]}", compressed(b, CALIBRATION, **attention)) for b in BUDGETS[name]),
        *(Method(f"compress layers, {b} of parameters", compressed(b, MORE)) for b in LAYERS),
    ]
    return [*ours, Method("a quarter of the heads removed", lambda text, draw: fewer_heads(name, text, draw)), *peers]


def fewer_heads(name: str, text: Text, draw: int) -> tuple[PreTrainedModel, dict]:
    """Keep the three quarters of the heads that the others of their layer replace worst, and refit W_O."""
    model, batches = load(name), text.calibration(draw)
    scores = head_importance(model, batches, criterion=Reconstruction(normalize=True))
    keep = 3 * sum(map(len, scores.values())) // 4
    alive = most_important(model, scores, keep)
    prune_heads(
        model,
        heads={path: [h for h, on in enumerate(heads) if not on] for path, heads in alive.items()},
        batches=batches,
    )
    return model, {"heads": keep}


def load(name: str) -> PreTrainedModel:
    """Load the original model."""
    return AutoModelForCausalLM.from_pretrained(shared(FOLDERS[name])).eval()


def measured(model: PreTrainedModel, original: PreTrainedModel, text: Text) -> dict[str, Any]:
    """Return all numbers of a row."""
    found = {name: perplexity(model, text.test(name)) for name in ("val", "test_2016_flickr")}
    found["elsewhere"] = perplexity(model, text.elsewhere())
    share = attention_parameters(model) / attention_parameters(original)
    sizes = {"parameters": model.num_parameters(), "attention": share, "cache": cache_bytes(model)}
    return found | sizes | decoding(model, original)


def measure(name: str, arguments: argparse.Namespace, done: Sequence[dict]) -> Iterator[dict]:
    """Yield the rows that are not measured yet: per draw and method one before and one after distillation."""
    known, text, original = {key(row) for row in done}, Text(name, arguments.sentences), load(name)
    row = {"model": name, "method": "stock", "draw": 0, "distilled": 0}
    if key(row) not in known:
        yield row | measured(original, load(name), text)
    for draw in range(arguments.draws):
        for method in methods(name):
            rows = [{"model": name, "method": method.name, "draw": draw, "distilled": n} for n in (0, arguments.steps)]
            if all(key(row) in known for row in rows):
                continue
            started = time.perf_counter()
            try:
                model, more = method.make(text, draw)
            except CollabHeadsError as error:
                yield rows[0] | {"note": f"{type(error).__name__}: {error}"}
                continue
            for row in rows:
                if key(row) in known:
                    continue
                if row["distilled"]:
                    method.train(model, original, text.unlabelled(draw), row["distilled"], seed=draw)
                seconds = time.perf_counter() - started
                yield row | measured(model, original, text) | more | {"seconds": seconds}


def key(row: Mapping) -> tuple:
    """Return what identifies a row."""
    return tuple(row[name] for name in ("model", "method", "draw", "distilled"))


def over_draws(rows: Sequence[dict]) -> list[dict]:
    """Return a row per model, method and distillation: means over the draws, and the increase in perplexity in %."""
    groups: dict[tuple, list[dict]] = {}
    for row in sorted(rows, key=lambda row: row["model"]):
        groups.setdefault((row["model"], row["method"], row["distilled"]), []).append(row)
    stock = {row["model"]: row for row in rows if row["method"] == "stock"}
    found = []
    for (model, method, distilled), group in groups.items():
        new = {"model": model, "method": method, "distilled": distilled or None, "draws": len(group)}
        for name in (*COLUMNS, "error", "predicted"):
            values = [row[name] for row in group if isinstance(row.get(name), float | int)]
            if name not in new and values:
                new[name] = statistics.mean(values)
        for name, more in (("val", "more"), ("elsewhere", "more elsewhere")):
            if name in new and method != "stock":
                new[more] = 100 * (new[name] / stock[model][name] - 1)
        found.append(new | {"note": group[-1].get("note")})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"some of {', '.join(FOLDERS)}")
    parser.add_argument("--draws", type=int, default=1, help="of calibration sentences")
    parser.add_argument("--steps", type=int, default=1000, help="of distillation")
    parser.add_argument("--sentences", type=int, help="of each test set, to try the program; nothing is stored then")
    parser.add_argument("--table", action="store_true", help="only make the table of what is there")
    arguments = parser.parse_args()
    if unknown := set(arguments.models) - set(FOLDERS):
        parser.error(f"unknown models: {', '.join(sorted(unknown))}")
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    store = RowStore("lm", is_tried=arguments.sentences is not None)
    store.rows = [row for row in store.rows if not row.get("note")]  # an adapter may be there by now
    for name in arguments.models:
        for row in measure(name, arguments, store.rows):
            store.add(row)
            print(row, flush=True)
    if store.rows:
        store.write(over_draws(store.rows), COLUMNS)


if __name__ == "__main__":
    main()
