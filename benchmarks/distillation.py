"""Distil all-MiniLM-L6-v2 and a small Marian from their originals, without labels, after a strong swap.

python benchmarks/distillation.py minilm [--values 8 12] [--steps 300] [--learning_rate 3e-4] [--output_weight 1]
python benchmarks/distillation.py marian [--sentences 300]

MiniLM: 10,000 sentences of STS-B, MRPC and RTE train, in batches of 32; scored as in `stsb.py`, on STS-B dev.
Marian: Multi30k train, German alone and with targets; BLEU with beam 5 on the first sentences of test_2016_flickr.
"""

import argparse
import copy
from collections.abc import Collection

import sacrebleu
import torch
from stsb import Task, pairs
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging
from translation import MODELS, calibration, load, read, translate

from collab_heads import distill, swap_to_collaborative
from common import lines_of, minilm, shared, table, write

COLUMNS = {
    "model": "",
    "setting": "",
    "learning_rate": ".0e",
    "output_weight": "",
    "original": ".2f",
    "before": ".2f",
    "after": ".2f",
    "hidden": "",
    "output": "",
    "best_step": "",
    "seconds": ".0f",
}
TEXTS = {"MRPC": (3, 4), "RTE": (1, 2)}  # task -> columns with sentences; none of SST-2, which is the other domain
COUNT, SIZE = 10_000, 32


def sentences(seed: int = 0, tasks: Collection[str] = tuple(TEXTS)) -> list[str]:
    """Return 10,000 random unlabelled sentences of STS-B train and other train sets; none is in STS-B dev."""
    found = {text: None for first, second, _ in pairs("train") for text in (first, second)}
    for task in tasks:
        for line in lines_of(f"data/glue/{task}/train.tsv")[1:]:
            cells = line.split("\t")
            found |= {cells[column]: None for column in TEXTS[task] if column < len(cells)}
    seen = {text for first, second, _ in pairs("dev") for text in (first, second)}
    texts = [text for text in found if text not in seen]
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    return [texts[i] for i in order[:COUNT]]


def row(name: str, setting: str, report, options: dict, scores: list[float]) -> dict:
    return {
        "model": name,
        "setting": setting,
        **options,
        **dict(zip(("original", "before", "after"), scores, strict=True)),
        "hidden": f"{report.before.hidden:.4f} -> {report.after.hidden:.4f}",
        "output": f"{report.before.output:.4f} -> {report.after.output:.4f}",
        "best_step": f"{report.best_step} of {report.steps_asked}",
        "seconds": report.seconds,
        "report": report.to_dict(),
    }


def measure_minilm(values: list[int], steps: int, options: dict):
    """Yield rows of MiniLM with queries, keys and values of each of these dimensions per head, instead of 32."""
    task = Task()
    original = AutoModel.from_pretrained(minilm()).eval()
    baseline = task.score(original)
    batches = task.tokenized(sentences(), SIZE)
    for each in values:
        model = copy.deepcopy(original)
        dim = each * model.config.num_attention_heads
        more = {"kind": "per_head", "batches": task.calibration(0)}
        swap_to_collaborative(model, dim_shared_query_key=dim, dim_value=dim, **more)
        before = task.score(model)
        report = distill(model, original, batches, steps, **options)
        yield row("MiniLM", f"{each} of 32 per head", report, options, [baseline, before, task.score(model)])


def measure_marian(count: int, steps: int, options: dict):
    """Yield rows of Marian, distilled on sources alone and on pairs.

    Queries and keys have 64 instead of 256 dimensions, values 16 instead of 32 per head.
    """
    tokenizer = AutoTokenizer.from_pretrained(shared(MODELS["marian"]))
    original = load(MODELS["marian"])
    sources, references = read("test_2016_flickr", "de", count), read("test_2016_flickr", "en", count)

    def bleu(model) -> float:
        return sacrebleu.corpus_bleu(translate(model, tokenizer, sources), [references]).score

    baseline = bleu(original)
    pairs_of = calibration(tokenizer, seed=1, count=COUNT, size=SIZE)
    without = [{name: tensor for name, tensor in batch.items() if name != "labels"} for batch in pairs_of]
    for mixing in ("shared", "per_head"):
        swapped = copy.deepcopy(original)
        more = {"kind": mixing, "batches": calibration(tokenizer, seed=0)}
        swap_to_collaborative(swapped, dim_shared_query_key=64, dim_value=8 * 16, **more)
        before = bleu(swapped)
        for name, batches in (("German only", without), ("with targets", pairs_of)):
            model = copy.deepcopy(swapped)
            report = distill(model, original, batches, steps, **options)
            yield row("Marian", f"{mixing}, {name}", report, options, [baseline, before, bleu(model)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("minilm", "marian"))
    parser.add_argument("--values", type=int, nargs="+", default=[8, 12], help="dimensions per head, of 32")
    parser.add_argument("--sentences", type=int, default=300, help="to translate")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--output_weight", type=float, default=1.0)
    parser.add_argument("--explore", action="store_true", help="print only, store nothing")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    options = {"learning_rate": arguments.learning_rate, "output_weight": arguments.output_weight}
    if arguments.part == "minilm":
        rows = measure_minilm(arguments.values, arguments.steps, options)
    else:
        rows = measure_marian(arguments.sentences, arguments.steps, options)
    found = []
    for each in rows:
        found.append(each)
        print(table([each], COLUMNS), flush=True)
    if not arguments.explore:
        write(f"distillation_{arguments.part}", found)


if __name__ == "__main__":
    main()
