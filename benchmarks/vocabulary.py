r"""Trim vocabularies to the texts of a domain, alone and with compressed layers: quality, size of the file, time.

    python benchmarks/vocabulary.py minilm marian [--layers 0.33] [--kept used 0.5] [--rounds 7]
    python benchmarks/vocabulary.py minilm --steps 600 [--layers 1.0 0.25] [--kept 0.32 0.5]
    python benchmarks/vocabulary.py mt5 [--pieces 250000]

The first line takes about forty minutes of an idle core. Models with compressed layers are those of serving.py, and
are made first where WORK/serving has none: eight minutes for each of the two of MiniLM, six for Marian's. A row of
MiniLM is scored in twenty to fifty seconds, one of Marian in about a minute. The third line takes half a minute, the
second up to half an hour for each row. All rows are stored when a model is done, beside those of other models and
settings.

The second line distils trimmed models from the original, which reads its own tokens (`original_batches`), on sentences
of STS-B, MRPC and SST-2 train.

all-MiniLM-L6-v2 is trimmed with the training sentences of STS-B and SST-2. Its scores are Spearman x 100 on STS-B dev,
elsewhere the accuracy x 100 of a classifier on the embeddings of SST-2, and retrieval in RTE. Marian is trimmed with
the training pairs of Multi30k; its score is BLEU on test_2016_flickr. "kept" is the share of the vocabulary that `keep`
asks for, "used" all that the texts use. The size is that of the weights in float32, as a share of the original's. Time:
encoding of 32 x 32 tokens, or translation of 32 sentences with beams of 5, as a share of the original's, one thread, in
turns. The third line is vocabulary_large.py: a random mT5 with a vocabulary of its size, trimmed in its own process.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from compression import SentenceEncoder, Translator, task_of
from retrieval import Retrieval
from serving import calls, prepared
from shown.records import stored
from stsb import pairs
from transformers.utils import logging
from translation import read

from collab_heads import distill, trim_vocabulary
from common import RESULTS, interleaved, lines_of, record, table, write

KEPT = {"minilm": ("used", "0.8", "0.5", "0.32"), "marian": ("used", "0.75", "0.5")}
LAYERS = {"minilm": (1.0, 0.33, 0.25), "marian": (1.0, 0.33)}
STEPS = {"minilm": 300, "marian": 1000}  # of distillation of models with compressed layers
SCORES = {"score": "lost", "elsewhere": "lost elsewhere", "retrieval": "lost in retrieval"}
LARGE = "mt5"
ROUNDS = 7
SENTENCES = 10_000  # of the texts that distillation reads beside those of other tasks
COLUMNS = {
    "model": "",
    "layers": ".2f",
    "kept": "",
    "tokens": ",",
    "changed": ".2%",
    "score": ".2f",
    "lost": ".2f",
    "lost elsewhere": ".2f",
    "lost in retrieval": ".2f",
    "size": ".3f",
    "time": ".2f",
    "seconds": ".1f",
}


def texts_of(name: str) -> list:
    """Return the texts of the domain."""
    if name == "marian":
        return list(zip(*(read("train", side, None) for side in ("de", "en")), strict=True))
    found = [text for first, second, _ in pairs("train") for text in (first, second)]
    return found + [line.rsplit("\t", 1)[0] for line in lines_of("data/glue/SST-2/train.tsv")[1:]]


def retokenize(task: SentenceEncoder | Translator, tokenizer) -> None:
    """Give a task another tokenizer, in place."""
    if isinstance(task, Translator):
        task.tokenizer = tokenizer
        return
    inner = task.task
    inner.tokenizer = tokenizer
    inner.batches = inner.tokenized(sorted(inner.index, key=inner.index.__getitem__), 128)
    task.probe, task.labels = task.probe_sentences()
    task.retrieval = Retrieval(inner)


def tokenizer_of(task: SentenceEncoder | Translator):
    return task.tokenizer if isinstance(task, Translator) else task.task.tokenizer


def encoding(model):
    """Return a call that encodes 32 x 32 tokens which every vocabulary has."""
    ids = torch.randint(200, 2000, (32, 32), generator=torch.Generator().manual_seed(0))
    return lambda: model(input_ids=ids, attention_mask=torch.ones_like(ids))


def measure(name: str, arguments: argparse.Namespace) -> Iterator[dict]:
    """Yield the rows of a model; others are compared with the whole one, which comes first."""
    texts, rows, timed = texts_of(name), {}, {}
    asked = [(layers, kept) for layers in arguments.layers or LAYERS[name] for kept in arguments.kept or KEPT[name]]
    whole = [(layers, "all") for layers in (1.0, *(layers for layers, _ in asked))]
    for layers, kept in sorted(dict.fromkeys([*whole, *asked]), key=lambda each: (-each[0], each[1] != "all")):
        task = task_of(name, arguments)
        model, _ = prepared(name, task, layers, STEPS[name] if layers < 1 else 0)
        row = {"model": name, "layers": layers, "kept": kept, "sentences": len(texts)}
        row |= {"tokens": len(tokenizer_of(task)), "changed": 0.0}
        if kept != "all":
            started = time.perf_counter()
            trimmed, report = trim_vocabulary(model, tokenizer_of(task), texts, keep=keep_of(kept), show_progress=False)
            row["seconds"] = time.perf_counter() - started
            row |= {"tokens": report.tokens_after, "changed": report.changed_tokens / report.text_tokens}
            retokenize(task, trimmed)
        row["parameters"] = model.num_parameters()
        with torch.no_grad():
            row |= task.scores(model)
        print(row, flush=True)
        rows[layers, kept] = row
        timed[layers, kept] = calls(name, task, model)["32 sentences"] if name == "marian" else encoding(model)
    torch.set_num_threads(1)
    with torch.no_grad():
        seconds = interleaved(timed, arguments.rounds)
    for key, row in rows.items():
        yield compared(row, rows[1.0, "all"]) | {"time": seconds[key] / seconds[1.0, "all"]}


def keep_of(kept: str) -> float | None:
    """Return the argument `keep` that a row names."""
    return None if kept == "used" else float(kept)


def compared(row: dict, original: dict) -> dict:
    """Return a row with its size as a share of the original's, and what it lost."""
    lost = {SCORES[name]: original[name] - row[name] for name in SCORES if name in row and name in original}
    return row | {"size": row["parameters"] / original["parameters"]} | lost


def key(row: dict) -> tuple:
    """Return what identifies a row."""
    return *(row[name] for name in ("model", "layers", "kept")), row.get("steps", 0), row.get("learning_rate")


def distilled(arguments: argparse.Namespace) -> Iterator[dict]:
    """Yield rows of all-MiniLM-L6-v2, trimmed and then distilled."""
    texts, first = texts_of("minilm"), task_of("minilm", arguments)
    original = first.load()
    with torch.no_grad():
        whole = {"parameters": original.num_parameters()} | first.scores(original)
    for layers in arguments.layers or LAYERS["minilm"]:
        for kept in arguments.kept or KEPT["minilm"][2:]:
            task = task_of("minilm", arguments)
            tokenizer = tokenizer_of(task)
            model, _ = prepared("minilm", task, layers, STEPS["minilm"] if layers < 1 else 0)
            started = time.perf_counter()
            trimmed, report = trim_vocabulary(model, tokenizer, texts, keep=keep_of(kept), show_progress=False)
            order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
            read = list(dict.fromkeys([*task.texts(0), *(texts[i] for i in order[:SENTENCES])]))
            read = [read[i] for i in torch.randperm(len(read), generator=torch.Generator().manual_seed(1)).tolist()]
            mine, theirs = (batches_of(each, read) for each in (trimmed, tokenizer))
            found = distill(
                model,
                original,
                mine,
                arguments.steps,
                original_batches=theirs,
                learning_rate=arguments.learning_rate,
                patience=10,
            )
            row = {"model": "minilm", "layers": layers, "kept": kept, "sentences": len(texts)}
            row |= {"tokens": report.tokens_after, "changed": report.changed_tokens / report.text_tokens}
            row |= {"steps": arguments.steps, "learning_rate": arguments.learning_rate}
            row |= {"seconds": time.perf_counter() - started, "parameters": model.num_parameters()}
            retokenize(task, trimmed)
            with torch.no_grad():
                row |= task.scores(model)
            print(row, found, flush=True)
            yield compared(row, whole)


def batches_of(tokenizer, texts: list[str]) -> list[dict]:
    """Tokenize texts in batches of 32, in order."""
    return [
        dict(tokenizer(texts[i : i + 32], padding=True, truncation=True, max_length=32, return_tensors="pt"))
        for i in range(0, len(texts), 32)
    ]


def large(pieces: int) -> list[dict]:
    """Return the row of a random mT5, trimmed in a process of its own."""
    call = [sys.executable, str(Path(__file__).with_name("vocabulary_large.py")), "--pieces", str(pieces)]
    return [json.loads(subprocess.run(call, check=True, stdout=subprocess.PIPE, text=True).stdout)]


def store(name: str, new: Iterable[dict], part: str = "") -> None:
    """Store new rows in the place of those with the same model and setting; all others stay."""
    new, is_first = list(new), not (RESULTS / "vocabulary.json").exists()
    before = {"rows": []} if is_first else stored("vocabulary")
    run = {key: value for key, value in record([]).items() if key != "rows"}
    more = {"runs": {**before.get("runs", {}), name: run}, LARGE: before.get(LARGE, {"rows": []})}
    if part:
        write("vocabulary", before["rows"], **more | {part: {"rows": new}})
        return
    rows = [row for row in before["rows"] if key(row) not in {key(each) for each in new}] + new
    write("vocabulary", sorted(rows, key=order), **more)


def order(row: dict) -> tuple:
    """Return the sort key of a row: distilled ones last, then by model, layers and tokens."""
    asked = (*KEPT[row["model"]], row["kept"])
    place = -1 if row["kept"] == "all" else asked.index(row["kept"])
    return row.get("steps", 0) > 0, [*KEPT].index(row["model"]), -row["layers"], place, row.get("steps", 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL", choices=[*KEPT, LARGE], help=f"some of {', '.join(KEPT)}")
    parser.add_argument("--sentences", type=int, help="to translate, to try the program; nothing is stored then")
    parser.add_argument("--steps", type=int, default=0, help="of distillation after trimming")
    parser.add_argument("--layers", nargs="+", type=float, help="shares of the layers (default: by model)")
    parser.add_argument("--kept", nargs="+", help="shares of the vocabulary, or used (default: by model)")
    parser.add_argument("--learning_rate", type=float, default=0.01)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of timing")
    parser.add_argument("--pieces", type=int, default=250_000, help="of the vocabulary of the mT5")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    for name in arguments.models:
        if name == LARGE:
            store(name, large(arguments.pieces), LARGE)
        elif arguments.steps:
            for row in distilled(arguments):
                store(f"{name}, distilled", [row])
        elif arguments.sentences is not None:
            print(table(measure(name, arguments), COLUMNS))
        else:
            store(name, measure(name, arguments))
    print(table(stored("vocabulary")["rows"], COLUMNS))


if __name__ == "__main__":
    main()
