"""Collaborative DeiTs on scikit-learn's handwritten digits: from scratch beside narrow heads, and trained ones swapped.

python benchmarks/digits.py [--longer]

1,797 images of 8 x 8 pixels, which come with scikit-learn, in a fixed split: 1,197 to train on, 600 to measure on. The
model is a DeiT for 16 x 16 pixels: 4 layers, width 64, 4 heads, patches of 4 x 4. Every training is the same number of
steps (some again twice as many), and what is measured is its end: nothing is chosen by it. Three seeds, of the first
weights and of the order; ten of the longer training of shared and of narrow heads, which --longer measures alone, while
the other rows stay as they are stored.

From scratch, queries and keys of a layer are R wide in all: `shared` by all heads, or R/4 for each (`per_head`), which
has a multiple of 4: 16 in all at least.
Swapped: the same, of the trained models of full width, from the weights alone, and calibrated on 256 training images.
All runs are those of examples/run_image_classification.py; what is complete under the same flags is not repeated.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from accelerate.state import AcceleratorState, GradientState, PartialState

from common import RESULTS, ROOT, WORK, table, write

sys.path.insert(0, str(ROOT / "examples"))
import run_image_classification
from collab_heads.demo.demos import TRAIN_DIGITS as TRAINING
from collab_heads.demo.demos import write_digits

SEEDS, MORE_SEEDS = (1, 2, 3), tuple(range(1, 11))
SIZES = "--model_type deit --image_size 16 --patch_size 4 --d_model 64 --num_layers 4 --num_heads 4 --d_ff 128".split()
TRAIN = (
    "--num_train_epochs 24 --per_device_train_batch_size 64 --per_device_eval_batch_size 100 --learning_rate 1e-3 "
    "--weight_decay 0.05 --warmup_ratio 0.1 --eval_steps 1000000 --cpu"
).split()
LONG = ["--num_train_epochs", "48"]
MEASURE = "--num_train_epochs 0 --per_device_eval_batch_size 100 --cpu".split()
# kind -> widths of queries and keys, of 64; a head of its own has a multiple of 4
BORN = {"shared": (32, 16, 8, 4), "per_head": (32, 16)}
LONGER = {"shared": (16,), "per_head": (16,)}  # trained twice as long
SWAPPED = {"shared": (32, 16, 8, 4, 2), "per_head": (32, 16)}
COLUMNS = {"what": "", "mixing": "", "R": "", "accuracy": ".2f", "range": "", "parameters": ","}


def run(out: Path, flags: Sequence[str]) -> dict:
    """Return the results of a run of the script; a complete run with the same flags is not repeated."""
    done, flags = out.with_suffix(".json"), [*flags]
    if not (done.is_file() and json.loads(done.read_text()) == flags):
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()  # Accelerate keeps its settings for the life of a process
        run_image_classification.main([*flags, "--output_dir", str(out), "--overwrite_output_dir"])
        done.write_text(json.dumps(flags))
    return json.loads((out / "all_results.json").read_text())


def row(what: str, runs: Sequence[dict], mixing: str | None = None, width: int = 64) -> dict:
    """Return a row of the table from runs that differ only in their seeds."""
    found = [100 * each["eval_accuracy"] for each in runs]
    return {
        "what": what,
        "mixing": mixing,
        "R": width,
        "accuracy": statistics.mean(found),
        "range": f"{min(found):.2f} to {max(found):.2f}",
        "accuracies": found,
        "parameters": runs[0]["parameters"],
        "train_loss": [each["train_loss"] for each in runs],
        "seconds": sum(training["seconds"] for each in runs for training in each["train"]),
    }


def trained(
    folder: Path, digits: list[str], name: str, more: Sequence[str], seeds: Sequence[int] = SEEDS
) -> list[dict]:
    """Train a model from scratch for every seed, with additional flags; returns the results."""
    return [run(folder / f"{name}-{seed}", [*SIZES, *digits, *TRAIN, *more, "--seed", str(seed)]) for seed in seeds]


def asked(kind: str, width: int) -> list[str]:
    """Return the flags of a kind and its width."""
    return ["--collaborative", "--kind", kind, "--dim_shared_query_key", str(width)]


def swapped(folder: Path, digits: list[str], kind: str, width: int, samples: int) -> list[dict]:
    """Swap the trained models and evaluate them without further training; returns the results."""
    change = [*asked(kind, width), "--calibration_samples", str(samples)]
    return [
        run(
            folder / f"swapped-{kind}-{width}-{samples}-{seed}",
            ["--model_name_or_path", str(folder / f"full-{seed}"), *digits, *MEASURE, *change, "--seed", str(seed)],
        )
        for seed in SEEDS
    ]


def longer(folder: Path) -> list[dict]:
    """Return the rows of shared and of narrow heads, trained twice as long."""
    digits, rows = write_digits(folder / "images"), []
    for kind, width in pairs(LONGER):
        flags = [*LONG, *asked(kind, width)]
        rows.append(row("longer", trained(folder, digits, f"longer-{kind}-{width}", flags, MORE_SEEDS), kind, width))
    return rows


def measure(folder: Path) -> list[dict]:
    """Return all rows."""
    digits = write_digits(folder / "images")
    rows = [row("full", trained(folder, digits, "full", []))]
    for kind, width in pairs(BORN):
        rows.append(row("born", trained(folder, digits, f"born-{kind}-{width}", asked(kind, width)), kind, width))
    rows += [row("full-longer", trained(folder, digits, "full-longer", LONG)), *longer(folder)]
    for samples, what in ((0, "swapped"), (256, "calibrated")):
        rows += [row(what, swapped(folder, digits, *each, samples), *each) for each in pairs(SWAPPED)]
    return rows


def pairs(widths: Mapping[str, Sequence[int]]) -> list[tuple[str, int]]:
    """Return every kind with each of its widths."""
    return [(kind, width) for kind, of_kind in widths.items() for width in of_kind]


def main() -> None:
    """Measure what is missing, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longer", action="store_true", help="only the longer training of shared and narrow heads")
    if parser.parse_args().longer:
        stored = json.loads((RESULTS / "digits.json").read_text())["rows"]
        new = {each["mixing"]: each for each in longer(WORK / "digits")}
        rows = [new[each["mixing"]] if each["what"] == "longer" else each for each in stored]
    else:
        rows = measure(WORK / "digits")
    print(table(rows, COLUMNS))
    write("digits", rows, seeds=MORE_SEEDS, training=[*SIZES, *TRAIN], images={"train": TRAINING, "validation": 600})


if __name__ == "__main__":
    main()
