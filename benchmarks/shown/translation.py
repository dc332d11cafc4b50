"""Tables of translation models: swapped, fine-tuned, trained from scratch."""

from statistics import mean

from shown.columns import AFTER, BLEU, CONTINUED, DIFFERENCE, PARAMETERS, TABLES, made, plain, shown
from shown.records import current, rows_of, stored

ROLE_COUNTS = {"encoder / decoder / cross": ("enc/dec/cross", "")}
HEADS = {"heads": "", "kept": ""} | ROLE_COUNTS | BLEU | DIFFERENCE | PARAMETERS
TABLES["nmt_heads"] = lambda: shown(current("nmt_heads"), HEADS)
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


@made
def nmt_patient_again() -> str:
    """Return the rows of further seeds, each with an original of its own."""
    rows = [row | {"seed": of["seeds"][0]} for of in stored("nmt_patient_both")["again"] for row in of["rows"]]
    columns = {"heads, further seeds": ("patient", ""), "seed": "", "kept": ""} | ROLE_COUNTS | CONTINUED
    return shown(rows, columns)


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


TABLES["nmt_mixing"] = lambda: shown(current("nmt_mixing"), {"continued": ("mixing", "")} | CONTINUED)


@made
def nmt_mixing_again() -> str:
    """Return the rows of that table that ran once more."""
    return shown(rows_of("nmt_mixing", again=1), {"continued, again": ("mixing", "")} | CONTINUED)


@made
def nmt_born_again() -> str:
    """Return the rows from scratch that ran later, with a plain run of their own."""
    return shown(rows_of("nmt_born_both", again=1), {"from scratch, later": ("born", "")} | CONTINUED)
