"""Draw the pictures of the start page, of the guide to efficiency and of results, from stored results.

python benchmarks/pictures.py

These pictures show the results of several benchmarks; a benchmark draws its own pictures itself.
"""

from collections.abc import Mapping, Sequence

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from nmt_pictures import save_figure
from shown.efficiency import WORDS, encoders
from shown.head_worth import half_width, measures, of_models
from shown.records import rows_of, stored

matplotlib.rcParams["svg.hashsalt"] = "collab_heads"  # the same picture is the same file
# colours of Okabe and Ito, which people with any kind of colour vision can tell apart
STYLES = {
    "PyTorch": ("#000000", "o"),
    "ONNX Runtime": ("#0072B2", "s"),
    "ONNX Runtime, 8 bits": ("#56B4E9", "s"),
    "OpenVINO": ("#009E73", "^"),
    "CTranslate2": ("#D55E00", "D"),
    "CTranslate2, 8 bits": ("#E69F00", "D"),
}
PANELS = {
    "MB": "megabytes on disk",
    "time of one sentence": "time of one sentence",
    "time of 32 x 128 tokens": "time of 32 x 128 tokens",
}
MEASURES = {
    "MB": ("megabytes", "#0072B2", "{:.0f}"),
    "time of one sentence": ("time of one sentence", "#D55E00", "{:.2f}"),
    "STS-B": ("quality: Spearman x 100, STS-B", "#009E73", "{:.1f}"),
}
ENGINES = {"PyTorch": "PyTorch", "onnx": "ONNX Runtime", "onnx, int8": "ONNX Runtime, 8 bits", "openvino": "OpenVINO"}
ENGINES |= {"ctranslate2": "CTranslate2", "ctranslate2, int8": "CTranslate2, 8 bits"}
SHARES = {1.0: "all", 0.5: "½", 0.33: "⅓", 0.25: "¼"}
OVERVIEW = {  # model -> title, what is timed, place of the legend
    "minilm": ("MiniLM: Spearman on STS-B dev", "32 x 128 tokens", "lower right"),
    "marian": ("Marian: BLEU on test_2016", "32 sentences, beams of 5", "lower center"),
}
ALTERNATIVES = {  # method -> colour, marker
    "compress": ("#000000", "o"),
    "K-prune": ("#009E73", "^"),
    "GRAIL": ("#0072B2", "s"),
    "Kwon et al. 2022": ("#E69F00", "D"),
    "Torch-Pruning, Taylor": ("#D55E00", "v"),
}
COMPRESSED = {  # engine -> label, colour, marker
    "PyTorch": ("compress", "#000000", "o"),
    "onnx, int8": ("compress, 8 bits in ONNX Runtime", "#56B4E9", "s"),
}
SCORES = {"score": "Spearman x 100, STS-B", "elsewhere": "accuracy x 100, SST-2 (of another kind)"}
BYTES = {  # label -> the methods of `bytes.py`, colour, marker
    "compress, width and bits": (("compress, 8, 4 and 3 bits",), "#000000", "o"),
    "the same, layers in 8 bits, int8": (("layers in 8 bits, int8",), "#CC79A7", "v"),
    "our grids: 8, 4 or 3 bits": (("8 bits", "4 bits", "3 bits"), "#E69F00", "D"),
    "export, int8": (("export, int8", "export, int8, OpenVINO"), "#D55E00", "v"),
    "ONNX Runtime: int8, 4 bits": (
        ("ONNX Runtime, int8", "ONNX Runtime, int8, by column", "ONNX Runtime, 4 bits"),
        "#0072B2",
        "s",
    ),
    "NNCF: 8 or 4 bits": (("NNCF, 8 bits", "NNCF, 4 bits", "NNCF, 4 bits, GPTQ"), "#009E73", "^"),
}
TYPES = {  # label -> the methods of `real_decoder.py`, colour, marker
    "compress, width and bits": (("compress, in",), "#000000", "o"),
    "our grids alone: 8, 4 or 3 bits": (("8 bits alone", "4 bits alone", "3 bits alone"), "#E69F00", "D"),
    "llama.cpp's types alone": (("Q4_K_M", "IQ4_NL", "Q3_K_M"), "#0072B2", "s"),
}
TRANSLATED = {  # the methods of `translation_bytes.py` -> label, colour, marker
    "compress, 8, 4 and 3 bits": ("compress, width and bits", "#000000", "o"),
    "bits alone, 8, 4 and 3": ("bits alone", "#E69F00", "D"),
}
NAMES = {"marian": "Marian", "t5": "T5"}
ENCODERS = {"all-MiniLM-L6-v2": (7, 8, 10, 13, 16, 20, 24), "all-mpnet-base-v2": (45, 60, 80, 110)}  # ticks: megabytes
LOST, TIME = ("lost, STS-B", "lost, SST-2", "lost, retrieval"), "time, 1 x 16"
KINDS_OF_TEXT = ("news", "web", "python", "reviews")
LAYERS, STEPS = 6, 300  # of MiniLM; of distillation, of dropped layers as of compressed ones
FORMS = ((1.0, "PyTorch"), (0.5, "PyTorch"), (0.5, "ONNX Runtime, 8 bits"), (0.25, "ONNX Runtime, 8 bits"))


def efficiency() -> Figure:
    """Draw what is lost on STS-B against size and times, a line per engine."""
    figure, panels = plt.subplots(1, 3, figsize=(11, 3.8), layout="constrained", sharey=True)
    rows = encoders()
    for panel, (cost, label) in zip(panels, PANELS.items(), strict=True):
        for engine, (colour, marker) in STYLES.items():
            line = sorted((each for each in rows if each["runs in"] == engine), key=lambda each: -each["budget"])
            values = [each[cost] for each in line]
            panel.plot(values, [each["STS-B"] for each in line], marker=marker, color=colour, label=engine, lw=1, ms=5)
        panel.set(xlabel=label + ("" if cost == "MB" else ", of PyTorch's"), xscale="log")
        ticks = (16, 20, 30, 50, 90) if cost == "MB" else (0.1, 0.2, 0.4, 0.7, 1)
        panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("Spearman x 100, STS-B")
    panels[1].set_title("all-MiniLM-L6-v2, with all, half, a third and a quarter of its layers", fontsize=10)
    panels[2].legend(fontsize=7, loc="lower right")
    return figure


def calibration() -> Figure:
    """Draw what is lost on three tasks against the number of sentences, a line per kind of sentence."""
    tasks = {"lost, STS-B": "STS-B", "lost, SST-2": "SST-2", "lost, retrieval": "retrieval in RTE"}
    kinds = {"pairs": "o", "reviews": "s", "captions": "^", "web": "D", "mixed": "v"}
    colours = [colour for colour, _ in STYLES.values()]
    figure, panels = plt.subplots(1, 3, figsize=(11, 3.8), layout="constrained")
    for panel, (key, title) in zip(panels, tasks.items(), strict=True):
        for (kind, marker), colour in zip(kinds.items(), colours, strict=False):
            for budget, style in ((0.5, "-"), (0.25, "--")):
                line = [each for each in rows_of("calibration") if (each["kind"], each["budget"]) == (kind, budget)]
                line.sort(key=lambda each: each["sentences"])
                label = kind if budget == 0.5 else None
                places, values = [each["sentences"] for each in line], [each[key] for each in line]
                panel.plot(places, values, style, marker=marker, color=colour, label=label, lw=1, ms=5)
        panel.set(xlabel="sentences", xscale="log", title=title)
        panel.set_xticks((16, 64, 256, 1024, 4096), ("16", "64", "256", "1,024", "4,096"))
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("points lost: half (solid), a quarter (dashed)")
    panels[2].legend(fontsize=7, loc="upper left")
    return figure


def start() -> Figure:
    """Draw size, time and quality of four forms of one model as bars."""
    found = {(each["budget"], each["runs in"]): each for each in encoders()}
    rows = [found[form] for form in FORMS]
    names = [f"{WORDS[each['budget']]} of the layers,\n{each['runs in']}" for each in rows]
    names[0] = "the original,\nPyTorch"
    figure, panels = plt.subplots(1, 3, figsize=(9, 2.4), layout="constrained", sharey=True)
    for panel, (key, (label, colour, form)) in zip(panels, MEASURES.items(), strict=True):
        bars = panel.barh(range(len(rows)), [each[key] for each in rows], color=colour)
        panel.bar_label(bars, [form.format(each[key]) for each in rows], padding=3, fontsize=8)
        panel.set_title(label, fontsize=9)
        panel.set_xlim(0, 1.18 * max(each[key] for each in rows))
        panel.set_xticks([])
        panel.spines[["top", "right", "bottom"]].set_visible(False)
    panels[0].set_yticks(range(len(rows)), names, fontsize=8)
    panels[0].invert_yaxis()
    return figure


def overview() -> Figure:
    """Draw quality against time in all engines, for shares of the layers of an encoder and of a translation model."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    for panel, (model, (score, work, place)) in zip(panels, OVERVIEW.items(), strict=True):
        for engine, label in ENGINES.items():
            rows = [row for row in rows_of("serving") if (row["model"], row["engine"]) == (model, engine)]
            points = [(float(row["time"].split(", ")[-1]), row["score"], SHARES[row["budget"]]) for row in rows]
            if not points:
                continue
            colour, marker = STYLES[label]
            panel.plot(*zip(*(point[:2] for point in points), strict=True), marker=marker, color=colour, label=label)
            for x, y, share in points:
                panel.annotate(share, (x, y), xytext=(4, 5), textcoords="offset points", fontsize=8, color=colour)
        panel.set(xscale="log", xlabel=f"time of {work}, of PyTorch's")
        panel.set_xticks(ticks := [0.1, 0.2, 0.3, 0.5, 1.0], [f"{tick:g}" for tick in ticks])
        panel.minorticks_off()
        panel.set_title(score, loc="left", fontsize=10)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8, loc=place)
    figure.suptitle("Shares of the layers that are left (all, ½, ⅓, ¼), on one thread", fontsize=11)
    return figure


def alternatives() -> Figure:
    """Draw `compress` beside what else makes an encoder smaller: quality against time, and losses of classifiers."""
    figure, (*left, right) = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    lines = [
        ([row for row in rows_of("serving") if (row["model"], row["engine"]) == ("minilm", engine)], *style)
        for engine, style in COMPRESSED.items()
    ]
    dropped = [row for row in rows_of("dropped_layers") if row["layers"] == LAYERS or row["steps"] == STEPS]
    lines.append((dropped, "layers dropped", "#CC79A7", "D"))
    for panel, (score, label) in zip(left, SCORES.items(), strict=True):
        for rows, name, colour, marker in lines:
            times, values = [float(row["time"].split(", ")[-1]) for row in rows], [row[score] for row in rows]
            panel.plot(times, values, marker=marker, color=colour, label=name, ms=5)
            for row, time, value in zip(rows, times, values, strict=True):
                if row.get("layers") != LAYERS:  # the original has its label from `compress`
                    share = SHARES[row["budget"]] if "budget" in row else f"{row['layers']} of {LAYERS}"
                    place = {"xytext": (5, -9), "textcoords": "offset points"}
                    panel.annotate(share, (time, value), **place, fontsize=7, color=colour)
        panel.set(xlabel="time of 32 x 128 tokens, of PyTorch's", xscale="log")
        panel.set_xticks(ticks := [0.15, 0.2, 0.3, 0.5, 1.0], [f"{tick:g}" for tick in ticks])
        panel.minorticks_off()
        panel.set_title(label, fontsize=9)
    left[0].set_ylabel(f"MiniLM, {STEPS} steps of distillation")
    for method, (colour, marker) in ALTERNATIVES.items():
        rows = [row for row in rows_of("layer_peers") if row["task"].startswith("mean") and row["method"] == method]
        points = sorted((row["budget"], row["lost"]) for row in rows)
        right.plot(*zip(*points, strict=True), marker=marker, color=colour, label=method, ms=5)
    right.set(xlabel="operations of the layers that are left", xticks=(0.25, 0.33, 0.5))
    right.set_xticklabels(("¼", "⅓", "½"))
    right.set_title("points lost, five GLUE classifiers, not trained", fontsize=9)
    for panel in (*left, right):
        panel.grid(alpha=0.3)
    left[0].legend(fontsize=7, loc="lower right")
    right.legend(fontsize=7, loc="upper right")
    return figure


def megabytes() -> Figure:
    """Draw what MiniLM and MPNet keep and lose by size, and by time in an engine, beside other quantisation."""
    figure, lines = plt.subplots(len(ENCODERS), 3, figsize=(11, 3.6 * len(ENCODERS)), layout="constrained")
    for (model, ticks), panels in zip(ENCODERS.items(), lines, strict=True):
        draw_model(panels, [row for row in rows_of("bytes") if row["model"] == model], ticks)
    lines[0][1].legend(fontsize=7, loc="upper right")
    return figure


def draw_model(panels: Sequence[Axes], rows: Sequence[Mapping], ticks: Sequence[int]) -> None:
    """Draw the rows of one model in three panels: neighbours and losses by size, neighbours by time."""
    original = next(row for row in rows if row["method"] == "original")
    for label, (methods, colour, marker) in BYTES.items():
        points = sorted((row for row in rows if row["method"] in methods), key=lambda row: row["MB"])
        line = "-" if label.startswith("compress") else ""
        style = {"color": colour, "marker": marker, "ls": line, "lw": 1, "ms": 5, "label": label}
        sizes, near = [row["MB"] for row in points], [row["neighbours"] for row in points]
        panels[0].plot(sizes, near, **style)
        panels[1].plot(sizes, [max(row[key] for key in LOST) for row in points], **style)
        timed = [row for row in points if row.get(TIME) is not None]
        panels[2].plot([row[TIME] for row in timed], [row["neighbours"] for row in timed], **style)
    for panel in panels[:2]:
        panel.set(xlabel=f"megabytes of all weights ({original['MB']:.0f} in float32)", xscale="log")
        panel.set_xticks(ticks, map(str, ticks))
    panels[0].set_title(f"{original['model']}: neighbours that stay, %", fontsize=10)
    panels[1].set_title("points lost: the worst of three tasks", fontsize=10)
    panels[2].set_title("neighbours that stay, %", fontsize=10)
    panels[2].set_xlabel("time of 16 tokens, of PyTorch's in float32")
    for panel in panels:
        panel.minorticks_off()
        panel.grid(alpha=0.3)


def decoder_megabytes() -> Figure:
    """Draw how much the perplexity of SmolLM2 grows as it takes fewer megabytes, beside bits alone."""
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained")
    rows = rows_of("real_decoder")
    original = next(row for row in rows if row["method"] == "original")
    for label, (begins, colour, marker) in TYPES.items():
        points = sorted((row for row in rows if row["method"].startswith(begins)), key=lambda row: row["MB"])
        line = "-" if label.startswith("compress") else ""
        style = {"color": colour, "marker": marker, "ls": line, "lw": 1, "ms": 5, "label": label}
        more = [[100 * (row[name] / original[name] - 1) for name in KINDS_OF_TEXT] for row in points]
        sizes = [row["MB"] for row in points]
        panels[0].plot(sizes, [each[0] for each in more], **style)
        panels[1].plot(sizes, [max(each[1:]) for each in more], **style)
    for panel, title in zip(
        panels, ("the kind of text that was calibrated on", "the worst of three others"), strict=True
    ):
        panel.set(xlabel="megabytes of all weights (538 in float32)", title=title, ylim=(-3, 90))
        panel.title.set_size(10)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("more perplexity, %")
    panels[0].legend(fontsize=7, loc="upper right")
    return figure


def translation_megabytes() -> Figure:
    """Draw what translation models keep by their size: BLEU, and agreement with the original, of every draw."""
    rows = stored("translation_bytes")["each"]
    models = [row["model"] for row in rows if row["method"] == "original"]
    figure, panels = plt.subplots(len(models), 2, figsize=(8, 3.4 * len(models)), layout="constrained", squeeze=False)
    for model, line in zip(models, panels, strict=True):
        own = [row for row in rows if row["model"] == model]
        original = next(row for row in own if row["method"] == "original")
        for method, (label, colour, marker) in TRANSLATED.items():
            points = [row for row in own if row["method"] == method]
            style = {"color": colour, "marker": marker, "ls": "", "ms": 5, "alpha": 0.7, "label": label}
            for panel, score in zip(line, ("BLEU", "agreement"), strict=True):
                panel.plot([row["MB"] for row in points], [row[score] for row in points], **style)
        line[0].axhline(original["BLEU"], color="#888888", lw=0.8, label=f"original, {original['MB']:.0f} MB")
        for panel, title in zip(line, ("BLEU", "BLEU against the original's translations"), strict=True):
            panel.set_title(f"{NAMES[model]}: {title}", fontsize=10)
            panel.grid(alpha=0.3)
        line[0].legend(fontsize=7, loc="lower right")
    for panel in panels[-1]:
        panel.set_xlabel("megabytes of all weights")
    return figure


def head_worth() -> Figure:
    """Draw how well each measure predicts the harm without a head, a mark for every model, with intervals."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 5.2), layout="constrained", sharey=True)
    names, titles = measures(), {"moved": "outputs move without the head", "refitted": "harm with W_O refitted"}
    for panel, (truth, title) in zip(panels, titles.items(), strict=True):
        for number, (model, rows) in enumerate(of_models().items()):
            colour, marker = [*STYLES.values()][number]
            places = [place for place, name in enumerate(names) if name in rows]
            values = [rows[names[place]][truth] for place in places]
            widths = [half_width(rows[names[place]], truth) for place in places]
            heights = [place + 0.13 * (number - 2) for place in places]
            style = {"fmt": marker, "color": colour, "label": model, "ms": 4.5, "lw": 1}
            panel.errorbar(values, heights, xerr=widths, **style)
        panel.axvline(0, color="#888888", lw=0.8)
        panel.set(xlabel="rank correlation", xlim=(-1, 1))
        panel.set_title(title, fontsize=10)
        panel.grid(alpha=0.3)
    panels[0].set_yticks(range(len(names)), names, fontsize=8)
    panels[0].invert_yaxis()
    panels[1].legend(fontsize=7, loc="upper left")
    return figure


DRAWN = {
    each.__name__: each
    for each in (
        *(efficiency, overview, start, calibration, alternatives),
        *(megabytes, decoder_megabytes, translation_megabytes, head_worth),
    )
}


def main() -> None:
    """Draw all of them."""
    for name, draw in DRAWN.items():
        save_figure(draw(), name)


if __name__ == "__main__":
    main()
