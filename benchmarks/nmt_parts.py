"""The tables of nmt.py: the flags of each of their rows."""

import json
from dataclasses import dataclass

from mended import MENDED

DATA, TEST = "data/multi30k", "test_2016_flickr"
BOTH = (TEST, "val")
FILES = {"--train_file": "train", "--validation_file": TEST}
FILES_WITH_DEV = {"--train_file": "train", "--validation_file": "val", "--test_file": TEST}
DECODE = "--val_max_target_length 80 --per_device_eval_batch_size 50"
EVERY = f"{DECODE} --label_smoothing 0.1"
TUNE = f"{EVERY} --max_tokens 1000 --learning_rate 1e-3 --warmup_ratio 0.05 --max_train_steps 400 --eval_steps 400"
LONG = TUNE.replace("400", "1200") + " --selection_share 0.05"
PATIENT = LONG.replace("1200", "6000")
NARROW = f"{EVERY} --max_tokens 1000 --learning_rate 3e-4 --warmup_ratio 0.05 --max_train_steps 300 --eval_steps 300"
SCRATCH = (
    f"{EVERY} --model_type marian --d_model 256 --num_layers 2 --num_heads 4 --d_ff 512 --vocab_size 3000 "
    "--max_tokens 1200 --learning_rate 2e-3 --lr_scheduler_type inverse_sqrt --num_warmup_steps 300 "
    "--max_train_steps 1600 --eval_steps 1600"
)
LONGER = SCRATCH.replace("1600", "3200", 1).replace("1600", "800").replace("inverse_sqrt", "linear") + " --do_predict"
DEEP = (
    f"{EVERY} --model_type marian --d_model 256 --num_layers 6 --num_heads 8 --d_ff 512 --vocab_size 3000 "
    "--max_tokens 1200 --learning_rate 1e-3 --lr_scheduler_type linear --num_warmup_steps 400 --max_train_steps 2400 "
    "--eval_steps 2400 --checkpointing_steps 400"
)
MIX = (
    f"{EVERY} --max_tokens 1000 --learning_rate 3e-4 --warmup_ratio 0.05 --max_train_samples 7000 "
    "--num_train_epochs 4 --eval_steps 100000"
)
RISK = (
    f"{DECODE} --learning_rate 1e-4 --lr_scheduler_type constant_with_warmup --num_warmup_steps 10 --eval_steps 100000"
)
RISK_STEPS, CROSS_STEPS = 50, 1600  # of about the same time
SAMPLED = "--objective minimum_risk --risk_samples 20 --max_tokens 250 --gradient_accumulation_steps 2"
ENCODER = "--gated_sites enc-self --target_heads 5"


@dataclass(frozen=True)
class Part:
    """A table: the flags of all its rows, and those of each row.

    Attributes:
        common: flags of every row.
        rows: name -> flags; the others are compared with the first one.
        model: folder in the shared data with the initial model; None: from scratch.
        before: whether the model is also measured before fine-tuning.
        dev: whether the dev set is translated during the training, and the test set after it.
    """

    common: str
    rows: dict[str, str]
    model: str | None = None
    before: bool = False
    dev: bool = False


FEW = ("original", "learned 18", "importance 18", "random 18")  # rows that are trained five times as long, too
FLAG = {"importance": "gradient"}  # how a row is called -> its flag


def heads() -> dict[str, str]:
    """Return the rows with fewer heads."""
    rows = {"original": ""}
    for how, counts in {"learned": (36, 18, 9), "importance": (36, 18, 9), "random": (36, 18)}.items():
        rows |= {f"{how} {count}": f"--target_heads {count} --head_selection {FLAG.get(how, how)}" for count in counts}
    rows |= {f"lambda {weight}": f"--gate_weight {weight}" for weight in (0.003, 0.01, 0.03)}
    rows |= {
        f"encoder, {how} 5": f"{ENCODER} --head_selection {FLAG.get(how, how)}"
        for how in ("learned", "importance", "random")
    }
    return rows


def narrow(widths: tuple[int, ...], mixings: tuple[str, ...] = ("shared", "per_head")) -> dict[str, str]:
    """Return the rows with narrower keys."""
    return {
        f"{mixing} {width}": f"--collaborative --dim_shared_query_key {width} --kind {mixing}"
        for mixing in mixings
        for width in widths
    }


def lasting() -> dict[str, str]:
    """Return the rows of longer trainings, at the usual learning rate and at half of it."""
    rows = {"plain": ""} | narrow((64, 16))
    halved = {f"{name}, half the rate": f"{rows[name]} --learning_rate 1e-3" for name in ("plain", *narrow((16,)))}
    return rows | halved


def mixed(layers: int, heads: int) -> dict[str, str]:
    """Return the rows of alphas and rotation: heads change places before epoch 2, and back before epoch 3."""
    swaps = [{"role": "dec-enc", "layers": [0, layers - 1], "heads": [head, head]} for head in range(heads)]
    schedule = json.dumps({"2": swaps, "3": swaps}, separators=(",", ":"))
    rows = {"plain": "", "alphas": "--alpha_mixing --alpha_start 0.31"}
    growth = "--alpha_growth_weight 40 --alpha_growth_beside sum --alpha_growth_radius 1e-4"  # the source's numbers
    rows["alphas, growth"] = f"{rows['alphas']} {growth}"
    rows["manual rotation"] = f"--rotation_schedule {schedule}"
    cycle = "--rotation_count 2 --rotation_start 2 --rotation_end 2"
    return rows | {f"{policy} rotation": f"--rotate {policy} {cycle}" for policy in ("soft", "hard", "random")}


MARIAN, T5 = "models/marian-multi30k-de-en", "models/t5-multi30k-de-en"
PARTS = {
    "heads": Part(LONG, heads(), MARIAN),
    "patient": Part(PATIENT, {name: flags for name, flags in heads().items() if name in FEW}, MARIAN),
    "widths": Part(NARROW, {"original": ""} | narrow((128, 64, 32)), MARIAN, before=True),
    "scratch": Part(SCRATCH, {"plain": ""} | narrow((256,), ("shared",)) | narrow((64, 32, 16))),
    "longer": Part(LONGER, lasting(), dev=True),
    "deep": Part(DEEP, {"6 + 6 layers": ""}),
    "t5": Part(
        TUNE,
        {"original": ""} | narrow((128,), ("shared",)) | {"learned 36": "--target_heads 36"},
        T5,
        before=True,
    ),
    "mixing": Part(MIX, mixed(layers=3, heads=8), MARIAN),
    "born": Part(SCRATCH, mixed(layers=2, heads=4)),
    "mended": Part(
        LONG,
        {"original": "", "18 heads": "--target_heads 18 --head_selection gradient"}
        | {f"18 heads, {how}": f"--model_name_or_path {how}" for how in MENDED},
        MARIAN,
        before=True,
    ),
    "risk": Part(
        RISK,
        {
            "cross-entropy": f"--label_smoothing 0.1 --max_tokens 1000 --max_train_steps {CROSS_STEPS}",
            "minimum risk": f"{SAMPLED} --max_train_steps {RISK_STEPS}",
            "minimum risk, chrF": f"{SAMPLED} --max_train_steps {RISK_STEPS} --risk_metric chrf",
            "both": f"{SAMPLED} --max_train_steps {RISK_STEPS} --risk_cross_entropy 0.1",
        },
        MARIAN,
    ),
}
