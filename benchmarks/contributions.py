"""Measure where a translation comes from: contributions of source and target prefix, after three kinds of prefixes.

python benchmarks/contributions.py [--sentences 200] [--models NAME=FOLDER ...] [--name contributions]

The Marian of the shared folder on the first pairs of Multi30k test_2016_flickr: after the reference, after its own
translations (beams of 5) and after those of other sentences, as Voita, Sennrich and Titov 2021 look at theirs. With
--models other models, or checkpoints of one training in order, on the same sentences; --name is that of the record.
"""

import argparse
from dataclasses import replace

from heads_seen import MARIAN, marian_model, translation_batches
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from collab_heads.analysis import ContributionComparison, TokenContributions, compare_contributions
from collab_heads.analysis.relevance.contribution_curve import mean_and_error
from collab_heads.plots import save_figure
from common import PICTURES, shared, table, write

KINDS, BEAMS, PARTS = ("reference", "own", "random"), 5, 5
MEASURES = {"source": "source", "source_entropy": "entropy of source", "target_entropy": "entropy of target"}
COLUMNS = {"model": "", "prefixes": "", "measure": "", **{f"part {n}": ".3f" for n in range(1, PARTS + 1)}}
COLUMNS |= {"last token": ".3f", "mean": ".3f", "± mean": ".3f", "less the reference": "+.3f", "± less": ".3f"}
COLUMNS |= {"less the first model": "+.3f", "± less first": ".3f"}


def rows_of(comparison: ContributionComparison) -> list[dict]:
    """Return a row per model, kind of prefixes and measure.

    A row has the means over each fifth of a sentence without its last token, that token, and the mean. Differences are
    to the same model after the reference, and to the first model after the same prefixes; their errors are those of a
    mean over pairs of sentences.
    """
    rows = []
    first = {run.prefixes: run for name, run in comparison.runs if name == comparison.runs[0][0]}
    for name, run in comparison.runs:
        of_model = [each for other, each in comparison.runs if other == name]
        pair = ContributionComparison((("reference", of_model[0]), ("this", run)))
        beside = ContributionComparison((("first", first[run.prefixes]), ("this", run)))
        for measure, title in MEASURES.items():
            row: dict = {"model": name, "prefixes": run.prefixes, "measure": title, "tokens": run.tokens}
            curve = without_last(run).curve(measure, PARTS)
            row |= {f"part {n + 1}": float(each) for n, each in enumerate(curve.mean)}
            row |= {f"± part {n + 1}": float(each) for n, each in enumerate(curve.error)}
            last = [each[-1:] for each in run.rows(measure)]
            row["last token"], row["± last token"] = mean_and_error(last)
            row["mean"], row["± mean"] = run.average(measure)
            if run is not of_model[0]:
                row["less the reference"], row["± less"] = pair.difference(1, measure)
            if run is not first[run.prefixes]:
                row["less the first model"], row["± less first"] = beside.difference(1, measure)
            rows.append(row)
    return rows


def without_last(run: TokenContributions) -> TokenContributions:
    """Remove the last token of every sentence, the end token, which behaves differently."""
    cut = [
        replace(each, **{name: getattr(each, name)[:-1] for name in MEASURES})
        for each in run.sentences
        if len(each.source) > 1
    ]
    return replace(run, sentences=tuple(cut))


def fall(run: TokenContributions) -> dict[str, float]:
    """Return the source's share in both halves of a sentence without its last token, and their difference."""
    whole = without_last(run)
    halves = whole.curve("source", 2).mean.tolist()
    pairs = [row for row in whole.rows("source") if len(row) > 1]
    falls = [(row[: len(row) // 2].mean() - row[len(row) // 2 :].mean())[None] for row in pairs]
    mean, error = mean_and_error(falls)
    return {"first half": halves[0], "second half": halves[1], "fall": mean, "± fall": error}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=int, default=200)
    parser.add_argument("--models", nargs="+", metavar="NAME=FOLDER", default=[])
    parser.add_argument("--name", default="contributions", help="of the record")
    arguments = parser.parse_args()
    if arguments.models:
        folders = dict(each.split("=", 1) for each in arguments.models)
        models = {name: AutoModelForSeq2SeqLM.from_pretrained(folder).eval() for name, folder in folders.items()}
        tokenizer = AutoTokenizer.from_pretrained(next(iter(folders.values())))
    else:
        model, tokenizer = marian_model()
        models = {"Marian": model}
    batches = translation_batches(tokenizer, arguments.sentences)
    found = compare_contributions(models, batches, prefixes=KINDS, num_beams=BEAMS)
    rows = rows_of(found)
    falls = [{"model": name, "prefixes": run.prefixes, **fall(run)} for name, run in found.runs]
    curves = [
        {"model": name, "prefixes": run.prefixes, **{m: run.curve(m, 10).to_dict() for m in (*MEASURES, "influence")}}
        for name, run in found.runs
    ]
    print(found, table(rows, COLUMNS), table(falls, dict.fromkeys(falls[0], "")), sep="\n\n")
    more = {"sentences": arguments.sentences, "beams": BEAMS, "data": "Multi30k test_2016_flickr"}
    write(arguments.name, rows, falls=falls, curves=curves, divergence=found.divergence, **more)
    save_figure(found.plot(10), PICTURES / arguments.name)
    if len(models) > 1:
        save_figure(found.plot_history(), PICTURES / f"{arguments.name}_history")


if __name__ == "__main__":
    assert shared(MARIAN)
    main()
