"""Tables of models in engines, and of trimmed vocabularies."""

from shown.columns import made, plain, shown
from shown.records import stored

plain(
    "vocabulary",
    "vocabulary",
    {
        "model": "",
        "layers kept": ("layers", ".2f"),
        "vocabulary kept": ("kept", ""),
        "steps of distillation after it": ("steps", ""),
        "learning rate": ("learning_rate", ""),
        "tokens": ",",
        "score": ".2f",
        "lost": ".2f",
        "lost elsewhere": ".2f",
        "size": ".3f",
    },
)
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


@made
def serving() -> str:
    """Models that encode or translate, in all engines."""
    return shown([row for row in stored("serving")["rows"] if row["model"] != "gpt2"], ENGINE)


@made
def serving_decoder() -> str:
    """The decoder in all engines."""
    return shown([row for row in stored("serving")["rows"] if row["model"] == "gpt2"], CONTINUED)
