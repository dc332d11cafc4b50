"""Keep some of the 72 heads of all-MiniLM-L6-v2: learned, by importance, at random; equal fine-tuning, three seeds.

python benchmarks/heads.py [--tasks mrpc stsb] [--seeds 0 1 2] [--work DIR] [--table]

Every run is one of run_glue.py and starts from the same checkpoint, fine-tuned on the task for three epochs (the first
row of benchmarks/glue.py): 100 optimizer steps of 16 examples, gates or pruning included, then the whole dev set.
"original" takes the same steps with all heads. A number of heads is exact; those of a lambda follow from it. Runs found
complete in DIR are not repeated, so tasks can run side by side; --table only collects and draws.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import glue
from common import PICTURES, ROOT, WORK, minilm, shared, table, write

sys.path.insert(0, str(ROOT))
import run_glue
from collab_heads.data.metrics import score
from collab_heads.training.options.run import fingerprint
from collab_heads.training.runs.run import Run

TASKS, SEEDS, HEADS = ("mrpc", "stsb"), (0, 1, 2), 72
COUNTS, WEIGHTS = {"learned": (36, 18, 9), "importance": (36, 18, 9), "random": (18, 9)}, (0.01, 0.03, 0.1)
COMMON = (
    "--per_device_train_batch_size 16 --per_device_eval_batch_size 32 --learning_rate 5e-5 --warmup_ratio 0.06 "
    "--group_by_length --max_train_steps 100"
)
SETTINGS = {"original": ""}  # row -> flags
FLAG = {"importance": "gradient"}  # how a row is called -> its flag
SETTINGS |= {f"lambda {weight}": f"--gate_weight {weight}" for weight in WEIGHTS}
for how, counts in COUNTS.items():
    SETTINGS |= {f"{how} {count}": f"--target_heads {count} --head_selection {FLAG.get(how, how)}" for count in counts}
TICKS = (9, 18, 36, HEADS)
DEPTH = 9  # points below the original that the picture shows
NAMES = {"learned": "learned, exact", "importance": "importance", "random": "random", "lambda": "lambda"}


evaluate = Run.evaluate  # only after training: the other stages take half of the time, and the tests compare them


def run(task: str, name: str, seed: int, work: Path, start: Path) -> None:
    """Run run_glue.py once; a run whose results exist for the same flags is not repeated."""
    folder = folder_of(work, task, name, seed)
    flags = f"--task_name {task} {COMMON} {SETTINGS[name]} --seed {seed} --overwrite_output_dir".split()
    paths = ["--data_dir", str(shared("data/glue")), "--model_name_or_path", str(start), "--output_dir", str(folder)]
    asked = json.loads(json.dumps(fingerprint(run_glue.parse([*flags, *paths]))))
    if (folder / "all_results.json").exists():
        done = json.loads((folder / "all_results.json").read_text())["arguments"]
        unused = {"mixed_precision"} | ({"selection_share"} if "learned" not in name else set())
        if all(done.get(flag) == value for flag, value in asked.items() if flag not in unused):
            return
    Run.evaluate = lambda self, stage, *more: evaluate(self, stage, *more) if stage == "fine_tuned" else None
    run_glue.main([*flags, *paths])
    (folder / "model.safetensors").unlink()


def folder_of(work: Path, task: str, name: str, seed: int) -> Path:
    """Return the folder of a run's results."""
    return work / f"{task}-{name.replace(' ', '-')}-{seed}"


def results_of(work: Path, task: str, name: str) -> list[dict]:
    """Return the existing results of all seeds."""
    paths = (folder_of(work, task, name, seed) / "all_results.json" for seed in SEEDS)
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def heads_of(results: dict) -> list[int]:
    """Return the number of heads kept per layer."""
    heads = results["heads"]
    return [site["heads_after"] for site in heads["pruned"]["sites"]] if heads else [12] * 6


def final(task: str, results: dict) -> float:
    """Return GLUE's number for the task after the last step, x 100."""
    return 100 * score(task, results["history"][-1]["metrics"])


def rows_of(work: Path) -> list[dict]:
    """Return one row per setting: mean and spread over seeds."""
    rows = []
    for name in SETTINGS:
        row: dict = {"heads": name}
        for task in TASKS:
            found = results_of(work, task, name)
            if not found:
                continue
            scores, kept = [final(task, one) for one in found], [heads_of(one) for one in found]
            row[task] = statistics.mean(scores)
            row[f"{task} range"] = f"{min(scores):.2f} to {max(scores):.2f}"
            row[f"{task} kept"] = "/".join(map(str, sorted({sum(heads) for heads in kept}, reverse=True)))
            row[f"{task} runs"] = [
                {"score": s, "kept": k, "parameters": one["parameters"], "metrics": one["history"][-1]["metrics"]}
                for s, k, one in zip(scores, kept, found, strict=True)
            ]
        row["flags"] = f"{COMMON} {SETTINGS[name]}".strip()
        rows.append(row)
    return rows


def draw(rows: list[dict]) -> None:
    """Draw quality against heads kept: a panel per task, a line per way to choose."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(TASKS), figsize=(9, 3.4), layout="constrained")
    styles = {"learned": ("#0072B2", "o-"), "importance": ("#E69F00", "s--"), "random": ("#999999", "^:")}
    styles["lambda"] = ("#009E73", "D")  # colours of Okabe and Ito: they differ for every eye
    for panel, task in zip(panels, TASKS, strict=True):
        original = next(row for row in rows if row["heads"] == "original")
        panel.axhline(original[task], color="black", linewidth=1, label="all 72 heads, same steps")
        for how, (colour, style) in styles.items():
            points = [
                (
                    statistics.mean(sum(r["kept"]) for r in row[f"{task} runs"]),
                    [r["score"] for r in row[f"{task} runs"]],
                )
                for row in rows
                if row["heads"].startswith(how) and f"{task} runs" in row
            ]
            x, scores = [p[0] for p in points], [p[1] for p in points]
            means = [statistics.mean(s) for s in scores]
            below, above = ([abs(pick(s) - m) for s, m in zip(scores, means, strict=True)] for pick in (min, max))
            panel.errorbar(x, means, [below, above], fmt=style, color=colour, capsize=3, label=NAMES[how])
        panel.set(xlabel="heads kept of 72", ylabel=f"{task.upper()} dev x 100", xscale="log", xticks=TICKS)
        panel.set_xticklabels(TICKS)
        floor = original[task] - DEPTH
        panel.set_ylim(bottom=max(floor, panel.get_ylim()[0]))
        if low := [row for row in rows if row.get(task, floor) < floor]:
            below = ", ".join(f"{row['heads']}: {row[task]:.0f}" for row in low)
            panel.text(0.97, 0.03, f"below: {below}", transform=panel.transAxes, ha="right", fontsize=8)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    PICTURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURES / "heads.svg")
    figure.savefig(PICTURES / "heads.png", dpi=110)


def main() -> None:
    """Run what is missing, print, store, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--work", type=Path, default=WORK / "collab-heads-pruning")
    parser.add_argument("--start", type=Path, default=WORK / "collab-heads-glue", help="--work of benchmarks/glue.py")
    parser.add_argument("--table", action="store_true", help="collect and draw only")
    arguments = parser.parse_args()
    for folder in (arguments.work, arguments.start):
        folder.mkdir(parents=True, exist_ok=True)
    minilm()
    for seed in [] if arguments.table else arguments.seeds:
        for task in arguments.tasks:
            glue.run(task, "fine-tuned", arguments.start, 42)
            for name in arguments.settings:
                run(task, name, seed, arguments.work, arguments.start / f"{task}-42-fine-tuned")
    rows = rows_of(arguments.work)
    print(table(rows, {"heads": "", **{f"{t}{more}": s for t in TASKS for more, s in COLUMNS}}))
    if arguments.table:
        write("heads", rows, seeds=list(SEEDS))
        draw(rows)


COLUMNS = ((" kept", ""), ("", ".2f"), (" range", ""))


if __name__ == "__main__":
    main()
