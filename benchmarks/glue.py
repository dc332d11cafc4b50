"""Fine-tune, swap at several widths, fine-tune again: run_glue.py on real GLUE tasks with all-MiniLM-L6-v2.

python benchmarks/glue.py [--tasks rte mrpc stsb cola] [--settings NAME ...] [--seeds 42] [--work DIR]
                          [--table [--name glue] [--with_stored]]

Every row is a run of run_glue.py (its flags are in the JSON): the original is fine-tuned for three epochs; each width
starts from it, is swapped and calibrated on 256 training examples, evaluated, fine-tuned for one more epoch (or three)
and evaluated again; at 384, which is exact, training again is left out. "balanced" spreads the same parameters over the
layers. "again" in the row of the original is the same extra epoch (or three) without a swap. SST-2 is trained on 8,000
of its sentences; WNLI is in no average. "source" is the system of Cordonnier et al. 2020: CP decomposition of the dense
tensor from a random start, scores divided by sqrt(R / H). Runs that are complete in DIR are not repeated, so tasks can
run side by side; --table only collects, under a name of its own where these are not the tasks and settings of the table
that is there.
"""

import argparse
import dataclasses
import json
import math
import random
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path

from scipy.stats import t as student

from common import RESULTS, ROOT, WORK, minilm, shared, table, write

sys.path.insert(0, str(ROOT))
import run_glue
from collab_heads.data.metrics import score
from collab_heads.files.atomic import write_file
from collab_heads.training.runs import swap as swapping

TASKS = ("rte", "mrpc", "stsb", "cola")  # of a table, if not told otherwise
ALL_TASKS = (*TASKS, "wnli", "sst2")
UNAVERAGED = "wnli"  # as in Devlin et al. 2019; the texts of 65 of its 71 dev examples are in the training set
SENTENCES = 8000  # of SST-2, drawn from 67,349
COMMON = "--per_device_train_batch_size 16 --per_device_eval_batch_size 32 --learning_rate 5e-5 --warmup_ratio 0.06"
SETTINGS = {  # row -> flags of its swap
    "original": None,
    "384": "--collaborative --num_train_epochs 0",
    "192": "--collaborative --dim_shared_query_key 192",
    "128": "--collaborative --dim_shared_query_key 128",
    "64": "--collaborative --dim_shared_query_key 64",
    "64 per_head (96)": "--collaborative --dim_shared_query_key 64 --kind per_head",
    "64 balanced": "--collaborative --dim_shared_query_key 64 --allocation balanced",
    "64 balanced, 3 epochs": "--collaborative --dim_shared_query_key 64 --allocation balanced --num_train_epochs 3",
    "original, 3 epochs": "--num_train_epochs 3",
    "192, 3 epochs": "--collaborative --dim_shared_query_key 192 --num_train_epochs 3",
    "128, 3 epochs": "--collaborative --dim_shared_query_key 128 --num_train_epochs 3",
    "64, 3 epochs": "--collaborative --dim_shared_query_key 64 --num_train_epochs 3",
    "64 source": "--collaborative --dim_shared_query_key 64 --decomposition_method parafac --calibration_samples 0",
}


def source_swap(args, model, calibration):
    """Swap as the source system does: with its decomposition, and with its scale of the scores."""
    report = swapping_swap(args, model, calibration)
    for site in report.sites:
        query_key = model.base_model.get_submodule(site.path).query_key
        scale = 1 / math.sqrt(site.dim / query_key.num_heads)
        query_key.state = dataclasses.replace(query_key.state, scale=scale)
    return report


swapping_swap = swapping.swap


ORIGINALS = ("original", "original, 3 epochs")  # after one extra epoch, after three
AGAIN_AS_LONG = ("original, 3 epochs", "192, 3 epochs", "128, 3 epochs", "64, 3 epochs")  # a table of their own
USUAL = [name for name in SETTINGS if name not in AGAIN_AS_LONG]


def slug(name: str) -> str:
    """Return a setting's name in a form that fits into a folder's name."""
    return name.replace(" ", "-").replace(",", "")


def run(task: str, name: str, work: Path, seed: int) -> dict:
    """Return the results of one run of run_glue.py; a run whose results exist is not repeated."""
    folder = work / run_name(task, seed, name)
    results = folder / "all_results.json"
    if not results.exists():
        start = work / run_name(task, seed, "fine-tuned")
        again = name != "fine-tuned"
        flags = [
            *f"--task_name {task} --group_by_length {COMMON} --num_train_epochs {1 if again else 3}".split(),
            *("--data_dir", str(data_of(task, work)), "--model_name_or_path", str(start) if again else minilm()),
            *("--seed", str(seed), "--output_dir", str(folder), "--overwrite_output_dir"),
            *((SETTINGS[name] or "").split() if again else ()),
        ]
        swapping.swap = source_swap if name.endswith("source") else swapping_swap
        run_glue.main(flags)
        if again:
            (folder / "model.safetensors").unlink()
    return json.loads(results.read_text())


def data_of(task: str, work: Path) -> Path:
    """Return the folder with the files of a task; that of SST-2 is made in `work`, with a sample of the sentences."""
    whole = shared("data/glue")
    if task != "sst2":
        return whole
    part = work / "data"
    header, *lines = (whole / "SST-2" / "train.tsv").read_bytes().splitlines(keepends=True)
    write_file(part / "SST-2" / "train.tsv", b"".join([header, *random.Random(0).sample(lines, SENTENCES)]))
    write_file(part / "SST-2" / "dev.tsv", (whole / "SST-2" / "dev.tsv").read_bytes())
    return part


def run_name(task: str, seed: int, name: str) -> str:
    """Return the folder name of a run."""
    return f"{task}-{seed}-{slug(name)}"


def runs_of(work: Path, with_stored: bool = False) -> dict[str, dict]:
    """Return the results of the complete runs in `work`, and on request those of other runs from the table "glue"."""
    rows = json.loads((RESULTS / "glue.json").read_text())["rows"] if with_stored else []
    stored = {name: run for row in rows for name, run in row["runs"].items()}
    return stored | {path.parent.name: json.loads(path.read_text()) for path in sorted(work.glob("*/all_results.json"))}


def rows_of(runs: Mapping[str, dict], tasks: list[str], settings: list[str], seeds: list[int]) -> list[dict]:
    """Return one row per setting, from the existing runs: name -> results."""
    rows, averaged = [], [task for task in tasks if task != UNAVERAGED] or tasks
    for name in settings:
        row: dict = {"R": name}
        for stage, label in (("before", ""), ("after", " again")):
            for task in tasks:
                scores = [value for seed in seeds if (value := stage_score(runs, task, seed, name, stage)) is not None]
                row[f"{task}{label}"] = sum(scores) / len(scores) if scores else None
            found = [row[f"{task}{label}"] for task in averaged]
            row[f"average{label}"] = sum(found) / len(found) if None not in found else None
        row["gaps"] = {task: gaps_of(runs, task, name, seeds) for task in tasks}
        if name not in ORIGINALS:
            row |= average_gap([row["gaps"][task] for task in averaged])
        names = [run_name(task, seed, name) for task in tasks for seed in seeds]
        done = {each: runs[each] for each in names if each in runs}
        if whole := [each for each in done.values() if "parameters" in each]:  # of the stored table less is known
            swap = whole[0]["swap"]
            row["parameters"], row["swap"] = whole[0]["parameters"], swap and swap["mean_relative_error"]
        if done:
            row["flags"] = f"--group_by_length {COMMON} {SETTINGS[name] or ''}".strip()
            row["drawn"] = {"sst2": SENTENCES} if "sst2" in tasks else {}
            row["runs"] = {run: found if "widths" in found else run_record(found) for run, found in done.items()}
        rows.append(row)
    return rows


def gaps_of(runs: Mapping[str, dict], task: str, name: str, seeds: list[int]) -> dict[int, float]:
    """Return, by seed, by how much a setting ends better than the original after the same number of extra epochs."""
    first = ORIGINALS[name.endswith("3 epochs")]
    ends = {seed: [stage_score(runs, task, seed, each, "after") for each in (name, first)] for seed in seeds}
    return {seed: end - original for seed, (end, original) in ends.items() if None not in (end, original)}


def average_gap(gaps: list[dict[int, float]]) -> dict:
    """Return the gap averaged over tasks: mean over seeds common to all tasks, Student's 95 % interval, and by seed."""
    by_seed = [statistics.mean(of[seed] for of in gaps) for seed in gaps[0] if all(seed in of for of in gaps)]
    if len(by_seed) < 2:  # one seed has no interval
        return {}
    mean, error = statistics.mean(by_seed), statistics.stdev(by_seed) / math.sqrt(len(by_seed))
    low, high = (mean + sign * student.ppf(0.975, len(by_seed) - 1) * error for sign in (-1, 1))
    return {"difference": mean, "interval": (low, high), "95 %": f"{low:+.2f} to {high:+.2f}", "by seed": by_seed}


def run_record(results: dict) -> dict:
    """Return the part of a run that the table stores: the metrics of every stage, and the widths of the sites."""
    swap = results["swap"]
    return {"stages": results["stages"], "widths": swap and [site["dim"] for site in swap["sites"]]}


def stage_score(runs: Mapping[str, dict], task: str, seed: int, name: str, stage: str) -> float | None:
    """Return GLUE's number for a task, x 100, before or after the extra epoch; None if the run is missing."""
    stages = runs.get(run_name(task, seed, name), {"stages": {}})["stages"]
    before = "loaded" if name in ORIGINALS else "swapped"
    metrics = stages.get(before if stage == "before" else "fine_tuned")
    return None if metrics is None else 100 * score(task, metrics)


def main() -> None:
    """Run what is missing, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=ALL_TASKS)
    parser.add_argument("--settings", nargs="+", default=USUAL, choices=list(SETTINGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[42])
    parser.add_argument("--work", type=Path, default=WORK / "collab-heads-glue")
    parser.add_argument("--table", action="store_true", help="collect only")
    parser.add_argument("--name", default="glue", help="of the record")
    parser.add_argument("--with_stored", action="store_true", help="runs of the stored table count where DIR has none")
    arguments = parser.parse_args()
    usual = set(arguments.tasks) == set(TASKS) and set(arguments.settings) == set(USUAL)
    if arguments.with_stored and arguments.name == "glue":
        parser.error("--with_stored needs --name: the stored table would be stored as if it had run again")
    if arguments.table and arguments.name == "glue" and not usual:
        parser.error("--table with other tasks or settings needs --name: the stored table has others")
    arguments.work.mkdir(parents=True, exist_ok=True)
    for seed in [] if arguments.table else arguments.seeds:
        for task in arguments.tasks:
            for name in ("fine-tuned", *arguments.settings):
                run(task, name, arguments.work, seed)
    runs = runs_of(arguments.work, arguments.with_stored)
    rows = rows_of(runs, arguments.tasks, arguments.settings, arguments.seeds)
    tasks = (*arguments.tasks, "average")
    columns = {"R": "", **{f"{task}{again}": ".2f" for again in ("", " again") for task in tasks}}
    print(table(rows, {**columns, "parameters": ","}))
    if arguments.table:
        write(arguments.name, rows, seeds=arguments.seeds)


if __name__ == "__main__":
    main()
