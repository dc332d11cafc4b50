"""Compare measures of heads with what is lost without each head.

python benchmarks/head_worth.py PART [--real DIR] [--measures NAME ...] [--divergence]

minilm   all-MiniLM-L6-v2: 200 sentences of STS-B dev; three draws of 256 train sentences for the measures
marian   the Marian of the shared folder: 200 pairs of Multi30k test_2016_flickr; three draws of 256 train pairs
t5       the T5 of the shared folder: the same
mpnet    all-mpnet-base-v2: 64 sentences of STS-B dev; three draws of 128 train sentences
smollm2  SmolLM2-135M: 16 sentences of UD English EWT test; three draws of 64 sentences of its dev set

DIR holds what `real_models.py` of the shared folder makes. The truth of a head is the harm to the tested sentences
without it: the loss per token, or 1 - cosine of an embedding to the whole model's. "Refitted": W_O of its layer is
refitted on the draw, in closed form, for the heads that stay (`prune_heads`); for mpnet and smollm2 this takes the
first draw alone. No measure sees the tested sentences.

Correlations are Spearman's, means over draws. "95 %" is the middle of 1,000 resamples of the tested sentences, each by
one of the draws. A resample has more chance in it than the sample, so its correlations are lower; the page shows half
the width of the interval, on either side of the correlation. "Within" is the mean over layers of the correlation within
a layer. "Half" is the overlap of the best half of the heads by the measure and by the truth, where chance gives 0.50.
"Gone" is the harm once the worst half by the measure is left out. Seconds are those of the pass that gives a measure,
on the first draw and one thread; some measures share a pass, and flow sees few sentences. "Other sentences" correlates
the truth on two halves of the tested sentences, over 100 divisions: it says how much of the truth is chance.

With --measures some measures alone are measured, and the other rows stay as they are stored.
With --divergence the truth of a left out head is the KL divergence from the whole model's predictions, for the stored
measures of the first draw: it has less chance in it than the loss, which a head may also lower.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from head_truth import CASES, DRAWS, Case, Truth
from torch import Tensor
from transformers.utils import logging

from collab_heads.analysis import head_importance, head_relevance, head_statistics, head_worth
from collab_heads.fitting.head_regression import HeadRegression, regressions
from collab_heads.heads.comparison import rank_correlation
from collab_heads.heads.criteria import Gradient, Reconstruction
from common import RESULTS, WORK, record, table, write

Scores = Mapping[str, Tensor]  # path -> [H]
RESAMPLES, DIVISIONS = 1000, 100
TRUTHS = ("left out", "refitted")
COLUMNS = {"measure": "", "left out": "+.2f", "95 %": "", "refitted": "+.2f", "95 %, refitted": "", "within": "+.2f"}
COLUMNS |= {"half": ".2f", "half, refitted": ".2f", "gone": ".3f", "gone, refitted": ".3f", "seconds": ".1f"}


def statistics_of(case: Case, draw: int) -> dict[str, Scores]:
    """Return what one pass of `head_statistics` gives; heads that matter are expected to have much of each."""
    found = head_statistics(case.model, case.draws[draw], exclude=case.exclude)
    return {
        "confidence": found.confidence,
        "low entropy": {path: -values for path, values in found.entropy.items()},
        "attention distance": found.attention_distance,
        "little on the first token": {path: -values for path, values in found.first_token.items()},
        "distance to other heads": {path: found.distance(path) for path in found.l2},
    }


def worth(*names: str) -> Callable[[Case, int], dict[str, Scores]]:
    """Return measures of `head_worth`, in one pass."""

    def measure(case: Case, draw: int) -> dict[str, Scores]:
        batches = case.draws[draw]
        if names == ("flow",):  # sentences of all lengths, one by one
            rows = [
                {key: value[row : row + 1] for key, value in batch.items()} for batch in batches for row in range(4)
            ]
            batches = rows[:: max(1, len(rows) // case.flow)][: case.flow]
        found = head_worth(case.model, batches, measures=names, exclude=case.exclude, seed=draw)
        return {name.replace("_", " "): values for name, values in found.values.items()}

    return measure


def relevance(case: Case, draw: int) -> dict[str, Scores]:
    found = head_relevance(case.model, case.draws[draw], exclude=case.exclude)
    absolute = {path: each.abs() for path, each in found.signed.items()}
    return {"absolute relevance": absolute, "relevance (share of the layer)": found.relevance}


def gradient(case: Case, draw: int) -> dict[str, Scores]:
    if not case.has_labels:
        return {}
    return {"gradient": head_importance(case.model, case.draws[draw], criterion=Gradient(normalize=False))}


def reconstruction(case: Case, draw: int) -> dict[str, Scores]:
    return {"reconstruction": head_importance(case.model, case.draws[draw], criterion="reconstruction")}


def reconstruction_of_layers(case: Case, draw: int) -> dict[str, Scores]:
    criterion = Reconstruction(normalize=True)
    return {"reconstruction (share of the layer)": head_importance(case.model, case.draws[draw], criterion=criterion)}


Measured = Callable[[Case, int], dict[str, Scores]]  # measures that one pass gives, by their names
MEASURES: dict[str, Measured] = {
    "gradient": gradient,
    "reconstruction": reconstruction,
    "reconstruction_of_layers": reconstruction_of_layers,
    "relevance": relevance,
    "value_zeroing": worth("value_zeroing"),
    "norms": worth("value_norm", "context_norm"),
    "contribution": worth("contribution"),
    "rollout": worth("rollout"),
    "flow": worth("flow"),
    "statistics": statistics_of,
}


def measured(case: Case, truth: Truth, names: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return measure -> [draws, heads], and measure -> seconds on the first draw."""
    paths = [site.path for site in truth.sites]
    found: dict[str, Tensor] = {}
    seconds: dict[str, float] = {}
    for measure in map(MEASURES.__getitem__, names):
        begin, draws = time.perf_counter(), [measure(case, 0)]
        for name in draws[0]:
            seconds[name] = time.perf_counter() - begin
        draws += [measure(case, draw) for draw in range(1, DRAWS)]
        for name in draws[0]:
            if missing := [path for path in paths if path not in draws[0][name]]:
                print(f"{name}: left out, {missing[0]} has none")
                continue
            rows = [torch.cat([draw[name][path].double() for path in paths]) for draw in draws]
            found[name] = torch.stack(rows)
            print(f"{name}: {seconds[name]:.1f} s", flush=True)
    if len(names) < len(MEASURES):
        return found, seconds
    generator = torch.Generator().manual_seed(0)
    places = torch.tensor([float(number) for number, site in enumerate(truth.sites) for _ in range(site.num_heads)])
    found["later in the model"] = places.double().expand(DRAWS, -1)
    found["random"] = torch.rand(DRAWS, len(places), generator=generator, dtype=torch.float64)
    return found, seconds


def split(truth: Truth, flat: Tensor) -> list[Tensor]:
    return list(flat.split([site.num_heads for site in truth.sites]))


def within_layers(truth: Truth, scores: Tensor, harm: Tensor) -> float:
    each = zip(split(truth, scores), split(truth, harm), strict=True)
    return statistics.mean(rank_correlation(*pair) for pair in each if len(pair[0]) > 1)


def best_half(values: Tensor) -> set[int]:
    return set(values.argsort(descending=True, stable=True)[: -(-len(values) // 2)].tolist())


def worst_half(truth: Truth, scores: Tensor) -> dict[str, list[int]]:
    """Return path -> the heads of the worst half."""
    kept = best_half(scores)
    gone = torch.tensor([head not in kept for head in range(len(scores))])
    return {
        site.path: own.nonzero().flatten().tolist()
        for site, own in zip(truth.sites, split(truth, gone), strict=True)
        if own.any()
    }


def interval(draws: Tensor, harms: Tensor, weights: Tensor) -> tuple[float, float]:
    """Return the 95 % interval of the correlation: resampled sentences, and one of the draws each.

    Args:
        draws: [draws, heads], the measure.
        harms: [1 or draws, heads, S].
        weights: [S].
    """
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(RESAMPLES):
        rows = torch.randint(len(weights), (len(weights),), generator=generator)
        draw = int(torch.randint(len(draws), (1,), generator=generator))
        harm = harms[draw % len(harms)][:, rows].sum(-1) / weights[rows].sum()
        found.append(rank_correlation(draws[draw], harm))
    low, high = torch.tensor(found).quantile(torch.tensor([0.025, 0.975])).tolist()
    return low, high


def row_of(truth: Truth, name: str, draws: Tensor, harms: Mapping[str, Tensor], fits: list) -> dict:
    """Return the row of a measure."""
    row: dict = {"measure": name}
    for key in TRUTHS:
        each = harms[key].sum(-1) / truth.weights.sum()  # (1 or draws, heads)
        pairs = [(scores, each[draw % len(each)]) for draw, scores in enumerate(draws)]
        low, high = interval(draws, harms[key], truth.weights)
        end = "" if key == "left out" else ", refitted"
        row |= {
            key: statistics.mean(rank_correlation(*pair) for pair in pairs),
            f"95 %{end}": f"{low:+.2f} to {high:+.2f}",
        }
        row[f"within{end}"] = statistics.mean(within_layers(truth, *pair) for pair in pairs)
        row[f"half{end}"] = statistics.mean(
            len(best_half(scores) & best_half(harm)) / len(best_half(scores)) for scores, harm in pairs
        )
        gone = []
        for draw, scores in enumerate(draws[: len(fits)]):
            fit = fits[draw] if key == "refitted" else None
            gone.append(truth.mean(truth.harm(worst_half(truth, scores), fit)))
        row |= {f"gone{end}": statistics.mean(gone), f"gone{end}, draws": gone}
    return row


def reliability(harm: Tensor) -> float:
    """Return the mean rank correlation of the harm on two halves of the sentences: [heads, S]."""
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(DIVISIONS):
        rows = torch.randperm(harm.shape[1], generator=generator)
        halves = rows.chunk(2)
        found.append(rank_correlation(*(harm[:, half].sum(-1) for half in halves)))
    return statistics.mean(found)


def truths(case: Case, truth: Truth, fits: list[dict[str, HeadRegression]]) -> tuple[dict[str, Tensor], list[float]]:
    """Return what every sentence loses without each head, [1 or draws, heads, S], and the seconds of each truth."""
    begin = time.perf_counter()
    left_out = truth.of_each_head()[None]
    between = time.perf_counter()
    print(f"left out: {between - begin:.0f} s", flush=True)
    again = torch.stack([truth.of_each_head(fit) for fit in fits])
    seconds = [between - begin, (time.perf_counter() - between) / len(fits)]
    print(f"refitted: {seconds[1]:.0f} s each", flush=True)
    return {"left out": left_out, "refitted": again}, seconds


def part(name: str, real: Path, names: Sequence[str]) -> None:
    """Measure one model, and store its rows beside those of the others."""
    title, make = CASES[name]
    case = make(real)
    truth = Truth(case)
    fits = [regressions(case.model, truth.sites, case.draws[draw]) for draw in range(case.refits)]
    scores, seconds = measured(case, truth, names)
    harms, of_truths = truths(case, truth, fits)
    rows = []
    print(table([], COLUMNS))
    for measure, draws in scores.items():
        rows.append(row_of(truth, measure, draws, harms, fits) | {"seconds": seconds.get(measure)})
        print(table(rows[-1:], COLUMNS).splitlines()[-1], flush=True)
    for key, own in zip(TRUTHS, of_truths, strict=True):
        mean = harms[key].sum(-1)
        row = row_of(truth, f"the truth, {key}", mean, harms, fits) | {"seconds": own}
        rows.append(row | {"other sentences": statistics.mean(reliability(harm) for harm in harms[key])})
    rows = [{"model": title, "heads": harms["left out"].shape[1]} | row for row in rows]
    print(table(rows, COLUMNS))
    details = {
        "harm is": case.harm,
        "whole": truth.mean(truth.whole),
        "sentences": len(truth.weights),
        "draws": [sum(len(batch["input_ids"]) for batch in draw) for draw in case.draws],
        "refits": case.refits,
        "sites": [site.site.to_dict() for site in truth.sites],
        "scores of the first draw": {measure: rounded(draws[0]) for measure, draws in scores.items()},
        "harm of each head": {key: rounded(harms[key][0].sum(-1) / truth.weights.sum()) for key in TRUTHS},
    }
    own = record(rows, **details)
    if len(names) < len(MEASURES):
        own = joined(json.loads((RESULTS / "head_worth.json").read_text())["parts"][name], own)
    store(name, own)


def joined(stored: dict, own: dict) -> dict:
    """Put new rows and scores of a part into what is stored of it."""
    rows = {row["measure"]: row for each in (stored, own) for row in each["rows"]}
    scores = stored["scores of the first draw"] | own["scores of the first draw"]
    return stored | {"rows": list(rows.values()), "scores of the first draw": scores}


def by_divergence(name: str, real: Path) -> None:
    """Correlate the stored measures of a part, of its first draw, with a truth that has less chance in it."""
    truth = Truth(CASES[name][1](real), by_divergence=True)
    own = json.loads((RESULTS / "head_worth.json").read_text())["parts"][name]
    harm, rows = truth.of_each_head(), []
    for measure, scores in own["scores of the first draw"].items():
        draws = torch.tensor([scores], dtype=torch.float64)
        low, high = interval(draws, harm[None], truth.weights)
        value = rank_correlation(draws[0], harm.sum(-1))
        rows.append({"measure": measure, "left out": value, "95 %": f"{low:+.2f} to {high:+.2f}"})
        rows[-1]["within"] = within_layers(truth, draws[0], harm.sum(-1))
        print(rows[-1], flush=True)
    own["by divergence"] = record(rows, harm=rounded(harm.sum(-1) / truth.weights.sum()))
    own["by divergence"]["other sentences"] = reliability(harm)
    print(own["by divergence"]["other sentences"])
    store(name, own)


def rounded(values: Tensor) -> list[float]:
    return [float(f"{value:.4g}") for value in values.tolist()]


def store(name: str, own: dict) -> None:
    """Write the record of one part beside those of the others."""
    place = RESULTS / "head_worth.json"
    parts = json.loads(place.read_text())["parts"] if place.exists() else {}
    parts = {each: own if each == name else parts[each] for each in CASES if each == name or each in parts}
    write("head_worth", [row for each in parts.values() for row in each["rows"]], parts=parts)


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=tuple(CASES))
    parser.add_argument("--real", type=Path, default=WORK / "real", help="folder of the real models")
    parser.add_argument("--measures", nargs="+", choices=list(MEASURES), default=list(MEASURES))
    parser.add_argument("--divergence", action="store_true", help="another truth for the stored measures of the part")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    if arguments.divergence:
        by_divergence(arguments.part, arguments.real)
    else:
        part(arguments.part, arguments.real, arguments.measures)


if __name__ == "__main__":
    main()
