r"""Kill runs while they write, rename and delete; go on with them; compare with runs that nothing stopped.

    python benchmarks/kills.py [--kills 300] [--seed 0]

Two tiny runs: a classifier whose heads are mixed and folded at the end, and a translation model that keeps its best
weights; both keep only the newest checkpoint. Each starts in a folder with files of the user's. A kill is SIGKILL right
before an operation on a file (drawn evenly over kinds of operations and places), or at a random moment. After it,
whatever loads must be what some complete save wrote; the run that goes on must end with the weights and the results
of an unbroken one, to the last bit, with all of the user's files there and nothing left over.
"""

import argparse
import hashlib
import io
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
# ruff: noqa: E402

import crashing
import scripts
import torch
import translation_script
from transformers.utils import logging

import tiny
from collab_heads.errors import CollabHeadsError
from collab_heads.files.folders import damage
from common import write

MINE = ("thesis.txt", "translations/mine.txt", "predictions/train.csv", "logs/diary.txt", "best/notes.txt", "best.txt")
STEPS = "--max_train_steps 4 --checkpointing_steps 1 --save_total_limit 1 --max_eval_samples 6".split()
GLUE = [*STEPS, *"--max_train_samples 24 --alpha_mixing --fold_heads --num_train_epochs 1".split()]
TRANSLATION = [
    *STEPS,
    *"--max_train_samples 24 --eval_steps 1 --load_best_model_at_end --val_max_target_length 8".split(),
]


class Scenario:
    """A command line, the output of an unbroken run of it, and the file operations of that run.

    Args:
        name: of the scenario.
        main: the script's main function.
        flags: output folder -> flags.
        folder: the folder for runs.
    """

    def __init__(self, name, main, flags, folder):
        self.name, self.main, self.flags, self.folder = name, main, flags, folder
        self.saves: set = set()
        out, log = folder / f"{name}_unbroken", folder / f"{name}.operations"
        prepare(out)
        started = time.perf_counter()
        code, said = self.run(out, ["--overwrite_output_dir"], record=log)
        self.seconds = time.perf_counter() - started
        assert code == 0, said
        lines = [line.split("\t") for line in log.read_text().splitlines()]
        self.saves = {tuple(line[1:]) for line in lines if line[0] == "save"}
        self.operations = [tuple(line[1:]) for line in lines if line[0] == "operation"]
        self.end = ending(out)

    def run(self, out, more, *, at=None, after=None, record=None):
        """Run in a child process; returns its exit code (negative: a signal) and the end of its output.

        Args:
            out: output folder.
            more: additional flags.
            at: a file operation, its path, and n: the child kills itself before the n-th such operation.
            after: seconds after which the child is killed.
            record: file to which the operations are logged.
        """
        read, sent = os.pipe()
        child = os.fork()
        if not child:
            os.close(read)
            self.in_child(out, more, at, record, sent)
        os.close(sent)
        if after is not None:
            time.sleep(after)
            os.kill(child, signal.SIGKILL)
        said = b""
        while part := os.read(read, 1 << 16):
            said += part
        os.close(read)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said.decode()[-2000:]

    def in_child(self, out, more, at, record, sent):
        """Run in the child process; does not return."""
        log, left = None if record is None else record.open("w"), at and at[2]

        def before(name, path):
            nonlocal left
            place = os.readlink(f"/proc/self/fd/{path}") if name == "fsync" else path
            operation = name, re.sub("[0-9]+", "N", os.path.relpath(place, out))
            if at is not None and operation == at[:2]:
                left -= 1
                if not left:
                    os.kill(os.getpid(), signal.SIGKILL)
            if log is not None:
                if name == "fsync" and place.endswith("model.safetensors"):
                    log.write("save\t" + "\t".join(identity(Path(place).parent)) + "\n")
                log.write("\t".join(("operation", *operation)) + "\n")
                log.flush()

        code, text = 1, io.StringIO()
        try:
            with redirect_stdout(text), redirect_stderr(text), crashing.watched(before):
                self.main([str(flag) for flag in [*self.flags(out), *more]])
            code = 0
        except CollabHeadsError as error:
            text.write(f"\nrefused: {error}")
        except BaseException as error:
            text.write(f"\n{error!r}")
        finally:
            os.write(sent, text.getvalue().encode()[-60_000:])
            os._exit(code)


def identity(folder: Path) -> tuple[str, str]:
    """Return hashes of the files that determine what a stored model computes."""
    return tuple(
        hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ("config.json", "model.safetensors")
    )


def prepare(out: Path) -> None:
    """Make a folder that holds files of the user."""
    for name in MINE:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(f"mine: {name}")


def ending(out: Path) -> dict:
    """Return the outcome of a run: the model, the results without times, the names of all files."""
    results = json.loads((out / "all_results.json").read_text())
    names = sorted(path.relative_to(out).as_posix() for path in out.rglob("*"))
    return {"model": identity(out), "history": results["history"], "names": names}


def wrong_after_kill(scenario: Scenario, out: Path) -> list[str]:
    """Return what is wrong after a kill: models that load but are not complete save, and lost files of the user."""
    wrong = [f"{name} is not what it was" for name in MINE if f"mine: {name}" not in read_all(out, name)]
    for config in out.rglob("config.json"):
        folder = config.parent
        if folder.name.endswith((".partial", ".replaced", ".deleted", ".staged")):
            continue  # no one loads these
        if not (folder / "model.safetensors").exists() or identity(folder) not in scenario.saves:
            wrong.append(f"{folder.name} loads, and is not a complete save")
        if folder != out and (problem := damage(folder)):
            wrong.append(f"{folder.name}: {problem}")
    return wrong


def read_all(out: Path, name: str) -> list[str | None]:
    """Return the text of a file, and of its copy in a folder that is moved aside until the next run restores it."""
    first, _, rest = name.partition("/")
    return [read(out / name), *(read(out / (first + end) / rest) for end in (".replaced", ".deleted") if rest)]


def read(path: Path) -> str | None:
    """Return the text of a file; None if it does not exist."""
    return path.read_text() if path.exists() else None


def one(scenario: Scenario, chance: random.Random, number: int) -> dict:
    """Kill a run several times, resuming it each time, until it completes."""
    out = scenario.folder / f"{scenario.name}_{number}"
    prepare(out)
    new, resume = ["--overwrite_output_dir"], ["--resume_from_checkpoint"]
    counts, more, kills, wrong, code = Counter(scenario.operations), new, [], [], -signal.SIGKILL
    for leg in range(chance.randint(2, 5)):
        stop, operation = {"after": chance.random() * scenario.seconds}, "a random moment"
        if chance.random() < 0.75:
            name, place = chance.choice(sorted(counts))
            stop = {"at": (name, place, chance.randint(1, min(counts[name, place], 3 if leg else 99)))}
            operation = f"{name} {place}"
        code, said = scenario.run(out, more, **stop)
        if "holds no finished checkpoint" in said:
            more = new
            continue
        wrong += wrong_after_kill(scenario, out)
        if code != -signal.SIGKILL:
            break
        kills.append(operation)
        more = resume
    for flags in (resume, new):
        if code == -signal.SIGKILL or "holds no finished checkpoint" in said:
            more = flags
            code, said = scenario.run(out, more)
    if code:
        wrong.append(f"going on ended with {code}: {said[-1500:]}")
    else:
        end, whole = ending(out), scenario.end
        wrong += [f"its {part} differ {differing(end, whole, part)}" for part in end if end[part] != whole[part]]
    wrong += [f"{name} is gone" for name in MINE if read(out / name) != f"mine: {name}"]
    shutil.rmtree(out)
    return {"scenario": scenario.name, "kills": kills, "ended": more[0], "wrong": wrong}


def differing(end: dict, expected: dict, part: str) -> str:
    """Return the names that differ, if the part is "names"."""
    return str(sorted(set(end[part]) ^ set(expected[part]))) if part == "names" else ""


def scenarios(folder: Path) -> list[Scenario]:
    """Return the two scenarios, on generated data."""
    bert = tiny.save_tiny_bert(folder / "bert")
    for name, count, seed in (("train", 60, 0), ("validation", 12, 1), ("test", 6, 2)):
        tiny.write_csv(folder / f"{name}.csv", tiny.rows(count, seed))
    files = [part for name in ("train", "validation", "test") for part in (f"--{name}_file", folder / f"{name}.csv")]
    data = ["--train_file", *translation_script.write_pairs(folder, "train", 60, 0)]
    data += ["--validation_file", *translation_script.write_pairs(folder, "dev", 6, 1)]
    scratch = translation_script.SCRATCH
    return [
        Scenario(
            "glue", scripts.run_glue.main, lambda out: scripts.flags(bert, files, out, *GLUE, "--do_predict"), folder
        ),
        Scenario(
            "translation",
            translation_script.run_translation.main,
            lambda out: translation_script.flags(scratch, data, out, *TRANSLATION),
            folder,
        ),
    ]


def kill(number: int, seed: int, *, stored: bool = True) -> tuple[list[dict], list[Scenario]]:
    """Kill runs at least `number` times; returns a row per run, and the scenarios."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    rows, chance = [], random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        both = scenarios(Path(place))
        while sum(len(row["kills"]) for row in rows) < number:
            rows.append(one(both[len(rows) % 2], chance, len(rows)))
            print(len(rows), rows[-1], flush=True)
            if stored and len(rows) % 20 == 0:
                report(rows, both)
    return rows, both


def report(rows: list[dict], both: list[Scenario]) -> None:
    """Store the results."""
    counts = Counter(kill for row in rows for kill in row["kills"])
    write(
        "kills",
        [{"killed before": operation, "kills": count} for operation, count in counts.most_common()],
        kills=sum(counts.values()),
        runs=len(rows),
        ended_by_going_on=sum(row["ended"] == "--resume_from_checkpoint" for row in rows),
        wrong=[row for row in rows if row["wrong"]],
        kinds_of_operations={each.name: len(set(each.operations)) for each in both},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trial", action="store_true", help="store no results")
    arguments = parser.parse_args()
    found, runs = kill(arguments.kills, arguments.seed, stored=not arguments.trial)
    if not arguments.trial:
        report(found, runs)
    sys.exit(f"{sum(bool(row['wrong']) for row in found)} runs went wrong" if any(r["wrong"] for r in found) else 0)


if __name__ == "__main__":
    main()
