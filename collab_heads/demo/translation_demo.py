"""The demo of run_translation.py: train a small Marian from scratch, swap, gate and prune it, translate, compare.

The corpus is generated: scenes in an invented language, to be translated into English. No network and no
pretrained model are needed.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from transformers.utils import logging

from collab_heads.base.display import text_table
from collab_heads.demo.bilingual import corpus
from collab_heads.demo.rows import chosen, repeating

TRAIN, DEV, SEED, SAMPLES = 6000, 200, 0, 3
MODEL = "--model_type marian --d_model 96 --num_layers 2 --num_heads 6 --d_ff 256 --dropout 0.1 --vocab_size 100"
FLAGS = (
    "--source_lang invented --target_lang en --max_tokens 1600 --lr_scheduler_type inverse_sqrt --num_beams 2 "
    "--max_source_length 40 --max_target_length 40 --per_device_eval_batch_size 200 --calibration_samples 128 "
    "--refine_steps 40 --seed 0 --overwrite_output_dir"
)
FIRST = "--max_train_steps 450 --learning_rate 4e-3 --num_warmup_steps 80 --label_smoothing 0.1"
AGAIN = "--max_train_steps 120 --learning_rate 1.5e-3 --num_warmup_steps 20 --label_smoothing 0.1"
SETTINGS = {  # row -> flags
    "shared 32 of 96": "--collaborative --dim_shared_query_key 32",
    "per_head 48 of 96": "--collaborative --kind per_head --dim_shared_query_key 48",
    "9 of 36 heads": "--target_heads 9",
    "12 heads, 4 a role": "--target_heads enc-self=4,dec-self=4,dec-enc=4",
}


ORIGINAL = "original"
ROWS = [ORIGINAL, *SETTINGS]


def write_lines(path: Path, lines: Sequence[str]) -> str:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


def main(run: Callable[[Sequence[str]], dict], row: int | None = None) -> dict:
    """Run the demo in a temporary folder and print some translations and a table.

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
    samples: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = ["--train_file", *files(Path(folder), "train", TRAIN, SEED)]
        dev = files(Path(folder), "dev", DEV, SEED + 1)
        data += ["--validation_file", *dev, *FLAGS.split()]

        def go(name: str, flags: str, *more: str) -> None:
            print(f"\n== {name}: run_translation.py {flags}", flush=True)
            output_dir = Path(folder) / name.replace(" ", "_").replace(",", "")
            results[name] = run([*data, *flags.split(), *more, "--output_dir", str(output_dir)])
            newest = max((output_dir / "translations").glob("validation-*"), key=lambda path: path.stat().st_mtime)
            samples[name] = newest.read_text(encoding="utf-8").splitlines()[:SAMPLES]

        go(ORIGINAL, f"{MODEL} {FIRST}")
        for name in names[1:]:
            go(name, f"{AGAIN} {SETTINGS[name]}", "--model_name_or_path", str(Path(folder) / ORIGINAL))
        sources, references = (Path(path).read_text(encoding="utf-8").splitlines()[:SAMPLES] for path in dev)
    print(f"\n{translations(sources, references, samples)}\n\n{report(results, time.perf_counter() - started)}")
    return results


def files(folder: Path, name: str, count: int, seed: int) -> list[str]:
    """Write a generated corpus; return the files of both sides, the invented language first."""
    english, invented = corpus(count, seed)
    return [write_lines(folder / f"{name}.xx", invented), write_lines(folder / f"{name}.en", english)]


def report(results: dict[str, dict], seconds: float) -> str:
    """Return a table: BLEU after the swap and at the end, heads, parameters, command."""
    original, rows = results[ORIGINAL], []
    for name, result in results.items():
        heads, stages = result["heads"], result["stages"]
        rows.append(
            (
                name,
                f"{stages['swapped']['bleu']:.1f}" if "swapped" in stages else "",
                f"{result['eval_bleu']:.1f}",
                str(sum(site["heads_after"] for site in heads["pruned"]["sites"])) if heads else "36",
                f"{result['parameters']:,}",
                f"{result['parameters'] / original['parameters'] - 1:+.1%}",
                repeating(ROWS, name, "run_translation.py"),
            )
        )
    last = f"BLEU on 200 sentences; swapped: before any further training. {seconds:.0f} seconds in all."
    return text_table(("model", "swapped", "trained", "heads", "parameters", "change", "repeat it with"), rows, last)


def translations(sources: Sequence[str], references: Sequence[str], samples: dict[str, list[str]]) -> str:
    """Return the first sentences as every model translates them."""
    width = max(map(len, [*samples, "reference"]))
    lines = []
    for index, (source, reference) in enumerate(zip(sources, references, strict=True)):
        lines += [f"{'source':{width}}  {source}", f"{'reference':{width}}  {reference}"]
        lines += [f"{name:{width}}  {lines_of[index]}" for name, lines_of in samples.items()] + [""]
    return "\n".join(lines).rstrip()
