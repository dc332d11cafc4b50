"""Store the results of the package, to show that a change of its structure does not change them.

On one machine: `python benchmarks/stored_results.py before.json` in a checkout of the old commit, `... after.json` in
the new one, then `python benchmarks/stored_results.py before.json after.json` names every entry that differs.
Tensors are stored as hashes, so both runs need the same processor and the same libraries.
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import collab_heads
from collab_heads.command.main import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from families import FAMILIES  # noqa: E402

MODELS = ("bert", "albert-groups", "marian", "t5", "gpt2", "llama", "qwen3", "vit", "whisper", "modernbert")
VOLATILE = ("seconds",)  # keys of a report that differ from run to run


def batches(name: str) -> list[dict]:
    """Return four batches; the rows of each are in a different order."""
    inputs = FAMILIES[name].inputs()
    rows = len(next(iter(inputs.values())))
    return [{key: value.roll(turn % rows, 0) for key, value in inputs.items()} for turn in range(4)]


def digest(model: torch.nn.Module) -> str:
    """Return a hash of the names, types and bytes of all tensors."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def plain(value: object) -> object:
    """Return a report as JSON, without its times."""
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items() if key not in VOLATILE}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def changed(name: str, change: Callable[[torch.nn.Module], object]) -> dict:
    """Apply a change to a new model; return its report, the hash of the weights and the record in the config."""
    model = FAMILIES[name].build()
    try:
        report = plain(change(model))
    except collab_heads.CollabHeadsError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"report": report, "weights": digest(model), "record": getattr(model.config, "collab_heads", None)}


def removed(model: torch.nn.Module) -> dict[str, list[int]]:
    """Return the heads to remove by path: the first one of every site."""
    return {site.path: [0] for site in collab_heads.get_adapter(model).sites(model)}


def changes(name: str) -> dict[str, Callable[[torch.nn.Module], object]]:
    """Return every change whose result is stored, by name."""
    seen = batches(name)
    swap, compress = collab_heads.swap_to_collaborative, collab_heads.compress
    found = {
        "swap": lambda model: swap(model, kind="per_head"),
        "swap shared": lambda model: swap(model, None, 0.5, batches=seen, refine_steps=8),
        "swap per_head": lambda model: swap(model, None, 0.5, kind="per_head", batches=seen, refine_steps=8),
        "swap weights": lambda model: swap(model, None, 0.5, kind="per_head"),
        "swap values": lambda model: swap(model, dim_value=0.5, batches=seen),
        "swap all": lambda model: swap(
            model, None, 0.5, dim_value=0.5, kind="per_head", batches=seen, allocation="balanced", refine_steps=4
        ),
        "gate": collab_heads.swap_to_gated,
        "mix": collab_heads.swap_to_alpha,
        "prune": lambda model: collab_heads.prune_heads(model, heads=removed(model)),
        "prune and refit": lambda model: collab_heads.prune_heads(model, heads=removed(model), batches=seen),
        "prune twice": lambda model: (
            collab_heads.prune_heads(model, heads=removed(model)),
            collab_heads.prune_heads(model, heads={path: [1] for path in removed(model)}),
        )[1],
        "prune and fold": lambda model: (
            collab_heads.prune_heads(model, heads=removed(model)),
            collab_heads.fold_heads(model),
        )[1],
        "compress twice": lambda model: (
            compress(model, seen, 0.8, refine_steps=2),
            compress(model, seen, 0.7, refine_steps=2),
        )[1],
        "compress to an error": lambda model: compress(model, seen, max_error=0.3, refine_steps=2),
        "distil": lambda model: (
            compress(model, seen, 0.6, refine_steps=2),
            collab_heads.distill(model, FAMILIES[name].build(), seen, steps=3),
        )[1],
        "compress shared": lambda model: compress(model, seen, 0.6, kind="shared", refine_steps=2),
    }
    for measure in ("parameters", "operations", "cache"):
        found[f"compress {measure}"] = lambda model, measure=measure: compress(
            model, seen, 0.6, of=measure, refine_steps=4
        )
    for part in ("heads", "query_key", "values"):
        found[f"compress {part}"] = lambda model, part=part: compress(model, seen, 0.8, parts=part, refine_steps=2)
    return found


def looks(name: str) -> dict[str, Callable[[torch.nn.Module], object]]:
    """Return every analysis whose numbers are stored, by name."""
    seen = batches(name)
    return {
        "plan": lambda model: collab_heads.plan(model, seen, refine_steps=4),
        "planned": lambda model: str(collab_heads.plan(model, seen, refine_steps=4)),
        "importance": lambda model: collab_heads.analysis.head_importance(model, seen, criterion="reconstruction"),
        "statistics": lambda model: str(collab_heads.analysis.head_statistics(model, seen)),
        "analysis": lambda model: collab_heads.analyze_heads(model, seen, parts=("statistics", "roles")),
    }


def helps() -> dict[str, str]:
    """Return the output of every command for `--help`."""
    found = {}
    for command in ("", *COMMANDS):
        call = [sys.executable, "-m", "collab_heads", *command.split(), "--help"]
        found[command] = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return found


def collect() -> dict:
    """Compute all results: help texts, changes and analyses."""
    torch.set_num_threads(1)
    found: dict = {"help": helps(), "changes": {}, "looks": {}}
    for name in MODELS:
        for label, change in changes(name).items():
            found["changes"][f"{name}, {label}"] = changed(name, change)
        for label, look in looks(name).items():
            found["looks"][f"{name}, {label}"] = changed(name, look)
    return found


def compare(before: dict, after: dict, path: str = "") -> list[str]:
    """Return a line for every entry that differs."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [*before, *(key for key in after if key not in before)]
        return [line for key in keys for line in compare(before.get(key), after.get(key), f"{path} / {key}")]
    return [] if before == after else [f"{path[3:]}: {before!r:.300} -> {after!r:.300}"]


if __name__ == "__main__":
    if len(sys.argv) == 2:
        Path(sys.argv[1]).write_text(json.dumps(collect(), indent=1))
    else:
        lines = compare(*(json.loads(Path(file).read_text()) for file in sys.argv[1:3]))
        print("\n".join(lines) or "equal")
        sys.exit(bool(lines))
