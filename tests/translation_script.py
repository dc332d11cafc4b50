"""How tests run run_translation.py, and what they look at afterwards."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import translation_models
from later import run_translation
from safetensors.torch import load_file
from scripts import LAUNCH

COMMON = (
    "--source_lang xx --target_lang en --max_source_length 40 --max_target_length 40 --num_beams 1 --max_tokens 400 "
    "--per_device_eval_batch_size 20 --learning_rate 3e-3 --max_train_steps 6 --seed 1 --cpu"
).split()
SIZES = "--d_model 32 --num_layers 1 --num_heads 4 --d_ff 48 --vocab_size 90".split()
SCRATCH = ["--model_type", "marian", *SIZES]
LEARNS = "--max_train_steps 150 --learning_rate 1e-2 --lr_scheduler_type inverse_sqrt --num_warmup_steps 20".split()
LEARNS += ["--eval_steps", "75"]
SWAP = "--collaborative --dim_shared_query_key 16 --refine_steps 3 --calibration_samples 16".split()
PROCESSES = [*LAUNCH[:-1], "run_translation.py"]


def flags(model, files, out=None, *more) -> list[str]:
    """The command line; `model` is a folder, or the flags of one from scratch."""
    which = ["--model_name_or_path", model] if isinstance(model, str | Path) else model
    where = ["--output_dir", out] if out else []
    return [str(word) for word in (*which, *files, *COMMON, *where, *more)]


def run(*args) -> dict:
    """In this process."""
    return run_translation.main(flags(*args))


def write_lines(path: Path, lines: Sequence[str]) -> str:
    """A text file, a sentence a line."""
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


def write_pairs(folder: Path, name: str, count: int, seed: int) -> list[str]:
    """Generated pairs in two text files."""
    pairs = translation_models.pairs(count, seed)
    return [write_lines(folder / f"{name}.{end}", pairs[side]) for end, side in (("xx", "source"), ("en", "target"))]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The stored weights of a model."""
    return load_file(folder / "model.safetensors")


def differing(one, other) -> list[str]:
    """Names of the weights of two models (folders, or what `weights` gives) that are not the same to the last bit."""
    found, expected = (weights(each) if isinstance(each, Path) else each for each in (one, other))
    assert found.keys() == expected.keys()
    return [name for name in found if not torch.equal(found[name], expected[name])]


def as_json(results: dict, *names: str) -> list[str]:
    """Parts of the results as the file has them: tuples are lists there."""
    return [json.dumps(results[name]) for name in names]


def translations(out: Path, name: str) -> list[str]:
    """What an evaluation wrote."""
    return (out / "translations" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
