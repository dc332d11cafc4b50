"""Tables of quality lost against size saved: sentence encoders, compression, language models, chemistry."""

from shown.columns import LOST, PARAMETERS, TABLES, TASKS, Columns, made, plain, shown
from shown.records import current, stored

GLUE = {f"{task}{again}": (f"{key}{again}", ".2f") for again in ("", " again") for task, key in TASKS.items()}
TABLES["glue"] = lambda: shown(current("glue"), {"R": ""} | GLUE | PARAMETERS)
SEEDS_OF_GLUE = {"RTE": "rte", "MRPC": "mrpc", "STS-B": "stsb", "CoLA": "cola", "SST-2": "sst2"}
SEEDS_OF_GLUE |= {"average": "average", "WNLI": "wnli"}
BY_SEED = {"against the original": ("difference", "+.2f"), "95 %": "", "by seed": ("gaps_in_words", "")}


@made
def glue_seeds() -> str:
    """Return the rows of three seeds: averages after the swap, scores after training again, gaps to the original."""
    rows = [
        each | {"gaps_in_words": ", ".join(f"{gap:+.2f}" for gap in each.get("by seed", ()))}
        for each in stored("glue_seeds")["rows"]
    ]
    again = {f"{task} again": (f"{key} again", ".2f") for task, key in SEEDS_OF_GLUE.items()}
    return shown(rows, {"R": "", "average": ".2f"} | again | BY_SEED | PARAMETERS)


plain(
    "heads",
    "heads",
    {"heads": ""}
    | {
        f"{task}{suffix}": (f"{TASKS[task]}{suffix}", spec)
        for task in ("MRPC", "STS-B")
        for suffix, spec in ((" kept", ""), ("", ".2f"), (" range", ""))
    },
)
plain(
    "values",
    "values",
    {
        "query and key": ("width", ""),
        "values": "",
        "method": "",
        "sentences": "",
        "Spearman": ("spearman", ".2f"),
        "drop of every draw": ("drops", ""),
        "attention": ".0%",
        "cache": ".0%",
    },
)
REPAIR = {"heads": "", "chosen by": "", "W_O": "", "lost": ".2f", "lost in every draw": ("losses", "")}


def repair(model: str, score: str) -> str:
    """Return the rows of one model."""
    rows = [row for row in stored("repair")["rows"] if row["model"] == model]
    return shown(rows, {"heads": "", "chosen by": "", "W_O": "", score: ("score", ".2f")} | REPAIR)


TABLES["repair_minilm"] = lambda: repair("minilm", "Spearman")
TABLES["repair_marian"] = lambda: repair("marian", "BLEU")
COMPRESSION = {"budget": "", "method": "", "steps": ""}
COMPRESSED = {"heads of all": ("heads", ".0f"), "cache": ".2f", "predicted error": ("predicted", ".3f")}
COMPRESSED |= {"error": ".3f", "seconds": ".0f"}


def compression(score: str, more: Columns, *models: str) -> str:
    """Return the rows of some models."""
    rows = [row for row in stored("compression")["rows"] if row["model"] in models and not row.get("shape")]
    rows = [row | {"steps": row["steps"] or None} for row in rows]
    for row in rows:
        row["parts"] = {"all": "attention"}.get(row["parts"], row["parts"]) if row["method"] != "original" else None
        row["millions"] = row["parameters"] / 1e6
    several = {"model": ""} if len(models) > 1 else {}
    size = {"model's parameters, M": ("millions", ".2f")}
    sentences = {"calibrated on": ("sentences", "")}
    columns = several | {"may change": ("parts", "")} | COMPRESSION | sentences | size
    return shown(rows, columns | {score: ("score", ".2f")} | more)


ELSEWHERE = {"lost on SST-2": ("lost elsewhere", ".2f"), "lost in retrieval": ".2f"}
TABLES["compression_encoder"] = lambda: compression("Spearman", LOST | ELSEWHERE | COMPRESSED, "minilm")


NAMES = {"minilm": "MiniLM, Spearman on STS-B", "marian": "Marian, BLEU", "t5": "T5, BLEU"}


@made
def compression_layers() -> str:
    """Return the rows of whole layers, without a shape, of all models: what a reader decides by."""
    rows = []
    for row in stored("compression")["rows"]:
        if row["method"] == "original" or (row["parts"] == "layers" and not row.get("shape")):
            trained = {"refined": "no", "distilled": f"{row['steps']:,} steps"}.get(row["method"])
            name = NAMES[row["model"]]
            rows.append(row | {"model": name, "trained": trained, "millions": row["parameters"] / 1e6})
    columns = {
        "model and score": ("model", ""),
        "layers": ("budget", ""),
        "trained": "",
        "parameters, M": ("millions", ".2f"),
    }
    return shown(rows, columns | {"score": ".2f", "lost": ".2f"} | ELSEWHERE | {"draws": "", "seconds": ".0f"})


@made
def compression_shapes() -> str:
    """Return the rows of models whose sites have sizes of a named shape."""
    rows = [row for row in stored("compression")["rows"] if row.get("shape")]
    columns = {"model": "", "shape": "", "layers": ("budget", ""), "score": ".2f", "lost": ".2f"}
    return shown(rows, columns | ELSEWHERE | {"error": ".3f"})


TABLES["compression_translation"] = lambda: compression("BLEU", LOST | COMPRESSED, "marian", "t5")
PEERS_TASKS = {"MRPC": "mrpc", "STS-B": "stsb", "RTE": "rte", "CoLA": "cola", "SST-2": "sst2"}


def by_task(name: str) -> str:
    """Return what each method that ran on all tasks loses on each, and on average, by the share that is left."""
    lines: dict[tuple, dict] = {}
    for row in stored(name)["rows"]:
        if row["method"] != "original":
            line = lines.setdefault((row["budget"], row["method"]), {"budget": row["budget"], "method": row["method"]})
            line["mean" if row["task"].startswith("mean") else row["task"]] = row["lost"]
    tasks = {task: (key, ".2f") for task, key in PEERS_TASKS.items() if any(key in line for line in lines.values())}
    rows = sorted((line for line in lines.values() if "mean" in line), key=lambda line: -line["budget"])
    return shown(rows, {"budget": "", "method": ""} | tasks | {"mean": ".2f"})


TABLES["peers_by_task"] = lambda: by_task("peers")
TABLES["layer_peers_by_task"] = lambda: by_task("layer_peers")
LAYER_PEERS = {"task": "", "budget": "", "method": "", "operations": ".3f", "parameters": ".3f", "score": ".2f"}
LAYER_PEERS |= LOST | {"95 %": ("intervals", ""), "F1": ("f1", ".2f"), "examples": ".0f"}
LAYER_PEERS |= {"seconds": ("cpu_seconds", ".0f")}


@made
def layer_peers() -> str:
    """Return the rows with the means over tasks first; there the tasks are those that a method was run on."""
    rows = [row | {"intervals": row.get("intervals") or None} for row in stored("layer_peers")["rows"]]
    return shown(rows, LAYER_PEERS)


plain(
    "encoder_peers",
    "encoder_peers",
    {"budget": "", "method": "", "operations": ".3f", "Spearman": ("score", ".2f")}
    | LOST
    | ELSEWHERE
    | {"seconds": ("cpu_seconds", ".0f")},
)
plain(
    "calibration",
    "calibration",
    {"sentences of": ("kind", ""), "number": ("sentences", ""), "layers": ("budget", ""), "error": ".3f"}
    | {"lost, STS-B": ".2f", "lost, SST-2": ".2f", "lost, retrieval": ".2f", "seconds": ".0f"},
)
plain(
    "dropped_layers",
    "dropped_layers",
    {
        "layers": "",
        "which": ("kept", ""),
        "steps": "",
        "model's parameters": ("parameters", ","),
        "Spearman": ("score", ".2f"),
    }
    | {"lost": ".2f", "lost on SST-2": ("lost elsewhere", ".2f"), "time": ""},
)
plain(
    "lm",
    "lm",
    {"model": "", "method": "", "distilled": "", "parameters": ",", "attention": ".2f", "cache": ",.0f", "val": ".2f"}
    | {
        "more": "+.1f",
        "test_2016_flickr": ".2f",
        "web text": ("elsewhere", ".0f"),
        "more there": ("more elsewhere", "+.1f"),
    }
    | {"time": ".2f"},
)
plain(
    "real_decoder",
    "real_decoder",
    {"method": "", "layers": ("budget", ""), "parameters": ",.0f", "MB": ",.0f", "draws": ""}
    | dict.fromkeys(("news", "web", "python", "reviews"), ".1f")
    | {f"more, {name}": (f"more {name}", "") for name in ("news", "web", "python", "reviews")},
)
plain(
    "real_encoder",
    "real_encoder",
    {"method": "", "layers": ("budget", ".3g"), "draws": "", "parameters": ",.0f", "MB": ",.0f"}
    | dict.fromkeys(("STS-B", "SST-2", "retrieval"), ".2f")
    | {f"lost, {name}": ".2f" for name in ("STS-B", "SST-2", "retrieval")}
    | {"flips, %": ("flips", ".1f"), "neighbours, %": ("neighbours", ".1f"), "time": ".2f"},
)
plain(
    "bytes",
    "bytes",
    {"model": "", "method": "", "MB": ".1f", "draws": ""}
    | {f"lost, {name}": ".2f" for name in ("STS-B", "SST-2", "retrieval")}
    | {"flips, %": ("flips", ".1f"), "neighbours, %": ("neighbours", ".1f"), "error": ("measured", ".3f")}
    | {"seconds": ".0f", "time, 1 x 16": ".2f", "time, 32 x 64": ".2f"},
)
plain(
    "translation_bytes",
    "translation_bytes",
    {"model": "", "method": "", "MB": ".2f", "draws": "", "BLEU": ".2f", "lost": ".2f", "agreement": ".1f"}
    | {"same, %": ("same", ".1f"), "error": ("measured", ".3f"), "seconds": ".0f"},
)
plain(
    "zero_shot",
    "zero_shot",
    {"model": ""}
    | dict.fromkeys(("SST-2", "RTE", "CoLA"), ".1f")
    | {f"flips, {name}, %": (f"flips, {name}", ".1f") for name in ("SST-2", "RTE")},
)
plain(
    "rotary_widths",
    "rotary_widths",
    {"chosen by": ("method", ""), "query/key width": ("width", ".2f"), "fit": "", "attention": ".2f", "cache": ",.0f"}
    | {"val": ".2f", "least": ".2f", "most": ".2f", "draws": "", "time": ".2f"},
)


@made
def stsb() -> str:
    """Return the rows grouped by width, ours first, without the times of swaps, which ran on different days."""
    methods = ["original", "weights only", "calibrated", "calibrated, refined", "balanced, calibrated, refined"]
    methods.append("calibrated, refined (240 steps)")

    def place(row: dict) -> tuple:
        width = int(str(row.get("width", 999)).split()[0])
        rank = methods.index(row["method"]) if row["method"] in methods else len(methods)
        return -width, row.get("mixing") == "per_head", rank

    columns = {"R": ("width", ""), "mixing": "", "method": "", "sentences": "", "Spearman": ("spearman", ".2f")}
    columns |= {"drop of every draw": ("drops", ""), "worst drop": ("worst_drop", ".2f")}
    return shown(sorted(stored("stsb")["rows"], key=place), columns | PARAMETERS)


@made
def chemistry() -> str:
    """Return a row per model and mixing: exactness at full width, errors and size at half of it."""
    found: dict[tuple, dict] = {}
    parameters = {}
    for row in stored("chemistry")["rows"]:
        if row["method"] == "original":
            parameters[row["model"]] = row["parameters"]
            continue
        cases = found.setdefault((row["model"], row["mixing"]), {})
        cases[row["method"] if row["method"] != "lossless" else row["dtype"]] = row
    rows = []
    methods = ("weights only", "calibrated", "calibrated, refined")
    for (model, mixing), cases in found.items():
        row = {"model": model, "mixing": mixing}
        row["lossless"] = f"{cases['float32']['largest']:.0e} / {cases['float64']['largest']:.0e}"
        for what, digits in (("logits", 1), ("hidden", 0)):
            row[what] = " → ".join(f"{100 * cases[method][what]:.{digits}f} %" for method in methods)
        row["parameters"] = f"{parameters[model]:,} → {cases[methods[-1]]['parameters']:,}"
        rows.append(row)
    columns = {
        "model": "",
        "mixing": "",
        "full width: largest difference of a logit, float32 / float64": ("lossless", ""),
        "half width: error of the logits, weights only → calibrated → refined": ("logits", ""),
        "of the hidden states": ("hidden", ""),
        "parameters": "",
    }
    return shown(rows, columns)
