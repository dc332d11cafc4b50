"""The claims of the papers, the stored results on each, and the verdict: the table of docs/results/claims.md.

Our figures come from benchmarks/results/. Verdicts are words, which have to be checked when these results change.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from shown.columns import TABLES, made
from shown.figures import (
    against,
    against_first,
    beside_first,
    born_digits,
    by_seed,
    correlations,
    exact,
    fifths,
    glue,
    kept,
    less_reference,
    longer,
    over_training,
    roles_seen,
    sentences_needed,
)
from shown.records import row

from common import table

HOLDS, FAILS, OPEN = "holds here", "does not hold here", "cannot be decided at this size"


@dataclass(frozen=True)
class Claim:
    """A claim of a paper.

    Attributes:
        claim: in a sentence.
        paper: the paper's figure.
        ours: a function that returns our figure from the stored results, with its interval if there is one.
        seeds: the number of runs behind it.
        verdict: one of the three, or more exactly.
        where: link to the page with protocol and command.
        decides: a function that returns what would decide the claim; None for those that are decided.
    """

    claim: str
    paper: str
    ours: Callable[[], str]
    seeds: str
    verdict: str
    where: str
    decides: Callable[[], str] | None = None


TRANSLATION, GLUE_PAGE = "[translation](translation.md)", "[narrower projections](narrower-projections.md)"
IMAGES, FEWER = "[images](images.md)", "[fewer heads](fewer-heads.md)"
WORTH = "[the worth of a head](head-worth.md)"
MIXED, SEEN, SPEED = "[mixed heads](mixed-heads.md)", "[what heads do](what-heads-do.md)", "[speed](speed.md)"

IMPORTANT = "importance 18"

CLAIMS: dict[str, tuple[Claim, ...]] = {
    "collaborative": (
        Claim(
            "At full width a trained model's heads are rewritten over shared keys without loss",
            "exact",
            exact,
            "none needed",
            HOLDS,
            TRANSLATION,
        ),
        Claim(
            "Swapped to half or a third of the width and fine-tuned again, GLUE stays",
            "83.0 → 82.5 at 1/2, 81.7 at 1/3, 77.6 at 1/6 (BERT-base)",
            lambda: (
                "after one more epoch: "
                + glue({"1/2": "192", "1/3": "128", "1/6": "64", "1/6 balanced": "64 balanced"})
            ),
            "3; five tasks",
            f"at 1/2 and 1/3 {HOLDS}; 1/6 loses about as much as in the paper, with balanced widths far less",
            GLUE_PAGE,
        ),
        Claim(
            "From scratch, shared keys beat concatenated heads of the same width in translation",
            "27.3 / 26.6 at 64 of 1024, 27.1 / 25.5 at 32",
            longer,
            "3; plain at half the rate 2; at 64, and the others at half the rate, 1",
            HOLDS,
            TRANSLATION,
        ),
        Claim(
            "The same in images",
            "not in the paper",
            born_digits,
            "3; 10",
            "holds for the speed of learning; at the end of the training there is no difference",
            IMAGES,
        ),
    ),
    "gated": (
        Claim(
            "A quarter of all heads is enough",
            "29.60 → 29.06 with 36 of 144",
            lambda: (
                kept((36, 18), ("learned", "importance", "random"))
                + f", distilled first {row('nmt_mended', mended='18 heads, distilled')['difference']:+.2f}"
                + f"; 21, by lambda 0.03: {row('nmt_heads', heads='lambda 0.03')['difference']:+.2f}"
                + "; 18 after 6,000 steps instead of 1,200: importance "
                + f"{against_first('nmt_patient_both', 'patient', IMPORTANT)}, with a second seed "
                + f"{against_first('nmt_patient_both', 'patient', IMPORTANT, again=1)}, with a third "
                + f"{against_first('nmt_patient_both', 'patient', IMPORTANT, again=2)}, learned "
                + f"{row('nmt_patient_both', patient='learned 18')['difference']:+.2f}"
            ),
            "1, after 6,000 steps 3 of important heads, on both sets",
            f"half of the heads: within the interval; a quarter: {FAILS} after short training; after long training "
            "the interval of each seed of important heads holds the paper's loss",
            FEWER,
        ),
        Claim(
            "Of the encoder's heads a fifth is enough",
            "-0.15 BLEU with 10 of 48",
            lambda: (
                f"importance {against_first('nmt_heads_both', 'heads', 'encoder, importance 5')}, by seed "
                f"{by_seed('nmt_heads_both', 'heads', 'encoder, importance 5')}; learned "
                f"{against_first('nmt_heads', 'heads', 'encoder, learned 5')}"
            ),
            "3, on both sets; 1",
            f"{HOLDS}: a small loss, and the interval holds the paper's",
            FEWER,
        ),
        Claim(
            "Learning which heads to keep beats other ways to choose",
            "not compared in the paper",
            lambda: (
                kept((18, 9), ("learned", "importance"))
                + "; 18 after 6,000 steps: importance over learned "
                + against(row("nmt_patient_both", patient=IMPORTANT)["over learned"])
            ),
            "1",
            f"{FAILS}: importance is ahead at 9, and at 18 after long training",
            FEWER,
        ),
        Claim(
            "Important heads are positional, syntactic or look at rare tokens",
            "most heads that stay",
            roles_seen,
            "1 model each",
            "in the sentence encoder some are; in the models of captions there is none to ask about",
            SEEN,
        ),
        Claim(
            "Confident heads are important heads",
            "in words and pictures",
            lambda: (
                "rank correlation with how far outputs move without the head: "
                f"confidence {correlations('confidence')}; gradient {correlations('gradient')}"
            ),
            "5 models",
            "holds in the translation models; elsewhere the opposite; the gradient says it everywhere",
            WORTH,
        ),
    ),
    "mixed": (
        Claim(
            "Alphas help",
            "34.51 → 35.04",
            lambda: (
                f"trained on {against_first('nmt_mixing', 'mixing', 'alphas')}; from scratch "
                f"{against_first('nmt_born_both', 'born', 'alphas')}, by seed "
                f"{by_seed('nmt_born_both', 'born', 'alphas')}"
            ),
            "3; 5",
            f"trained on: {FAILS}; from scratch ahead, but seeds differ by more: cannot be decided",
            MIXED,
            lambda: "from scratch: some fifteen seeds, a quarter of an hour of one core each",
        ),
        Claim(
            "Growth of the alphas helps",
            "part of 35.04",
            lambda: against_first("nmt_mixing", "mixing", "alphas, growth", again=1),
            "2",
            f"{FAILS}, at the source's strength",
            MIXED,
        ),
        Claim(
            "Heads that change places by a schedule help",
            "34.51 → 34.74",
            lambda: (
                f"trained on {against_first('nmt_mixing_both', 'mixing', 'manual rotation')}; from scratch "
                f"{against_first('nmt_born_both', 'born', 'manual rotation')}"
            ),
            "3",
            f"{FAILS}: both intervals exclude the paper's gain",
            MIXED,
        ),
        Claim(
            "Heads that change places by confidence help: soft, hard, but not at random",
            "34.76, 34.66, 34.35",
            lambda: (
                "trained on: "
                + ", ".join(
                    f"{policy} {against_first('nmt_mixing', 'mixing', f'{policy} rotation')}"
                    for policy in ("soft", "hard", "random")
                )
                + "; from scratch: "
                + ", ".join(
                    f"{policy} {against_first('nmt_born_both', 'born', f'{policy} rotation', again=1)}"
                    for policy in ("soft", "hard")
                )
            ),
            "3",
            f"{FAILS}: the intervals exclude the paper's gains, and from scratch both lose",
            MIXED,
        ),
    ),
    "contributions": (
        Claim(
            "Training to lower the risk betters translations of a trained model",
            "not in these papers; in the source system of Voita et al.",
            lambda: (
                f"{against_first('nmt_risk_both', 'risk', 'minimum risk')} against as long with cross-entropy, by seed "
                f"{by_seed('nmt_risk_both', 'risk', 'minimum risk')}"
            ),
            "3, on both sets",
            f"{OPEN}: the interval holds 0, and a gain of half a point",
            TRANSLATION,
            lambda: f"{sentences_needed('nmt_risk', 'risk', 'minimum risk', 0)} sentences would exclude 0",
        ),
        Claim(
            "The source gives less as a translation goes on, and little at its end",
            "curves",
            lambda: fifths("source"),
            "1 model, 200 sentences",
            HOLDS,
            SEEN,
        ),
        Claim(
            "The entropy of source contributions rises, and falls in the last third",
            "curves",
            lambda: fifths("entropy of source"),
            "1 model, 200 sentences",
            f"the rise {HOLDS}; the fall does not",
            SEEN,
        ),
        Claim(
            "After prefixes of its own a model looks at the source more, after random ones far less",
            "curves",
            lambda: (
                "share of the source less that after the reference: "
                + ", ".join(less_reference("source", prefixes) for prefixes in ("own", "random"))
            ),
            "1 model, 200 sentences",
            f"own: {HOLDS}; random: the direction, not the size",
            SEEN,
        ),
        Claim(
            "Training to lower the risk makes a model look at the source more, most of all after random prefixes",
            "curves",
            lambda: (
                "share of the source: "
                + ", ".join(f"{each} {beside_first('source', each)}" for each in ("random", "reference", "own"))
            ),
            "1 model, 200 sentences",
            f"{HOLDS}, and is small after 50 steps",
            SEEN,
        ),
        Claim(
            "Over a training the source gives more and its contributions become sharper",
            "in stages, not all one way",
            lambda: f"share {over_training('source')}, entropy {over_training('entropy of source')}",
            "1 training, 4 moments",
            f"{HOLDS}; no way back was seen",
            SEEN,
        ),
    ),
}


def claims(source: str) -> str:
    """Return the table of the claims of one source system."""
    shown = [
        {
            "claim": each.claim,
            "in the paper": each.paper,
            "ours": each.ours(),
            "seeds": each.seeds,
            "verdict": each.verdict,
            "protocol and command": each.where,
        }
        for each in CLAIMS[source]
    ]
    return table(shown, dict.fromkeys(shown[0], ""))


@made
def claims_open() -> str:
    """Return the claims that are not decided, and what would decide them."""
    rows = [
        {"claim": each.claim, "what would decide it, if the difference stays": each.decides()}
        for of_source in CLAIMS.values()
        for each in of_source
        if each.decides
    ]
    return table(rows, dict.fromkeys(rows[0], ""))


TABLES |= {f"claims_{source}": partial(claims, source) for source in CLAIMS}
