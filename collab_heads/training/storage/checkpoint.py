"""Write, find and load checkpoints; a checkpoint is either complete or absent.

Beside what every checkpoint has (`files/checkpoint.py`), its folder holds what `save_pretrained` writes (so
`from_pretrained` loads it), and Accelerate's state of the optimizer, the schedule and the random generators. These
files are pickles, which torch's restricted unpickler reads: resume only from your own checkpoints.
"""

import logging
import math
import re
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils.other import load as unpickle
from transformers import PreTrainedModel

from collab_heads.errors import OutputError
from collab_heads.files.checkpoint import check_holds, check_same_run, check_undamaged, new_checkpoint, read_progress
from collab_heads.files.folders import MANIFEST, contents, is_ours, read_manifest, retire
from collab_heads.files.locks import INSIDE
from collab_heads.training.storage.sharding import OPTIMIZER, load_optimizer, save_optimizer, without_divided

NAME = re.compile(r"(?:epoch|step)_\d+(?:_\d+)?")
RESUME = "--resume_from_checkpoint"
logger = logging.getLogger(__name__)


def save_checkpoint(
    accelerator: Accelerator,
    folder: Path,
    save_model: Callable[[Path], None],
    progress: Mapping,
    size: int | None = None,
) -> None:
    """Save everything that a run needs to resume; all processes must call it.

    Args:
        accelerator: its prepared optimizer and schedule are saved; the model is not (see `save_model`).
        folder: the final path of the checkpoint.
        save_model: writes model and tokenizer into a folder; called on the main process.
        progress: a JSON object, which `load_progress` returns.
        size: bytes that it needs, if known; for the message of an error.
    """
    main = accelerator.is_main_process
    with new_checkpoint(folder, progress, size, writes=main) as partial:
        if main:
            save_model(partial)
        accelerator.wait_for_everyone()
        hook = accelerator.register_save_state_pre_hook(lambda models, weights, output_dir: weights.clear())
        try:
            with without_divided(accelerator):
                accelerator.save_state(str(partial))
            save_optimizer(accelerator, partial)
        finally:
            hook.remove()
        accelerator.wait_for_everyone()
    accelerator.wait_for_everyone()


def weight_bytes(model: PreTrainedModel) -> int:
    """Return the approximate size of a stored model in bytes."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def load_state(accelerator: Accelerator, folder: Path) -> None:
    """Load the state of optimizer, schedule and random generators into the objects that Accelerate prepared."""
    name = f"random_states_{accelerator.process_index}.pkl"
    hook = accelerator.register_load_state_pre_hook(lambda models, input_dir: models.clear())
    try:
        with without_divided(accelerator):
            accelerator.load_state(str(folder))
        load_optimizer(accelerator, folder)
    except Exception as error:
        for each in ("optimizer.bin", "scheduler.bin"):
            if (folder / each).exists():  # a sharded optimizer is in a file of our own
                read_state(folder / each)  # raises an error that names the damaged file
        raise OutputError(f"{RESUME}: the state in {folder} does not fit this run: {error}") from error
    finally:
        hook.remove()
    states = read_state(folder / name)
    drawn = states.get("torch_manual_seed") if isinstance(states, Mapping) else None
    if not isinstance(drawn, torch.Tensor) or not torch.equal(torch.get_rng_state(), drawn):  # Accelerate says nothing
        raise OutputError(f"{RESUME}: {folder / name} is damaged: its random generators could not be set")


def read_state(path: Path) -> Mapping:
    """Read a file of Accelerate's state; raise an OutputError that names the file if this fails."""
    try:
        return unpickle(path, map_location="cpu")
    except Exception as error:  # the unpickler raises many kinds on a damaged file
        reason = (str(error) or repr(error)).splitlines()[0]
        if reason.startswith("Weights only"):  # goes on to say how to run what is in the file
            reason = "it is cut, or holds more than numbers"
        raise OutputError(f"{RESUME}: {path} is damaged: {reason}") from error


def load_progress(folder: Path) -> dict:
    """Read the progress that a checkpoint records."""
    progress = read_progress(folder, check_progress)
    random_states = [f"random_states_{rank}.pkl" for rank in range(progress["run"]["processes"])]
    optimizer = OPTIMIZER if (folder / OPTIMIZER).exists() else "optimizer.bin"
    check_holds(folder, ["config.json", optimizer, "scheduler.bin", *random_states, MANIFEST])
    return progress


READ = (".json", ".safetensors", ".bin", ".pkl", ".py", ".model", ".spm", ".jinja", "vocab.txt", "merges.txt")


def check_whole(folder: Path) -> None:
    """Raise OutputError if a folder is damaged, or its manifest does not list a file that could be read from it."""
    check_undamaged(folder)
    listed = (read_manifest(folder) or {}).get("files") or {}
    if more := [name for name in contents(folder) if name not in listed and name.endswith(READ)]:
        raise OutputError(f"{folder} holds {', '.join(more):.300}, which its {MANIFEST} does not list: move it away")


def checkpoints(output_dir: Path) -> list[Path]:
    """Return the finished checkpoints of an output folder, oldest first."""
    ages = {}
    for folder in output_dir.glob("*_*"):
        if NAME.fullmatch(folder.name):
            with suppress(OutputError):  # not one of ours, or damaged: `load_progress` says so to whoever asks for it
                progress = read_progress(folder, check_progress)
                ages[folder] = progress["phase"], progress["step"]
    return sorted(ages, key=ages.__getitem__)


def newest_whole(output_dir: Path) -> tuple[Path | None, list[str]]:
    """Return the newest undamaged checkpoint of an output folder, and the errors of those tried before it."""
    known = checkpoints(output_dir)
    unreadable = [path for path in output_dir.glob("*_*") if NAME.fullmatch(path.name) and is_ours(path)]
    wrong: list[str] = []
    for folder in [*sorted(set(unreadable) - set(known)), *reversed(known)]:
        try:
            load_progress(folder)
            check_whole(folder)
            return folder, wrong
        except OutputError as error:
            wrong.append(str(error))
    return None, wrong


def find_checkpoint(resume_from: str, output_dir: Path) -> Path:
    """Resolve `--resume_from_checkpoint`: a folder, or "latest" for the newest undamaged checkpoint."""
    if resume_from == "latest":
        newest, wrong = newest_whole(output_dir)
        if newest is None:
            damaged = "".join(f"; {each}" for each in wrong)
            in_use = output_dir.is_dir() and any(path.name != INSIDE for path in output_dir.iterdir())
            way = "give --overwrite_output_dir instead" if in_use else "leave it out"
            raise OutputError(
                f"{RESUME}: {output_dir} holds no finished checkpoint{damaged}: to start from the beginning {way}; "
                "--checkpointing_steps writes checkpoints to resume from"
            )
        for each in wrong:
            logger.warning("%s; resuming from %s, the newest that is whole", each, newest)
        return newest
    folder = Path(resume_from)
    try:
        load_progress(folder)
        check_whole(folder)
    except OutputError as error:
        newest = newest_whole(folder.parent)[0] if NAME.match(folder.name) and folder.is_dir() else None
        offer = "" if newest is None else f". The newest checkpoint that is whole: {RESUME} {newest}"
        raise OutputError(f"{RESUME}: {error}{offer}") from error
    return folder


def checkpoint_to_resume(args: Namespace, run: Mapping) -> tuple[Path | None, dict]:
    """Return the checkpoint that the flags name, checked against this run, and its progress; else (None, {})."""
    if not args.resume_from_checkpoint:
        return None, {}
    folder = find_checkpoint(args.resume_from_checkpoint, Path(args.output_dir))
    progress = load_progress(folder)
    check_same_run(folder, progress["run"], run)
    return folder, progress


def prune_checkpoints(output_dir: Path, keep: int | None, newest: Path | None = None) -> None:
    """Delete all but the newest `keep` checkpoints (None: keep all); files that we did not write stay.

    Checkpoints after `newest` are neither counted nor deleted: the run resumed from `newest` because they are damaged,
    and will write them again.
    """
    known = checkpoints(output_dir)
    if newest in known:
        known = known[: known.index(newest) + 1]
    for folder in known[:-keep] if keep else []:
        retire(folder)


MOST = {"phase": 100, "step": 10**12, "processes": 10**5}
WHOLE = (int,)
# name -> its types; what is not named here is checked by whoever reads it
TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(MOST, WHOLE),
    "run": (dict,),
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
OF_BEST: dict[str, tuple[type, ...]] = {"bleu": (float, int), "stage": (str,), "step": WHOLE}


def check_progress(progress: dict) -> None:
    """Raise ValueError, with the reason, if this cannot be the progress of a run."""
    for name in ("phase", "step", "run"):
        if name not in progress:
            raise ValueError(f"{name!r} is missing")
    check_types(progress, TYPES, "")
    numbers = {**progress, "processes": progress["run"].get("processes")}
    check_types(numbers, TYPES, "")
    for name, most in MOST.items():
        least = 1 if name == "processes" else 0
        if not least <= numbers[name] <= most:
            raise ValueError(f"{name!r} is not between {least} and {most:,}")  # it may have thousands of digits
    for name, types in ENTRIES.items():
        for number, entry in enumerate(progress.get(name, [])):
            check_entry(entry, types, f"{name}[{number}]")
    if progress.get("best") is not None:
        check_entry(progress["best"], OF_BEST, "best")
    for number, name in enumerate(progress.get("frozen") or []):
        if not isinstance(name, str):
            raise ValueError(f"frozen[{number}] is {type_name(name)}, not the name of a parameter")


def check_entry(entry: object, types: Mapping[str, tuple[type, ...]], place: str) -> None:
    """Raise ValueError unless an entry, whose place is for the message, has values of these types, finite ones."""
    if not isinstance(entry, dict) or (missing := types.keys() - entry.keys()):
        lacking = f"without {', '.join(sorted(missing))}" if isinstance(entry, dict) else type_name(entry)
        raise ValueError(f"{place} is {lacking}")
    check_types(entry, types, f"{place}.")
    metrics = entry["metrics"] if "metrics" in types else {}
    if "metrics" in types and not (metrics and all(isinstance(each, int | float) for each in metrics.values())):
        raise ValueError(f"{place}.metrics are no numbers: {metrics!r:.80}")
    numbers = {**entry, **metrics}
    for name, value in numbers.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{place}.{name} is {value}")


def check_types(values: Mapping, types: Mapping[str, tuple[type, ...]], prefix: str) -> None:
    """Raise ValueError if a value has the wrong type for its name; `prefix` is its place, for the message."""
    for name in types.keys() & values:
        value = values[name]
        if not isinstance(value, types[name]) or isinstance(value, bool):
            expected = " or ".join("null" if each is type(None) else each.__name__ for each in types[name])
            raise ValueError(f"{prefix}{name} is {type_name(value)}, not {expected}")


def type_name(value: object) -> str:
    return "null" if value is None else type(value).__name__
