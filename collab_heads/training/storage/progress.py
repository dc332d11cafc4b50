"""Check the content of a checkpoint's `progress.json`."""

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
    **dict.fromkeys(("swap", "distilled", "penalty", "best", "rotation", "head_history"), (dict, type(None))),
    "best_manifest": (str, type(None)),
    **dict.fromkeys(("frozen", "gates_over_training"), (list, type(None))),
}
ENTRIES: dict[str, dict[str, tuple[type, ...]]] = {
    "history": {"stage": (str,), "epoch": WHOLE, "step": WHOLE, "metrics": (dict,)},
    "trained": {"stage": (str,), "steps": WHOLE, "examples": WHOLE},
}


def check_progress(progress: Any) -> None:
    """Raise ValueError, with the reason, if this cannot be the progress of a run."""
    if not isinstance(progress, dict):
        raise ValueError(f"it is {type_name(progress)}, not an object")
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
                lacking = f"without {', '.join(sorted(missing))}" if isinstance(entry, dict) else type_name(entry)
                raise ValueError(f"{name}[{number}] is {lacking}")
            check_types(entry, types, f"{name}[{number}].")


def check_types(values: Mapping, types: Mapping[str, tuple[type, ...]], prefix: str) -> None:
    """Raise ValueError if a value has the wrong type for its name; `prefix` is its place, for the message."""
    for name in types.keys() & values:
        value = values[name]
        if not isinstance(value, types[name]) or isinstance(value, bool):
            expected = " or ".join("null" if each is type(None) else each.__name__ for each in types[name])
            raise ValueError(f"{prefix}{name} is {type_name(value)}, not {expected}")


def type_name(value: object) -> str:
    return "null" if value is None else type(value).__name__
