"""The demo of `collab-heads images`: train a small DeiT from scratch, swap, compress and prune it, compare.

The images are scikit-learn's handwritten digits, 8 x 8 pixels, which come with that package. No network is needed.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from transformers.utils import logging

from collab_heads.base.display import text_table
from collab_heads.demo.rows import chosen, repeating

SPLIT_SEED, TRAIN = 0, 1197  # of 1,797 images; the others are measured on
MODEL = "--model_type deit --image_size 16 --patch_size 4 --d_model 64 --num_layers 4 --num_heads 4 --d_ff 128"
FLAGS = (
    "--per_device_train_batch_size 64 --per_device_eval_batch_size 200 --weight_decay 0.05 --warmup_ratio 0.1 "
    "--calibration_samples 256 --refine_steps 40 --seed 0 --overwrite_output_dir"
)
FIRST = "--num_train_epochs 24 --learning_rate 1e-3 --eval_steps 152"
AGAIN = "--num_train_epochs 3 --learning_rate 5e-4"
SETTINGS = {  # row -> flags
    "shared 16 of 64": "--collaborative --dim_shared_query_key 16",
    "per_head 16 of 64": "--collaborative --kind per_head --dim_shared_query_key 16",
    "8 of 16 heads": "--target_heads 8 --head_selection gradient",
    "half of attention": "--compress_budget 0.5",
}


ORIGINAL = "original"
ROWS = [ORIGINAL, *SETTINGS]


def write_digits(folder: Path) -> list[str]:
    """Write the digits as PNGs, folder/SPLIT/CLASS/*.png, in a fixed split; return the flags that name them."""
    digits = load_digits()
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    order = np.random.default_rng(SPLIT_SEED).permutation(len(pixels))
    for split, indices in (("train", order[:TRAIN]), ("validation", order[TRAIN:])):
        for index in indices:
            path = folder / split / str(digits.target[index]) / f"{index:04}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels[index]).save(path)
    return ["--train_dir", str(folder / "train"), "--validation_dir", str(folder / "validation")]


def main(run: Callable[[Sequence[str]], dict], row: int | None = None) -> dict:
    """Run the demo in a temporary folder and print a table.

    Args:
        run: the script: flags -> what `all_results.json` holds.
        row: the number of the only row to run, after the original; None for all rows.

    Returns:
        name of the row -> results of its run.
    """
    names = chosen(ROWS, row)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    started = time.perf_counter()
    results: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = [*write_digits(Path(folder)), *FLAGS.split()]

        def go(name: str, flags: str, *more: str) -> None:
            print(f"\n== {name}: collab-heads images {flags}", flush=True)
            output_dir = Path(folder) / name.replace(" ", "_")
            results[name] = run([*data, *flags.split(), *more, "--output_dir", str(output_dir)])

        go(ORIGINAL, f"{MODEL} {FIRST}")
        for name in names[1:]:
            go(name, f"{AGAIN} {SETTINGS[name]}", "--model_name_or_path", str(Path(folder) / ORIGINAL))
    print(f"\n{report(results, time.perf_counter() - started)}")
    return results


def report(results: dict[str, dict], seconds: float) -> str:
    """Return a table: accuracy after the change and at the end, parameters, command."""
    original, rows = results[ORIGINAL], []
    for name, result in results.items():
        changed = result["stages"].get("swapped", result["stages"].get("compressed"))
        rows.append(
            (
                name,
                f"{changed['accuracy']:.3f}" if changed else "",
                f"{result['eval_accuracy']:.3f}",
                f"{result['parameters']:,}",
                f"{result['parameters'] / original['parameters'] - 1:+.1%}",
                repeating(ROWS, name, "examples/run_image_classification.py"),
            )
        )
    last = "Accuracy on 600 images; swapped: before any further training, which is three epochs. "
    header = ("model", "swapped", "trained", "parameters", "change", "repeat it with")
    return text_table(header, rows, f"{last}{seconds:.0f} seconds in all.")
