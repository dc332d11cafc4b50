"""Translation models with fewer heads or narrower keys: Multi30k de-en, test_2016_flickr, beams of 5, sacreBLEU.

python benchmarks/nmt.py PART [--rows NAME ...] [--seeds 0 1 2] [--both] [--work DIR] [--keep] [--table [--note WHY]]

heads    the Marian of the shared folder with some of its 72 heads: learned, by importance, at random, by lambda
patient  some of these rows, trained five times as long
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
With --both the runs translate the dev set, too, and are scored on the 2,014 sentences of both sets: a table of its own,
for differences that 1,000 sentences do not decide.
With --note it adds these to "again", beside the table that is there: rows that ran later, with their own first row, are
not those of the run before, whose machine may have rounded otherwise.
The difference to the first row is that of the means over seeds, with the 95 % interval of a paired bootstrap over
sentences (1,000 draws; the seeds of a row are drawn together).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mended import mended
from nmt_parts import BOTH, DATA, FILES, FILES_WITH_DEV, PARTS, TEST
from nmt_pictures import draw_alphas, draw_heads
from nmt_rows import folder_of, lines_of, rows_of
from transformers import AutoModelForSeq2SeqLM

from common import ROOT, WORK, shared, table, write, write_again

sys.path.insert(0, str(ROOT))
import run_translation
from collab_heads.heads.penalty.alphas import AlphaPenalty
from collab_heads.training.options.run import fingerprint
from collab_heads.training.runs.run import Run

TONGUES = ("de", "en")
evaluate, step = Run.evaluate, AlphaPenalty.step


def run(part: str, name: str, seed: int, work: Path, keep: bool = False, splits: Sequence[str] = (TEST,)) -> None:
    """Run run_translation.py once; a run whose results exist is not repeated."""
    folder, of = folder_of(work, part, name, seed), PARTS[part]
    flags = f"{of.common} {of.rows[name]} --seed {seed} --overwrite_output_dir --output_dir {folder}".split()
    for flag, split in (FILES_WITH_DEV if of.dev else FILES).items():
        several = len(splits) > 1 and split == TEST
        flags += [
            flag,
            *(str(joined(work, splits, tongue) if several else file_of(split, tongue)) for tongue in TONGUES),
        ]
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
    needed = ["all_results.json"] + ["alphas.json"] * ("--alpha_mixing" in flags) + ["model.safetensors"] * keep
    if all((folder / name).exists() for name in needed):
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


def file_of(split: str, tongue: str) -> Path:
    """Return the file of a split in a language."""
    return shared(f"{DATA}/{split}.{tongue}.gz")


def joined(work: Path, splits: Sequence[str], tongue: str) -> Path:
    """Write several splits in a language one after the other, and return the file."""
    path = work / f"{'+'.join(splits)}.{tongue}"
    path.write_text("".join(f"{line}\n" for line in lines_of(splits, tongue)), encoding="utf-8")
    return path


def watch_alphas() -> list[list[float]]:
    """Return a list that fills with the nuclear norms of all alphas after every optimizer step of the next training."""
    norms: list[list[float]] = []

    def watched(self):
        step(self)
        norms.append(self.norms().tolist())  # `norms_now` stands still where no norm is pushed

    AlphaPenalty.step = watched
    return norms


def main() -> None:
    """Run what is missing, print, store, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="some of the table; all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--both", action="store_true", help="score the dev set beside the test set")
    parser.add_argument("--work", type=Path, default=WORK / "collab-heads-nmt")
    parser.add_argument("--keep", action="store_true", help="leave the trained models in DIR")
    parser.add_argument("--table", action="store_true", help="collect and draw only")
    parser.add_argument("--note", help="with --table and --rows: why these ran again")
    arguments = parser.parse_args()
    part = arguments.part
    if unknown := set(arguments.rows or ()) - set(PARTS[part].rows):
        parser.error(f"--rows {unknown}: {part} has {list(PARTS[part].rows)}")
    if arguments.both and PARTS[part].dev:
        parser.error(f"--both: {part} translates the dev set while it trains")
    splits = BOTH if arguments.both else (TEST,)
    arguments.work /= "both" if arguments.both else ""
    arguments.work.mkdir(parents=True, exist_ok=True)
    for seed in [] if arguments.table else arguments.seeds:
        for name in arguments.rows or PARTS[part].rows:
            run(part, name, seed, arguments.work, arguments.keep, splits)
    if arguments.note and not (arguments.table and arguments.rows):
        parser.error("--note goes with --table and --rows")
    if arguments.table and arguments.rows and not (arguments.both or arguments.note):
        parser.error("--table with --rows needs --note, and goes beside what is stored: why did these run again?")
    rows = rows_of(arguments.work, part, arguments.seeds, arguments.rows, splits)
    columns = {part: "", "kept": "", "enc/dec/cross": "", "before": ".2f", "bleu": ".2f", "range": ""}
    columns |= {"difference": "+.2f", "95 %": "", "parameters": ",", "runs": ""}
    columns |= {"chrf": ".2f", "seconds": ".0f"} if part == "risk" else {}
    print(table(rows, {name: spec for name, spec in columns.items() if any(row.get(name) for row in rows)}))
    name = f"nmt_{part}_both" if arguments.both else f"nmt_{part}"
    if arguments.note:
        write_again(name, rows, arguments.note, seeds=arguments.seeds)
    elif arguments.table:
        write(name, rows, seeds=arguments.seeds)
    if arguments.table and not (arguments.both or arguments.note):
        if part == "heads":
            draw_heads(rows)
        if part == "mixing":
            names = ("alphas", "alphas, growth")
            draw_alphas({name: folder_of(arguments.work, part, name, arguments.seeds[0]) for name in names})


if __name__ == "__main__":
    main()
