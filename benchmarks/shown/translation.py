"""Tables of translation models: swapped, fine-tuned, trained from scratch."""

from statistics import mean

from shown.columns import AFTER, BLEU, CONTINUED, DIFFERENCE, PARAMETERS, made, named, plain, shown
from shown.records import stored

ROLE_COUNTS = {"encoder / decoder / cross": ("enc/dec/cross", "")}
plain("nmt_heads", "nmt_heads", {"heads": "", "kept": ""} | ROLE_COUNTS | BLEU | DIFFERENCE | PARAMETERS)
plain("nmt_heads_both", "nmt_heads_both", {"heads": "", "kept": ""} | ROLE_COUNTS | CONTINUED)


@made
def nmt_patient_both() -> str:
    """Return the rows that were trained five times as long."""
    rows = []
    for row in stored("nmt_patient_both")["rows"]:
        over = row.get("over learned")
        rows.append(row | ({"over": f"{over['difference']:+.2f} ({over['95 %']})"} if over else {}))
    columns = {"heads": ("patient", ""), "kept": ""} | ROLE_COUNTS | CONTINUED
    return shown(rows, columns | {"over as many learned ones": ("over", "")})


plain("nmt_mixing_both", "nmt_mixing_both", {"continued": ("mixing", "")} | CONTINUED)
plain("nmt_risk_both", "nmt_risk_both", {"trained on": ("risk", "")} | CONTINUED)
plain("nmt_born_both", "nmt_born_both", {"from scratch": ("born", "")} | CONTINUED)
plain("nmt_widths", "nmt_widths", {"R": ("widths", "")} | AFTER | DIFFERENCE | PARAMETERS)
plain("nmt_scratch", "nmt_scratch", {"keys": ("scratch", "")} | BLEU | DIFFERENCE | PARAMETERS)
plain("nmt_mended", "nmt_mended", {"heads": ("mended", "")} | AFTER | DIFFERENCE | PARAMETERS)
plain(
    "nmt_risk",
    "nmt_risk",
    {"trained on": ("risk", "")} | BLEU | {"range": "", "chrF": ("chrf", ".2f")} | DIFFERENCE | {"seconds": ",.0f"},
)
plain("nmt_t5", "nmt_t5", {"T5": ("t5", ""), "kept": ""} | AFTER | DIFFERENCE | PARAMETERS)
plain(
    "translation",
    "translation",
    {"model": "", "R of 256": ("width", ""), "mixing": "", "method": ""}
    | BLEU
    | {"lost": "+.2f", "identical": "", "stepwise": ".0e", "cache per token (cross)": ("cache", "")}
    | PARAMETERS,
)


@made
def nmt_longer() -> str:
    """Return the longer trainings: dev set on the way, test set at the end."""
    rows = []
    for row in stored("nmt_longer")["rows"]:
        steps = next(iter(row["dev"].values()))
        means = {f"{int(step):,}": mean(of[step] for of in row["dev"].values()) for step in steps}
        over = row.get("shared over it")
        rows.append(row | means | ({"over": f"{over['difference']:+.2f} ({over['95 %']})"} if over else {}))
    dev = {f"dev, step {step}": (step, ".2f") for step in means}
    columns = {"keys": ("longer", ""), "seeds": ("runs", "")} | dev | BLEU | {"range": ""} | DIFFERENCE
    return shown(rows, columns | {"shared over it": ("over", "")} | PARAMETERS)


@made
def nmt_mixing() -> str:
    """Return alphas and rotation in fine-tuning; the growth loss was too strong, see the note in the record."""
    rows = named(stored("nmt_mixing")["rows"], "mixing", {"alphas, growth": "alphas, growth 867 times"})
    return shown(rows, {"continued": ("mixing", "")} | CONTINUED)


@made
def nmt_mixing_again() -> str:
    """Return the rows of that table that ran once more."""
    return shown(stored("nmt_mixing")["again"]["rows"], {"continued, again": ("mixing", "")} | CONTINUED)


@made
def nmt_born() -> str:
    """Return the same from scratch; the record has a note on it, too."""
    names = {"alphas, growth": "alphas, growth of 40 beside the mean"}
    rows = named(stored("nmt_born")["rows"], "born", names)
    return shown(rows, {"from scratch": ("born", "")} | BLEU | DIFFERENCE | PARAMETERS)
