"""Write the tables of the documentation: results from benchmarks/results/, supported models from the adapters.

python benchmarks/tables.py [--check]

A table stands in README.md or a page of docs/ between two lines, and this program writes what is between them:

    <!-- table: stsb -->
    <!-- end -->

With --check it changes nothing, and exits with 1 if a table is not what the stored results say.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from claims import CLAIMS, claims

from collab_heads import AttentionAdapter, registry
from common import RESULTS, ROOT, table

MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)
# heading -> (key of the row, format); a heading that is its own key needs only the format
Columns = Mapping[str, str | tuple[str, str]]
TABLES: dict[str, Callable[[], str]] = {}


def stored(name: str) -> dict:
    """A stored record of a benchmark."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def shown(rows: Iterable[Mapping], columns: Columns) -> str:
    """A markdown table of some columns, under headings of the documentation."""
    pairs = {heading: (heading, each) if isinstance(each, str) else each for heading, each in columns.items()}
    renamed = [{heading: row.get(key) for heading, (key, _) in pairs.items()} for row in rows]
    return table(renamed, {heading: spec for heading, (_, spec) in pairs.items()})


def plain(name: str, file: str, columns: Columns, rows: str = "rows") -> None:
    """Register a table that shows the rows of a record as they are."""
    TABLES[name] = lambda: shown(stored(file)[rows], columns)


def made(function: Callable[[], str]) -> Callable[[], str]:
    """Register a table that a function makes, under its name."""
    TABLES[function.__name__] = function
    return function


PARAMETERS = {"parameters": ","}
DIFFERENCE = {"difference": "+.2f", "95 %": ""}
TASKS = {"RTE": "rte", "MRPC": "mrpc", "STS-B": "stsb", "CoLA": "cola", "average": "average"}
BLEU = {"BLEU": ("bleu", ".2f")}
AFTER = {"before": ".2f", "BLEU after": ("bleu", ".2f")}
CONTINUED = BLEU | {"range": ""} | DIFFERENCE | PARAMETERS

plain(
    "glue",
    "glue",
    {"R": ""}
    | {f"{task}{again}": (f"{key}{again}", ".2f") for again in ("", " again") for task, key in TASKS.items()}
    | PARAMETERS,
)
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
ROLE_COUNTS = {"encoder / decoder / cross": ("enc/dec/cross", "")}
plain("nmt_heads", "nmt_heads", {"heads": "", "kept": ""} | ROLE_COUNTS | BLEU | DIFFERENCE | PARAMETERS)
plain("nmt_widths", "nmt_widths", {"R": ("widths", "")} | AFTER | DIFFERENCE | PARAMETERS)
plain("nmt_scratch", "nmt_scratch", {"keys": ("scratch", "")} | BLEU | DIFFERENCE | PARAMETERS)
plain("nmt_mended", "nmt_mended", {"heads": ("mended", "")} | AFTER | DIFFERENCE | PARAMETERS)
plain(
    "nmt_risk",
    "nmt_risk",
    {"trained on": ("risk", "")} | BLEU | {"range": "", "chrF": ("chrf", ".2f")} | DIFFERENCE | {"seconds": ",.0f"},
)
plain("nmt_t5", "nmt_t5", {"T5": ("t5", ""), "kept": ""} | AFTER | DIFFERENCE | PARAMETERS)
plain("nmt_inference", "nmt_speed_inference", {"model": ("variant", ""), "time": ".3f", "quartiles": ""})
plain(
    "translation",
    "translation",
    {"model": "", "R of 256": ("width", ""), "mixing": "", "method": ""}
    | BLEU
    | {"lost": "+.2f", "identical": "", "stepwise": ".0e", "cache per token (cross)": ("cache", "")}
    | PARAMETERS,
)
BLOCK = {"mixing": "", "width": ""} | {f"{n} tokens": (n, ".2f") for n in ("32", "128", "512")}
plain("attention", "attention", BLOCK)
DECODE = {"mixing": "", "width": ""} | {f"{n} cached": (n, ".2f") for n in ("32", "128", "512")}
plain("decoding", "attention", DECODE | {"cached elements per token": ("cache", "")}, "decoding")
plain(
    "decomposition",
    "decomposition",
    {"method": "", "seconds": ".3f", "relative error": ("error", ".4f"), "sweeps": ""}
    | {"peak memory, MB": ("peak_mb", ".0f"), "times faster": ("times_faster", ".0f")},
)
plain(
    "pruning",
    "pruning",
    {"model": "", "heads": "", "parameters": ",", "cache bytes per token": ",", "operations": ".3f"}
    | {"encoding time": ".3f", "share realised": ".2f", "greedy time": ".3f", "greedy tokens/s": ".0f"}
    | {"beam time": ".3f", "beam tokens/s": ".0f"},
)
plain(
    "training",
    "training",
    {"variant": "", "width": "", "ratio": ".3f", "examples per second": ("examples_per_second", ".1f")} | PARAMETERS,
)
plain(
    "nmt_speed",
    "nmt_speed",
    {"variant": "", "ratio": ".3f", "quartiles": "", "target pieces per second": ("targets_per_second", ".0f")}
    | PARAMETERS,
)
plain(
    "seen_marian",
    "seen_marian",
    {
        "role": "",
        "heads": "",
        "confidence": ".2f",
        "entropy": ".2f",
        "attention distance": ("attention_distance", ".2f"),
    }
    | {"positional": "", "rare tokens": "", "balance of relevance": ("relevance_balance", ".2f")}
    | {"most relevant (layer.head share)": ("most relevant (layer.head)", "")},
)
ROLES = {role: ".2f" for role in ("enc-self", "dec-self", "dec-enc")}
plain("seen_balance", "seen_balance", {"model": "", "measure": "", "heads": ""} | ROLES)
plain("seen_speed", "seen_speed", {"what": "", "ratio": ".2f", "seconds": ".2f"})
plain("seen_memory", "seen_speed", {"sentences": "", "peak MB": ".0f"}, "memory")
FIFTHS = {f"part {part}": ".2f" for part in range(1, 6)}


@made
def contributions() -> str:
    """Shares and entropies over a sentence, after three kinds of prefixes."""
    rows = [
        row
        | {"mean ±": f"{row['mean']:.3f} ± {row['± mean']:.3f}"}
        | ({"less": f"{row['less the reference']:+.3f} ± {row['± less']:.3f}"} if "± less" in row else {})
        for row in sorted(stored("contributions")["rows"], key=lambda row: list(MEASURED).index(row["measure"]))
    ]
    columns = {"of each generated token": ("measure", ""), "prefixes": ""} | FIFTHS
    columns |= {"last token": ".2f", "mean": ("mean ±", ""), "less after the reference": ("less", "")}
    return shown(named(rows, "measure", MEASURED), columns)


MEASURED = {
    "source": "share of the source",
    "entropy of source": "entropy of the source",
    "entropy of target": "entropy of the target prefix",
}


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
    """The rows of one model."""
    rows = [row for row in stored("repair")["rows"] if row["model"] == model]
    return shown(rows, {"heads": "", "chosen by": "", "W_O": "", score: ("score", ".2f")} | REPAIR)


TABLES["repair_minilm"] = lambda: repair("minilm", "Spearman")
TABLES["repair_marian"] = lambda: repair("marian", "BLEU")


COMPRESSION = {"budget": "", "method": "", "steps": ""}
LOST = {"lost": ".2f", "lost in every draw": ("losses", "")}
COMPRESSED = {"heads of all": ("heads", ".0f"), "cache": ".2f", "predicted error": ("predicted", ".3f")}
COMPRESSED |= {"error": ".3f", "seconds": ".0f"}


def compression(score: str, more: Columns, *models: str) -> str:
    """The rows of some models."""
    rows = [row | {"steps": row["steps"] or None} for row in stored("compression")["rows"] if row["model"] in models]
    several = {"model": ""} if len(models) > 1 else {}
    return shown(rows, several | {"may change": ("parts", "")} | COMPRESSION | {score: ("score", ".2f")} | more)


TABLES["compression_encoder"] = lambda: compression(
    "Spearman", LOST | {"lost on SST-2": ("lost elsewhere", ".2f")} | COMPRESSED, "minilm"
)
TABLES["compression_translation"] = lambda: compression("BLEU", LOST | COMPRESSED, "marian", "t5")
plain(
    "peers",
    "peers",
    {"task": "", "budget": "", "method": "", "attention": ".2f", "score": ".2f"}
    | LOST
    | {"F1": ("f1", ".2f"), "seconds": ("cpu_seconds", ".0f")},
)


def compression_speed(wanted: tuple[str, ...], settings: tuple[str, ...]) -> str:
    """Shares of stock's time of some parts of models, by setting."""
    rows = [row for row in stored("compression_speed")["rows"] if row["what"] in wanted and row["variant"] != "stock"]
    return shown(rows, {"what": "", "threads": "", "variant": ""} | dict.fromkeys(settings, ".2f"))


TABLES["compression_speed_encoder"] = lambda: compression_speed(
    ("block", "encoder"), ("1 x 32", "1 x 128", "1 x 512", "32 x 32", "32 x 128", "32 x 512")
)
TABLES["compression_speed_decoder"] = lambda: compression_speed(("greedy", "beam"), ("1", "32"))
plain(
    "lm",
    "lm",
    {"model": "", "method": "", "distilled": "", "attention": ".2f", "cache": ",.0f", "val": ".2f", "more": "+.1f"}
    | {"test_2016_flickr": ".2f", "time": ".2f"},
)
plain(
    "rotary_widths",
    "rotary_widths",
    {"chosen by": ("method", ""), "query/key width": ("width", ".2f"), "fit": "", "attention": ".2f", "cache": ",.0f"}
    | {"val": ".2f", "least": ".2f", "most": ".2f", "draws": "", "time": ".2f"},
)
plain(
    "scale_pieces",
    "scale",
    {"work": "", "width": "", "layers": "", "model, MB": ("model_mb", ".0f"), "peak, of the model": ("peak", ".2f")}
    | {"seconds of the processor": ("cpu_seconds", ".1f")},
)
plain(
    "real_sizes",
    "real_sizes",
    {"model": "", "work": "", "model, MB": ("model_mb", ".0f"), "peak, of the model": ("peak", ".2f")}
    | {"of a forward pass": ("of forward", ".2f"), "seconds of the processor": ("cpu_seconds", ".1f")},
)
plain(
    "scale_memory",
    "scale",
    {"model": "", "in bfloat16, GB": ("model_gb", ",.0f"), "moments of all sites, GB": ("all_moments_gb", ",.0f")}
    | {
        "groups of sites": ("groups", ""),
        "compress, GB": ("compress_gb", ",.0f"),
        "of the model": ("compress_share", ".2f"),
    }
    | {"compress, offloaded, GB": ("offloaded_gb", ",.0f"), "distill, GB": ("distill_gb", ",.0f")}
    | {"train, GB": ("train_gb", ",.0f"), "train, GB of each of 8": ("shard_gb", ",.0f")},
    rows="sizes",
)
plain(
    "scale_time",
    "scale",
    {"model": "", "passes over 131,072 tokens": ("passes", ".0f"), "their operations, 10^15": ("operations", ",.0f")}
    | {"hours of one thread here": ("pass_hours", ",.0f"), "solves, hours of one thread": ("solve_hours", ",.1f")}
    | {"operations of a training step of 4,096 tokens, 10^15": ("step_operations", ",.2f")},
    rows="sizes",
)


@made
def stsb() -> str:
    """Rows of a width together, ours first; how long a swap took is not shown, as they ran on different days."""
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
def decomposition_base() -> str:
    """A whole model on one thread, to which the library keeps at this size."""
    rows = [row for row in stored("decomposition")["base"] if row["threads"] == 1]
    columns = {"tol": ".0e", "seconds": ".1f", "per layer": ("per_layer", ".2f")}
    return shown(rows, columns | {"relative error": ("error", ".4f")})


def named(rows: list[dict], key: str, names: Mapping[str, str]) -> list[dict]:
    """Rows whose names say more than those of the runs."""
    return [row | {key: names.get(row[key], row[key])} for row in rows]


@made
def nmt_mixing() -> str:
    """Alphas and rotation, trained on; its growth loss was too strong, see the note in the record."""
    rows = named(stored("nmt_mixing")["rows"], "mixing", {"alphas, growth": "alphas, growth 867 times"})
    return shown(rows, {"continued": ("mixing", "")} | CONTINUED)


@made
def nmt_mixing_again() -> str:
    """The rows of that table that ran once more."""
    return shown(stored("nmt_mixing")["again"]["rows"], {"continued, again": ("mixing", "")} | CONTINUED)


@made
def nmt_born() -> str:
    """The same from scratch; see the note in the record, too."""
    names = {"alphas, growth": "alphas, growth of 40 beside the mean"}
    rows = named(stored("nmt_born")["rows"], "born", names)
    return shown(rows, {"from scratch": ("born", "")} | BLEU | DIFFERENCE | PARAMETERS)


@made
def swap_speed() -> str:
    """What a calibrated swap costs, against a forward pass or against itself on an idle machine."""
    rows = [row | {"against": row["pass"] or row.get("alone")} for row in stored("swap_speed")["rows"]]
    columns = {"what": "", "sentences": "", "mixing": "", "compared with": ("against", ",.2f"), "swap": ",.2f"}
    return shown(rows, columns | {"ratio": ".2f", "range": ""})


@made
def marian_measures() -> str:
    """Which measures say what is lost without a head: a translation model."""
    signed = {role: "+.2f" for role in ("all", *ROLES)}
    return shown(stored("seen_marian")["correlations"], {"Marian: measure": ("measure", "")} | signed)


@made
def minilm_measures() -> str:
    """The same for sentence embeddings: a column for each kind of harm."""
    harms = {"1 - cosine to the original": "embeddings move", "Spearman x 100": "STS-B Spearman"}
    rows: dict[str, dict] = {}
    for row in stored("seen_minilm")["correlations"]:
        rows.setdefault(row["measure"], {"MiniLM: measure": row["measure"]})[harms[row["harm to"]]] = row["all"]
    return shown(rows.values(), {"MiniLM: measure": ""} | {name: "+.2f" for name in harms.values()})


@made
def minilm_roles() -> str:
    """What the heads of all-MiniLM-L6-v2 do: a row per head and label."""
    roles = stored("seen_minilm")["report"]["roles"]
    rows = []
    for site in roles["sites"]:
        for head, labels in enumerate(roles["labels"][site["path"]]):
            for label in labels:
                relation = roles["syntax"][site["path"]].get(label)
                looks = roles["positional"][site["path"]]
                share = looks["first_token" if label == "first token" else "share"] if relation is None else relation
                row = {"layer.head": f"{site['layer']}.{head}", "what it does": label.replace("->", " → ")}
                row["share"] = share[head]
                row["offset"] = roles["baselines"][label]["accuracy"] if relation else None
                rows.append(row)
    columns = {"layer.head": "", "what it does": "", "share or accuracy": ("share", ".2f")}
    return shown(rows, columns | {"best fixed offset": ("offset", ".2f")})


@made
def chemistry() -> str:
    """A row per model and mixing: exactness at full width, errors and size at half of it."""
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


def digits(what: str) -> dict[tuple[str, int], dict]:
    """Rows of the small DeiT on digits: mixing, width -> row."""
    return {(row["mixing"], row["R"]): row for row in stored("digits")["rows"] if row["what"] == what}


def with_range(row: Mapping) -> str:
    """The mean over seeds, with the lowest and the highest."""
    return f"{row['accuracy']:.2f} ({row['range']})"


def born(whole: str, changed: str) -> str:
    """From scratch: all heads share queries and keys, or each has narrow ones of its own; and full width."""
    (full,), found = digits(whole).values(), digits(changed)
    rows = [
        {"R": f"{full['R']}, stock", "stock or per_head": with_range(full), "parameters": f"{full['parameters']:,}"}
    ]
    for width in sorted({width for _, width in found}, reverse=True):
        shared, narrow = found["shared", width], found.get(("per_head", width))
        row = {"R": str(width), "shared": with_range(shared), "parameters": f"{shared['parameters']:,}"}
        if narrow is not None:
            gaps = [one - other for one, other in zip(shared["accuracies"], narrow["accuracies"], strict=True)]
            row["shared over per_head, by seed"] = ", ".join(f"{gap:+.2f}" for gap in gaps)
            row["stock or per_head"] = with_range(narrow)
            row["parameters"] += f" / {narrow['parameters']:,}"
        rows.append(row)
    columns = ("R", "shared", "stock or per_head", "shared over per_head, by seed", "parameters")
    return table(rows, dict.fromkeys(columns, ""))


TABLES["digits_born"] = lambda: born("full", "born")
TABLES["digits_longer"] = lambda: born("full-longer", "longer")


@made
def digits_swapped() -> str:
    """Trained ones, swapped and measured as they are then: from the weights alone, and calibrated."""
    cases = {"weights alone": digits("swapped"), "calibrated": digits("calibrated")}
    widths = sorted({width for _, width in cases["calibrated"]}, reverse=True)
    rows = [
        {"R": str(width)}
        | {
            f"{mixing}, {how}": with_range(found[mixing, width])
            for mixing in ("shared", "per_head")
            for how, found in cases.items()
            if (mixing, width) in found
        }
        for width in widths
    ]
    return table(rows, dict.fromkeys(rows[0], ""))


@made
def kills() -> str:
    """Where runs were killed, by the kind of operation."""
    counts: Counter[str] = Counter()
    for row in stored("kills")["rows"]:
        where = row["killed before"]  # an operation and a place, or a random moment
        counts[where if where == "a random moment" else f"before `{where.split()[0]}`"] += row["kills"]
    return shown(
        ({"killed": where, "times": times} for where, times in counts.most_common()), {"killed": "", "times": ""}
    )


CAPABILITIES = {
    "collaborative": "collaborative",
    "per_head": "narrower queries and keys",
    "values": "narrower values",
    "gated": "gated",
    "alpha": "mixed",
    "prune": "removal",
}


@made
def support() -> str:
    """What the toolkit can do with which models, as their adapters say it."""
    adapters = dict.fromkeys(registry._ADAPTERS[name] for name in registry.supported_model_types())
    served: list[tuple[AttentionAdapter, str]] = []
    for adapter in adapters:
        served.append((adapter, ""))
        for entry, variants in adapter.variants.items():
            served += [(variant(), f" with `{entry}={value!r}`") for value, variant in variants.items()]
    rows = [
        {
            "adapter": f"`{type(adapter).__name__}`",
            "model types": ", ".join(f"`{name}`" for name in adapter.model_types) + which,
            "roles": ", ".join(adapter.roles),
        }
        | {heading: "yes" if kind in adapter.capabilities else "no" for kind, heading in CAPABILITIES.items()}
        for adapter, which in served
    ]
    return table(rows, dict.fromkeys(rows[0], ""))


def row_of(name: str, **wanted) -> dict:
    """The one row of a record that has these values."""
    (row,) = [row for row in stored(name)["rows"] if all(row.get(key) == value for key, value in wanted.items())]
    return row


@made
def summary() -> str:
    """The table of the README: what is lost for what is saved."""
    embedding, marian = row_of("stsb", method="original"), row_of("translation", model="marian", mixing="original")
    shared = row_of("stsb", mixing="shared", width=128, method="balanced, calibrated, refined")
    per_head = row_of("stsb", mixing="per_head", width="128 (144)", method="calibrated, refined")
    block = [row_of("attention", mixing="per_head", width=144)[length] for length in ("32", "128", "512")]
    half = row_of("values", width="384 of 384", values="16 of 32", sentences=256)
    glue, balanced = row_of("glue", R="original"), row_of("glue", R="64 balanced")
    keys = row_of("translation", model="marian", mixing="shared", width="64", method="calibrated, refined")
    mrpc, learned = row_of("heads", heads="original"), row_of("heads", heads="learned 18")
    sizes = {n: row_of("pruning", model="all-MiniLM-L6-v2", heads=n) for n in (72, 18)}
    bleu, halved = row_of("nmt_heads", heads="original"), row_of("nmt_heads", heads="learned 36")
    speeds = {n: row_of("pruning", model="Marian (Multi30k)", heads=n) for n in (72, 36)}
    cache = speeds[36]["cache bytes per token"] / speeds[72]["cache bytes per token"]
    similarity, tasks, translation = "MiniLM, STS-B, Spearman", "MiniLM, four GLUE tasks", "Marian, Multi30k, BLEU"
    original = {row["model"]: row for row in stored("compression")["rows"] if row["method"] == "original"}
    encoder = {b: row_of("compression", model="minilm", parts="all", method="refined", budget=b) for b in (0.5, 0.25)}
    translator = row_of("compression", model="marian", parts="all", method="refined", budget=0.5)
    rows = (
        (
            "`compress`, half of attention",
            similarity,
            "none",
            (original["minilm"], encoder[0.5], "score"),
            None,
            f"{encoder[0.5]['heads']:.0f} of 72 heads, narrower",
        ),
        (
            "`compress`, a quarter of attention",
            similarity,
            "none",
            (original["minilm"], encoder[0.25], "score"),
            None,
            f"{encoder[0.25]['heads']:.0f} of 72 heads, narrower",
        ),
        (
            "`compress`, half of attention",
            translation,
            "none",
            (original["marian"], translator, "score"),
            None,
            f"cache {translator['cache']:.2f}",
        ),
        (
            "shared keys, balanced, R=128 of 384",
            similarity,
            "none",
            (embedding, shared, "spearman"),
            (embedding, shared),
            "",
        ),
        (
            "narrow heads, R=144 of 384",
            similarity,
            "none",
            (embedding, per_head, "spearman"),
            (embedding, per_head),
            f"attention takes {min(block):.2f} to {max(block):.2f} of the time",
        ),
        (
            "narrow values, 16 of 32 per head",
            similarity,
            "none",
            (embedding, half, "spearman"),
            (embedding, half),
            f"attention has {half['attention']:.0%} of its parameters and of its cache",
        ),
        (
            "shared keys, balanced, R=64 of 384",
            tasks,
            "none",
            (glue, balanced, "average"),
            (glue, balanced),
            f"after one more epoch each: {glue['average again']:.2f} and {balanced['average again']:.2f}",
        ),
        (
            "shared keys, R=64 of 256",
            translation,
            "none",
            (marian, keys, "bleu"),
            (marian, keys),
            f"cross-attention caches {keys['cache'].replace('->', '→')} numbers a token",
        ),
        (
            "18 of 72 heads",
            "MiniLM, MRPC",
            "100 steps",
            (mrpc, learned, "mrpc"),
            (sizes[72], sizes[18]),
            f"encoding takes {sizes[18]['encoding time']:.2f} of the time",
        ),
        (
            "36 of 72 heads",
            translation,
            "1,200 steps",
            (bleu, halved, "bleu"),
            (bleu, halved),
            f"cache {cache:.2f}, greedy translation {speeds[36]['greedy time']:.2f} of the time",
        ),
    )
    shown_rows = [
        {
            "change": change,
            "model and task": task,
            "training after it": training,
            "original": original[key],
            "changed": changed[key],
            "parameters": "" if pair is None else " → ".join(f"{each['parameters'] / 1e6:.2f} M" for each in pair),
            "also": also,
        }
        for change, task, training, (original, changed, key), pair, also in rows
    ]
    columns = dict.fromkeys(shown_rows[0], "") | {"original": ".2f", "changed": ".2f"}
    return table(shown_rows, columns)


TABLES |= {f"claims_{source}": partial(claims, source) for source in CLAIMS}


def pages() -> list[Path]:
    """The README and the pages of the documentation."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def written(text: str) -> str:
    """A page with its tables as the stored results have them.

    Raises:
        KeyError: if a page asks for a table that this program does not make.
    """
    return MARKED.sub(lambda marks: f"{marks[1]}\n{TABLES[marks[2]]()}\n\n{marks[3]}", text)


def main() -> None:
    """Write, or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a page is not up to date; write nothing")
    arguments = parser.parse_args()
    stale = {page: new for page in pages() if (new := written(old := page.read_text(encoding="utf-8"))) != old}
    names = ", ".join(str(page.relative_to(ROOT)) for page in stale)
    if arguments.check:
        sys.exit(f"tables differ from benchmarks/results/: {names}; run python benchmarks/tables.py" if stale else 0)
    for page, new in stale.items():
        page.write_text(new, encoding="utf-8")
    print(f"written: {names or 'nothing, all are up to date'}")


if __name__ == "__main__":
    main()
