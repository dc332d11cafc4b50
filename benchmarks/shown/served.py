"""Tables of models in engines, and of trimmed vocabularies."""

from shown.columns import Columns, made, shown
from shown.records import rows_of, stored

TRIMMED = {
    "model": "",
    "layers kept": ("layers", ".2f"),
    "vocabulary kept": ("kept", ""),
    "tokens": ",",
    "score": ".2f",
    "lost": ".2f",
    "lost elsewhere": ".2f",
    "lost in retrieval": ".2f",
    "size": ".3f",
    "time": ".2f",
}
DISTILLED = {"steps of distillation after it": ("steps", ""), "learning rate": ("learning_rate", "")}
LARGE = {
    "model": "",
    "tokens before": ("pieces", ","),
    "tokens after": ("tokens", ","),
    "parameters before": ("parameters_before", ","),
    "parameters after": ("parameters", ","),
    "texts": ("sentences", ","),
    "seconds": ".1f",
    "model, MB": ("model_mb", ",.0f"),
    "peak beyond it, MB": ("beyond_mb", ",.0f"),
}
ENGINE = {
    "model": "",
    "layers kept": ("kept", ""),
    "steps of distillation": ("steps", ""),
    "engine": "",
    "score": ".2f",
    "lost": ".2f",
    "lost elsewhere": ".2f",
    "MB": ("megabytes", ".1f"),
    "time": "",
    "time, against the original there": ("against original", ""),
}
CONTINUED = {
    "layers kept": ("kept", ""),
    "engine": "",
    "perplexity": ("score", ".2f"),
    "same tokens": ".1%",
    "MB": ("megabytes", ".1f"),
    "time": "",
    "time, against the original there": ("against original", ""),
}
OF_SMOLLM2 = {
    "engine": "",
    "weights": "",
    "layers kept": ("kept", ""),
    "MB": ",.0f",
    "perplexity, news": ("news", ".1f"),
    "web pages": ("web", ".1f"),
    "from PyTorch, nats": ("KL", ".1e"),
    "prompt, tokens/s": ("prompt", ",.0f"),
    "generation, tokens/s": ("generation", ",.0f"),
    "prompt, against the original there": ("times prompt", ".2f"),
    "generation, against it": ("times generation", ".2f"),
}
PACKED = {
    "model": "",
    "weights, MB": ".1f",
    "engine": "",
    "graph": "",
    "folder, MB": ("MB", ".1f"),
    "time, 1 x 16 and 32 x 64": ("time", ""),
    "load, s": ("load", ".2f"),
    "memory, MB": ("memory", ".0f"),
    "difference": ".1e",
}


def trimmed(rows: list[dict], columns: Columns) -> str:
    """Return rows of trimmed models, without a column that none of them has."""
    shown_of = {heading: each if isinstance(each, tuple) else (heading, each) for heading, each in columns.items()}
    return shown(rows, {name: each for name, each in shown_of.items() if any(each[0] in row for row in rows)})


@made
def vocabulary() -> str:
    """Models with fewer tokens, alone and with compressed layers."""
    return trimmed([row for row in rows_of("vocabulary") if not row.get("steps")], TRIMMED)


@made
def vocabulary_distilled() -> str:
    """Models that were distilled after they had been trimmed."""
    return trimmed([row for row in rows_of("vocabulary") if row.get("steps")], TRIMMED | DISTILLED)


@made
def vocabulary_large() -> str:
    """Seconds and memory of a vocabulary of mT5's size."""
    return shown(rows_of("vocabulary", "mt5"), LARGE)


@made
def serving() -> str:
    """Models that encode or translate, in all engines."""
    return shown([row for row in stored("serving")["rows"] if row["model"] != "gpt2"], ENGINE)


@made
def serving_grids() -> str:
    """Models with weights on grids, in floating point, packed and in integers."""
    return shown(rows_of("serving_grids"), PACKED)


@made
def serving_decoder() -> str:
    """The decoder in all engines."""
    return shown([row for row in stored("serving")["rows"] if row["model"] == "gpt2"], CONTINUED)


@made
def serving_smollm2() -> str:
    """SmolLM2 at several sizes in PyTorch, ONNX Runtime and llama.cpp."""
    return shown(rows_of("serving_decoder"), OF_SMOLLM2)
