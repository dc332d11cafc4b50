"""Functions that read our own figures in the table of claims from the stored records."""

import math
import statistics
from collections.abc import Mapping

from scipy.stats import t as student
from shown.head_worth import of_models
from shown.records import row, rows_of


def against_first(name: str, key: str, value: str, again: int = 0) -> str:
    """Return the difference of a row to the first row of its table, or of a repetition, with its interval."""
    return against(row(name, again=again, **{key: value}))


def against(found: Mapping) -> str:
    """Return a difference with its interval."""
    return f"{found['difference']:+.2f} BLEU ({found['95 %']})"


def by_seed(name: str, key: str, value: str) -> str:
    """Return the differences of a row to the first row of its table, seed by seed."""
    return ", ".join(f"{gap:+.2f}" for gap in row(name, **{key: value})["by seed"])


TESTED = 2014  # sentences of test_2016_flickr and val


def sentences_needed(name: str, key: str, value: str, bound: float) -> str:
    """Return how many sentences would exclude a difference that both sets leave open; intervals shrink by roots."""
    found = row(f"{name}_both", **{key: value})
    low, high = found["interval"]
    count = TESTED * ((high - low) / 2 / (found["difference"] - bound)) ** 2
    return f"{math.ceil(count / 100) * 100:,}"


def scores(name: str, shown: Mapping[str, tuple[str, str]], score: str) -> str:
    """Return the scores of some rows, given as label -> (key, value)."""
    return ", ".join(f"{label} {row(name, **{key: value})[score]:.2f}" for label, (key, value) in shown.items())


def exact() -> str:
    """Return how many translations are identical after swaps at full width."""
    found = [each["identical"] for each in rows_of("translation") if each.get("method") == "lossless"]
    return f"{', '.join(sorted(set(found)))} translations identical, in {len(found)} swaps"


def glue(settings: Mapping[str, str]) -> str:
    """Return averages over the tasks after training again: that of the original, and the gap of each setting to it."""
    ends = {label: row("glue_seeds", R=value) for label, value in settings.items()}
    gaps = ", ".join(f"{label} {end['difference']:+.2f} ({end['95 %']})" for label, end in ends.items())
    return f"original {row('glue_seeds', R='original')['average again']:.2f}, {gaps}"


ALONE = {"at 64": "per_head 64", "at half the rate": "per_head 16, half the rate"}  # one seed


def longer() -> str:
    """Return the results of keys 16 wide, shared and per head, from scratch and trained to a learning rate of zero."""
    kinds = ("shared 16", "per_head 16", "plain")
    found = row("nmt_longer", longer="per_head 16")["shared over it"]
    ends = scores("nmt_longer", {each: ("longer", each) for each in kinds}, "bleu")
    gaps = ", ".join(f"{gap:+.2f}" for gap in found["by seed"])
    plain = row("nmt_longer", longer="plain, half the rate")["bleu"]
    text = f"{ends}, at half the learning rate {plain:.2f}; shared over per_head {found['difference']:+.2f}"
    others = {label: row("nmt_longer", longer=name)["shared over it"]["difference"] for label, name in ALONE.items()}
    alone = ", ".join(f"{label} {gap:+.2f}" for label, gap in others.items())
    return f"{text} ({found['95 %']}), by seed {gaps}; {alone}"


def born_digits() -> str:
    """Return the gain of shared over narrow heads at a quarter of the width, by seed, for two lengths of training."""
    record = rows_of("digits")
    texts = []
    for what, label in (("born", "456 steps"), ("longer", "912 steps")):
        shared, narrow = (
            next(r["accuracies"] for r in record if (r["what"], r["mixing"], r["R"]) == (what, mixing, 16))
            for mixing in ("shared", "per_head")
        )
        gaps = [one - other for one, other in zip(shared, narrow, strict=True)]
        if len(gaps) > 3:
            wide = student.ppf(0.975, len(gaps) - 1) * statistics.stdev(gaps) / len(gaps) ** 0.5
            mean = statistics.mean(gaps)
            texts.append(f"{label}: {mean:+.2f} points ({mean - wide:+.2f} to {mean + wide:+.2f}), {len(gaps)} seeds")
        else:
            texts.append(f"{label}: {', '.join(f'{gap:+.2f}' for gap in gaps)} points")
    return "; ".join(texts)


def kept(counts: tuple[int, ...], ways: tuple[str, ...]) -> str:
    """Return the differences to the whole model by heads kept and way to choose them."""
    texts = []
    for count in counts:
        found = {way: row("nmt_heads", heads=f"{way} {count}")["difference"] for way in ways}
        texts.append(f"{count}: " + ", ".join(f"{way} {gap:+.2f}" for way, gap in found.items()))
    return "; ".join(texts)


def roles_seen() -> str:
    """Return how many heads have which role, in the analyzed models."""
    others = [each for each in rows_of("roles") if not each["model"].startswith("Marian (3")]
    seen = {"Marian": ("seen_marian", "positional", "rare tokens")}  # it reads no treebank
    seen["MiniLM"] = ("seen_minilm", "positional", "rare tokens", "syntactic")
    texts = []
    for label, (name, *roles) in seen.items():
        rows = rows_of(name)
        counts = [f"{sum(each[role] for each in rows)} {role}" for role in roles]
        texts.append(f"{label}: of {sum(each['heads'] for each in rows)} heads {', '.join(counts)}")
    names = ", ".join(dict.fromkeys(each["model"] for each in others))
    counts = [f"{sum(each[role] for each in others)} {role}" for role in ("positional", "rare tokens")]
    return "; ".join([*texts, f"{names}: of {sum(each['heads'] for each in others)} heads {', '.join(counts)}"])


def beside_first(measure: str, prefixes: str) -> str:
    """Return by how much lowering the risk changes a measure of contributions, with its standard error."""
    found = row("contributions_risk", model="minimum risk", measure=measure, prefixes=prefixes)
    return f"{found['less the first model']:+.3f} ± {found['± less first']:.3f}"


def over_training(measure: str) -> str:
    """Return the means of a measure of contributions at all checkpoints of a training."""
    rows = [each for each in rows_of("contributions_training") if each["prefixes"] == "reference"]
    return " → ".join(f"{each['mean']:.3f}" for each in rows if each["measure"] == measure)


def fifths(measure: str, prefixes: str = "reference") -> str:
    """Return a measure of contributions over a sentence: first and last fifth, and the end token."""
    found = row("contributions", measure=measure, prefixes=prefixes)
    return f"{found['part 1']:.2f} → {found['part 5']:.2f}, {found['last token']:.2f} at the end token"


def less_reference(measure: str, prefixes: str) -> str:
    """Return the difference of a measure of contributions to that after the reference, with its standard error."""
    found = row("contributions", measure=measure, prefixes=prefixes)
    return f"{prefixes} {found['less the reference']:+.3f} ± {found['± less']:.3f}"


def correlations(measure: str) -> str:
    """Return the rank correlation of a measure with how far outputs move without a head, in every model that has it."""
    found = {model: rows[measure]["moved"] for model, rows in of_models().items() if measure in rows}
    return ", ".join(f"{model} {value:+.2f}" for model, value in found.items())
