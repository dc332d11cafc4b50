"""Training speed after a swap, as a ratio to the original in the same run: examples per second of run_glue.py's steps.

python benchmarks/training.py [--rounds N]

all-MiniLM-L6-v2 on MRPC, batches of 16 of like length, AdamW, one thread. The original and both mixings at a third of
the width (R = 128; `per_head` rounds up to 144) take a step on the same batch in turns, in an order that is shuffled
every round. "plain loop" is the original in ten lines of torch, without Accelerate: what our loop costs.
"""

import argparse
import random
import statistics
import time

import torch
from accelerate import Accelerator
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding
from transformers.utils import logging

from collab_heads import swap_to_collaborative
from collab_heads.data.batches import chunked
from collab_heads.data.classification import Labels, encode
from collab_heads.data.glue import from_folder
from collab_heads.training.loop.steps import optimizer_and_schedule, optimizer_step, parameter_groups
from common import minilm, shared, table, write

BATCH, WIDTH = 16, 128
VARIANTS = ("plain loop", "original", "shared", "per_head")
COLUMNS = {"variant": "", "width": "", "ratio": ".3f", "examples_per_second": ".1f", "parameters": ","}


def batches(count: int) -> list[dict]:
    """Return batches of MRPC training pairs."""
    data = from_folder("mrpc", shared("data/glue")).first({"train": BATCH * count})
    tokenizer = AutoTokenizer.from_pretrained(minilm())
    rows = sorted(encode(data, tokenizer, Labels((0, 1)), 128, False)["train"], key=lambda row: len(row["input_ids"]))
    return [dict(DataCollatorWithPadding(tokenizer)(chunk)) for chunk in chunked(rows, BATCH)]


def stepper(variant: str, accelerator: Accelerator):
    """Return a function that takes one optimizer step on a batch, the model, and its query/key width."""
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(minilm()).train()
    width = 384
    if variant in ("shared", "per_head"):
        report = swap_to_collaborative(model, dim_shared_query_key=WIDTH, kind=variant, tol=1e-2)
        width = report.sites[0].dim
    optimizer, schedule = optimizer_and_schedule(parameter_groups(model, 0.0), 1e-5, "linear", 0, 10_000)

    def plain(batch):
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    if variant == "plain loop":
        return plain, model, width
    wrapped, prepared = accelerator.prepare(model, optimizer)

    def ours(batch):
        optimizer_step(accelerator, wrapped, prepared, [batch], [BATCH], 1.0)
        schedule.step()

    return ours, model, width


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    steps = {variant: stepper(variant, accelerator) for variant in VARIANTS}
    chance = random.Random(0)
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for index, batch in enumerate(chance.sample(batches(arguments.rounds), arguments.rounds)):
        for variant in chance.sample(VARIANTS, len(VARIANTS)):
            started = time.perf_counter()
            steps[variant][0](batch)
            if index >= 2:  # warm-up
                seconds[variant].append(time.perf_counter() - started)
    rows = []
    for variant, (_, model, width) in steps.items():
        # per batch, then the median: batches differ in length
        ratio = statistics.median(o / s for o, s in zip(seconds["original"], seconds[variant], strict=True))
        speed = BATCH * len(seconds[variant]) / sum(seconds[variant])
        rows.append({"variant": variant, "width": width, "ratio": ratio, "examples_per_second": speed})
        rows[-1]["parameters"] = model.num_parameters()
    print(table(rows, COLUMNS))
    write("training", rows, batch=BATCH, rounds=arguments.rounds)


if __name__ == "__main__":
    main()
