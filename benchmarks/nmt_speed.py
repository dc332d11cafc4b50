"""Training speed of run_translation.py's steps, as ratios to the original in the same run: target pieces per second.

python benchmarks/nmt_speed.py [--rounds N] [--tokens N] [--inference]

The Marian of the shared folder on Multi30k de-en, batches of --tokens padded pieces, label smoothing, AdamW, one
thread. All variants take a step on the same pairs, collated by themselves, in turns, in an order that is shuffled every
round. "plain loop" is the stock model in ten lines of torch, without Accelerate and without our loss and batches. With
--inference, greedy translation of batches of 16 sentences is timed instead.
"""

import argparse
import random
import statistics
import time
from functools import partial

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq
from transformers.utils import logging

from collab_heads import fold_heads, swap_to_alpha, swap_to_collaborative, swap_to_gated
from collab_heads.data.batches import Collate, token_steps
from collab_heads.data.parallel import from_files, read_lines
from collab_heads.data.translation import Objective, encode, num_targets
from collab_heads.training import HeadPenalty
from collab_heads.training.loop.steps import optimizer_and_schedule, optimizer_step, parameter_groups
from common import shared, table, write

MODEL, SMOOTHING = "models/marian-multi30k-de-en", 0.1
VARIANTS = ("plain loop", "original", "alphas", "alphas, growth", "folded", "gates", "18 heads", "shared", "per_head")
TRANSLATING = ("original", "alphas", "folded")
COLUMNS = {"variant": "", "ratio": ".3f", "quartiles": "", "targets_per_second": ".0f", "parameters": ","}


def changed(variant: str):
    """Return the model of a variant, and the penalty that its training adds, if any."""
    torch.manual_seed(0)
    model, penalty = AutoModelForSeq2SeqLM.from_pretrained(shared(MODEL)).train(), None
    if variant.startswith("alphas") or variant == "folded":
        swap_to_alpha(model)
    if variant == "folded":
        fold_heads(model)
    if variant.startswith("alphas"):
        penalty = HeadPenalty(model, growth=40.0 if "growth" in variant else 0.0)
    if variant in ("gates", "18 heads"):
        swap_to_gated(model)
        sizes = {"gates": {"gate_weight": 0.01}, "18 heads": {"target_heads": 18, "steps": 1}}
        penalty = HeadPenalty(model, **sizes[variant])
    if variant in ("shared", "per_head"):
        swap_to_collaborative(model, dim_shared_query_key=128, kind=variant, tol=1e-2)
    return model, penalty


def stepper(variant: str, accelerator: Accelerator, tokenizer):
    """Return a function that takes one optimizer step on pairs, and the model."""
    model, penalty = changed(variant)
    groups = parameter_groups(model, 0.0, penalty)
    optimizer, schedule = optimizer_and_schedule(groups, 1e-5, "linear", 0, 10_000)
    if variant == "plain loop":
        pad = DataCollatorForSeq2Seq(tokenizer, model)

        def plain(pairs):
            batch = pad(pairs)
            labels = batch.pop("labels")
            logits = model(**batch, use_cache=False).logits
            F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=SMOOTHING).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

        return plain, model
    wrapped, prepared = accelerator.prepare(model, optimizer)
    collate = Collate(model, tokenizer.pad_token_id)
    loss = Objective(SMOOTHING)

    def ours(pairs):
        batch = collate(pairs)
        optimizer_step(accelerator, wrapped, prepared, [batch], [num_targets(batch)], 1.0, penalty, loss)
        schedule.step()

    return ours, model


def inference(tokenizer, sentences: list[str], rounds: int) -> list[dict]:
    """Measure greedy translation against the original, batch by batch, with the variants in shuffled order."""
    models = {name: changed(name)[0].eval() for name in TRANSLATING}
    ratios: dict[str, list[float]] = {name: [] for name in models}
    chance = random.Random(0)
    for index in range(rounds + 1):
        batch = tokenizer(sentences[16 * index : 16 * index + 16], padding=True, return_tensors="pt")
        seconds = {}
        for name in chance.sample(TRANSLATING, len(TRANSLATING)):
            started = time.perf_counter()
            models[name].generate(**batch, num_beams=1, do_sample=False, min_length=20, max_length=20)
            seconds[name] = time.perf_counter() - started
        for name in models if index else ():  # the first is a warm-up
            ratios[name].append(seconds[name] / seconds["original"])
    rows = []
    for name, found in ratios.items():
        low, ratio, high = statistics.quantiles(found, n=4)
        rows.append({"variant": name, "time": ratio, "quartiles": f"{low:.3f} to {high:.3f}"})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--inference", action="store_true")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    tokenizer = AutoTokenizer.from_pretrained(shared(MODEL))
    if arguments.inference:
        sentences = read_lines(shared("data/multi30k/train.de.gz"))
        found = inference(tokenizer, sentences, arguments.rounds)
        print(table(found, {"variant": "", "time": ".3f", "quartiles": ""}))
        write("nmt_speed_inference", found, rounds=arguments.rounds)
        return
    files = {"train": [str(shared(f"data/multi30k/train.{language}.gz")) for language in ("de", "en")]}
    pairs = encode(from_files(files, None, None).first({"train": 5000}), tokenizer, "", 128, 128)["train"]
    lengths = [max(map(len, pair)) for pair in zip(pairs["input_ids"], pairs["labels"], strict=True)]
    order = partial(token_steps, lengths, arguments.tokens, 1, 0)(0)
    steps = {variant: stepper(variant, accelerator, tokenizer) for variant in VARIANTS}
    chance = random.Random(0)
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    targets = 0
    for index, (batch,) in enumerate(order[: arguments.rounds + 2]):
        rows = [{name: pairs[i][name] for name in ("input_ids", "labels")} for i in batch]
        rows = [row | {"attention_mask": [1] * len(row["input_ids"])} for row in rows]
        targets += sum(len(row["labels"]) for row in rows) if index >= 2 else 0
        for variant in chance.sample(VARIANTS, len(VARIANTS)):
            started = time.perf_counter()
            steps[variant][0]([dict(row) for row in rows])
            if index >= 2:  # warm-up
                seconds[variant].append(time.perf_counter() - started)
    found = []
    for variant, (_, model) in steps.items():
        base = seconds["plain loop"]
        ratios = [plain / own for plain, own in zip(base, seconds[variant], strict=True)]  # batches differ in length
        low, ratio, high = statistics.quantiles(ratios, n=4)
        speed = targets / sum(seconds[variant])
        row = {"variant": variant, "ratio": ratio, "quartiles": f"{low:.3f} to {high:.3f}", "targets_per_second": speed}
        found.append(row | {"parameters": model.num_parameters()})
    print(table(found, COLUMNS))
    write("nmt_speed", found, tokens=arguments.tokens, rounds=arguments.rounds)


if __name__ == "__main__":
    main()
