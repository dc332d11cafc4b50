r"""Spend a budget of megabytes on width and on bits, in one plan: all-MiniLM-L6-v2, or another sentence encoder.

    python benchmarks/bytes.py [MODEL] [--draws 0 1 2] [--methods ...] [--sizes 13 10 7.5]
    python benchmarks/bytes.py [MODEL] --methods "NNCF, 4 and 8 bits" --sizes 13 15.2
    python benchmarks/bytes.py [MODEL] --table

A draw is 2,048 sentences, as many of each kind of `calibration.py`, and the seed of all that follows. Only "distilled"
is trained, on its grids: 300 steps of 32 of 10,000 other such sentences, without labels. "compress, 8, 4 and 3 bits" is
`compress(model, batches, "10MB", bits=(8, 4, 3))`; "trimmed" does so, in 5.5 MB, after `trim_vocabulary` has kept half
of the tokens, by the sentences of all kinds that no task has; there "distilled" takes the trimmed original as the
teacher, and "distilled from the original" the original, which reads its own tokens; "bits alone" is the same with no
part that becomes smaller (`parts=()`), and has no row for a size that three bits of all weights exceed. "8 bits", "4
bits" and "3 bits" put every weight and every embedding on one grid (GPTQ, embeddings rounded; `bits_alone.py`); "half
of the layers, N bits" does so after `compress(model, batches, 0.5)`. "export, int8" is `export(model, folder,
int8=True)` of the original to ONNX Runtime or OpenVINO; "layers in 8 bits" does so after `compress(model, batches,
"10MB", bits=8, table_bits=(8, 4))`, whose layers all run in integers; "by time" gives the layers a fifth of their time
in ONNX Runtime in float32, and the tables what is left of the size. ONNX Runtime and NNCF quantise the original, and
run it in their own engine (`bits_of_peers.py`); those that take no data have one row. Megabytes (10^6 bytes) are those
of all weights in a checkpoint, or in the file that a peer writes. Scores, flips and neighbours are those of
`real_encoder.py`. The times of what runs in an engine are for 1 x 16 and 32 x 64 random tokens on one thread, in turns
with the original in PyTorch, as a share of its time; they and the seconds are the processor's. Rows are kept as they
come, in WORK/bytes.jsonl.
"""

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from bits_alone import on_grid
from bits_of_peers import GRAPHS, PEERS, WITH_DATA, WITH_SIZE, written
from calibration import COUNTS, SCORES
from real_encoder import CALIBRATION, STEPS, UNLABELLED, Encoder, Judged
from torch import nn
from transformers.utils import logging

from collab_heads import compress, distill, export, load_exported, plan, trim_vocabulary
from collab_heads.errors import ArgumentError
from collab_heads.model.site_size import num_bytes
from common import WORK, RowStore, compressed_copy, interleaved, minilm

SIZES = (13.0, 10.0, 7.5)  # megabytes
TRIMMED, TRIMMED_SIZES = "trimmed, ", (5.5,)
BITS = (8, 4, 3)
SHARE = 0.2  # of the time of the layers in ONNX Runtime in float32: that of the plan for 10 MB
RATE = 0.005  # of distillation: 60 steps at 0.01 do as well, at 0.02 they diverge
TIMED = {"1 x 16": (1, 16, 100), "32 x 64": (32, 64, 7)}  # rows, tokens, rounds
TIMES = tuple(f"time, {name}" for name in TIMED)
MEANS = ("parameters", "MB", *SCORES, "flips", "neighbours", "predicted", "measured", "seconds", *TIMES)
COLUMNS = {"model": "", "method": "", "draws": "", "MB": ".1f", **dict.fromkeys(SCORES, ".2f")}
COLUMNS |= {f"lost, {name}": ".2f" for name in SCORES}
COLUMNS |= {"flips": ".1f", "neighbours": ".1f", "predicted": ".3f", "measured": ".3f", "seconds": ".0f"}
COLUMNS |= dict.fromkeys(TIMES, ".2f")


class Draw:
    """The calibration of one draw.

    Args:
        encoder: the encoder that is made smaller.
        number: of the draw.
        original: the encoder before its vocabulary was trimmed, if it was.
    """

    def __init__(self, encoder: Encoder, number: int, original: Encoder | None = None):
        self.encoder, self.number, self.original = encoder, number, original or encoder

    @functools.cached_property
    def batches(self) -> list[dict]:
        return self.encoder.draw("mixed", CALIBRATION, self.number)

    @functools.cache  # noqa: B019 (a draw lives as long as the program)
    def planned(self, **options: object) -> tuple:
        """Return a plan that budgets share, and its processor seconds."""
        started = time.process_time()
        made = plan(self.encoder.load(), self.batches, seed=self.number, **options)
        return made, time.process_time() - started


def trimmed(encoder: Encoder) -> Encoder:
    """Return an encoder with half of its tokens, those that sentences use most which no task has."""
    folder = WORK / "bytes" / f"trimmed-{encoder.load().config.hidden_size}"
    if not folder.exists():
        model, texts = encoder.load(), [text for name in COUNTS if name != "mixed" for text in encoder.kind(name)]
        tokenizer, report = trim_vocabulary(model, encoder.task.tokenizer, texts, keep=0.5)
        print(report, flush=True)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return Encoder(str(folder))


def solved(draw: Draw, size: float, **options: object) -> tuple[nn.Module, dict]:
    """Solve a plan for a size, in megabytes."""
    made, before = draw.planned(**options)
    started = time.process_time()
    model, error = compressed_copy(made, f"{size}MB")
    seconds = before + time.process_time() - started
    return model, {"predicted": made.predicted(made.choose(f"{size}MB")), "measured": error, "seconds": seconds}


def solved_by_time(draw: Draw, size: float, *, share: float) -> tuple[nn.Module, dict]:
    """Solve a plan for a share of the time of the layers, then one for a size, which only tables can make."""
    made, before = draw.planned(of="time", engine="onnxruntime", bits=8)
    started = time.process_time()
    model, _ = compressed_copy(made, share)
    compress(model, draw.batches, f"{size}MB", parts=(), bits=8, table_bits=BITS, seed=draw.number)
    return model, {"seconds": before + time.process_time() - started}


def distilled(draw: Draw, size: float, *, untrimmed: bool = False, **options: object) -> tuple[nn.Module, dict]:
    """Solve a plan for a size, and distil the model on its grids."""
    model, more = solved(draw, size, **options)
    teacher = draw.original if untrimmed else draw.encoder
    batches, options = draw.encoder.draw("mixed", UNLABELLED, draw.number), {"learning_rate": RATE, "seed": draw.number}
    if untrimmed:
        options["original_batches"] = teacher.draw("mixed", UNLABELLED, draw.number)
    started = time.process_time()
    report = distill(model, teacher.load(), batches, STEPS, **options)
    errors = [each.total(1.0) for each in (report.before, report.after)]
    return model, {"seconds": more["seconds"] + time.process_time() - started, "held out": errors}


def uniform(draw: Draw, size: float, *, bits: int, budget: float | None = None) -> tuple[nn.Module, dict]:
    """Put all weights on one grid, perhaps of a model with a share of the layers."""
    before = 0.0
    if budget is None:
        model = draw.encoder.load()
    else:
        made, before = draw.planned()
        model, _ = compressed_copy(made, budget)
    started = time.process_time()
    taken = on_grid(model, draw.batches, bits, bits)
    return model, {"seconds": before + time.process_time() - started, "MB": taken / 1e6}


def served(
    draw: Draw, size: float, *, engine: str, make: Callable = solved, **options: object
) -> tuple[nn.Module, dict]:
    """Export the original, or what a plan makes of it, in integers, and load it in its engine."""
    model, more = make(draw, size, **options) if options else (draw.encoder.load(), {"seconds": 0.0})
    started = time.process_time()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "served"
        example = {name: tensor[:4] for name, tensor in draw.encoder.task.batches[0].items()}
        export(model, folder, engine, int8=True, batches=[example])
        graph = folder / GRAPHS[engine]
        taken = written(graph) if engine == "onnx" else graph.with_suffix(".bin").stat().st_size / 1e6
        more |= {"MB": taken, "parameters": model.num_parameters()}
        more["seconds"] += time.process_time() - started
        return load_exported(folder, threads=1, check=False), more


METHODS: dict[str, Callable[[Draw, float], tuple[nn.Module, dict]]] = {
    "compress, 8, 4 and 3 bits": functools.partial(solved, bits=BITS),
    "compress, 8, 4 and 3 bits, distilled": functools.partial(distilled, bits=BITS),
    "bits alone, 8, 4 and 3": functools.partial(solved, bits=BITS, parts=()),
    "8 bits": functools.partial(uniform, bits=8),
    "4 bits": functools.partial(uniform, bits=4),
    "3 bits": functools.partial(uniform, bits=3),
}
METHODS |= {f"half of the layers, {bits} bits": functools.partial(uniform, bits=bits, budget=0.5) for bits in (8, 4, 3)}
METHODS |= {
    "export, int8": functools.partial(served, engine="onnx"),
    "export, int8, OpenVINO": functools.partial(served, engine="openvino"),
    "layers in 8 bits, int8": functools.partial(served, engine="onnx", bits=8, table_bits=(8, 4)),
}
METHODS["layers in 8 bits by time, int8"] = functools.partial(METHODS["export, int8"], make=solved_by_time, share=SHARE)
METHODS["layers in 8 bits, int8, distilled"] = functools.partial(METHODS["layers in 8 bits, int8"], make=distilled)
METHODS |= {f"{TRIMMED}{name}": METHODS[name] for name in METHODS if name.startswith("compress")}
METHODS[f"{TRIMMED}compress, 8, 4 and 3 bits, distilled from the original"] = functools.partial(
    distilled, bits=BITS, untrimmed=True
)
METHODS |= PEERS
SIZED = (*(name for name in METHODS if "and 3" in name or "layers in" in name), *WITH_SIZE)
SERVED = (*(name for name in METHODS if "int8" in name), *PEERS)
WITHOUT_DRAW = (*(name for name in PEERS if name not in WITH_DATA), "export, int8", "export, int8, OpenVINO")  # one row


@torch.no_grad()
def time_shares(model: nn.Module, original: nn.Module, inputs: Sequence[str]) -> dict[str, float]:
    """Return the times of a model as shares of the original's.

    Args:
        model: the model.
        original: the original.
        inputs: the names of what both take.
    """
    found, threads = {}, torch.get_num_threads()
    torch.set_num_threads(1)
    for name, (rows, tokens, rounds) in TIMED.items():
        ids = torch.randint(1000, 30_000, (rows, tokens), generator=torch.Generator().manual_seed(0))
        values = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
        given = {each: values[each] for each in inputs}
        runs = {"model": functools.partial(model, **given), "original": functools.partial(original, **given)}
        seconds = interleaved(runs, rounds, clock=time.process_time)
        found[f"time, {name}"] = seconds["model"] / seconds["original"]
    torch.set_num_threads(threads)
    return found


def original_of(encoder: Encoder, store: RowStore, name: str) -> Judged:
    """Return what the original makes of the tasks."""
    model = encoder.load()
    judged = encoder.judged_once(model)
    if not any(row["method"] == "original" and row["model"] == name for row in store.rows):
        row = {"model": name, "method": "original", "size": None, "draw": 0, "MB": num_bytes(model) / 1e6}
        store.add(row | {"parameters": model.num_parameters()} | judged.scores)
        print(store.rows[-1], flush=True)
    return judged


def measure(arguments: argparse.Namespace, store: RowStore) -> None:
    """Measure the rows that are not there."""
    name, encoder = Path(arguments.model).name, Encoder(arguments.model)
    name = "all-MiniLM-L6-v2" if arguments.model == minilm() else name
    original = original_of(encoder, store, name)
    there = {(row["model"], row["method"], row["size"], row["draw"]) for row in store.rows}
    drawn, trimmed_once = functools.cache(Draw), functools.cache(trimmed)
    for number in arguments.draws:
        for method in arguments.methods:
            is_trimmed = method.startswith(TRIMMED)
            read = trimmed_once(encoder) if is_trimmed else encoder
            draw, place = drawn(read, number, encoder), 0 if method in WITHOUT_DRAW else number
            sizes = TRIMMED_SIZES if is_trimmed else arguments.sizes
            for size in sizes if method in SIZED else (None,):
                if (name, method, size, place) in there:
                    continue
                there.add((name, method, size, place))
                try:
                    model, more = METHODS[method](draw, size)
                except ArgumentError as error:  # it cannot be so small
                    print(method, size, error, flush=True)
                    continue
                row = {"model": name, "method": method, "size": size, "draw": place}
                judged = read.judged(model)
                if method not in SERVED:
                    row |= {"MB": num_bytes(model) / 1e6, "parameters": model.num_parameters()}
                else:
                    more |= time_shares(model, encoder.load(), list(encoder.task.batches[0]))
                store.add(row | more | judged.scores | judged.compared(original))
                print(store.rows[-1], flush=True)


def averaged(rows: Sequence[dict]) -> list[dict]:
    """Return one row for each model, method and size: means over the draws, and what they lost."""
    found, order = [], ["original", *METHODS]
    originals = {row["model"]: row for row in rows if row["method"] == "original"}
    groups = {(row["model"], row["method"], row["size"]) for row in rows}
    for model, method, size in sorted(groups, key=lambda each: (each[0], -(each[2] or 1e3), order.index(each[1]))):
        same = [row for row in rows if (row["model"], row["method"], row["size"]) == (model, method, size)]
        new = {"model": model, "method": method, "size": size, "draws": len(same)}
        known = {name: [row[name] for row in same if row.get(name) is not None] for name in MEANS}
        new |= {name: statistics.mean(values) for name, values in known.items() if values}
        if method != "original":
            new |= {f"lost, {name}": originals[model][name] - new[name] for name in SCORES}
        found.append(new)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=minilm(), help="the folder of a sentence encoder; default MiniLM")
    parser.add_argument("--draws", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--sizes", nargs="+", type=float, default=list(SIZES), help="megabytes")
    parser.add_argument("--table", action="store_true", help="only collect the rows that are there")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    store = RowStore("bytes")
    if not arguments.table:
        measure(arguments, store)
    store.write(averaged(store.rows), COLUMNS)


if __name__ == "__main__":
    main()
