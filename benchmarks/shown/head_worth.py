"""Tables of what predicts the worth of a head."""

import math
import statistics
from collections.abc import Iterator

from shown.columns import made, shown
from shown.records import stored

BASELINES = ("later in the model", "random")
ENDS = {"moved": ", moved", "left out": "", "refitted": ", refitted"}  # truth -> the end of the keys that go with it
TRUE, DIVERGENCE = "the truth, ", "by divergence"
NEEDS = {
    "gradient": "labels, a backward pass",
    "absolute relevance": "a backward pass",
    "relevance (share of the layer)": "a backward pass",
    "flow": "a pass, maximum flows",
}
ENCODED = "sentences of STS-B dev", "sentences of STS-B train"
TRANSLATED = "pairs of Multi30k test_2016_flickr", "pairs of Multi30k train"
TEXTS = {"minilm": ENCODED, "mpnet": ENCODED, "marian": TRANSLATED, "t5": TRANSLATED}
TEXTS |= {"smollm2": ("sentences of UD English EWT test", "sentences of UD English EWT dev")}
SHORT = {"all-MiniLM-L6-v2": "MiniLM", "all-mpnet-base-v2": "MPNet", "SmolLM2-135M": "SmolLM2"}


def overlap(scores: list[float], harm: list[float]) -> float:
    """Return the share of the better half of the heads by some scores that is in the better half by the harm."""
    count = -(-len(scores) // 2)
    one, other = (set(sorted(range(len(each)), key=lambda head: -each[head])[:count]) for each in (scores, harm))
    return len(one & other) / count


def of_models() -> dict[str, dict[str, dict]]:
    """Return model -> measure -> its row, with the truth that is "moved": how far outputs move without the head.

    That is the cosine of embeddings, which is what is lost, or else the KL divergence of predictions.
    """
    found: dict[str, dict[str, dict]] = {}
    for part in stored("head_worth")["parts"].values():
        rows = {row["measure"]: row for row in part["rows"]}
        again = part.get(DIVERGENCE)
        if again is None:
            keys = {"moved": "left out", "95 %, moved": "95 %", "within, moved": "within", "half, moved": "half"}
            moved = {name: {key: row[old] for key, old in keys.items()} for name, row in rows.items()}
        else:
            scores = part["scores of the first draw"]
            moved = {
                row["measure"]: {
                    "moved": row["left out"],
                    "95 %, moved": row["95 %"],
                    "within, moved": row["within"],
                    "half, moved": overlap(scores[row["measure"]], again["harm"]),
                }
                for row in again["rows"]
            }
        model = part["rows"][0]["model"]
        found[SHORT.get(model, model)] = {name: row | moved.get(name, {}) for name, row in rows.items()}
        chance = rows[f"{TRUE}left out"]["other sentences"] if again is None else again["other sentences"]
        found[SHORT.get(model, model)][f"{TRUE}left out"]["chance"] = chance
    return found


def half_width(row: dict, truth: str) -> float:
    """Return half the width of the interval of a correlation."""
    low, high = map(float, row[f"95 %{ENDS[truth]}"].split(" to "))
    return (high - low) / 2


def shown_value(row: dict, truth: str) -> str:
    return f"{row[truth]:+.2f} ± {half_width(row, truth):.2f}"


def measures() -> list[str]:
    """Return the measures, the best first by how far outputs move, in the mean of models; then the baselines."""
    found: dict[str, list[float]] = {}
    for rows in of_models().values():
        for name, row in rows.items():
            if not name.startswith(TRUE) and name not in BASELINES:
                found.setdefault(name, []).append(row["moved"])
    return [*sorted(found, key=lambda name: -statistics.mean(found[name])), *BASELINES]


def having(measure: str) -> Iterator[dict]:
    """Yield the rows of a measure, of the models that have it."""
    yield from (rows[measure] for rows in of_models().values() if measure in rows)


def of_random(measure: str, end: str) -> float:
    """Return the harm of a measure's worst half, as a share of that of random halves: the geometric mean of models."""
    shares = []
    for rows in of_models().values():
        if measure in rows:
            shares.append(rows[measure][f"gone{end}"] / rows["random"][f"gone{end}"])
    return math.exp(statistics.mean(map(math.log, shares)))


def passes(measure: str) -> float | None:
    """Return the time of a measure in passes of `head_statistics`: the geometric mean of models."""
    shares = []
    for rows in of_models().values():
        if (seconds := rows.get(measure, {}).get("seconds")) is not None:
            shares.append(seconds / rows["confidence"]["seconds"])
    return math.exp(statistics.mean(map(math.log, shares))) if shares else None


@made
def head_worth_models() -> str:
    """Return the models, and the texts of the truth and of the measures."""
    rows = []
    for name, part in stored("head_worth")["parts"].items():
        tested, drawn = TEXTS[name]
        row = {"model": part["rows"][0]["model"], "heads": part["rows"][0]["heads"]}
        row["truth on"] = f"{part['sentences']} {tested}"
        rows.append(row | {"measures on three draws of": f"{part['draws'][0]} {drawn}"})
    return shown(rows, dict.fromkeys(rows[0], ""))


@made
def head_worth() -> str:
    """Return how well every measure predicts how far outputs move without a head, by model, and what follows."""
    rows = []
    for measure in measures():
        row: dict = {"measure": measure, "needs": "" if measure in BASELINES else NEEDS.get(measure, "a pass")}
        for model, of_model in of_models().items():
            if measure in of_model:
                row[model] = shown_value(of_model[measure], "moved")
        for key in ("moved", "within, moved", "half, moved"):
            row[key] = statistics.mean(each[key] for each in having(measure))
        for end in ("", ", refitted"):
            row[f"gone{end}"] = of_random(measure, end)
        row["time"] = passes(measure)
        rows.append(row)
    columns = {"measure": "", "needs": "", **dict.fromkeys(of_models(), ""), "mean": ("moved", "+.2f")}
    columns |= {"within layers": ("within, moved", "+.2f"), "best half": ("half, moved", ".2f")}
    columns |= {"worst half gone": ("gone", ".2f"), "the same, refitted": ("gone, refitted", ".2f"), "time": ".1f"}
    return shown(rows, columns)


@made
def head_worth_loss() -> str:
    """Return the correlations with the loss without a head, and after a refit, and how much of a truth is chance."""
    rows = []
    for measure in measures():
        row: dict = {"measure": measure}
        for model, of_model in of_models().items():
            if (found := of_model.get(measure)) is not None:
                both = [shown_value(found, truth) for truth in ("left out", "refitted")]
                row[model] = both[1] if found["moved"] == found["left out"] else " / ".join(both)
        rows.append(row)
    chances = {
        "outputs move": (f"{TRUE}left out", "chance"),
        "left out": (f"{TRUE}left out", "other sentences"),
        "refitted": (f"{TRUE}refitted", "other sentences"),
    }
    for truth, (name, key) in chances.items():
        row = {"measure": f"other sentences: {truth}"}
        rows.append(row | {model: f"{of_model[name][key]:+.2f}" for model, of_model in of_models().items()})
    return shown(rows, {"measure": "", **dict.fromkeys(of_models(), "")})
