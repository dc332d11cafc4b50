"""The rows of a table of nmt.py, from the existing runs: BLEU, its interval, dev set, heads kept."""

import gzip
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from nmt_parts import DATA, PARTS, TEST
from sacrebleu.metrics import BLEU

from common import shared

ROLES = ("enc-self", "dec-self", "dec-enc")


def folder_of(work: Path, part: str, name: str, seed: int) -> Path:
    """Return the folder of a run's results."""
    return work / f"{part}-{name.replace(',', '').replace(' ', '-')}-{seed}"


def lines_of(splits: Sequence[str], tongue: str) -> list[str]:
    """Return the sentences of splits in a language, one after the other."""
    found = []
    for split in splits:
        with gzip.open(shared(f"{DATA}/{split}.{tongue}.gz"), "rt", encoding="utf-8") as file:
            found += file.read().splitlines()
    return found


def statistics_of(folder: Path, splits: Sequence[str]) -> np.ndarray:
    """Return the counts behind BLEU for every sentence, [N, 10]: four of matches, four of totals, both lengths."""
    (final,) = sorted((folder / "translations").glob("*.txt"), key=lambda path: path.stat().st_mtime)[-1:]  # the test's
    references = lines_of(splits, "en")
    metric = BLEU(effective_order=True)
    scores = (
        metric.sentence_score(line, [reference])
        for line, reference in zip(final.read_text(encoding="utf-8").splitlines(), references, strict=True)
    )
    return np.array([[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in scores])


def bleu(sums: np.ndarray) -> float:
    """Compute corpus BLEU from summed counts [10]."""
    numbers = [int(number) for number in sums]
    return BLEU.compute_bleu(numbers[:4], numbers[4:8], numbers[8], numbers[9]).score


def compared(ours: list[np.ndarray], theirs: list[np.ndarray]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the difference between two mean BLEUs; sentences are resampled."""
    generator, differences = np.random.default_rng(0), []
    for _ in range(1000):
        drawn = generator.integers(len(ours[0]), size=len(ours[0]))
        means = [statistics.mean(bleu(one[drawn].sum(0)) for one in systems) for systems in (ours, theirs)]
        differences.append(means[0] - means[1])
    low, high = np.quantile(differences, [0.025, 0.975])
    return float(low), float(high)


def rows_of(
    work: Path, part: str, seeds: list[int], names: list[str] | None = None, splits: Sequence[str] = (TEST,)
) -> list[dict]:
    """Return one row per setting, all or some: mean and spread over seeds, and the difference to the first."""
    rows, of = [], {}  # of: name -> seed -> counts
    for name, flags in PARTS[part].rows.items():
        if names and name not in names:
            continue
        found = {seed: folder_of(work, part, name, seed) for seed in seeds}
        found = {seed: folder for seed, folder in found.items() if (folder / "all_results.json").exists()}
        if not found:
            continue
        results = {seed: json.loads((folder / "all_results.json").read_text()) for seed, folder in found.items()}
        counts = {seed: statistics_of(folder, splits) for seed, folder in found.items()}
        of[name] = counts
        finals = {seed: one["history"][-1]["metrics"] for seed, one in results.items()}
        scores = {seed: one["bleu"] for seed, one in finals.items()}
        for seed, score in scores.items():
            assert abs(bleu(counts[seed].sum(0)) - score) < 1e-6, (name, seed)
        row: dict = {part: name, "runs": len(found), "bleu": statistics.mean(scores.values())}
        row["range"] = f"{min(scores.values()):.2f} to {max(scores.values()):.2f}" if len(found) > 1 else ""
        if rows:
            row |= differences(counts, of[rows[0][part]])
        if name.startswith("per_head") and (sharing := of.get(name.replace("per_head", "shared"))):  # of that width
            row["shared over it"] = differences(sharing, counts)
        if learned := of.get(name.replace("importance", "learned")) if "importance" in name else None:
            row["over learned"] = differences(counts, learned)
        some = results[min(results)]
        stages = some["stages"]
        row["before"] = next((stages[s]["bleu"] for s in ("swapped", "loaded") if s in stages), None)
        row["seconds"] = statistics.mean(one["train"][-1]["seconds"] for one in results.values())
        row["chrf"] = statistics.mean(one["chrf"] for one in finals.values())
        if PARTS[part].dev:
            row["dev"] = {seed: dev_of(one) for seed, one in results.items()}
        row["parameters"], row["signature"] = some["parameters"], some["signatures"]["bleu"]
        if part in ("heads", "patient", "t5"):
            kept = [kept_of(one) for one in results.values()]
            row["kept"] = "/".join(map(str, sorted({sum(one) for one in kept}, reverse=True)))
            row["enc/dec/cross"] = ", ".join("/".join(map(str, one)) for one in kept)
            row["per seed"] = [{"bleu": s, "kept": k} for s, k in zip(scores.values(), kept, strict=True)]
        row["flags"] = f"{PARTS[part].common} {flags}".strip()
        rows.append(row)
    return rows


def differences(ours: dict[int, np.ndarray], theirs: dict[int, np.ndarray]) -> dict:
    """Return the difference of the mean BLEUs over common seeds, its interval, also as text, and that of each seed."""
    seeds = [seed for seed in ours if seed in theirs]
    if not seeds:
        return {}
    gaps = [bleu(ours[seed].sum(0)) - bleu(theirs[seed].sum(0)) for seed in seeds]
    low, high = compared([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds])
    found = {"difference": statistics.mean(gaps), "interval": (low, high), "95 %": f"{low:+.2f} to {high:+.2f}"}
    return found | {"by seed": gaps}


def dev_of(results: dict) -> dict[int, float]:
    """Return the BLEU on the dev set by step."""
    return {one["step"]: one["metrics"]["bleu"] for one in results["history"] if one["stage"] == "fine_tuned"}


def kept_of(results: dict) -> list[int]:
    """Return the heads kept per role, of 24 each."""
    sites = results["heads"]["pruned"]["sites"] if results["heads"] else []
    return [24 - sum(s["heads_before"] - s["heads_after"] for s in sites if s["role"] == role) for role in ROLES]
