"""Swap trained translation models and translate Multi30k test_2016_flickr, beam 5, without fine-tuning.

python benchmarks/translation.py [--models marian t5] [--sentences N]
"""

import argparse
import gzip
import itertools

import sacrebleu
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.utils import logging

from collab_heads import swap_to_collaborative
from common import shared, table, write

MODELS = {"marian": "models/marian-multi30k-de-en", "t5": "models/t5-multi30k-de-en"}
COLUMNS = {
    "model": "",
    "mixing": "",
    "width": "",
    "method": "",
    "bleu": ".2f",
    "lost": ".2f",
    "identical": "",
    "stepwise": ".1e",
    "parameters": ",",
    "cache": "",
    "error": ".3f",
    "seconds": ".1f",
}


def read(name: str, language: str, count: int | None = None) -> list[str]:
    """Read the lines of one side of Multi30k."""
    with gzip.open(shared(f"data/multi30k/{name}.{language}.gz"), "rt", encoding="utf-8") as file:
        return [line.rstrip("\n") for line in file][:count]


def load(path: str):
    """Load a model in evaluation mode."""
    return AutoModelForSeq2SeqLM.from_pretrained(shared(path)).eval()


def translate(model, tokenizer, sentences: list[str], beams: int = 5, size: int = 50) -> list[str]:
    """Translate in batches of similar length; the translations are in the given order."""
    order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
    result = [""] * len(sentences)
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        inputs = tokenizer([sentences[i] for i in chosen], return_tensors="pt", padding=True)
        with torch.no_grad():
            tokens = model.generate(**inputs, num_beams=beams, do_sample=False, max_length=80)
        texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        for i, text in zip(chosen, texts, strict=True):
            result[i] = text
    return result


def calibration(tokenizer, seed: int, count: int = 256, size: int = 32) -> list[dict]:
    """Return training pairs as model inputs with labels."""
    source, target = read("train", "de"), read("train", "en")
    chosen = torch.randperm(len(source), generator=torch.Generator().manual_seed(seed))[:count].tolist()
    batches = []
    for start in range(0, len(chosen), size):
        rows = chosen[start : start + size]
        batch = tokenizer(
            [source[i] for i in rows], text_target=[target[i] for i in rows], return_tensors="pt", padding=True
        )
        batches.append(dict(batch))
    return batches


@torch.no_grad()
def stepwise_difference(path: str, mixing: str, tokenizer, sentences: list[str]) -> float:
    """Return the largest logit difference between a lossless swap that decodes stepwise with a cache and the original.

    Both are in float64.
    """
    original, model = load(path).double(), load(path).double()
    swap_to_collaborative(model, kind=mixing)
    inputs = tokenizer(sentences, return_tensors="pt", padding=True)
    tokens = original.generate(**inputs, num_beams=1, do_sample=False, max_length=30)
    expected = original(**inputs, decoder_input_ids=tokens).logits
    cache, worst = None, 0.0
    encoder = model.get_encoder()(**inputs)
    for index, step in enumerate(tokens.split(1, dim=1)):
        result = model(
            encoder_outputs=encoder,
            attention_mask=inputs["attention_mask"],
            decoder_input_ids=step,
            past_key_values=cache,
            use_cache=True,
        )
        cache = result.past_key_values
        worst = max(worst, float((result.logits[:, 0] - expected[:, index]).abs().max()))
    return worst


# method -> (calibrated, refinement steps; None for the default)
METHODS = {"weights only": (False, 0), "calibrated": (True, 0), "calibrated, refined": (True, None)}
SETTINGS = [(256, "weights only"), *((width, method) for width in (128, 64) for method in METHODS)]
SETTINGS.remove((128, "weights only"))  # to save time


def measure(name: str, count: int | None) -> list[dict]:
    """Return all rows of one model."""
    tokenizer = AutoTokenizer.from_pretrained(shared(MODELS[name]))
    sources, references = read("test_2016_flickr", "de", count), read("test_2016_flickr", "en", count)
    original = load(MODELS[name])
    translations = translate(original, tokenizer, sources)
    metric = sacrebleu.metrics.BLEU()
    baseline = metric.corpus_score(translations, [references]).score
    rows = [{"model": name, "mixing": "original", "bleu": baseline, "parameters": original.num_parameters()}]
    rows[0]["signature"] = str(metric.get_signature())
    print(table(rows[-1:], COLUMNS), flush=True)
    for (width, method), mixing in itertools.product(SETTINGS, ("shared", "per_head")):
        calibrated, steps = METHODS[method]
        model = load(MODELS[name])
        report = swap_to_collaborative(
            model,
            dim_shared_query_key=width,
            kind=mixing,
            batches=calibration(tokenizer, seed=0) if calibrated else None,
            **({"refine_steps": steps} if steps is not None else {}),
        )
        ours = translate(model, tokenizer, sources)
        bleu = metric.corpus_score(ours, [references]).score
        row = {
            "model": name,
            "mixing": mixing,
            "width": "/".join(map(str, sorted({site.dim for site in report.sites}))),
            "method": "lossless" if width == 256 else method,
            "bleu": bleu,
            "lost": baseline - bleu,
            "identical": f"{sum(a == b for a, b in zip(ours, translations, strict=True))}/{len(ours)}",
            "parameters": model.num_parameters(),
            "cache": f"{report.sites[-1].cache_before} -> {report.sites[-1].cache_after}",
            "error": sum(site.relative_error for site in report.sites) / len(report.sites),
            "seconds": report.seconds,
        }
        if width == 256:
            row["stepwise"] = stepwise_difference(MODELS[name], mixing, tokenizer, sources[:20])
        rows.append(row)
        print(table(rows[-1:], COLUMNS).splitlines()[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--sentences", type=int, help="only the first N test sentences")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    rows = [row for name in arguments.models for row in measure(name, arguments.sentences)]
    print(table(rows, COLUMNS))
    write("translation", rows)


if __name__ == "__main__":
    main()
