"""Swap all-MiniLM-L6-v2 and score STS-B dev without fine-tuning: mean-pooled cosine, Spearman x 100, all 1,500 pairs.

python benchmarks/stsb.py [--draws 3] [--widths 128 64] [--refined]
python benchmarks/stsb.py --values [--draws 3]

With --values the rows are those with narrower values (`results/values.json`), alone and with narrower query and key.
Calibration: draws of 256 STS-B train sentences (first sentences of the pairs). "source" is the system of Cordonnier et
al. 2020: CP decomposition of the dense tensor from a random start, scores divided by sqrt(R / H).
"""

import argparse
import dataclasses
import json
import math

import torch
from scipy.stats import spearmanr
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

from collab_heads import swap_to_collaborative
from collab_heads.running.embeddings import embed
from common import RESULTS, minilm, shared, table, write

COLUMNS = {
    "width": "",
    "mixing": "",
    "method": "",
    "sentences": "",
    "spearman": ".2f",
    "worst_drop": ".2f",
    "drops": "",
    "error": ".3f",
    "output_error": ".3f",
    "parameters": ",",
    "seconds": ".1f",
}
VALUE_COLUMNS = {
    "width": "",
    "values": "",
    "method": "",
    "sentences": "",
    "spearman": ".2f",
    "worst_drop": ".2f",
    "drops": "",
    "variance_lost": ".3f",
    "attention": ".0%",
    "cache": ".0%",
    "seconds": ".1f",
}


def pairs(split: str) -> list[tuple[str, str, float]]:
    """Read (sentence, sentence, score) of STS-B; quotes are not special, because several fields begin with one."""
    header, *rows = shared(f"data/glue/STS-B/{split}.tsv").read_text(encoding="utf-8").rstrip("\n").split("\n")
    columns = [header.split("\t").index(name) for name in ("sentence1", "sentence2", "score")]
    cells = (row.split("\t") for row in rows)
    return [(row[columns[0]], row[columns[1]], float(row[columns[2]])) for row in cells]


class Task:
    """STS-B dev, tokenised once, with calibration sentences and the score.

    Args:
        folder: of the model whose tokenizer it is; None for all-MiniLM-L6-v2.
    """

    def __init__(self, folder: str | None = None):
        self.tokenizer = AutoTokenizer.from_pretrained(folder or minilm())
        self.dev, self.train = pairs("dev"), pairs("train")
        texts = sorted({text for first, second, _ in self.dev for text in (first, second)}, key=len)
        self.index = {text: i for i, text in enumerate(texts)}
        self.batches = self.tokenized(texts, 128)
        self.gold = [score for *_, score in self.dev]

    def tokenized(self, texts: list[str], size: int) -> list[dict]:
        """Return batches of model inputs."""
        kwargs = {"padding": True, "truncation": True, "max_length": 128, "return_tensors": "pt"}
        return [dict(self.tokenizer(texts[i : i + size], **kwargs)) for i in range(0, len(texts), size)]

    def calibration(self, draw: int, count: int = 256) -> list[dict]:
        """Return batches from a draw of train sentences."""
        chosen = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(draw))[:count].tolist()
        return self.tokenized([self.train[i][0] for i in chosen], 32)

    def score(self, model) -> float:
        """Return Spearman's correlation x 100."""
        return self.correlation(embed(model, self.batches))

    def correlation(self, rows: torch.Tensor) -> float:
        """Return Spearman's correlation x 100 of the embeddings of `batches`."""
        first, second = ([self.index[pair[side]] for pair in self.dev] for side in (0, 1))
        return 100 * spearmanr((rows[first] * rows[second]).sum(-1), self.gold).statistic


def source_rows(task: Task, width: int, baseline: float) -> list[dict]:
    """Return two rows for the source system's decomposition: with the right scale and with its own."""
    model = AutoModel.from_pretrained(minilm()).eval()
    report = swap_to_collaborative(model, dim_shared_query_key=width, method="parafac")
    right = task.score(model)
    for layer in model.encoder.layer:
        query_key = layer.attention.self.query_key
        scale = 1 / math.sqrt(width / query_key.num_heads)
        query_key.state = dataclasses.replace(query_key.state, scale=scale)
    methods = {"dense random CP, right scale": right, "source: dense random CP, its scale": task.score(model)}
    return [row(report, width, "shared", name, None, [score], baseline) for name, score in methods.items()]


def row(report, width, mixing, method, sentences, scores, baseline) -> dict:
    """Return one row of the table, over the draws."""
    count = len(report.sites)
    output_errors = [site.output_error for site in report.sites if site.output_error is not None]
    return {
        "width": width if report.sites[0].dim == width else f"{width} ({report.sites[0].dim})",
        "mixing": mixing,
        "method": method,
        "sentences": sentences,
        "spearman": sum(scores) / len(scores),
        "worst_drop": baseline - min(scores),
        "drops": ", ".join(f"{baseline - score:.2f}" for score in scores),
        "error": sum(site.relative_error for site in report.sites) / count,
        "output_error": sum(output_errors) / count if output_errors else None,
        "parameters": report.model_parameters_after,
        "seconds": report.seconds,
    }


def our_row(task: Task, width, mixing, method, sentences, draws, steps, baseline, allocation="uniform") -> dict:
    """Swap with every draw, and score."""
    scores = []
    for draw in range(draws):
        model = AutoModel.from_pretrained(minilm()).eval()
        calibration = task.calibration(draw, sentences) if sentences else None
        more = {"refine_steps": steps} if steps is not None else {}
        report = swap_to_collaborative(
            model,
            dim_shared_query_key=width,
            kind=mixing,
            batches=calibration,
            allocation=allocation,
            seed=draw,
            **more,
        )
        scores.append(task.score(model))
    found = row(report, width, mixing, method, sentences, scores, baseline)
    return found | {"width": width} if allocation == "balanced" else found


def refined_rows(task: Task, widths: list[int], draws: int, baseline: float):
    """Yield the rows with refinement."""
    for width in widths:
        for mixing in ("shared", "per_head"):
            yield our_row(task, width, mixing, "calibrated, refined", 256, draws, None, baseline)
    for width in widths:  # the same parameters, spread over the layers
        method = "balanced, calibrated, refined"
        yield our_row(task, width, "shared", method, 256, draws, None, baseline, allocation="balanced")
    for mixing in ("shared", "per_head"):  # how far more sentences go
        yield our_row(task, widths[0], mixing, "calibrated, refined (240 steps)", 1024, 1, 240, baseline)


def values_row(task: Task, values: int, draws: int, baseline: float, width: int | None = None, sentences=256) -> dict:
    """Narrow the values with every draw, and queries and keys too if a width is given, and score."""
    scores, lost = [], []
    for draw in range(draws):
        model = AutoModel.from_pretrained(minilm()).eval()
        dim = model.config.num_attention_heads * values
        calibration = task.calibration(draw, sentences) if sentences else None
        narrow = {"dim_shared_query_key": width, "kind": "per_head"} if width else {}
        report = swap_to_collaborative(model, dim_value=dim, batches=calibration, seed=draw, **narrow)
        scores.append(task.score(model))
        lost += [site.variance_lost for site in report.sites]
    sizes = {
        name: sum(getattr(site, f"{part}_after") for site in report.sites)
        / sum(getattr(site, f"{part}_before") for site in report.sites)
        for name, part in (("attention", "parameters"), ("cache", "cache"))
    }
    return {
        "width": f"{width or report.sites[0].dim_exact} of {report.sites[0].dim_exact}",
        "values": f"{values} of {report.sites[0].dim_value_exact // model.config.num_attention_heads}",
        "method": ("calibrated, refined" if width else "calibrated") if sentences else "weights only",
        "sentences": sentences or None,
        "spearman": sum(scores) / len(scores),
        "worst_drop": baseline - min(scores),
        "drops": ", ".join(f"{baseline - score:.2f}" for score in scores),
        "variance_lost": sum(lost) / len(lost),
        **sizes,
        "parameters": report.model_parameters_after,
        "seconds": report.seconds,
    }


def measure_values(task: Task, draws: int, baseline: float) -> None:
    """Print and store the rows with narrower values."""
    rows = [{"method": "original", "spearman": baseline, "attention": 1.0, "cache": 1.0}]
    for values, width in ((24, None), (16, None), (8, None), (16, 144)):
        rows.append(values_row(task, values, draws, baseline, width))
        print(table(rows[-1:], VALUE_COLUMNS), flush=True)
    rows.append(values_row(task, 16, draws, baseline, sentences=32))
    rows.append(values_row(task, 8, draws, baseline, sentences=32))
    rows.append(values_row(task, 16, 1, baseline, sentences=None))
    print(table(rows, VALUE_COLUMNS))
    write("values", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=3, help="calibration draws")
    parser.add_argument("--refined", action="store_true", help="measure and replace the rows with refinement only")
    parser.add_argument("--values", action="store_true", help="measure narrower values only, into values.json")
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 64])
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    task, rows = Task(), []

    def add(new: list[dict]) -> None:
        rows.extend(new)
        print(table(new, COLUMNS), flush=True)

    original = AutoModel.from_pretrained(minilm()).eval()
    baseline = task.score(original)
    if arguments.values:
        measure_values(task, arguments.draws, baseline)
        return
    if not arguments.refined:
        add([{"method": "original", "spearman": baseline, "parameters": original.num_parameters()}])
        for width in arguments.widths:
            for mixing in ("shared", "per_head"):
                add([our_row(task, width, mixing, "weights only", None, 1, 0, baseline)])
                add([our_row(task, width, mixing, "calibrated", 256, arguments.draws, 0, baseline)])
            add(source_rows(task, width, baseline))
    for row in refined_rows(task, arguments.widths, arguments.draws, baseline):
        add([row])
    note = {}
    if arguments.refined:
        stored = json.loads((RESULTS / "stsb.json").read_text())["rows"]
        rows = [old for old in stored if old["method"] not in {new["method"] for new in rows}] + rows
        note = {"note": "the rows with refinement were measured later than the others, with --refined"}
    print(table(rows, COLUMNS))
    write("stsb", rows, **note)


if __name__ == "__main__":
    main()
