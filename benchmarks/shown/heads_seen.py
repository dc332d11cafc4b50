"""Tables of what heads do, and of contributions of source and target to a translation."""

from shown.columns import made, named, plain, shown
from shown.records import stored

plain(
    "seen_marian",
    "seen_marian",
    {
        "role": "",
        "heads": "",
        "confidence": ".2f",
        "entropy": ".2f",
        "attention distance": ("attention_distance", ".2f"),
    }
    | {"positional": "", "rare tokens": "", "balance of relevance": ("relevance_balance", ".2f")}
    | {"most relevant (layer.head share)": ("most relevant (layer.head)", "")},
)
ROLES = {role: ".2f" for role in ("enc-self", "dec-self", "dec-enc")}
plain("seen_balance", "seen_balance", {"model": "", "measure": "", "heads": ""} | ROLES)
plain(
    "roles",
    "roles",
    {"model": "", "role": "", "heads": "", "positional": "", "first token": "", "rare tokens": ""}
    | {"nearest to positional": ("best positional", ".2f"), "median": ".2f"}
    | {"nearest to rare tokens": ("best rare", ".2f"), "chance": ".2f"},
)
plain("seen_speed", "seen_speed", {"what": "", "ratio": ".2f", "seconds": ".2f"})
plain("seen_memory", "seen_speed", {"sentences": "", "peak MB": ".0f"}, "memory")
FIFTHS = {f"part {part}": ".2f" for part in range(1, 6)}


@made
def contributions() -> str:
    """Return shares and entropies over a sentence, after three kinds of prefixes."""
    rows = [
        row
        | {"mean ±": f"{row['mean']:.3f} ± {row['± mean']:.3f}"}
        | ({"less": f"{row['less the reference']:+.3f} ± {row['± less']:.3f}"} if "± less" in row else {})
        for row in sorted(stored("contributions")["rows"], key=lambda row: list(MEASURED).index(row["measure"]))
    ]
    columns = {"of each generated token": ("measure", ""), "prefixes": ""} | FIFTHS
    columns |= {"last token": ".2f", "mean": ("mean ±", ""), "less after the reference": ("less", "")}
    return shown(named(rows, "measure", MEASURED), columns)


@made
def contributions_training() -> str:
    """Return means over a training: a row per checkpoint."""
    rows: dict[str, dict] = {}
    for row in stored("contributions_training")["rows"]:
        found = rows.setdefault(row["model"], {"after": row["model"]})
        found[f"{MEASURED[row['measure']]}, {row['prefixes']}"] = f"{row['mean']:.3f} ± {row['± mean']:.3f}"
    wanted = [f"{MEASURED['source']}, {prefixes}" for prefixes in ("reference", "own", "random")]
    wanted += [f"{MEASURED[measure]}, reference" for measure in ("entropy of source", "entropy of target")]
    return shown(rows.values(), {"after": ""} | dict.fromkeys(wanted, ""))


@made
def contributions_risk() -> str:
    """Return means before and after training to lower the risk: a row per measure and kind of prefixes."""
    rows: dict[tuple, dict] = {}
    for row in stored("contributions_risk")["rows"]:
        found = rows.setdefault(
            (row["measure"], row["prefixes"]), {"of each generated token": MEASURED[row["measure"]]}
        )
        found |= {"prefixes": row["prefixes"], row["model"]: f"{row['mean']:.3f}"}
        if "± less first" in row:
            found["difference"] = f"{row['less the first model']:+.3f} ± {row['± less first']:.3f}"
    columns = ("of each generated token", "prefixes", "before", "minimum risk", "difference")
    return shown(rows.values(), dict.fromkeys(columns, ""))


MEASURED = {
    "source": "share of the source",
    "entropy of source": "entropy of the source",
    "entropy of target": "entropy of the target prefix",
}


@made
def minilm_roles() -> str:
    """Return what the heads of all-MiniLM-L6-v2 do: a row per head and label."""
    roles = stored("seen_minilm")["report"]["roles"]
    rows = []
    for site in roles["sites"]:
        for head, labels in enumerate(roles["labels"][site["path"]]):
            for label in labels:
                relation = roles["syntax"][site["path"]].get(label)
                looks = roles["positional"][site["path"]]
                share = looks["first_token" if label == "first token" else "share"] if relation is None else relation
                row = {"layer.head": f"{site['layer']}.{head}", "what it does": label.replace("->", " → ")}
                row["share"] = share[head]
                row["offset"] = roles["baselines"][label]["accuracy"] if relation else None
                rows.append(row)
    columns = {"layer.head": "", "what it does": "", "share or accuracy": ("share", ".2f")}
    return shown(rows, columns | {"best fixed offset": ("offset", ".2f")})
