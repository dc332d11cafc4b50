"""The line before a long work beside the truth: what compress, swap, distill and analyze say they will take, and take.

    python benchmarks/estimates.py [--rows NUMBER ...]
    python benchmarks/estimates.py --row NUMBER

The second form does one work in this process and prints a line of JSON; the first runs each so, and keeps the stored
rows that are not measured again. One thread, and its processor time, which a busy machine stretches little. "ratio" is
what was said over what was taken; the memory is what the process holds at most, from the line on.
"""

import argparse
import copy
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from real_sizes import MODELS as SIZES
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as theirs

from collab_heads import analyze_heads, compress, distill, swap_to_collaborative
from collab_heads.base import estimates
from collab_heads.demo import sentences
from collab_heads.running import speed
from common import ATTENTION, RowStore, memory_bytes, minilm, reset_peak, shared, table

Batches = list[dict[str, torch.Tensor]]
STEPS = 40  # of a distillation
SAID = "transformers.collab_heads"  # the logger of the line


def distilled(model: PreTrainedModel, batches: Batches) -> object:
    """Distil a model of half of the heads' widths, cut from the weights alone."""
    small = copy.deepcopy(model)
    swap_to_collaborative(small, dim_shared_query_key=0.5, dim_value=0.5, kind="per_head")
    return distill(small, model, batches, STEPS)


WORKS: dict[str, Callable[[PreTrainedModel, Batches], object]] = {
    "compress": lambda model, batches: compress(model, batches, 0.5),
    "compress, no refinement": lambda model, batches: compress(model, batches, 0.5, refine_steps=0),
    "compress, attention": lambda model, batches: compress(model, batches, 0.5, parts=ATTENTION),
    "swap": lambda model, batches: swap_to_collaborative(model, dim_shared_query_key=0.33, batches=batches),
    "swap, per_head": lambda model, batches: swap_to_collaborative(
        model, dim_shared_query_key=0.5, kind="per_head", batches=batches
    ),
    "swap, balanced, values": lambda model, batches: swap_to_collaborative(
        model, dim_shared_query_key=0.33, dim_value=0.5, allocation="balanced", batches=batches
    ),
    "distill": distilled,
    "analyze": lambda model, batches: analyze_heads(model, batches),
}


class Row(NamedTuple):
    """A work to be timed, with how many sentences; 0 for the random batches of `real_sizes.py`."""

    work: str
    model: str
    sentences: int = 0


ROWS = (
    Row("compress", "all-MiniLM-L6-v2", 256),
    Row("compress, attention", "all-MiniLM-L6-v2", 1024),
    Row("compress", "BERT-base, random weights"),
    Row("compress", "GPT-2, 256 wide", 256),
    Row("compress", "Qwen3, 256 wide", 256),
    Row("compress", "Marian, 256 wide", 256),
    Row("swap", "all-MiniLM-L6-v2", 256),
    Row("swap, per_head", "all-MiniLM-L6-v2", 1024),
    Row("swap, balanced, values", "all-MiniLM-L6-v2", 256),
    Row("swap", "BERT-base, random weights"),
    Row("swap, per_head", "SmolLM2-135M, random weights"),
    Row("swap", "Marian, 256 wide", 256),
    Row("distill", "all-MiniLM-L6-v2", 256),
    Row("distill", "GPT-2, 256 wide", 256),
    Row("analyze", "all-MiniLM-L6-v2", 128),
    Row("analyze", "GPT-2, 256 wide", 512),
    Row("analyze", "Marian, 256 wide", 128),
)
SHARED = {  # in the shared data
    "GPT-2, 256 wide": (AutoModelForCausalLM, "models/gpt2-multi30k-en"),
    "Qwen3, 256 wide": (AutoModelForCausalLM, "models/qwen3-multi30k-en"),
    "Marian, 256 wide": (AutoModelForSeq2SeqLM, "models/marian-multi30k-de-en"),
}
RANDOM = {"BERT-base, random weights": "bert", "SmolLM2-135M, random weights": "smollm2"}
BATCH, LONGEST = 32, 64
COLUMNS = {"work": "", "model": "", "sentences": "", "said": ",.0f", "taken": ",.0f", "ratio": ".2f"}
COLUMNS |= {"said_gb": ".2f", "held_gb": ".2f"}


def inputs_of(row: Row) -> tuple[PreTrainedModel, Batches]:
    """Return the model of a row, and its batches."""
    if row.model in RANDOM:
        make, batches = SIZES[RANDOM[row.model]]
        torch.manual_seed(0)
        return make().eval(), batches()
    kind, folder = SHARED[row.model] if row.model in SHARED else (AutoModel, "")
    place = shared(folder) if folder else minilm()
    tokenizer = AutoTokenizer.from_pretrained(place)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    texts, options = sentences(row.sentences), {"padding": True, "truncation": True, "max_length": LONGEST}
    batches = [
        dict(tokenizer(texts[start : start + BATCH], return_tensors="pt", **options))
        for start in range(0, len(texts), BATCH)
    ]
    model = kind.from_pretrained(place, dtype=torch.float32).eval()
    has_labels = model.can_generate()
    return model, [each | ({"labels": each["input_ids"]} if has_labels else {}) for each in batches]


class Line(logging.Handler):
    """Notes what the line says, and the processor time and the memory at that moment."""

    def emit(self, line: logging.LogRecord) -> None:
        """Note a line."""
        if line.args and isinstance(said := line.args[-1], estimates.Estimate):
            self.said, self.held = said, memory_bytes("VmRSS")
            reset_peak()
            self.began = time.process_time()


def measured(row: Row) -> dict:
    """Do a work in this process, and return what its line said and what it took."""
    model, batches = inputs_of(row)
    estimates.LEAST, line = 0.0, Line()  # of short works, too
    speed.time = argparse.Namespace(perf_counter=time.process_time)
    logger = logging.getLogger(SAID)
    logger.setLevel(logging.INFO)
    logger.addHandler(line)
    logger.propagate = False
    WORKS[row.work](model, batches)
    said, taken = line.said, time.process_time() - line.began
    found = {**row._asdict(), "said": said.seconds, "taken": taken, "ratio": said.seconds / taken}
    found["sentences"] = row.sentences or sum(len(each["input_ids"]) for each in batches)
    if said.memory is not None:
        found |= {"said_gb": (line.held + said.memory) / 1e9, "held_gb": memory_bytes("VmHWM") / 1e9}
    return found


def main() -> None:
    """Measure one row, or each in a process of its own; print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", type=int, metavar="NUMBER", help="this row alone, in this process")
    parser.add_argument("--rows", type=int, nargs="+", metavar="NUMBER", help="these, stored or not")
    arguments = parser.parse_args()
    theirs.disable_progress_bar()
    theirs.set_verbosity_error()
    torch.set_num_threads(1)
    if arguments.row is not None:
        print(json.dumps(measured(ROWS[arguments.row])))
        return
    store, keys = RowStore("estimates"), [row[:2] for row in ROWS]
    known = {(row["work"], row["model"]) for row in store.rows}
    for number in arguments.rows or [number for number, key in enumerate(keys) if key not in known]:
        command = [sys.executable, __file__, "--row", str(number)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        store.add(json.loads(done.stdout.splitlines()[-1]))
        print(table(store.rows[-1:], COLUMNS).splitlines()[-1], flush=True)
    rows = store.newest(lambda row: (row["work"], row["model"]))
    store.write(sorted(rows, key=lambda row: keys.index((row["work"], row["model"]))), COLUMNS)


if __name__ == "__main__":
    main()
