"""BERT, MPNet, Whisper, CLIP, SmolLM2 and a Llama of 1.2 billion parameters at their sizes, with random weights.

Seconds, and memory at its peak, of every step.

    python benchmarks/real_sizes.py [--models bert mpnet whisper clip smollm2 llama-1b] [--work forward swap ...]
    python benchmarks/real_sizes.py MODEL WORK FOLDER

The second form does one piece of work in this process and prints a line of JSON; the first runs each so, and keeps the
stored rows that are not measured again. One thread.
Batches are those that a user would calibrate with: 64 sentences of 32 tokens, 8 clips of 30 s one at a time, 32
pictures with captions, 64 pieces of 128 tokens, and 8 of these for the largest model. "forward" runs the model on them
as it is; "save" and "load" take one with half the widths. "Time" is that of a pass through the smaller model, as a
share of the original's, in turns after the peak was read. The peak is what the process holds at most beyond what it
held before the model was made, in multiples of the original's own memory, the model included; "of forward" is the peak
as a share of what the model needs to run.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial

import torch
from transformers import (
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPModel,
    LlamaConfig,
    LlamaForCausalLM,
    MPNetConfig,
    MPNetModel,
    PreTrainedModel,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.utils import logging

from collab_heads import compress, swap_to_collaborative
from collab_heads.compression.report import CompressReport
from common import ATTENTION, RowStore, memory_bytes, reset_peak, table

Batches = list[dict[str, torch.Tensor]]
GENERATOR = torch.Generator().manual_seed(1)
SIDE = {"layers": 6, "attention_heads": 8, "ffn_dim": 2048}  # of Whisper base, encoder and decoder


def bert() -> PreTrainedModel:
    """Build a random model of the size of bert-base-uncased."""
    return BertModel(BertConfig())


def mpnet() -> PreTrainedModel:
    """Build a random model of the size of microsoft/mpnet-base."""
    return MPNetModel(MPNetConfig())


def whisper() -> PreTrainedModel:
    """Build a random model of the size of openai/whisper-base."""
    sides = {f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in SIDE.items()}
    config = WhisperConfig(d_model=512, suppress_tokens=None, begin_suppress_tokens=None, **sides)
    return WhisperForConditionalGeneration(config)


def clip() -> PreTrainedModel:
    """Build a random model of the size of openai/clip-vit-base-patch32."""
    return CLIPModel(CLIPConfig())


def smollm2() -> PreTrainedModel:
    """Build a random model of the size of HuggingFaceTB/SmolLM2-135M."""
    return llama(hidden_size=576, intermediate_size=1536, num_hidden_layers=30, vocab_size=49_152, heads=(9, 3))


def billion() -> PreTrainedModel:
    """Build a random model of the size of meta-llama/Llama-3.2-1B, in float32."""
    return llama(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, vocab_size=128_256, heads=(32, 8))


def llama(heads: tuple[int, int], **sizes: int) -> PreTrainedModel:
    """Build a random Llama of given sizes and numbers of heads and key heads, with tied embeddings."""
    counts = dict(zip(("num_attention_heads", "num_key_value_heads"), heads, strict=True))
    return LlamaForCausalLM(LlamaConfig(**sizes, **counts, tie_word_embeddings=True, max_position_embeddings=2048))


def pieces(count: int = 64, vocabulary: int = 49_000) -> Batches:
    """Return random pieces of 128 tokens, without a mask: a decoder reads texts without padding."""
    ids = torch.randint(5, vocabulary, (4, count // 4, 128), generator=GENERATOR)
    return [{"input_ids": rows} for rows in ids]


def sentences() -> Batches:
    """Return 64 random sentences of 32 tokens."""
    ids = torch.randint(5, 30_000, (4, 16, 32), generator=GENERATOR)
    return [{"input_ids": rows, "attention_mask": torch.ones_like(rows)} for rows in ids]


def clips() -> Batches:
    """Return 8 random clips of 30 seconds, each with 24 decoder tokens."""
    sounds = torch.randn(8, 1, 80, 3000, generator=GENERATOR)
    words = torch.randint(0, 50_000, (8, 1, 24), generator=GENERATOR)
    return [{"input_features": one, "decoder_input_ids": ids} for one, ids in zip(sounds, words, strict=True)]


def pictures() -> Batches:
    """Return 32 random pictures with captions of 24 tokens."""
    batches = []
    for _ in range(4):
        ids = torch.randint(3, 49_000, (8, 24), generator=GENERATOR)
        ids[:, -1] = 49_407  # the end, whose state is the sentence's
        pixels = torch.randn(8, 3, 224, 224, generator=GENERATOR)
        batches.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels})
    return batches


def forward(model: PreTrainedModel, batches: Batches) -> None:
    with torch.no_grad():
        for batch in batches:
            model(**batch)


def narrow(model: PreTrainedModel) -> None:
    """Halve the width of queries, keys and values, from the weights alone."""
    swap_to_collaborative(model, dim_shared_query_key=0.5, dim_value=0.5, kind="per_head")


MODELS = {
    "bert": (bert, sentences),
    "mpnet": (mpnet, sentences),
    "whisper": (whisper, clips),
    "clip": (clip, pictures),
    "smollm2": (smollm2, pieces),
    "llama-1b": (billion, partial(pieces, 8, 128_000)),
}
WORK: dict[str, Callable[[PreTrainedModel, Batches], object]] = {
    "forward": forward,
    "swap": lambda model, batches: swap_to_collaborative(model),
    "swap, half": lambda model, batches: narrow(model),
    "compress": lambda model, batches: compress(model, batches, 0.5, parts=ATTENTION),
    "compress layers": lambda model, batches: compress(model, batches, 0.5),
}
FILES = ("save", "load")
COLUMNS = {"model": "", "work": "", "model_mb": ".0f", "peak": ".2f", "of forward": ".2f", "cpu_seconds": ".1f"}
COLUMNS |= {"operations": ".2f", "time": ".2f"}
ROUNDS = 5


def time_share(small: PreTrainedModel, original: PreTrainedModel, batches: Batches) -> float:
    """Return the processor time of passes through a model as a share of the original's: medians, in turns."""
    seconds: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(ROUNDS + 1):
        for number, model in enumerate((small, original)):
            started = time.process_time()
            forward(model, batches[:1])
            seconds[number].append(time.process_time() - started)
    ours, theirs = (statistics.median(taken[1:]) for taken in seconds.values())
    return ours / theirs


def measured(name: str, work: str, folder: str) -> dict:
    """Measure a piece of work in this process; "load" loads the model that "save" saved."""
    make, batches_of = MODELS[name]
    with torch.device("meta"):
        empty = make()
    size = sum(each.nbytes for each in (*empty.parameters(), *empty.buffers()))
    before = memory_bytes("VmRSS")
    torch.manual_seed(0)
    model = empty if work == "load" else make().eval()
    batches = batches_of()
    if work == "save":
        narrow(model)
    reset_peak()
    started, used, report = time.perf_counter(), time.process_time(), None
    if work == "save":
        model.save_pretrained(folder)
    elif work == "load":
        model = type(empty).from_pretrained(folder)
        forward(model, batches[:1])  # reads the weights that are only mapped from the file
    else:
        report = WORK[work](model, batches)
    taken = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - used}
    peak = memory_bytes("VmHWM") - before
    found = {"model": name, "work": work, "model_bytes": size, "model_mb": size / 1e6, "peak_bytes": peak}
    found |= {"peak": peak / size, "parameters": model.num_parameters(), **taken}
    if isinstance(report, CompressReport):
        torch.manual_seed(0)
        found["operations"] = report.costs["operations"].share
        found["time"] = time_share(model, make().eval(), batches)
    return found


def key(row: dict) -> tuple[str, str]:
    """Return what identifies a row."""
    return row["model"], row["work"]


def main() -> None:
    """Measure one piece, or each in a process of its own; print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("one", nargs="*", metavar="MODEL WORK FOLDER", help="one piece, in this process")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--work", nargs="+", default=[*WORK, *FILES], choices=[*WORK, *FILES])
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    if arguments.one:
        print(json.dumps(measured(*arguments.one)))
        return
    store = RowStore("real_sizes")
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            for work in arguments.work:
                command = [sys.executable, __file__, name, work, folder]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                row = json.loads(done.stdout.splitlines()[-1])
                passes = (each for each in [row, *reversed(store.rows)] if key(each) == (name, "forward"))
                first = next(passes, None)
                store.add(row | {"of forward": first and row["peak_bytes"] / first["peak_bytes"]})
                print(table(store.rows[-1:], COLUMNS).splitlines()[-1], flush=True)
    works = [*WORK, *FILES]
    rows = store.newest(key)
    store.save(sorted(rows, key=lambda row: (list(MODELS).index(row["model"]), works.index(row["work"]))))


if __name__ == "__main__":
    main()
