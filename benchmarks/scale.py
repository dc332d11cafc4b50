"""Compute what `compress` and training take at 1, 8 and 70 billion parameters, from pieces that are measured here.

    python benchmarks/scale.py measure [--widths 256 384 512] [--layers 8] [--works WORK ...]
    python benchmarks/scale.py

Pieces: each kind of work on a random encoder in a process of its own (`scale_pieces`), on one thread, at several
widths: seconds of the processor and the peak of memory; and how many operations a second a product of matrices does.
"Neurons of one block" chooses and refits the neurons of a feed-forward block four times as wide as the model, as
`compress` does. What the pieces say of a site is carried over to the sites of larger models by what the work is made
of: the cube of a width where matrices are solved, the square where they are held, tokens times parameters where the
model runs. The sizes are those of the Llama 3 family. All figures are estimates; `real_sizes.py` runs the smallest.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from collab_heads.calibration.calibrate import FLOAT64, grouped, most_bytes
from collab_heads.compression.fitting import MOST_TOKENS
from collab_heads.compression.fitting import TOKENS as REFIT_TOKENS
from common import RESULTS, RowStore, table

NEURONS = "neurons of one block"
PIECES = ("swap, from the weights", "swap, calibrated", "swap, refined", "compress", NEURONS, "analyze", "train")
PROGRAM = Path(__file__).with_name("scale_pieces.py")
# bytes of a parameter: in bfloat16, in float32, and in training (itself, its gradient, and two moments of Adam)
HALF, SINGLE, STEP = 2, 4, 16
PROCESSES, BATCH = 8, 4096  # that a training is divided among; tokens of an optimizer step
TOKENS, HELD_OUT = 256 * 512, 1 / 8  # that a large model is calibrated on, and the share that errors are measured on
PARTS = 3  # of attention, each of which is changed once to see what that does to the output
GIGA = 1e9


@dataclass(frozen=True)
class Size:
    """The sizes of a decoder with grouped keys and gated feed-forwards.

    Attributes:
        name: its name in the table.
        width, layers, heads, key_heads, inner, vocabulary: as in its config.
    """

    name: str
    width: int
    layers: int
    heads: int
    key_heads: int
    inner: int
    vocabulary: int = 128_256

    @property
    def attention(self) -> int:
        """Return the parameters of attention in a layer."""
        return 2 * self.width**2 + 2 * self.width * self.width * self.key_heads // self.heads

    @property
    def parameters(self) -> int:
        """Return the parameters of the model, with embeddings counted once."""
        return self.layers * (self.attention + 3 * self.width * self.inner) + self.vocabulary * self.width

    @property
    def feed_forward(self) -> int:
        """Return the parameters of the feed-forward block of a layer."""
        return 3 * self.width * self.inner

    def changing(self, what: str) -> int:
        """Return the parameters that may change: of "attention" or of "layers"."""
        return self.layers * (self.attention + (self.feed_forward if what == "layers" else 0))

    def moments(self, what: str) -> list[int]:
        """Return the bytes of the moments of every site that may change, in model order.

        Attention has two matrices of its input and one of its heads, a feed-forward block one of its neurons.
        """
        of_layer = [3 * self.width**2] + ([self.inner**2] if what == "layers" else [])
        return self.layers * [FLOAT64 * count for count in of_layer]

    def site(self, what: str) -> int:
        """Return the bytes that one site takes in float64 while it is solved, beside its moments.

        Of attention: weights, roots and products. Of a feed-forward block: a factor, a copy of a part of it, and six
        matrices of the shape of the last projection.
        """
        attention, neurons = 6 * self.width**2, 2 * self.inner**2 + 6 * self.width * self.inner
        return FLOAT64 * (max(attention, neurons) if what == "layers" else attention)


SIZES = (
    Size("1 billion", 2048, 16, 32, 8, 8192),
    Size("8 billion", 4096, 32, 32, 8, 14336),
    Size("70 billion", 8192, 80, 64, 8, 28672),
)


def pieces(works: list[str], widths: list[int], layers: int) -> Iterator[dict]:
    """Yield the measurement of each kind of work at each width, made in a separate process."""
    for width in widths:
        for work in works:
            command = [sys.executable, str(PROGRAM), work, str(width), str(layers)]
            found = subprocess.run(command, capture_output=True, text=True, check=True)
            row = json.loads(found.stdout.strip().splitlines()[-1])
            print(row, flush=True)
            yield row


def speed(size: int = 768) -> float:
    """Return the floating-point operations per second of one thread in a matrix product."""
    torch.set_num_threads(1)
    left = torch.randn(size, size)
    return 2 * size**3 / seconds_of(lambda: left @ left)


def seconds_of(function: Callable[[], object]) -> float:
    """Return the processor seconds of a call: the shortest of four, after a warm-up."""
    times = []
    for _ in range(5):
        started = time.process_time()
        function()
        times.append(time.process_time() - started)
    return min(times[1:])


def key(row: dict) -> tuple:
    """Return what identifies a piece, as a sort key for the table."""
    return row["width"], row["layers"], PIECES.index(row["work"])


def passes(layers: int, groups: int, held_groups: int, changes: int) -> float:
    """Return how often `compress` runs all calibration tokens through the model, in units of one pass.

    Args:
        layers: of the model.
        groups: in which sites are calibrated on the examples to fit to.
        held_groups: the same on the examples to measure on.
        changes: parts of a layer's sites, each of which is changed once to see what that does to the output.
    """
    calibrations = groups + HELD_OUT * held_groups + (2 * groups if groups > 1 else 0)  # again for each thing fitted
    return calibrations + HELD_OUT * (changes * layers + 2)  # the output as it is, with each change, with the plan


def refit_passes(sites: int) -> float:
    """Return the same of the refit in order, which runs a sample up to each site, half of the model on average."""
    return sites / 2 * min(MOST_TOKENS, REFIT_TOKENS / sites) / TOKENS


def solve_seconds(rows: list[dict], product: float) -> dict[str, float]:
    """Return the processor seconds of `compress` per site beside running the model, by the cube of its width.

    That is the width of the model for attention, the number of neurons for a feed-forward block. The largest piece
    that was measured counts.
    """
    found = {}
    for row in sorted(rows, key=key):
        if row["work"] == "compress":
            runs = 2 * row["tokens"] * row["model_bytes"] / SINGLE * passes(row["layers"], 1, 1, PARTS) / product
            found["attention"] = max(row["cpu_seconds"] - runs, 0.0) / row["layers"] / row["width"] ** 3
        if row["work"] == NEURONS:
            found["neurons"] = row["cpu_seconds"] / row["neurons"] ** 3
    return found


def estimates(rows: list[dict], measured: dict[str, float]) -> list[dict]:
    """Return two rows per size of model: memory and time of `compress`, of distillation and of training."""
    seconds, found = solve_seconds(rows, measured["product"]), []
    for size in SIZES:
        for what in ("attention", "layers"):
            model, changing = HALF * size.parameters, HALF * size.changing(what)
            sizes = dict(enumerate(size.moments(what)))
            groups, held_groups = (grouped(sizes, most_bytes(model, are_few=are_few)) for are_few in (False, True))
            held = sum(max(sum(sizes[site] for site in group) for group in each) for each in (groups, held_groups))
            working = held + changing / 2 + size.site(what)  # half of what may change waits for its place
            changes = PARTS + (what == "layers")
            count = passes(size.layers, len(groups), len(held_groups), changes) + refit_passes(len(sizes))
            operations = 2 * TOKENS * size.parameters * count
            solves = seconds["attention"] * size.width**3 + seconds["neurons"] * size.inner**3 * (what == "layers")
            found.append(
                {
                    "model": size.name,
                    "compressed": what,
                    "parameters": size.parameters,
                    "model_gb": model / GIGA,
                    "all_moments_gb": 2 * sum(sizes.values()) / GIGA,
                    "groups": len(groups),
                    "compress_gb": (model + working) / GIGA,
                    "compress_share": (model + working) / model,
                    "passes": count,
                    "operations": operations / 1e15,
                    "pass_hours": operations / measured["product"] / 3600,
                    "solve_hours": size.layers * solves / 3600,
                    "distill_gb": (2 * model + STEP * size.changing(what) / 2) / GIGA,
                    "train_gb": STEP * size.parameters / GIGA,
                    "shard_gb": STEP * size.parameters / PROCESSES / GIGA,
                    "step_operations": 6 * BATCH * size.parameters / 1e15,
                }
            )
    return found


def main() -> None:
    """Measure the pieces if requested, then compute, print and store the estimates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("measure",), help="measure the pieces first")
    parser.add_argument("--widths", nargs="+", type=int, default=[256, 384, 512])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--works", nargs="+", choices=PIECES, default=PIECES, help="which pieces (default: all)")
    arguments = parser.parse_args()
    store, path = RowStore("scale"), RESULTS / "scale.json"
    for row in pieces(arguments.works, arguments.widths, arguments.layers) if arguments.what else ():
        store.add(row)
    known = path.exists() and not arguments.what
    measured = json.loads(path.read_text())["speeds"] if known else {"product": speed()}
    rows = sorted(store.newest(key), key=key)
    sizes = estimates(rows, measured)
    print(table(sizes, {name: "" if name in ("model", "compressed") else ",.4g" for name in sizes[0]}))
    store.save(rows, speeds=measured, sizes=sizes)


if __name__ == "__main__":
    main()
