"""Spend a budget of megabytes on width and on bits, in one plan: the Marian and the T5 of the shared folder.

    python benchmarks/translation_bytes.py [--models marian t5] [--draws 0 1 2] [--methods ...]
    python benchmarks/translation_bytes.py --table

A draw is 1,024 training pairs of Multi30k, German to English, and the seed of all that follows; nothing is trained.
"compress, 8, 4 and 3 bits" is `compress(model, batches, "2.5MB", bits=(8, 4, 3))`; "bits alone" is the same with no
part that becomes smaller (`parts=()`), and has no row for a size that three bits of all weights exceed. BLEU is that of
the 1,000 sentences of test_2016_flickr, beam 5. "Agreement" is the BLEU of a model's translations with the original's
as references, "same" the share of them that is equal, in per cent. Megabytes (10^6 bytes) are those of all weights in
a checkpoint. Seconds are the processor's, of plan and fit. Rows are kept as they come, in WORK/translation_bytes.jsonl.
"""

import argparse
import statistics
import time
from collections.abc import Sequence

import sacrebleu
from transformers import AutoTokenizer
from transformers.utils import logging
from translation import MODELS, calibration, load, read, translate

from collab_heads import plan
from collab_heads.errors import ArgumentError
from collab_heads.model.site_size import num_bytes
from common import RowStore, compressed_copy, shared

SIZES = {"marian": (2.9, 2.5, 2.0), "t5": (3.3, 2.9, 2.4)}  # megabytes; four bits of all weights take 2.9 and 3.3
BITS, PAIRS = (8, 4, 3), 1024
METHODS: dict[str, dict] = {"compress, 8, 4 and 3 bits": {}, "bits alone, 8, 4 and 3": {"parts": ()}}
MEANS = ("MB", "BLEU", "lost", "agreement", "same", "predicted", "measured", "seconds")
COLUMNS = {"model": "", "method": "", "draws": "", "MB": ".2f", "BLEU": ".2f", "lost": ".2f", "agreement": ".1f"}
COLUMNS |= {"same": ".1f", "predicted": ".3f", "measured": ".3f", "seconds": ".0f"}


def bleu(translations: Sequence[str], references: Sequence[str]) -> float:
    return sacrebleu.corpus_bleu(translations, [references]).score


def measure(name: str, arguments: argparse.Namespace, store: RowStore) -> None:
    """Measure the rows of one model that are not there."""
    there = {(row["model"], row["method"], row["size"], row["draw"]) for row in store.rows}
    tokenizer = AutoTokenizer.from_pretrained(shared(MODELS[name]))
    sources, references = (read("test_2016_flickr", language) for language in ("de", "en"))
    original = load(MODELS[name])
    before = translate(original, tokenizer, sources)
    score = bleu(before, references)
    if (name, "original", None, 0) not in there:
        row = {"model": name, "method": "original", "size": None, "draw": 0, "MB": num_bytes(original) / 1e6}
        store.add(row | {"BLEU": score})
    for draw in arguments.draws:
        for method in arguments.methods:
            sizes = [size for size in SIZES[name] if (name, method, size, draw) not in there]
            if not sizes:
                continue
            started = time.process_time()
            made = plan(
                load(MODELS[name]), calibration(tokenizer, draw, PAIRS), bits=BITS, seed=draw, **METHODS[method]
            )
            planned = time.process_time() - started
            for size in sizes:
                started = time.process_time()
                try:
                    model, error = compressed_copy(made, f"{size}MB")
                except ArgumentError as refused:  # it cannot be so small
                    print(method, size, refused, flush=True)
                    continue
                seconds = planned + time.process_time() - started
                found = translate(model, tokenizer, sources)
                row = {"model": name, "method": method, "size": size, "draw": draw, "MB": num_bytes(model) / 1e6}
                row |= {"BLEU": bleu(found, references), "agreement": bleu(found, before), "measured": error}
                row |= {"lost": score - row["BLEU"], "predicted": made.predicted(made.choose(f"{size}MB"))}
                row["same"] = 100 * statistics.mean(one == other for one, other in zip(found, before, strict=True))
                store.add(row | {"seconds": seconds})
                print(store.rows[-1], flush=True)


def averaged(rows: Sequence[dict]) -> list[dict]:
    """Return one row for each model, method and size: means over the draws."""
    found, order = [], ["original", *METHODS]
    groups = {(row["model"], row["method"], row["size"]) for row in rows}
    for model, method, size in sorted(groups, key=lambda each: (each[0], -(each[2] or 1e3), order.index(each[1]))):
        same = [row for row in rows if (row["model"], row["method"], row["size"]) == (model, method, size)]
        means = {name: statistics.mean(row[name] for row in same) for name in MEANS if same[0].get(name) is not None}
        found.append({"model": model, "method": method, "draws": len(same)} | means)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--draws", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--table", action="store_true", help="only collect the rows that are there")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    store = RowStore("translation_bytes")
    if not arguments.table:
        for name in arguments.models:
            measure(name, arguments, store)
    store.write(averaged(store.rows), COLUMNS)


if __name__ == "__main__":
    main()
