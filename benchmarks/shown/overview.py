"""The first page of the results: what was gained and lost, against what else, and where it breaks."""

from collections.abc import Mapping

from shown.columns import made
from shown.records import row, rows_of

from common import table

NAMES = {"minilm": "MiniLM, Spearman on STS-B", "marian": "Marian, BLEU", "t5": "T5, BLEU"}
NAMES |= {"gpt2": "GPT-2, perplexity", "qwen3": "Qwen3, perplexity"}
PAGES = {
    "minilm": "compression",
    "marian": "compression",
    "t5": "compression",
    "gpt2": "language-models-small",
    "qwen3": "language-models-small",
}
SHARES = {0.5: "half", 0.33: "a third", 0.25: "a quarter"}
BOUNDS = (1, 2, 5)  # per cent of the original's score
ENGINES = {"onnx, int8": "ONNX Runtime, int8", "ctranslate2, int8": "CTranslate2, int8"}


def linked(text: str, page: str) -> str:
    """Return a link to a page of results, or of docs where the page has a folder."""
    return f"[{text}]({page}.md)"


def percent(share: float) -> str:
    """Return a loss in per cent of the original's score; "none" where the score is no worse."""
    return f"{share:.1f} %" if share > 0 else "none"


def megabytes(parameters: float) -> float:
    """Return the size of a file in float32."""
    return parameters * 4 / 1e6


def of_layers(model: str) -> list[dict]:
    """Return the rows of a model whose whole layers were compressed: budget, method, score, per cent lost, parameters.

    Of several numbers of sentences those of the largest are returned.
    """
    if model in ("gpt2", "qwen3"):
        stock = row("lm", model=model, method="stock")
        return [
            {
                "budget": float(each["method"].split()[2]),
                "distilled": bool(each["distilled"]),
                "score": each["val"],
                "original": stock["val"],
                "worse": each["more"],
                "on other data": f"web text: {each['more elsewhere']:+.1f} %" if "more elsewhere" in each else "",
                "parameters": each["parameters"],
                "whole": stock["parameters"],
                "draws": each["draws"],
            }
            for each in rows_of("lm")
            if each["model"] == model and each["method"].startswith("compress layers")
        ]
    rows = [each for each in rows_of("compression") if each["model"] == model]
    original = next(each for each in rows if each["method"] == "original")
    layers = [each for each in rows if each["parts"] == "layers" and not each.get("shape")]
    most = max((each["sentences"] for each in layers), default=0)
    return [
        {
            "budget": each["budget"],
            "distilled": each["method"] == "distilled",
            "score": each["score"],
            "original": original["score"],
            "worse": 100 * each["lost"] / original["score"],
            "on other data": elsewhere(each),
            "parameters": each["parameters"],
            "whole": original["parameters"],
            "draws": each["draws"],
        }
        for each in layers
        if each["sentences"] == most
    ]


def compressed_rows(model: str, budgets: tuple[float, ...]) -> list[dict]:
    """Return a line of the overview for each budget, after distillation."""
    found = []
    for each in of_layers(model):
        if each["distilled"] and each["budget"] in budgets:
            found.append(
                {
                    "what": linked(f"`compress`, {SHARES[each['budget']]} of the layers", PAGES[model]),
                    "model and score": NAMES[model],
                    "MB": f"{megabytes(each['whole']):.0f} → {megabytes(each['parameters']):.0f}",
                    "score": f"{each['original']:.2f} → {each['score']:.2f}",
                    "loss": percent(each["worse"]),
                    "time": time_of(model, each["budget"]),
                    "on other data": each["on other data"],
                }
            )
    return found


def time_of(model: str, budget: float) -> str:
    """Return the time of a compressed model in PyTorch, as a share of the original's."""
    for each in rows_of("serving"):
        if (each["model"], each["budget"], each["engine"]) == (model, budget, "PyTorch"):
            return each["time"].split(", ")[-1]
    for each in rows_of("lm"):
        if each["model"] == model and each["method"].startswith(f"compress layers, {budget} ") and each["distilled"]:
            return f"{each['time']:.3f}"
    return "not timed"


def elsewhere(each: Mapping) -> str:
    """Return what is lost on data of another kind than the calibration's."""
    lost, found = each.get("lost elsewhere"), each.get("lost in retrieval")
    if lost is None:
        return "none in the data at hand"
    return f"SST-2: {lost:.2f} points of accuracy lost" + ("" if found is None else f"; retrieval: {found:.2f}")


def served_row(model: str, budget: float, engine: str, steps: int) -> dict:
    """Return the line of a model in an engine, in eight bits, against the original in PyTorch; budget 1 is that."""
    original = row("serving", model=model, budget=1.0, engine="PyTorch")
    found = row("serving", model=model, budget=budget, engine=engine, steps=steps)
    alone = row("serving", model=model, budget=1.0, engine=engine)
    lost, other = found["score"] - original["score"], elsewhere(found)
    if budget < 1 and found.get("lost elsewhere") is not None:
        other += f"; int8 alone: {alone['lost elsewhere']:.2f}"
    what = f"{SHARES[budget]} of the layers" if budget < 1 else "the original alone"
    return {
        "what": linked(f"{what}, {ENGINES[engine]}", "engines"),
        "model and score": NAMES[model],
        "MB": f"{original['megabytes']:.0f} → {found['megabytes']:.0f}",
        "score": f"{original['score']:.2f} → {found['score']:.2f}",
        "loss": percent(-100 * lost / original["score"]),
        "time": found["time"].split(", ")[-1],
        "on other data": other,
    }


@made
def overview() -> str:
    """Return the lines that answer how small, how fast, at what loss, for which model."""
    words = row("vocabulary", model="minilm", layers=0.25, kept="used")
    share = words["tokens"] / row("vocabulary", model="minilm", layers=0.25, kept="all")["tokens"]
    whole, before = of_layers("minilm")[0]["whole"], words["score"] + words["lost"]
    rows = [
        *compressed_rows("minilm", (0.5, 0.33, 0.25)),
        served_row("minilm", 1.0, "onnx, int8", 0),
        served_row("minilm", 0.25, "onnx, int8", 300),
        {
            "what": linked(f"a quarter of the layers, {share:.0%} of the vocabulary", "../guides/trim-vocabulary"),
            "model and score": NAMES["minilm"],
            "MB": f"{megabytes(whole):.0f} → {megabytes(words['size'] * whole):.0f}",
            "score": f"{before:.2f} → {words['score']:.2f}",
            "loss": percent(100 * words["lost"] / before),
            "time": f"{words['time']:.3f}",
            "on other data": f"SST-2: {words['lost elsewhere']:.2f} points of accuracy lost",
        },
        *compressed_rows("marian", (0.5, 0.33)),
        served_row("marian", 1.0, "ctranslate2, int8", 0),
        served_row("marian", 0.5, "ctranslate2, int8", 0),
        *compressed_rows("t5", (0.33,)),
        *compressed_rows("gpt2", (0.25,)),
        *compressed_rows("qwen3", (0.33,)),
    ]
    return table(rows, dict.fromkeys(rows[0], ""))


@made
def breaking() -> str:
    """Return the smallest share of the layers at which each model is still near its original."""
    rows = []
    for model in NAMES:
        found = of_layers(model)
        if not found:
            continue
        least = min(each["budget"] for each in found)
        line = {"model and score": NAMES[model], "smallest share measured": f"{least:g}"}
        for bound in BOUNDS:
            within = [each["budget"] for each in found if each["worse"] <= bound]
            line[f"within {bound} %"] = f"{min(within):g}" if within else "none measured"
        rows.append(line)
    return table(rows, dict.fromkeys(rows[0], ""))


def mean_losses(name: str) -> str:
    """Return the mean loss over tasks of every method of a record of peers, by the share that is left."""
    rows = [each for each in rows_of(name) if each["task"].startswith("mean")]
    budgets = sorted({each["budget"] for each in rows}, reverse=True)
    lines = []
    for method in dict.fromkeys(each["method"] for each in rows):
        lost = {each["budget"]: f"{each['lost']:.2f}" for each in rows if each["method"] == method}
        lines.append(
            {"method": method} | {f"lost at {SHARES[budget]}": lost.get(budget, "not run") for budget in budgets}
        )
    return table(lines, dict.fromkeys(lines[0], ""))


@made
def peers_mean() -> str:
    """Return the mean losses of methods that leave a share of attention's parameters."""
    return mean_losses("peers")


@made
def layer_peers_mean() -> str:
    """Return the mean losses of methods that leave a share of the layers' operations."""
    return mean_losses("layer_peers")
