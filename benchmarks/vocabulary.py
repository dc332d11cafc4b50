r"""Trim vocabularies to the texts of a domain, alone and with compressed layers: quality, size of the file, time.

    python benchmarks/serving.py minilm
    python benchmarks/serving.py marian --budgets 0.5 0.33 --steps 0 1000
    python benchmarks/vocabulary.py minilm marian
    python benchmarks/vocabulary.py minilm --steps 600 [--layers 1.0 0.25] [--kept 0.32 0.5]

The last line distils trimmed models from the original, which reads its own tokens (`original_batches`), on sentences of
STS-B, MRPC, RTE and SST-2 train, and adds rows to the stored ones. The first two lines make the compressed models. all-
MiniLM-L6-v2 is trimmed with the training sentences of STS-B and SST-2; its scores are Spearman x 100 on STS-B dev, and
elsewhere the accuracy x 100 of a classifier on the embeddings of SST-2. Marian is trimmed with the training pairs of
Multi30k; its score is BLEU on test_2016_flickr. "kept" is the share of the vocabulary that `keep` asks for, "used" all
that the texts use. The size is that of the weights in float32, as a share of the original's. Time: encoding of 32 x 32
tokens, or translation of 32 sentences with beams of 5, as a share of the original's, one thread, in turns.
"""

import argparse
import time
from collections.abc import Iterator

import torch
from compression import SentenceEncoder, Translator, task_of
from distillation import sentences
from serving import MODELS, calls
from shown.records import rows_of
from stsb import pairs
from transformers.utils import logging
from translation import read

from collab_heads import distill, trim_vocabulary
from common import interleaved, shared, table, write

KEPT = {"minilm": (None, 0.8, 0.5, 0.32), "marian": (None, 0.75, 0.5)}
LAYERS = {"minilm": (1.0, 0.25), "marian": (1.0, 0.33)}
FOLDERS = {"minilm": "minilm-0.25-300", "marian": "marian-0.33-1000"}
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
    "size": ".3f",
    "time": ".2f",
    "seconds": ".1f",
}


def texts_of(name: str) -> list:
    """Return the texts of the domain."""
    if name == "marian":
        return list(zip(*(read("train", side, None) for side in ("de", "en")), strict=True))
    lines = shared("data/glue/SST-2/train.tsv").read_text(encoding="utf-8").rstrip("\n").split("\n")[1:]
    found = [text for first, second, _ in pairs("train") for text in (first, second)]
    return found + [line.rsplit("\t", 1)[0] for line in lines]


def retokenize(task: SentenceEncoder | Translator, tokenizer) -> None:
    """Give a task another tokenizer, in place."""
    if isinstance(task, Translator):
        task.tokenizer = tokenizer
        return
    inner = task.task
    inner.tokenizer = tokenizer
    inner.batches = inner.tokenized(sorted(inner.index, key=inner.index.__getitem__), 128)
    task.probe, task.labels = task.probe_sentences()


def tokenizer_of(task: SentenceEncoder | Translator):
    return task.tokenizer if isinstance(task, Translator) else task.task.tokenizer


def encoding(model):
    """Return a call that encodes 32 x 32 tokens which every vocabulary has."""
    ids = torch.randint(200, 2000, (32, 32), generator=torch.Generator().manual_seed(0))
    return lambda: model(input_ids=ids, attention_mask=torch.ones_like(ids))


def measure(name: str, arguments: argparse.Namespace) -> Iterator[dict]:
    """Yield the rows of a model."""
    texts, rows, timed = texts_of(name), {}, {}
    original = task_of(name, arguments)
    whole = original.load().num_parameters()
    for layers in LAYERS[name]:
        for keep in ("all", *KEPT[name]):
            task = task_of(name, arguments)
            model = original.load()
            if layers < 1:
                model = type(model).from_pretrained(MODELS / FOLDERS[name]).eval()
            row = {
                "model": name,
                "layers": layers,
                "kept": "used" if keep is None else str(keep),
                "sentences": len(texts),
            }
            row |= {"tokens": len(tokenizer_of(task)), "changed": 0.0}
            if keep != "all":
                started = time.perf_counter()
                report = trim_vocabulary(model, tokenizer_of(task), texts, keep=keep, show_progress=False)
                row["seconds"] = time.perf_counter() - started
                row |= {"tokens": report.tokens_after, "changed": report.changed_tokens / report.text_tokens}
                retokenize(task, report.tokenizer)
            with torch.no_grad():
                row |= {"score": task.score(model), "elsewhere": task.score_elsewhere(model)}
            row["size"] = model.num_parameters() / whole
            print(row, flush=True)
            rows[layers, keep] = row
            timed[layers, keep] = calls(name, task, model)["32 sentences"] if name == "marian" else encoding(model)
    torch.set_num_threads(1)
    with torch.no_grad():
        seconds = interleaved(timed, ROUNDS)
    first = rows[1.0, "all"]
    for key, row in rows.items():
        row |= {"lost": first["score"] - row["score"], "time": seconds[key] / seconds[1.0, "all"]}
        if row["elsewhere"] is not None:
            row["lost elsewhere"] = first["elsewhere"] - row["elsewhere"]
        yield row


def key(row: dict) -> tuple:
    """Return what identifies a row."""
    return *(row[name] for name in ("model", "layers", "kept")), row.get("steps", 0), row.get("learning_rate")


def distilled(arguments: argparse.Namespace, stored: list[dict]) -> Iterator[dict]:
    """Yield rows of all-MiniLM-L6-v2, trimmed and then distilled."""
    texts = texts_of("minilm")
    first = next(row for row in stored if key(row) == ("minilm", 1.0, "all", 0, None))
    for layers in arguments.layers:
        for keep in arguments.kept:
            task = task_of("minilm", arguments)
            original, tokenizer = task.load(), tokenizer_of(task)
            model = original if layers == 1 else type(original).from_pretrained(MODELS / FOLDERS["minilm"])
            model, original = model.eval(), task.load()
            started = time.perf_counter()
            report = trim_vocabulary(model, tokenizer, texts, keep=keep, show_progress=False)
            order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
            read = list(dict.fromkeys([*sentences(0), *(texts[i] for i in order[:SENTENCES])]))
            read = [read[i] for i in torch.randperm(len(read), generator=torch.Generator().manual_seed(1)).tolist()]
            mine, theirs = (batches_of(each, read) for each in (report.tokenizer, tokenizer))
            found = distill(
                model,
                original,
                mine,
                arguments.steps,
                original_batches=theirs,
                learning_rate=arguments.learning_rate,
                patience=10,
            )
            row = {"model": "minilm", "layers": layers, "kept": str(keep), "sentences": len(texts)}
            row |= {"tokens": report.tokens_after, "changed": report.changed_tokens / report.text_tokens}
            row |= {"steps": arguments.steps, "learning_rate": arguments.learning_rate}
            row["seconds"] = time.perf_counter() - started
            retokenize(task, report.tokenizer)
            with torch.no_grad():
                row |= {"score": task.score(model), "elsewhere": task.score_elsewhere(model)}
            row["size"] = model.num_parameters() / original.num_parameters()
            row |= {"lost": first["score"] - row["score"], "lost elsewhere": first["elsewhere"] - row["elsewhere"]}
            print(row, found, flush=True)
            yield row


def batches_of(tokenizer, texts: list[str]) -> list[dict]:
    """Tokenize texts in batches of 32, in order."""
    return [
        dict(tokenizer(texts[i : i + 32], padding=True, truncation=True, max_length=32, return_tensors="pt"))
        for i in range(0, len(texts), 32)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL", help=f"some of {', '.join(KEPT)}")
    parser.add_argument("--sentences", type=int, help="to translate")
    parser.add_argument("--steps", type=int, default=0, help="of distillation after trimming")
    parser.add_argument("--layers", nargs="+", type=float, default=LAYERS["minilm"], help="shares that are distilled")
    parser.add_argument("--kept", nargs="+", type=float, default=KEPT["minilm"][2:], help="shares that are distilled")
    parser.add_argument("--learning_rate", type=float, default=0.01)
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    if arguments.steps:
        rows = rows_of("vocabulary")
        for row in distilled(arguments, rows):
            rows = [each for each in rows if key(each) != key(row)] + [row]
            write("vocabulary", rows)
        return
    rows = [row for name in arguments.models for row in measure(name, arguments)]
    print(table(rows, COLUMNS))
    write("vocabulary", [*rows, *(row for row in rows_of("vocabulary") if row.get("steps"))])


if __name__ == "__main__":
    main()
