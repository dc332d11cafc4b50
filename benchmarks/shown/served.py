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


@made
def serving() -> str:
    """All models in all engines."""
    return shown(stored("serving")["rows"], ENGINE)
