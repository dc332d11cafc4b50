"""Measure the cost of a calibrated swap and of `compress`: all-MiniLM-L6-v2, STS-B train sentences in batches of 32.

python benchmarks/swap_speed.py [--rounds N]

The swap is to R=128 of 384; `compress` is to half of attention, or to half of whole layers.

ratio     256 sentences, one thread: processor seconds of the work over those of one forward pass over the same batches,
          in turns; median over the rounds, and the range
busy      the same swap, and `compress` of layers, with torch's own number of threads, alone and beside busy processes:
          wall seconds, in turns. There are as many as the machine has processors, or one less
memory    2,000 sentences in a process of its own: peak resident memory, of a forward pass and of each work
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager

import torch
from stsb import Task
from transformers import AutoModel
from transformers.utils import logging

from collab_heads import compress, swap_to_collaborative
from common import ATTENTION, memory_bytes, minilm, table, write

WIDTH, SENTENCES, MANY = 128, 256, 2000
COLUMNS = {"what": "", "sentences": "", "work": "", "mixing": "", "pass": ".2f", "swap": ".2f", "ratio": ".2f"}
COLUMNS |= {"range": ""}
MEMORY = {"what": "", "sentences": "", "work": "", "pass": ",.0f", "swap": ",.0f", "ratio": ".2f"}


def original():
    return AutoModel.from_pretrained(minilm()).eval()


@torch.no_grad()
def forward_pass(batches) -> None:
    """Load the model and run it once over the batches."""
    model = original()
    for batch in batches:
        model(**batch)


def swap(batches, mixing: str = "shared") -> None:
    """Load the model and swap it, calibrated on the batches."""
    swap_to_collaborative(original(), dim_shared_query_key=WIDTH, kind=mixing, batches=batches)


WORK = {
    "pass": forward_pass,
    "swap": swap,
    "compress, attention": lambda batches: compress(original(), batches, 0.5, parts=ATTENTION),
    "compress, layers": lambda batches: compress(original(), batches, 0.5),
}


def seconds(clock, function, *args) -> float:
    """Return how long a call takes by a clock."""
    start = clock()
    function(*args)
    return clock() - start


def spread(values) -> str:
    """Return the smallest and the largest value as text."""
    return f"{min(values):.2f} to {max(values):.2f}"


def ratio_row(batches, work: str, rounds: int, *mixing: str) -> dict:
    """Return the ratio of a work's processor time to that of a pass, on one thread; both include loading the model."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    forward_pass(batches)
    pairs = [
        (seconds(time.process_time, forward_pass, batches), seconds(time.process_time, WORK[work], batches, *mixing))
        for _ in range(rounds)
    ]
    torch.set_num_threads(threads)
    passes, swaps = zip(*pairs, strict=True)
    ratios = [b / a for a, b in pairs]
    return {
        "what": "one thread, processor seconds",
        "sentences": SENTENCES,
        "work": work,
        "mixing": ", ".join(mixing),
        "pass": statistics.median(passes),
        "swap": statistics.median(swaps),
        "ratio": statistics.median(ratios),
        "range": spread(ratios),
    }


@contextmanager
def busy(count: int):
    """Keep `count` processors busy while the context is open."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def busy_row(batches, work: str, rounds: int, others: int) -> dict:
    """Return the ratio of a work's wall time beside `others` busy processes to its time alone, with torch's threads."""
    pairs = []
    swap(batches)
    for _ in range(rounds):
        alone = seconds(time.perf_counter, WORK[work], batches)
        with busy(others):
            pairs.append((alone, seconds(time.perf_counter, WORK[work], batches)))
    ratios = [b / a for a, b in pairs]
    return {
        "what": f"alone, and beside {others} busy process(es), {torch.get_num_threads()} threads, wall seconds",
        "sentences": SENTENCES,
        "work": work,
        "mixing": "shared" if work == "swap" else "",
        "pass": None,
        "alone": statistics.median(a for a, _ in pairs),
        "swap": statistics.median(b for _, b in pairs),
        "ratio": statistics.median(ratios),
        "range": spread(ratios),
    }


def peak(what: str) -> float:
    """Return the peak resident MB of a process that does one thing with many sentences."""
    command = [sys.executable, __file__, "--peak", what]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def memory_rows() -> list[dict]:
    """Return the peak memory of each work beside that of a pass."""
    used = {what: peak(what) for what in WORK}
    row = {"what": "peak MB", "sentences": MANY, "pass": used.pop("pass")}
    return [row | {"work": work, "swap": most, "ratio": most / row["pass"]} for work, most in used.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak", choices=WORK, help="print the peak memory of this one, in MB")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    task = Task()
    if arguments.peak:
        WORK[arguments.peak](task.calibration(0, MANY))
        print(memory_bytes("VmHWM") / 2**20)
        return
    batches = task.calibration(0, SENTENCES)
    rows = [ratio_row(batches, "swap", arguments.rounds, mixing) for mixing in ("shared", "per_head")]
    fewer = max(arguments.rounds // 2, 1)
    rows += [ratio_row(batches, work, fewer) for work in WORK if work.startswith("compress")]
    for others in (os.cpu_count() - 1, os.cpu_count()):
        rows += [
            busy_row(batches, "swap", arguments.rounds, others),
            busy_row(batches, "compress, layers", fewer, others),
        ]
    print(table(rows, COLUMNS))
    memory = memory_rows()
    print(table(memory, MEMORY))
    write("swap_speed", [*rows, *memory])


if __name__ == "__main__":
    main()
