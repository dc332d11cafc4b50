"""Tables of what predicts the worth of a head."""

import math
import statistics
from collections.abc import Iterator

from shown.columns import made, shown
from shown.records import stored

ALL, BASELINES = "head_worth", ("later in the model", "random")
ENDS = {"left out": "", "refitted": ", refitted"}  # truth -> the end of the keys that go with it
TRUE = "the truth, "
NEEDS = {
    "gradient": "labels, a backward pass",
    "absolute relevance": "a backward pass",
    "relevance (share of the layer)": "a backward pass",
    "flow": "a pass, maximum flows",
}
SHORT = {"all-MiniLM-L6-v2": "MiniLM", "all-mpnet-base-v2": "MPNet", "SmolLM2-135M": "SmolLM2"}


def of_models() -> dict[str, dict[str, dict]]:
    """Return model -> measure -> its row."""
    found: dict[str, dict[str, dict]] = {}
    for row in stored(ALL)["rows"]:
        found.setdefault(SHORT.get(row["model"], row["model"]), {})[row["measure"]] = row
    return found


def half_width(row: dict, truth: str) -> float:
    """Return half the width of the interval of a correlation."""
    low, high = map(float, row[f"95 %{ENDS[truth]}"].split(" to "))
    return (high - low) / 2


def measures() -> list[str]:
    """Return the measures, the best of all models first, by both truths; then what is compared with them."""
    found: dict[str, list[float]] = {}
    for rows in of_models().values():
        for name, row in rows.items():
            if not name.startswith(TRUE) and name not in BASELINES:
                found.setdefault(name, []).extend(row[truth] for truth in ENDS)
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
def head_worth() -> str:
    """Return the correlation of every measure with the harm without a head, by model, and what follows from it."""
    rows = []
    for measure in measures():
        row: dict = {"measure": measure, "needs": "" if measure in BASELINES else NEEDS.get(measure, "a pass")}
        for model, of_model in of_models().items():
            if measure in of_model:
                found = of_model[measure]
                row[model] = f"{found['left out']:+.2f} ± {half_width(found, 'left out'):.2f}"
        for truth, end in ENDS.items():
            row[f"mean{end}"] = statistics.mean(each[truth] for each in having(measure))
            row[f"gone{end}"] = of_random(measure, end)
        row["within"] = statistics.mean(each["within"] for each in having(measure))
        row["half"] = statistics.mean(each["half"] for each in having(measure))
        row["time"] = passes(measure)
        rows.append(row)
    columns = {"measure": "", "needs": "", **dict.fromkeys(of_models(), ""), "mean": "+.2f"}
    columns |= {"mean, refitted": "+.2f", "within layers": ("within", "+.2f"), "best half": ("half", ".2f")}
    columns |= {"worst half gone": ("gone", ".2f"), "the same, refitted": ("gone, refitted", ".2f")}
    return shown(rows, columns | {"time": ".1f"})


@made
def head_worth_refitted() -> str:
    """Return the same correlations where W_O is refitted, and what the truth says of itself."""
    rows = []
    for measure in (*measures(), f"{TRUE}left out"):
        row: dict = {"measure": measure.replace(TRUE, "the harm, ")}
        for model, of_model in of_models().items():
            if measure in of_model:
                found = of_model[measure]
                row[model] = f"{found['refitted']:+.2f} ± {half_width(found, 'refitted'):.2f}"
        rows.append(row)
    for truth in ENDS:
        row = {"measure": f"the harm, {truth}, on other sentences"}
        row |= {model: f"{each[TRUE + truth]['other sentences']:+.2f}" for model, each in of_models().items()}
        rows.append(row)
    return shown(rows, {"measure": "", **dict.fromkeys(of_models(), "")})
