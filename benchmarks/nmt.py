"""Translation models with fewer heads or narrower keys: Multi30k de-en, test_2016_flickr, beams of 5, sacreBLEU.

python benchmarks/nmt.py PART [--rows NAME ...] [--seeds 0 1 2] [--work DIR] [--keep] [--table [--note WHY]]

heads    the Marian of the shared folder with some of its 72 heads: learned, by importance, at random, by lambda
widths   the same Marian with narrower shared keys, before and after fine-tuning
scratch  small Marians trained from the start: collaborative against narrow concatenated heads
longer   the narrowest of them and the plain one, trained twice as long, until the learning rate is zero
deep     a Marian of 6 + 6 layers, trained from the start, to look at its heads (heads_seen.py) and contributions
t5       the T5 of the shared folder: a swap and a pruning
mixing   the same Marian trained on, with alphas, with growth loss, with heads that rotate
born     small Marians trained from the start in these ways
mended   the same Marian with 18 of 72 heads, mended before it is trained on (mended.py)
risk     the same Marian trained on, to lower the risk of its translations, and as long with cross-entropy

Every run is one of run_translation.py and translates the test set at the end of its steps: nothing is selected on it
(or on the dev set, which "longer" translates every 800 steps to show whether BLEU still rises).
Runs found complete in DIR are not repeated, so parts and seeds can run side by side; --table only collects and draws.
With --rows it stores these under "again", beside the table that is there: rows that ran once more, with their own first
row, are not those of the run before, whose machine may have rounded otherwise.
The difference to the first row is that of the means over seeds, with the 95 % interval of a paired bootstrap over
sentences (1,000 draws; the seeds of a row are drawn together).
"""

import argparse
import gzip
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from mended import MENDED, mended
from nmt_pictures import draw_alphas, draw_heads
from sacrebleu.metrics import BLEU
from transformers import AutoModelForSeq2SeqLM

from common import ROOT, WORK, shared, table, write, write_again

sys.path.insert(0, str(ROOT))
import run_translation
from collab_heads.heads.penalty.alphas import AlphaPenalty
from collab_heads.training.flags.arguments import fingerprint
from collab_heads.training.runs.run import Run

DATA, TEST = "data/multi30k", "test_2016_flickr"
FILES = {"--train_file": "train", "--validation_file": TEST}
FILES_WITH_DEV = {"--train_file": "train", "--validation_file": "val", "--test_file": TEST}
DECODE = "--val_max_target_length 80 --per_device_eval_batch_size 50"
EVERY = f"{DECODE} --label_smoothing 0.1"
TUNE = f"{EVERY} --max_tokens 1000 --learning_rate 1e-3 --warmup_ratio 0.05 --max_train_steps 400 --eval_steps 400"
LONG = TUNE.replace("400", "1200") + " --selection_share 0.05"
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
ROLES = ("enc-self", "dec-self", "dec-enc")


@dataclass(frozen=True)
class Part:
    """A table: the flags of all its rows, and those of each.

    Attributes:
        common: flags of every row.
        rows: name -> flags; the first is what the others are compared with.
        model: folder of the shared data to start from; None: from scratch.
        before: whether the model is measured before fine-tuning too.
        dev: whether the dev set is translated during the training, and the test set after it.
    """

    common: str
    rows: dict[str, str]
    model: str | None = None
    before: bool = False
    dev: bool = False


def heads() -> dict[str, str]:
    """Rows of heads kept."""
    rows = {"original": ""}
    for how, counts in {"learned": (36, 18, 9), "importance": (36, 18, 9), "random": (36, 18)}.items():
        rows |= {f"{how} {count}": f"--target_heads {count} --head_selection {how}" for count in counts}
    rows |= {f"lambda {weight}": f"--gate_weight {weight}" for weight in (0.003, 0.01, 0.03)}
    rows |= {f"encoder, {how} 5": f"{ENCODER} --head_selection {how}" for how in ("learned", "importance", "random")}
    return rows


def narrow(widths: tuple[int, ...], mixings: tuple[str, ...] = ("shared", "per_head")) -> dict[str, str]:
    """Rows of key widths."""
    return {
        f"{mixing} {width}": f"--collaborative --dim_shared_query_key {width} --mixing {mixing}"
        for mixing in mixings
        for width in widths
    }


def mixed(layers: int, heads: int) -> dict[str, str]:
    """Rows of alphas and rotation: heads change places before epoch 2, and back before epoch 3."""
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
    "widths": Part(NARROW, {"original": ""} | narrow((128, 64, 32)), MARIAN, before=True),
    "scratch": Part(SCRATCH, {"plain": ""} | narrow((256,), ("shared",)) | narrow((64, 32, 16))),
    "longer": Part(LONGER, {"plain": ""} | narrow((16,)), dev=True),
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
        {"original": "", "18 heads": "--target_heads 18 --head_selection importance"}
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
evaluate, step = Run.evaluate, AlphaPenalty.step


def run(part: str, name: str, seed: int, work: Path, keep: bool = False) -> None:
    """One run of run_translation.py, unless its results are there already."""
    folder, of = folder_of(work, part, name, seed), PARTS[part]
    flags = f"{of.common} {of.rows[name]} --seed {seed} --overwrite_output_dir --output_dir {folder}".split()
    for flag, split in (FILES_WITH_DEV if of.dev else FILES).items():
        flags += [flag, *(str(shared(f"{DATA}/{split}.{language}.gz")) for language in ("de", "en"))]
    if "--model_name_or_path" in flags:  # the row has a model of its own
        place = flags.index("--model_name_or_path") + 1
        flags[place] = str(mended(flags[place], seed, work))
    else:
        flags += ["--model_name_or_path", str(shared(of.model))] if of.model else []
    if "--rotation_schedule" in flags:  # the row has the schedule itself
        schedule, place = work / f"{part}-schedule.json", flags.index("--rotation_schedule") + 1
        schedule.write_text(flags[place])
        flags[place] = str(schedule)
    asked = json.loads(json.dumps(fingerprint(run_translation.parse(flags))))
    if (folder / "all_results.json").exists() and ("--alpha_mixing" not in flags or (folder / "alphas.json").exists()):
        done = json.loads((folder / "all_results.json").read_text())["arguments"]
        if all(done.get(flag) == value for flag, value in asked.items() if flag != "mixed_precision"):
            return

    def measured(self, stage, *more):
        """Measure at the end, and before the training where the table shows it."""
        if (stage == "pruned" if "gates" in self.heads.record else stage == "fine_tuned" and not self.learns) or (
            of.before and stage in ("loaded", "swapped")
        ):
            evaluate(self, stage, *more)

    Run.learns = "--gate_weight" in flags or ("--target_heads" in flags and "learned" in name)
    Run.evaluate = evaluate if of.dev else measured
    norms = watch_alphas()
    run_translation.main(flags)
    if norms:
        (folder / "norms.json").write_text(json.dumps(norms))
        found = AutoModelForSeq2SeqLM.from_pretrained(folder).state_dict()
        alphas = {name: value.tolist() for name, value in found.items() if name.endswith("mixing.alpha")}
        (folder / "alphas.json").write_text(json.dumps(alphas))
    if not keep:
        (folder / "model.safetensors").unlink()


def watch_alphas() -> list[list[float]]:
    """A list that fills with the nuclear norms of all alphas, after every optimizer step of the next training."""
    norms: list[list[float]] = []

    def watched(self):
        step(self)
        norms.append(self.norms().tolist())  # `norms_now` stands still where no norm is pushed

    AlphaPenalty.step = watched
    return norms


def folder_of(work: Path, part: str, name: str, seed: int) -> Path:
    """Where the results of a run are."""
    return work / f"{part}-{name.replace(',', '').replace(' ', '-')}-{seed}"


def statistics_of(folder: Path) -> np.ndarray:
    """BLEU's counts of every sentence, [1000, 10]: four of matches, four of totals, both lengths."""
    (final,) = sorted((folder / "translations").glob("*.txt"), key=lambda path: path.stat().st_mtime)[-1:]  # the test's
    with gzip.open(shared(f"{DATA}/{TEST}.en.gz"), "rt", encoding="utf-8") as file:
        references = file.read().splitlines()
    metric = BLEU(effective_order=True)
    scores = (
        metric.sentence_score(line, [reference])
        for line, reference in zip(final.read_text(encoding="utf-8").splitlines(), references, strict=True)
    )
    return np.array([[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in scores])


def bleu(sums: np.ndarray) -> float:
    """Corpus BLEU of summed counts [10]."""
    numbers = [int(number) for number in sums]
    return BLEU.compute_bleu(numbers[:4], numbers[4:8], numbers[8], numbers[9]).score


def compared(ours: list[np.ndarray], theirs: list[np.ndarray]) -> tuple[float, float]:
    """The 95 % interval of the difference of the mean BLEUs, sentences drawn with replacement."""
    generator, differences = np.random.default_rng(0), []
    for _ in range(1000):
        drawn = generator.integers(len(ours[0]), size=len(ours[0]))
        means = [statistics.mean(bleu(one[drawn].sum(0)) for one in systems) for systems in (ours, theirs)]
        differences.append(means[0] - means[1])
    low, high = np.quantile(differences, [0.025, 0.975])
    return float(low), float(high)


def rows_of(work: Path, part: str, seeds: list[int], names: list[str] | None = None) -> list[dict]:
    """One row per setting, all or some: mean and spread over seeds, and the difference to the first."""
    rows, first = [], {}
    for name, flags in PARTS[part].rows.items():
        if names and name not in names:
            continue
        found = {seed: folder_of(work, part, name, seed) for seed in seeds}
        found = {seed: folder for seed, folder in found.items() if (folder / "all_results.json").exists()}
        if not found:
            continue
        results = {seed: json.loads((folder / "all_results.json").read_text()) for seed, folder in found.items()}
        counts = {seed: statistics_of(folder) for seed, folder in found.items()}
        first = first or counts
        finals = {seed: one["history"][-1]["metrics"] for seed, one in results.items()}
        scores = {seed: one["bleu"] for seed, one in finals.items()}
        for seed, score in scores.items():
            assert abs(bleu(counts[seed].sum(0)) - score) < 1e-6, (name, seed)
        row: dict = {part: name, "runs": len(found), "bleu": statistics.mean(scores.values())}
        row["range"] = f"{min(scores.values()):.2f} to {max(scores.values()):.2f}" if len(found) > 1 else ""
        common = [seed for seed in counts if seed in first]
        if rows and common:
            base = statistics.mean(bleu(first[seed].sum(0)) for seed in common)
            row["difference"] = statistics.mean(scores[seed] for seed in common) - base
            row["interval"] = compared([counts[s] for s in common], [first[s] for s in common])
            row["95 %"] = f"{row['interval'][0]:+.2f} to {row['interval'][1]:+.2f}"
        some = results[min(results)]
        stages = some["stages"]
        row["before"] = next((stages[s]["bleu"] for s in ("swapped", "loaded") if s in stages), None)
        row["seconds"] = statistics.mean(one["train"][-1]["seconds"] for one in results.values())
        row["chrf"] = statistics.mean(one["chrf"] for one in finals.values())
        if PARTS[part].dev:
            row["dev"] = {seed: dev_of(one) for seed, one in results.items()}
        row["parameters"], row["signature"] = some["parameters"], some["signatures"]["bleu"]
        if part in ("heads", "t5"):
            kept = [kept_of(one) for one in results.values()]
            row["kept"] = "/".join(map(str, sorted({sum(one) for one in kept}, reverse=True)))
            row["enc/dec/cross"] = ", ".join("/".join(map(str, one)) for one in kept)
            row["per seed"] = [{"bleu": s, "kept": k} for s, k in zip(scores.values(), kept, strict=True)]
        row["flags"] = f"{PARTS[part].common} {flags}".strip()
        rows.append(row)
    return rows


def dev_of(results: dict) -> dict[int, float]:
    """BLEU of the dev set: step -> BLEU."""
    return {one["step"]: one["metrics"]["bleu"] for one in results["history"] if one["stage"] == "fine_tuned"}


def kept_of(results: dict) -> list[int]:
    """Heads kept per role, of 24 each."""
    sites = results["heads"]["pruned"]["sites"] if results["heads"] else []
    return [24 - sum(s["heads_before"] - s["heads_after"] for s in sites if s["role"] == role) for role in ROLES]


def main() -> None:
    """Run what is missing, print, store, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="some of the table; all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--work", type=Path, default=WORK / "collab-heads-nmt")
    parser.add_argument("--keep", action="store_true", help="leave the trained models in DIR")
    parser.add_argument("--table", action="store_true", help="collect and draw only")
    parser.add_argument("--note", help="with --table and --rows: why these ran again")
    arguments = parser.parse_args()
    part = arguments.part
    if unknown := set(arguments.rows or ()) - set(PARTS[part].rows):
        parser.error(f"--rows {unknown}: {part} has {list(PARTS[part].rows)}")
    arguments.work.mkdir(parents=True, exist_ok=True)
    for seed in [] if arguments.table else arguments.seeds:
        for name in arguments.rows or PARTS[part].rows:
            run(part, name, seed, arguments.work, arguments.keep)
    if arguments.table and bool(arguments.rows) != bool(arguments.note):
        parser.error("--table with --rows needs --note, and goes beside what is stored: why did these run again?")
    rows = rows_of(arguments.work, part, arguments.seeds, arguments.rows)
    columns = {part: "", "kept": "", "enc/dec/cross": "", "before": ".2f", "bleu": ".2f", "range": ""}
    columns |= {"difference": "+.2f", "95 %": "", "parameters": ",", "runs": ""}
    columns |= {"chrf": ".2f", "seconds": ".0f"} if part == "risk" else {}
    print(table(rows, {name: spec for name, spec in columns.items() if any(row.get(name) for row in rows)}))
    if arguments.table and arguments.rows:
        write_again(f"nmt_{part}", rows, arguments.note, seeds=arguments.seeds)
    elif arguments.table:
        write(f"nmt_{part}", rows, seeds=arguments.seeds)
        if part == "heads":
            draw_heads(rows)
        if part == "mixing":
            names = ("alphas", "alphas, growth")
            draw_alphas({name: folder_of(arguments.work, part, name, arguments.seeds[0]) for name in names})


if __name__ == "__main__":
    main()
