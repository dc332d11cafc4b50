"""Compare every kind of attention with stock on a CUDA device: time, peak memory, exactness.

python benchmarks/gpu.py [--minutes N] [--modes ...] [--models ...] [--backends ...]

One command of at most ten minutes, without data or downloads: an encoder of BERT-base's shape and a translator of a
base-sized Marian's, with random weights. Each variant is timed in turns with stock on the same batch, from an idle
device to an idle device; `time` is the median ratio (below 1: faster than stock), `stock` against itself shows what the
clock alone does. Batches are halved until they fit, for both alike.

encode: one pass of the encoder. decode: greedy generation of a fixed number of tokens, dynamic cache, encoder included.
static: the same with a static cache and the compiled decode step, for few variants. train: forward, backward and a step
of fused AdamW, weights in float32, bf16 by autocast, dropout 0.1, without penalties. exact: swaps that lose nothing
against stock on padded batches; `ratio` is the largest difference of the outputs as a multiple of stock's own largest
difference between sdpa and eager. Flex attention is compiled for every size, so it encodes only, and few variants.

What does not run is named with the reason; so is what the time does not reach. Without a CUDA device there is nothing
to measure: the program says so and ends. `--device cpu --quick` tries every path with tiny models, stores nothing, and
its numbers mean nothing.
"""

import argparse
import gc
import sys
from collections.abc import Iterator, Sequence

import torch
from transformers.utils import is_flash_attn_2_available, logging

from common import table, write
from gpu_calls import BACKENDS, DTYPES, FLASH, FLEX, SDPA, Bench, Setting
from gpu_models import STOCK
from gpu_timing import Budget

LENGTHS = (128, 512)
SHORT, LONG = LENGTHS[:1], LENGTHS[1:]
BOTH = ("encoder", "translator")
# mode, precision, backend, models, lengths: in order of importance, since the time may end
PLAN = (
    *(("exact", precision, SDPA, BOTH, SHORT) for precision in DTYPES),
    ("encode", "bf16", SDPA, ("encoder",), LENGTHS),
    ("decode", "bf16", SDPA, ("translator",), LENGTHS),
    ("train", "bf16", SDPA, ("encoder",), LENGTHS),
    ("exact", "bf16", FLASH, BOTH, SHORT),
    ("encode", "bf16", FLASH, ("encoder",), LENGTHS),
    ("encode", "fp32", SDPA, ("encoder",), LENGTHS),
    ("train", "bf16", SDPA, ("translator",), SHORT),
    ("decode", "fp32", SDPA, ("translator",), SHORT),
    ("train", "fp32", SDPA, ("encoder",), SHORT),
    ("decode", "bf16", FLASH, ("translator",), LENGTHS),
    ("train", "bf16", FLASH, ("encoder",), LENGTHS),
    ("static", "bf16", SDPA, ("translator",), SHORT),
    *(("exact", precision, FLEX, ("encoder",), SHORT) for precision in DTYPES),
    ("encode", "bf16", FLEX, ("encoder",), LONG),
    ("encode", "fp32", FLEX, ("encoder",), LONG),
    ("decode", "fp32", SDPA, ("translator",), LONG),
    ("train", "fp32", SDPA, ("translator",), SHORT),
    ("train", "fp32", SDPA, ("encoder",), LONG),
    ("train", "bf16", FLASH, ("translator",), SHORT),
)
MODES = tuple(dict.fromkeys(mode for mode, *_ in PLAN))
GUESS = {"static": 120.0, FLEX: 40.0}  # seconds of a first comparison where something is compiled
COLUMNS = {"model": "", "precision": "", "backend": "", "length": "", "batch": "", "variant": ""}
TIMED = COLUMNS | {"time": ".3f", "quartiles": "", "tokens/s": ",.0f", "peak MiB": ",.0f", "peak": ".3f"}
EXACT = COLUMNS | {"difference": ".1e", "stock's own": ".1e", "ratio": ".2f"}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="what is not begun by then is skipped (default: 10)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="what to measure (default: all)")
    parser.add_argument("--models", nargs="+", choices=BOTH, default=BOTH, help="on which models (default: both)")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS, help="(default: all)")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, ...; with --quick also cpu (default: cuda)")
    parser.add_argument("--quick", action="store_true", help="tiny models, to try the program; nothing is stored")
    found = parser.parse_args(arguments)
    if not found.quick and not found.device.startswith("cuda"):
        parser.error(f"--device {found.device}: only CUDA devices are measured; add --quick to try the program")
    return found


def settings(arguments: argparse.Namespace) -> Iterator[Setting]:
    """Yield the requested settings, the most important first."""
    for mode, precision, backend, models, lengths in PLAN:
        if mode in arguments.modes and backend in arguments.backends:
            for model in models:
                for length in lengths if model in arguments.models else ():
                    yield Setting(mode, precision, backend, model, length)


def obstacle(setting: Setting, device: torch.device) -> str | None:
    """Return the reason why a setting cannot run here; None if it can."""
    if setting.backend == FLASH and not is_flash_attn_2_available():
        return "the package flash_attn is not installed, or finds no device"
    if setting.precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(False):
        return "the device has no bfloat16"
    return None


def described(device: torch.device) -> dict:
    """Return the description of the device for the stored record."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory MiB": properties.total_memory // 2**20,
        "cuda": torch.version.cuda,
        "float32 products": torch.get_float32_matmul_precision(),
    }


def forget(device: torch.device) -> None:
    """Free the memory of unreferenced models and of code compiled for them."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measured(bench: Bench, setting: Setting, budget: Budget) -> list[dict]:
    """Return a row for every variant: its measurements, or the reason why there are none."""
    shared = {name: getattr(setting, name) for name in ("mode", "model", "precision", "backend")}
    shared |= {"length": bench.length(setting)}
    why, stock, batch, rows = obstacle(setting, bench.device), None, bench.first_batch(setting), []
    for variant in setting.variants:
        row = shared | {"variant": variant}
        work = setting.mode + setting.backend
        if why is None and not budget.allows(work, GUESS.get(setting.mode, GUESS.get(setting.backend, 0.0))):
            why = "the time is up"
        if why is not None:
            rows.append(row | {"skipped": why})
            continue
        try:
            with budget.spending(work):
                stock = stock or bench.load(setting, STOCK)
                found = bench.measure(setting, stock, variant, batch)
            batch = found["batch"]  # the next are measured like this one
        except Exception as error:  # a kernel that cannot is a result; the others go on
            found = {"skipped": first_line(error)}
        rows.append(row | found)
        gc.collect()  # a compiled model refers to itself
    del stock
    forget(bench.device)
    return rows


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, with the name of its class."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160]}" if text else type(error).__name__


def show(rows: list[dict]) -> None:
    """Print a table for every mode, and the skipped measurements with their reasons."""
    for mode in MODES:
        mine = [row for row in rows if row["mode"] == mode and "skipped" not in row]
        if mine:
            print(f"\n{mode}\n\n{table(mine, EXACT if mode == 'exact' else TIMED)}")
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if "skipped" in row:
            what = " ".join(str(row[name]) for name in ("mode", "model", "precision", "backend", "length"))
            reasons.setdefault(f"{what}: {row['skipped']}", []).append(row["variant"])
    for reason, variants in reasons.items():
        print(f"\nskipped: {reason} ({'; '.join(variants)})")


def main(arguments: Sequence[str] | None = None) -> list[dict]:
    """Measure and print all rows, and return them; they are stored unless `--quick` is given."""
    asked = parse(arguments)
    budget, device = Budget(asked.minutes), torch.device(asked.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("skipped: torch finds no CUDA device here, and nothing else is measured")
        return []
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # every size is compiled separately, which needs a higher limit
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.config.recompile_limit = 64
    bench, rows = Bench(device, quick=asked.quick), []
    for setting in settings(asked):
        print(setting, file=sys.stderr)
        rows += measured(bench, setting, budget)
        if not asked.quick:  # after each setting: a stopped program keeps its rows
            write("gpu", rows, device=described(device), minutes=asked.minutes)
    show(rows)
    if asked.quick:
        print("\ntiny models: these numbers mean nothing, and nothing is stored")
    return rows


if __name__ == "__main__":
    main()
