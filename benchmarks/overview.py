"""Draw the picture of the first page of the results: quality against time, from the stored tables.

python benchmarks/overview.py
"""

from shown.records import rows_of

from collab_heads.analysis.plots.canvas import MARKERS, OKABE_ITO
from common import PICTURES

LINES = {  # label -> engine
    "PyTorch": "PyTorch",
    "ONNX Runtime": "onnx",
    "ONNX Runtime, int8": "onnx, int8",
    "OpenVINO": "openvino",
    "CTranslate2, int8": "ctranslate2, int8",
}
SHARES = {1.0: "all", 0.5: "½", 0.33: "⅓", 0.25: "¼"}
PANELS = {
    "minilm": ("MiniLM: Spearman on STS-B dev", "32 x 128 tokens", "lower right"),
    "marian": ("Marian: BLEU on test_2016", "32 sentences, beams of 5", "lower center"),
}


def main() -> None:
    """Draw docs/pictures/overview."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    for axes, (model, (score, work, place)) in zip(figure.subplots(1, 2), PANELS.items(), strict=True):
        for (label, engine), colour, marker in zip(LINES.items(), OKABE_ITO, MARKERS, strict=False):
            rows = [row for row in rows_of("serving") if (row["model"], row["engine"]) == (model, engine)]
            if not rows:
                continue
            points = [(float(row["time"].split(", ")[-1]), row["score"], SHARES[row["budget"]]) for row in rows]
            axes.plot(*zip(*(point[:2] for point in points), strict=True), marker=marker, color=colour, label=label)
            for x, y, share in points:
                axes.annotate(share, (x, y), xytext=(4, 5), textcoords="offset points", fontsize=8, color=colour)
        axes.set_xscale("log")
        axes.set_xticks(ticks := [0.1, 0.2, 0.3, 0.5, 1.0], [f"{tick:g}" for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.set_title(score, loc="left", fontsize=10)
        axes.set_xlabel(f"time of {work}, as a share of the original's in PyTorch", fontsize=9)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc=place)
    figure.suptitle("Shares of the layers that are left (all, ½, ⅓, ¼), in engines, on one thread", fontsize=11)
    PICTURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURES / "overview.svg")
    figure.savefig(PICTURES / "overview.png", dpi=110)


if __name__ == "__main__":
    main()
