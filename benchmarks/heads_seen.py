"""Show what the heads of real models do: roles, relevance, and what the measures of importance are worth.

python benchmarks/heads_seen.py PART [--work DIR]

marian   the Marian of the shared folder on 1,000 pairs of Multi30k; every head left out on 200 of them (the loss)
minilm   all-MiniLM-L6-v2 on the sentences of a treebank; every head left out on 200 pairs of STS-B: how far the
         sentence embeddings move (1 - cosine to the whole model's), and Spearman x 100
balance  the Marian trained on for 300 steps plain, with alphas, with gates: is importance more balanced?
speed    time against an evaluation pass with attention outputs, interleaved, and peak memory by number of sentences

marian and minilm write the report of `analyze_heads` to DIR, and pictures of it to docs/pictures.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from scipy.stats import spearmanr
from stsb import pairs
from transformers import AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer
from translation import read

from collab_heads import analyze_heads, get_adapter, plots
from collab_heads.analysis import head_importance, leave_one_out
from collab_heads.files.conllu import read_conllu
from collab_heads.heads.comparison import balance
from collab_heads.running.embeddings import embed
from common import PICTURES, ROOT, WORK, interleaved, memory_bytes, minilm, shared, table, write

MARIAN, TEST = "models/marian-multi30k-de-en", "test_2016_flickr"
LEFT_OUT = 200  # examples, for every head
FORWARD = ("statistics", "roles")
TRAIN = (
    "--val_max_target_length 80 --per_device_eval_batch_size 50 --label_smoothing 0.1 --max_tokens 1000 "
    "--learning_rate 3e-4 --warmup_ratio 0.05 --max_train_steps 300 --eval_steps 300 --max_eval_samples 100 "
    "--num_beams 1"
)
TRAINED = {
    "plain": "",
    "alphas": "--alpha_mixing --alpha_start 0.31 --alpha_growth_weight 40 --alpha_growth_radius 1e-4",
    "gated": "--target_heads 36",
}


def translation_batches(tokenizer, count: int | None = None, size: int = 50) -> list[dict]:
    """Return batches of Multi30k pairs of similar length, with labels."""
    source, target = read(TEST, "de", count), read(TEST, "en", count)
    order = sorted(range(len(source)), key=lambda i: len(source[i]))
    batches = []
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        texts = {"text": [source[i] for i in chosen], "text_target": [target[i] for i in chosen]}
        batch = dict(tokenizer(**texts, padding=True, return_tensors="pt"))
        batch["labels"] = batch["labels"].masked_fill(batch["labels"] == tokenizer.pad_token_id, -100)
        batches.append(batch)
    return batches


def marian_model(folder: Path | None = None):
    """Return a Marian, and the tokenizer of the shared one."""
    model = AutoModelForSeq2SeqLM.from_pretrained(folder or shared(MARIAN)).eval()
    return model, AutoTokenizer.from_pretrained(shared(MARIAN))


def head_rows(report) -> list[dict]:
    """Return a row per role: means, roles found, the strongest heads."""
    rows, scores = [], report.scores()
    for role in dict.fromkeys(site.role for site in report.sites):
        sites = [site for site in report.sites if site.role == role]
        labels = [labels for site in sites for labels in report.roles.labels[site.path]]
        row: dict = {"role": role, "heads": len(labels)}
        for name in ("confidence", "entropy", "attention_distance"):
            row[name] = float(torch.cat([scores[name][site.path] for site in sites]).mean())
        for kind in ("positional", "rare tokens"):
            row[kind] = sum(any(label.startswith(kind) for label in each) for each in labels)
        row["syntactic"] = sum(any("->" in label for label in each) for each in labels)
        row["relevance_balance"] = balance(scores["relevance"][site.path] for site in sites)
        best = [
            (float(v), s.layer, report.heads[s.path][i])
            for s in sites
            for i, v in enumerate(scores["relevance"][s.path])
        ]
        row["most relevant (layer.head)"] = ", ".join(
            f"{layer}.{head} {v:.2f}" for v, layer, head in sorted(best)[:-4:-1]
        )
        rows.append(row)
    return rows


def correlation_rows(report, ablation=None) -> list[dict]:
    """Return the rank correlation of every measure with the harm of removing a head: over all heads, and per role."""
    ablation, rows = ablation or report.ablation, []
    harm = ablation.harm()
    for name, scores in report.scores().items():
        if name == "leave_one_out" or scores.keys() != harm.keys():  # what not every site has
            continue
        row: dict = {"measure": name, "harm to": ablation.metric}
        for role in ("all", *dict.fromkeys(site.role for site in report.sites)):
            paths = [site.path for site in report.sites if role in ("all", site.role)]
            row[role] = float(spearmanr(*(torch.cat([each[path] for path in paths]) for each in (scores, harm)))[0])
        rows.append(row)
    return rows


def finish(name: str, report, work: Path, pictures: dict[str, str], more: list[dict] | None = None) -> None:
    """Print and store the tables and the report, and copy the pictures of the documentation."""
    rows, correlations = head_rows(report), correlation_rows(report) + (more or [])
    print(
        report.roles,
        table(rows, dict.fromkeys(rows[0], "")),
        table(correlations, dict.fromkeys(correlations[0], "")),
        sep="\n\n",
    )
    write(f"seen_{name}", rows, correlations=correlations, report=report.to_dict())
    report.save(work / name)
    for picture, as_name in pictures.items():
        for suffix in (".png", ".svg"):
            shutil.copyfile(work / name / f"{picture}{suffix}", PICTURES / f"{as_name}{suffix}")


def marian(work: Path) -> None:
    """Analyze the Marian on Multi30k."""
    model, tokenizer = marian_model()
    report = analyze_heads(model, translation_batches(tokenizer), tokenizer=tokenizer, data=f"Multi30k {TEST}")
    few = translation_batches(tokenizer, LEFT_OUT)
    ablation = analyze_heads(model, few, parts=("statistics", "relevance", "gradient", "ablation"), data="as above")
    report = combined(report, ablation)
    finish("marian", report, work, {"relevance": "marian_relevance", "quality": "marian_quality"})


def combined(report, ablation):
    """Return a report with the ablation and the curves of another one."""
    import dataclasses

    notes = tuple(note for note in report.notes if "left out" not in note)
    notes += (f"heads were left out on the first {ablation.data['sentences']} examples",)
    return dataclasses.replace(report, ablation=ablation.ablation, curves=ablation.curves, notes=notes)


def minilm_part(work: Path) -> None:
    """Analyze all-MiniLM-L6-v2 on the treebank, and its heads' importance on STS-B."""
    model, tokenizer = AutoModel.from_pretrained(minilm()).eval(), AutoTokenizer.from_pretrained(minilm())
    sentences = read_conllu(shared("data/ud_english_ewt/en_ewt-ud-dev.conllu"))
    texts = sorted((sentence.text for sentence in sentences), key=len)
    batches = [
        dict(tokenizer(texts[i : i + 64], padding=True, truncation=True, max_length=128, return_tensors="pt"))
        for i in range(0, len(texts), 64)
    ]
    rows = pairs("dev")[:LEFT_OUT]
    sides = [
        [dict(tokenizer([row[side] for row in rows], padding=True, truncation=True, return_tensors="pt"))]
        for side in (0, 1)
    ]

    whole = [embed(model, side) for side in sides]

    def spearman(model) -> float:
        first, second = (embed(model, side) for side in sides)
        return 100 * float(spearmanr((first * second).sum(-1), [row[2] for row in rows])[0])

    def drift(model) -> float:
        return float(1 - torch.cat([(embed(model, s) * e).sum(-1) for s, e in zip(sides, whole, strict=True)]).mean())

    given = {"tokenizer": tokenizer, "treebank": sentences, "evaluate": drift, "metric": "1 - cosine to the original"}
    report = analyze_heads(model, batches, **given, data="UD English EWT dev")
    scored = leave_one_out(model, spearman, metric="Spearman x 100", higher_is_better=True)
    finish("minilm", report, work, {"roles": "minilm_roles"}, correlation_rows(report, scored))


def balance_part(work: Path) -> None:
    """Continue training in several ways, and compare how evenly importance is spread over the heads."""
    sys.path.insert(0, str(ROOT))
    import run_translation

    rows, spread, sites = [], {}, {}
    for name, flags in TRAINED.items():
        folder = work / f"balance-{name}"
        if not (folder / "all_results.json").exists():
            files = [
                f"{flag} {' '.join(str(shared(f'data/multi30k/{split}.{side}.gz')) for side in ('de', 'en'))}"
                for flag, split in (("--train_file", "train"), ("--validation_file", "val"))
            ]
            command = f"{TRAIN} {flags} {' '.join(files)} --model_name_or_path {shared(MARIAN)} --output_dir {folder}"
            run_translation.main([*command.split(), "--overwrite_output_dir"])
        model, tokenizer = marian_model(folder)
        report = analyze_heads(model, translation_batches(tokenizer), parts=("statistics", "relevance", "gradient"))
        scores = report.scores()
        for measure in ("relevance", "gradient", "confidence"):
            row: dict = {"model": name, "measure": measure, "heads": sum(site.num_heads for site in report.sites)}
            for role in dict.fromkeys(site.role for site in report.sites):
                row[role] = balance(scores[measure][site.path] for site in report.sites if site.role == role)
            rows.append(row)
        spread[name], sites[name] = scores["relevance"], report.sites
    print(
        table(rows, {"model": "", "measure": "", "heads": "", "enc-self": ".3f", "dec-self": ".3f", "dec-enc": ".3f"})
    )
    write("seen_balance", rows, flags={name: f"{TRAIN} {flags}" for name, flags in TRAINED.items()})
    figure = plots.importance_distributions(spread, sites, "relevance")
    plots.save_figure(figure, PICTURES / "relevance_balance")


def speed(rounds: int = 5, count: int = 200) -> None:
    """Measure time as ratios on some batches, and peak memory in separate processes."""
    model, tokenizer = marian_model()
    batches = translation_batches(tokenizer, count)

    def plain() -> None:
        model.set_attn_implementation("eager")
        with torch.no_grad():
            for batch in batches:
                model(**batch, output_attentions=True)

    model.set_attn_implementation("eager")
    common = {"exclude": [tokenizer.eos_token_id], "num_examples": 0}
    kinds = {
        "evaluation pass with attention outputs": plain,
        "forward-only measures": lambda: analyze_heads(model, batches, parts=FORWARD, **common),
        "and relevance": lambda: analyze_heads(model, batches, parts=(*FORWARD, "relevance"), **common),
        "gradient importance alone": lambda: head_importance(model, batches),
    }
    seconds = interleaved(kinds, rounds)
    first = seconds["evaluation pass with attention outputs"]
    rows = [{"what": name, "seconds": value, "ratio": value / first} for name, value in seconds.items()]
    peaks = []
    for sentences in (250, 500, 1000):
        out = subprocess.run(
            [sys.executable, __file__, "memory", "--count", str(sentences)], capture_output=True, text=True, check=True
        )
        peaks.append({"sentences": sentences, "peak MB": float(out.stdout.split()[-1])})
    print(
        table(rows, {"what": "", "seconds": ".2f", "ratio": ".2f"}),
        table(peaks, {"sentences": "", "peak MB": ".0f"}),
        sep="\n\n",
    )
    write("seen_speed", rows, memory=peaks, rounds=rounds, sentences=count)


class Streamed:
    """An iterable of identical batches that are made on demand; only their number varies."""

    def __init__(self, tokenizer, count: int):
        (self.batch,), self.number = translation_batches(tokenizer, 50), count // 50

    def __iter__(self):
        for _ in range(self.number):
            yield {name: tensor.clone() for name, tensor in self.batch.items()}


def memory(count: int) -> None:
    """Print the peak memory of this process, in MB, after the forward-only measures and relevance."""
    model, tokenizer = marian_model()
    assert get_adapter(model)
    analyze_heads(model, Streamed(tokenizer, count), parts=(*FORWARD, "relevance"), num_examples=0)
    print(memory_bytes("VmHWM") / 2**20)


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("marian", "minilm", "balance", "speed", "memory"))
    parser.add_argument("--work", type=Path, default=WORK / "collab-heads-seen")
    parser.add_argument("--count", type=int, default=1000, help="sentences, for memory")
    arguments = parser.parse_args()
    PICTURES.mkdir(parents=True, exist_ok=True)
    parts = {"marian": marian, "minilm": minilm_part, "balance": balance_part}
    if arguments.part in parts:
        parts[arguments.part](arguments.work)
    elif arguments.part == "speed":
        speed()
    else:
        memory(arguments.count)


if __name__ == "__main__":
    main()
