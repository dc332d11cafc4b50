"""What `progress.json` of a checkpoint may hold."""

from collections.abc import Mapping
from typing import Any

MOST = {"phase": 100, "step": 10**12, "processes": 10**5}
WHOLE = (int,)
# name -> its types; what is not named here is checked by whoever reads it
TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(MOST, WHOLE),
    "format": WHOLE,
    "arguments": (dict,),
    "history": (list,),
    "trained": (list,),
    "heads": (dict,),
    "signatures": (dict,),
    **dict.fromkeys(("swap", "penalty", "best", "rotation"), (dict, type(None))),
    "best_manifest": (str, type(None)),
    **dict.fromkeys(("frozen", "gates_over_training"), (list, type(None))),
}
ENTRIES: dict[str, dict[str, tuple[type, ...]]] = {
    "history": {"stage": (str,), "epoch": WHOLE, "step": WHOLE, "metrics": (dict,)},
    "trained": {"stage": (str,), "steps": WHOLE, "examples": WHOLE},
}


def check_progress(progress: Any) -> None:
    """Raise ValueError, naming what is wrong, unless this can be the progress of a run."""
    if not isinstance(progress, dict):
        raise ValueError(f"it is {kind(progress)}, not an object")
    for name in (*MOST, "arguments"):
        if name not in progress:
            raise ValueError(f"{name!r} is missing")
    check_types(progress, TYPES, "")
    for name, most in MOST.items():
        least = 1 if name == "processes" else 0
        if not least <= progress[name] <= most:
            raise ValueError(f"{name!r} is not between {least} and {most:,}")  # it may have thousands of digits
    for name, types in ENTRIES.items():
        for number, entry in enumerate(progress.get(name, [])):
            if not isinstance(entry, dict) or (missing := types.keys() - entry.keys()):
                lacking = f"without {', '.join(sorted(missing))}" if isinstance(entry, dict) else kind(entry)
                raise ValueError(f"{name}[{number}] is {lacking}")
            check_types(entry, types, f"{name}[{number}].")


def check_types(found: Mapping, types: Mapping[str, tuple[type, ...]], place: str) -> None:
    """Raise ValueError if a named value has another type."""
    for name in types.keys() & found:
        value = found[name]
        if not isinstance(value, types[name]) or isinstance(value, bool):
            expected = " or ".join("null" if each is type(None) else each.__name__ for each in types[name])
            raise ValueError(f"{place}{name} is {kind(value)}, not {expected}")


def kind(value: object) -> str:
    """The name of a type, for a message."""
    return "null" if value is None else type(value).__name__
