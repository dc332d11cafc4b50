"""Tables of time, memory and killed runs."""

from collections import Counter

from shown.columns import PARAMETERS, TABLES, made, plain, shown
from shown.records import stored

plain("nmt_inference", "nmt_speed_inference", {"model": ("variant", ""), "time": ".3f", "quartiles": ""})
BLOCK = {"mixing": "", "width": ""} | {f"{n} tokens": (n, ".2f") for n in ("32", "128", "512")}
plain("attention", "attention", BLOCK)
DECODE = {"mixing": "", "width": ""} | {f"{n} cached": (n, ".2f") for n in ("32", "128", "512")}
plain("decoding", "attention", DECODE | {"cached elements per token": ("cache", "")}, "decoding")
plain(
    "decomposition",
    "decomposition",
    {"method": "", "seconds": ".3f", "relative error": ("error", ".4f"), "sweeps": ""}
    | {"peak memory, MB": ("peak_mb", ".0f"), "times faster": ("times_faster", ".0f")},
)
plain(
    "pruning",
    "pruning",
    {"model": "", "heads": "", "parameters": ",", "cache bytes per token": ",", "operations": ".3f"}
    | {"encoding time": ".3f", "share realised": ".2f", "greedy time": ".3f", "greedy tokens/s": ".0f"}
    | {"beam time": ".3f", "beam tokens/s": ".0f"},
)
plain(
    "training",
    "training",
    {"variant": "", "width": "", "ratio": ".3f", "examples per second": ("examples_per_second", ".1f")} | PARAMETERS,
)
plain(
    "nmt_speed",
    "nmt_speed",
    {"variant": "", "ratio": ".3f", "quartiles": "", "target pieces per second": ("targets_per_second", ".0f")}
    | PARAMETERS,
)


def compression_speed(wanted: tuple[str, ...], settings: tuple[str, ...]) -> str:
    """Return the time of some parts of models, as shares of stock's, by setting."""
    rows = [row for row in stored("compression_speed")["rows"] if row["what"] in wanted and row["variant"] != "stock"]
    return shown(rows, {"what": "", "threads": "", "variant": ""} | dict.fromkeys(settings, ".2f"))


TABLES["compression_speed_encoder"] = lambda: compression_speed(
    ("block", "encoder"), ("1 x 32", "1 x 128", "1 x 512", "32 x 32", "32 x 128", "32 x 512")
)
BY_KERNEL = {"block": ("variant", ""), "size": "", "milliseconds": ".2f", "attention": ".2f", "products": ".2f"}
plain("block_profile", "block_profile", BY_KERNEL | {"norm, sums, copies": ".2f", "calls": ".2f"})
SIZES = ("1 x 32", "1 x 128", "1 x 512", "32 x 128")
plain("attention_kernel", "block_profile", {"width of a head": ""} | dict.fromkeys(SIZES, ".3f"), "kernel")
TABLES["compression_speed_decoder"] = lambda: compression_speed(("greedy", "beam"), ("1", "32"))
plain(
    "scale_pieces",
    "scale",
    {"work": "", "width": "", "layers": "", "model, MB": ("model_mb", ".0f"), "peak, of the model": ("peak", ".2f")}
    | {"seconds of the processor": ("cpu_seconds", ".1f")},
)
plain(
    "real_sizes",
    "real_sizes",
    {"model": "", "work": "", "model, MB": ("model_mb", ".0f"), "peak, of the model": ("peak", ".2f")}
    | {"of a forward pass": ("of forward", ".2f"), "seconds of the processor": ("cpu_seconds", ".1f")}
    | {"operations left": ("operations", ".2f"), "time of a pass": ("time", ".2f")},
)
plain(
    "scale_memory",
    "scale",
    {"model": "", "compressed": "", "in bfloat16, GB": ("model_gb", ",.0f")}
    | {
        "moments of all sites, GB": ("all_moments_gb", ",.0f"),
        "groups of sites": ("groups", ""),
        "compress, GB": ("compress_gb", ",.0f"),
        "of the model": ("compress_share", ".2f"),
    }
    | {"distill, GB": ("distill_gb", ",.0f")}
    | {"train, GB": ("train_gb", ",.0f"), "train, GB of each of 8": ("shard_gb", ",.0f")},
    rows="sizes",
)
plain(
    "scale_time",
    "scale",
    {"model": "", "compressed": "", "passes over 131,072 tokens": ("passes", ".0f")}
    | {"their operations, 10^15": ("operations", ",.0f")}
    | {"hours of one thread here": ("pass_hours", ",.0f"), "solves, hours of one thread": ("solve_hours", ",.1f")}
    | {"operations of a training step of 4,096 tokens, 10^15": ("step_operations", ",.2f")},
    rows="sizes",
)


@made
def decomposition_base() -> str:
    """Return a whole model on one thread, as the library uses at this size."""
    rows = [row for row in stored("decomposition")["base"] if row["threads"] == 1]
    columns = {"tol": ".0e", "seconds": ".1f", "per layer": ("per_layer", ".2f")}
    return shown(rows, columns | {"relative error": ("error", ".4f")})


@made
def swap_speed() -> str:
    """Return the cost of a calibrated swap and of `compress`, against a forward pass, or alone on an idle machine."""
    rows = [row | {"against": row["pass"] or row.get("alone")} for row in stored("swap_speed")["rows"]]
    columns = {"what": "", "sentences": "", "work": "", "mixing": "", "compared with": ("against", ",.2f")}
    return shown(rows, columns | {"figure": ("swap", ",.2f"), "ratio": ".2f", "range": ""})


@made
def kills() -> str:
    """Return where runs were killed, by the kind of operation."""
    counts: Counter[str] = Counter()
    for row in stored("kills")["rows"]:
        where = row["killed before"]  # an operation and a place, or a random moment
        counts[where if where == "a random moment" else f"before `{where.split()[0]}`"] += row["kills"]
    return shown(
        ({"killed": where, "times": times} for where, times in counts.most_common()), {"killed": "", "times": ""}
    )


plain(
    "estimates",
    "estimates",
    {
        "work": "",
        "model": "",
        "sentences": "",
        "seconds: said": ("said", ",.0f"),
        "taken": ",.0f",
        "GB: said": ("said_gb", ".1f"),
        "held": ("held_gb", ".1f"),
    },
)
