"""The tables of the README: the supported models, and quality lost against size saved."""

from shown.columns import made
from shown.records import row, stored

from collab_heads import AttentionAdapter
from collab_heads.contract import registry
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


def served(model: str, budget: float, engine: str, what: str, task: str, training: str) -> tuple:
    """Return the row of a compressed model in eight bits in an engine, against the original in PyTorch."""
    original, found = (row("serving", model=model, budget=b, engine="PyTorch") for b in (1.0, budget))
    small = row("serving", model=model, budget=budget, engine=f"{engine}, int8")
    share = [f"{small['times'][words] / seconds:.2f}" for words, seconds in original["times"].items()][-1]
    sizes = tuple({"parameters": each["megabytes"] * 1e6 / 4} for each in (original, found))  # in float32
    said = f"{original['megabytes']:.0f} → {small['megabytes']:.0f} MB, {share} of PyTorch's time on one thread"
    return (f"`compress`, {what}", task, training, (original, small, "score"), sizes, said)


@made
def summary() -> str:
    """Return the README's table of quality lost against size saved."""
    embedding, marian = row("stsb", method="original"), row("translation", model="marian", mixing="original")
    shared = row("stsb", mixing="shared", width=128, method="balanced, calibrated, refined")
    per_head = row("stsb", mixing="per_head", width="128 (144)", method="calibrated, refined")
    block = [row("attention", mixing="per_head", width=144)[length] for length in ("32", "128", "512")]
    half = row("values", width="384 of 384", values="16 of 32", sentences=256)
    glue, balanced = row("glue_seeds", R="original"), row("glue_seeds", R="64 balanced")
    keys = row("translation", model="marian", mixing="shared", width="64", method="calibrated, refined")
    mrpc, learned = row("heads", heads="original"), row("heads", heads="learned 18")
    sizes = {n: row("pruning", model="all-MiniLM-L6-v2", heads=n) for n in (72, 18)}
    bleu, halved = row("nmt_heads", heads="original"), row("nmt_heads", heads="learned 36")
    speeds = {n: row("pruning", model="Marian (Multi30k)", heads=n) for n in (72, 36)}
    cache = speeds[36]["cache bytes per token"] / speeds[72]["cache bytes per token"]
    similarity, tasks, translation = "MiniLM, STS-B, Spearman", "MiniLM, five GLUE tasks", "Marian, Multi30k, BLEU"
    original = {row["model"]: row for row in stored("compression")["rows"] if row["method"] == "original"}
    encoder = {b: row("compression", model="minilm", parts="all", method="refined", budget=b) for b in (0.5, 0.25)}
    translator = row("compression", model="marian", parts="all", method="refined", budget=0.5)
    whole = {"model": "minilm", "parts": "layers", "sentences": 2048}
    layers = row("compression", **whole, method="refined", budget=0.5)
    trained = {b: row("compression", **whole, method="distilled", budget=b) for b in (0.5, 0.33)}
    rows = (
        *(
            (
                f"`compress`, {name} of the layers",
                similarity,
                training,
                (original["minilm"], found, "score"),
                (original["minilm"], found),
                f"accuracy on SST-2 {original['minilm']['elsewhere']:.2f} → {found['elsewhere']:.2f}",
            )
            for name, training, found in (
                ("half", "none", layers),
                ("half", "300 steps, no labels", trained[0.5]),
                ("a third", "300 steps, no labels", trained[0.33]),
            )
        ),
        served(
            "minilm", 0.25, "onnx", "a quarter of the layers, ONNX Runtime, int8", similarity, "300 steps, no labels"
        ),
        served("marian", 0.5, "ctranslate2", "half of the layers, CTranslate2, int8", translation, "none"),
        (
            "`compress`, half of attention",
            similarity,
            "none",
            (original["minilm"], encoder[0.5], "score"),
            (original["minilm"], encoder[0.5]),
            f"{encoder[0.5]['heads']:.0f} of 72 heads, narrower",
        ),
        (
            "`compress`, a quarter of attention",
            similarity,
            "none",
            (original["minilm"], encoder[0.25], "score"),
            (original["minilm"], encoder[0.25]),
            f"{encoder[0.25]['heads']:.0f} of 72 heads, narrower",
        ),
        (
            "`compress`, half of attention",
            translation,
            "none",
            (original["marian"], translator, "score"),
            (original["marian"], translator),
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
