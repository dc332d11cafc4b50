"""The tables of the start page and of the guide to efficiency: what the same model costs and loses in all forms."""

from collections.abc import Mapping, Sequence

from shown.columns import made, shown
from shown.records import row, rows_of

WORDS = {1.0: "all", 0.5: "half", 0.33: "a third", 0.25: "a quarter"}
ENGINES = {"onnx": "ONNX Runtime", "openvino": "OpenVINO", "ctranslate2": "CTranslate2"}
ONE, MANY = "1 x 32", "32 x 128"  # tokens
FORM = {"layers": "", "runs in": ""}
COST = {"MB": ".1f", "time of one sentence": ".2f", "time of 32 x 128 tokens": ".2f"}
QUALITY = {"STS-B": ".2f", "lost": ".2f", "lost on SST-2": ".2f"}


def encoders() -> list[dict]:
    """Return all-MiniLM-L6-v2 in every form that was measured; times are shares of the original's in PyTorch."""
    rows = [each for each in rows_of("serving") if each["model"] == "minilm"]
    original = rows[0]["times"]
    return [
        {
            "layers": share(each["budget"]),
            "budget": each["budget"],
            "engine": each["engine"].removesuffix(", int8"),
            "int8": each["int8"],
            "runs in": in_words(each["engine"]),
            "MB": each["megabytes"],
            "time of one sentence": each["times"][ONE] / original[ONE],
            "time of 32 x 128 tokens": each["times"][MANY] / original[MANY],
            "STS-B": each["score"],
            "lost": round(each["lost"], 2),  # engines differ in the last bits
            "lost on SST-2": each["lost elsewhere"],
        }
        for each in rows
    ]


def share(kept: float) -> str:
    """Return a share of the layers in words."""
    return WORDS.get(kept, f"{kept:.2g}")


def in_words(engine: str) -> str:
    """Return the name of an engine as readers know it."""
    name, _, bits = engine.partition(", ")
    return ", ".join(filter(None, (ENGINES.get(name, name), bits and "8 bits")))


def best(rows: Sequence[Mapping], cost: str) -> list[dict]:
    """Return the original and the rows that no other one beats in both cost and quality, by cost."""
    kept = [
        dict(each)
        for each in rows
        if not any(
            other[cost] <= each[cost] and other["lost"] <= each["lost"] and other is not each for other in rows[1:]
        )
    ]
    return [dict(rows[0]), *sorted((each for each in kept if each != rows[0]), key=lambda each: -each[cost])]


@made
def start() -> str:
    """Return four forms of one model."""
    forms = [(1.0, "PyTorch", False), (0.5, "PyTorch", False), (0.5, "onnx", True), (0.25, "onnx", True)]
    found = {(each["budget"], each["engine"], each["int8"]): each for each in encoders()}
    return shown([found[form] for form in forms], FORM | COST | QUALITY)


@made
def efficiency_size() -> str:
    """Return the forms of MiniLM that no other one beats in size and quality."""
    return shown(best(encoders(), "MB"), FORM | {"MB": ".1f"} | QUALITY)


@made
def efficiency_latency() -> str:
    """Return those that no other one beats in the time of one sentence and quality."""
    return shown(best(encoders(), "time of one sentence"), FORM | {"time of one sentence": ".2f"} | QUALITY)


@made
def efficiency_throughput() -> str:
    """Return those that no other one beats in the time of a large batch and quality."""
    return shown(best(encoders(), "time of 32 x 128 tokens"), FORM | {"time of 32 x 128 tokens": ".2f"} | QUALITY)


@made
def efficiency_cache() -> str:
    """Return the decoders that no other one beats in cache and quality; all but the originals are distilled."""
    rows: list[dict] = []
    for name, word in (("gpt2", "GPT-2"), ("qwen3", "Qwen3")):
        original = row("lm", model=name, method="stock")
        others = [each for each in rows_of("lm") if each["model"] == name and each["distilled"]]
        found = [
            {
                "model": word,
                "what was done": each["method"].replace("stock", "nothing"),
                "cache": each["cache"] / original["cache"],
                "perplexity": each["val"],
                "lost": round(100 * (each["val"] / original["val"] - 1), 1),
                "time of decoding": each.get("time"),
            }
            for each in (original, *others)
        ]
        rows += best(found, "cache")
    columns = {"model": "", "what was done": "", "cache": ".2f", "perplexity": ".2f", "more, %": ("lost", "+.1f")}
    return shown(rows, columns | {"time of decoding": ".2f"})


@made
def durations() -> str:
    """Return what `compress` and `distill` take, in minutes of one core, but of two for MiniLM."""
    minilm = {"model": "minilm", "parts": "layers", "budget": 0.5, "sentences": 2048, "shape": None}
    refined, distilled = (row("compression", **minilm, method=each)["seconds"] for each in ("refined", "distilled"))
    mpnet, smollm2 = (
        [row(record, method=each, budget=budget)["seconds"] for each in (name, f"{name}, distilled")]
        for record, name, budget in (("real_encoder", "compress", 0.5), ("real_decoder", "compress, and its own", 0.8))
    )
    bert = row("real_sizes", model="bert", work="compress layers")["cpu_seconds"]
    names = "model", "parameters", "layers left", "fitted to", "plan and fit, minutes", "distilled, minutes more"
    rows = (
        ("all-MiniLM-L6-v2", "23 M", "half", "2,048 sentences", refined, distilled - refined),
        ("BERT-base, random weights", "109 M", "half", "64 sentences", bert, None),
        ("all-mpnet-base-v2", "110 M", "half", "2,048 sentences", *mpnet),
        ("SmolLM2-135M-Instruct", "135 M", "0.8", "128 pieces of 128 tokens", *smollm2),
    )
    minutes = [[seconds and seconds / 60 for seconds in each[4:]] for each in rows]
    cells = [dict(zip(names, (*each[:4], *taken), strict=True)) for each, taken in zip(rows, minutes, strict=True)]
    return shown(cells, dict.fromkeys(names[:4], "") | dict.fromkeys(names[4:], ".0f"))
