"""The tables of the README: the supported models, and quality lost against size saved."""

from shown.columns import made
from shown.records import row, rows_of, stored

from collab_heads import AttentionAdapter
from collab_heads.contract.registry import all_adapters
from common import table

CAPABILITIES = {
    "collaborative": "collaborative",
    "per_head": "narrower queries and keys",
    "values": "narrower values",
    "gated": "gated",
    "alpha": "mixed",
    "prune": "removal",
    "neurons": "neurons",
}


@made
def support() -> str:
    """Return what the toolkit can do with which models, as their adapters state it."""
    adapters = dict.fromkeys(all_adapters().values())
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


SIMILARITY, TASKS, TRANSLATION = "MiniLM, STS-B, Spearman", "MiniLM, five GLUE tasks", "Marian, Multi30k, BLEU"
BASE = "MPNet, STS-B, Spearman"
HEADS = {"original": 72, "learned 18": 18}  # row of the heads of MRPC -> how many of them
UNLABELLED = "300 steps, no labels"
TRIM = "`trim_vocabulary`"
OF_ENCODERS = {"accuracy on SST-2": "SST-2", "retrieval": "retrieval"}
KINDS = {"web pages": "web", "Python's documentation": "python", "film reviews": "reviews"}
FORMS = {
    "tokens": ("tokens", ","),
    "elsewhere": ("accuracy on SST-2", ".2f"),
    "retrieval": ("retrieval", ".2f"),
}


def change(
    name: str, task: str, before: dict, after: dict, score: str, training: str = "none", also: str = "", **more
) -> dict:
    """Return one row: the whole model and its score before and after a change; a model is stored in float32."""
    parameters = [each["parameters"] / 1e6 for each in (before, after)]
    megabytes = more.get("megabytes") or [4 * count for count in parameters]
    return {
        "change": name,
        "model and task": task,
        "parameters": " → ".join(f"{count:.2f} M" for count in parameters),
        "MB": " → ".join(f"{size:.0f}" for size in megabytes),
        "original": before[score],
        "changed": after[score],
        "training after it": training,
        "also": also,
    }


def example() -> dict:
    """Return the row of the README's first example."""
    before, after = row("first_example", method="original"), row("first_example", method="half")
    also = f"{1 - after['flips']:.0%} of the nearest ten stay".replace("%", " %")
    name, task = "`compress`, half of the layers, the example above", "MiniLM, Python's documentation, nDCG@10"
    return change(name, task, before, after, "nDCG@10", also=also, megabytes=(before["MB"], after["MB"]))


def compressed(name: str, budget: float, method: str, training: str) -> dict:
    """Return the row of a MiniLM whose layers are compressed."""
    whole = {"model": "minilm", "parts": "layers", "shape": None, "sentences": 2048, "method": method, "budget": budget}
    (before,) = (
        row for row in stored("compression")["rows"] if row["method"] == "original" and row["model"] == "minilm"
    )
    after = row("compression", **whole)
    also = f"accuracy on SST-2 {before['elsewhere']:.2f} → {after['elsewhere']:.2f}"
    if "retrieval" in after:
        also += f"; retrieval {before['retrieval']:.2f} → {after['retrieval']:.2f}"
    return change(f"`compress`, {name} of the layers", SIMILARITY, before, after, "score", training, also)


def served(name: str, model: str, budget: float, engine: str, task: str) -> dict:
    """Return the row of a model in eight bits in its engine and shape, against the original in PyTorch, untrained."""
    before, found = (row("serving", model=model, budget=each, engine="PyTorch") for each in (1.0, budget))
    small = row("serving", model=model, budget=budget, engine=f"{engine}, int8")
    share = [small["times"][words] / seconds for words, seconds in before["times"].items()][-1]
    sizes = [{"parameters": each["megabytes"] * 1e6 / 4} for each in (before, found)]  # PyTorch's are float32
    megabytes, also = (before["megabytes"], small["megabytes"]), f"{share:.2f} of PyTorch's time on one thread"
    if small.get("elsewhere") is not None:
        also = f"accuracy on SST-2 {before['elsewhere']:.2f} → {small['elsewhere']:.2f}; {also}"
    scored = before | sizes[0], small | sizes[1]
    if budget < 1:
        also += f"; {found['score']:.2f} in PyTorch"
    return change(f"{name}, int8", task, *scored, "score", "none", also, megabytes=megabytes)


def trimmed(what: str, model: str, layers: float, kept: str, task: str, training: str) -> list[dict]:
    """Return the row of a model with fewer tokens and compressed layers; none if it was not measured."""
    found = [each for each in rows_of("vocabulary") if each["model"] == model and not each.get("steps")]
    of = {(each["layers"], each["kept"]): each for each in found}
    if (layers, kept) not in of:
        return []
    whole = row("serving", model=model, budget=1.0, engine="PyTorch")["megabytes"] * 1e6 / 4  # in float32
    sizes = [each | {"parameters": each["size"] * whole} for each in (of[1.0, "all"], of[layers, kept])]
    also = [
        f"{text} {' → '.join(f'{each[name]:{form}}' for each in sizes)}"
        for name, (text, form) in FORMS.items()
        if all(each.get(name) is not None for each in sizes)
    ]
    also.append(f"{sizes[1]['time']:.2f} of the time")
    return [change(what, task, *sizes, "score", training, "; ".join(also))]


def base_encoder(name: str, budget: float) -> dict:
    """Return the row of a real base encoder whose layers are compressed."""
    before, after = row("real_encoder", method="original"), row("real_encoder", method="compress", budget=budget)
    also = [f"{what} {before[key]:.2f} → {after[key]:.2f}" for what, key in OF_ENCODERS.items()]
    also.append(f"{after['time']:.2f} of the time")
    return change(f"`compress`, {name} of the layers", BASE, before, after, "STS-B", also="; ".join(also))


def in_megabytes(model: str, task: str, size: float) -> dict:
    """Return the row of a sentence encoder with weights of few bits, which as a file has a size."""
    before = row("bytes", model=model, method="original")
    after = row("bytes", model=model, method="compress, 8, 4 and 3 bits", size=size)
    also = [f"{what} {before[key]:.2f} → {after[key]:.2f}" for what, key in OF_ENCODERS.items()]
    also.append(f"{after['neighbours']:.0f} % of the nearest ten stay")
    megabytes = before["MB"], after["MB"]
    scored = before, after, "STS-B"
    return change("`compress`, 8, 4 and 3 bits", task, *scored, "none", "; ".join(also), megabytes=megabytes)


def in_integers(size: float) -> dict:
    """Return the row of a MiniLM whose layers run in integers."""
    before = row("bytes", model="all-MiniLM-L6-v2", method="original")
    after = row("bytes", model="all-MiniLM-L6-v2", method="layers in 8 bits, int8, distilled", size=size)
    also = [f"{what} {before[key]:.2f} → {after[key]:.2f}" for what, key in OF_ENCODERS.items()]
    also.append(f"{after['time, 1 x 16']:.2f} (16 tokens) and {after['time, 32 x 64']:.2f} of PyTorch's time")
    name, megabytes = "`compress`, layers in 8 bits, ONNX Runtime, int8", (before["MB"], after["MB"])
    return change(name, SIMILARITY, before, after, "STS-B", UNLABELLED, "; ".join(also), megabytes=megabytes)


def decoder(size: int) -> dict:
    """Return the row of a real decoder in some megabytes, fitted to news and to texts of its own."""
    before, after = row("real_decoder", method="original"), row("real_decoder", method=f"compress, in {size} MB")
    also = "; ".join(f"{name} {before[key]:.1f} → {after[key]:.1f}" for name, key in KINDS.items())
    name, megabytes = "`compress`, 8, 4 and 3 bits", (before["MB"], after["MB"])
    return change(name, "SmolLM2, perplexity on news", before, after, "news", also=also, megabytes=megabytes)


@made
def summary() -> str:
    """Return the README's table: the whole model and its quality, before and after a change."""
    embedding, marian = row("stsb", method="original"), row("translation", model="marian", mixing="original")
    shared = row("stsb", mixing="shared", width=128, method="balanced, calibrated, refined")
    alike = row("stsb", mixing="shared", width=128, method="weights only")
    per_head = row("stsb", mixing="per_head", width="128 (144)", method="calibrated, refined")
    block = [row("attention", mixing="per_head", width=144)[length] for length in ("32", "128", "512")]
    glue, balanced = row("glue_seeds", R="original"), row("glue_seeds", R="64 balanced")
    keys = row("translation", model="marian", mixing="shared", width="64", method="calibrated, refined")
    small = {n: row("pruning", model="all-MiniLM-L6-v2", heads=n) for n in (72, 18)}
    mrpc = [row("heads", heads=name) | {"parameters": small[n]["parameters"]} for name, n in HEADS.items()]
    bleu, halved = row("nmt_heads", heads="original"), row("nmt_heads", heads="learned 36")
    speeds = {n: row("pruning", model="Marian (Multi30k)", heads=n) for n in (72, 36)}
    cache = speeds[36]["cache bytes per token"] / speeds[72]["cache bytes per token"]
    rows = [
        example(),
        compressed("half", 0.5, "refined", "none"),
        compressed("half", 0.5, "distilled", UNLABELLED),
        compressed("a third", 0.33, "distilled", UNLABELLED),
        served("the original alone, ONNX Runtime", "minilm", 1.0, "onnx", SIMILARITY),
        in_megabytes("all-MiniLM-L6-v2", SIMILARITY, 10.0),
        in_megabytes("all-mpnet-base-v2", BASE, 50.0),
        base_encoder("half", 0.5),
        in_integers(10.0),
        served("the original alone, CTranslate2", "marian", 1.0, "ctranslate2", TRANSLATION),
        served("`compress`, half of the layers, CTranslate2", "marian", 0.5, "ctranslate2", TRANSLATION),
        decoder(110),
        *trimmed(f"`compress`, a third, and {TRIM}", "marian", 0.33, "0.75", TRANSLATION, "1,000 steps, no labels"),
        change(
            "shared keys, balanced, R=128 of 384",
            SIMILARITY,
            embedding,
            shared,
            "spearman",
            also=f"the same width everywhere, uncalibrated: {alike['spearman']:.2f}",
        ),
        change(
            "narrow heads, R=144 of 384",
            SIMILARITY,
            embedding,
            per_head,
            "spearman",
            also=f"attention takes {min(block):.2f} to {max(block):.2f} of the time",
        ),
        change(
            "shared keys, balanced, R=64 of 384",
            TASKS,
            glue,
            balanced,
            "average",
            also=f"after one more epoch each: {glue['average again']:.2f} and {balanced['average again']:.2f}",
        ),
        change(
            "shared keys, R=64 of 256",
            TRANSLATION,
            marian,
            keys,
            "bleu",
            also=f"cross-attention caches {keys['cache'].replace('->', '→')} numbers a token",
        ),
        change(
            "18 of 72 heads",
            "MiniLM, MRPC",
            *mrpc,
            "mrpc",
            "100 steps",
            f"encoding takes {small[18]['encoding time']:.2f} of the time",
        ),
        change(
            "36 of 72 heads",
            TRANSLATION,
            bleu,
            halved,
            "bleu",
            "1,200 steps",
            f"cache {cache:.2f}, greedy translation {speeds[36]['greedy time']:.2f} of the time",
        ),
    ]
    return table(rows, dict.fromkeys(rows[0], "") | {"original": ".2f", "changed": ".2f"})
