"""Profile an attention block of half the size: which of its operations shrink with it, and which do not.

python benchmarks/block_profile.py [--seconds N]

The attention block of one layer of all-MiniLM-L6-v2 (12 heads, each 32 wide), with heads of half the width, and with
half of the heads, on one thread. torch's profiler tells the time of each kernel; "calls" is what a call takes beyond
its kernels, without the profiler: Python, and torch's way to a kernel. In another table torch's attention kernel alone,
with heads of several widths: what is left at a width of 1 is the softmax and what surrounds it.

Times are processor time, of the blocks' medians the smallest, as in compression_speed.py.
"""

import argparse
import time
from collections.abc import Callable

import torch
from compression_speed import SEED, encoding, steady, variants
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModel
from transformers.utils import logging

from common import minilm, table, write

SIZES = ((1, 32), (1, 128), (1, 512), (32, 128), (32, 512))
WIDTHS = (32, 16, 8, 1)
HEADS, SHAPES = 12, ((1, 32), (1, 128), (1, 512), (32, 128))
NARROW = ((192, 192), (144, 192))
GROUPS = {
    "attention": ("aten::_scaled_dot_product_flash_attention_for_cpu",),
    "products": ("aten::addmm", "aten::mm"),
    "norm, sums, copies": ("aten::native_layer_norm", "aten::add", "aten::copy_", "aten::fill_"),
}
COLUMNS = {"variant": "", "size": "", "milliseconds": ".3f"} | {name: ".3f" for name in (*GROUPS, "calls")}


def kernels(call: Callable, seconds: float) -> dict[str, float]:
    """Return the milliseconds of each group of kernels in one call."""
    begun, count = time.perf_counter(), 0
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        while not count or time.perf_counter() < begun + seconds:
            call()
            count += 1
    times = {event.key: event.self_cpu_time_total / count / 1000 for event in profiler.key_averages()}
    return {group: sum(times.get(name, 0.0) for name in names) for group, names in GROUPS.items()}


def block_rows(seconds: float) -> list[dict]:
    """Profile the blocks in all sizes."""
    models = variants(lambda: AutoModel.from_pretrained(minilm()), 384, NARROW, [6])
    blocks = {name: model.get_submodule("encoder.layer.0.attention") for name, model in models.items()}
    rows = []
    for batch, length in SIZES:
        calls = encoding(blocks, torch.randn(batch, length, 384, generator=torch.Generator().manual_seed(SEED)))
        whole = steady(calls, 1, seconds)
        for name, call in calls.items():
            row = {"variant": name, "size": f"{batch} x {length}", "milliseconds": 1000 * whole[name]}
            row |= (found := kernels(call, seconds / len(calls)))
            rows.append(row | {"calls": row["milliseconds"] - sum(found.values())})
    return rows


def kernel_rows(seconds: float) -> list[dict]:
    """Time torch's attention kernel alone, by the width of its heads."""
    rows = {width: {"width of a head": width} for width in WIDTHS}
    for batch, length in SHAPES:
        calls = {}
        for width in WIDTHS:
            states = torch.randn(3, batch, HEADS, length, width, generator=torch.Generator().manual_seed(SEED))
            calls[str(width)] = lambda states=states: F.scaled_dot_product_attention(*states)
        for width, taken in steady(calls, 1, seconds).items():
            rows[int(width)][f"{batch} x {length}"] = 1000 * taken
    return list(rows.values())


@torch.no_grad()
def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="for each size")
    seconds = parser.parse_args().seconds
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows, alone = block_rows(seconds), kernel_rows(seconds)
    print(f"{table(rows, COLUMNS)}\n\n{table(alone, dict.fromkeys(alone[0], '.3f') | {'width of a head': ''})}")
    write("block_profile", rows, kernel=alone, seconds=seconds)


if __name__ == "__main__":
    main()
