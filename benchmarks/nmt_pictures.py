"""The pictures of benchmarks/nmt.py."""

import json
import re
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from common import PICTURES


def draw_heads(rows: list[dict]) -> None:
    """Draw BLEU against heads kept, a line per way to choose them."""
    styles = {"learned": ("#0072B2", "o-"), "importance": ("#E69F00", "s--"), "random": ("#999999", "^:")}
    styles |= {"lambda": ("#009E73", "D"), "encoder": ("#CC79A7", "P")}  # colours of Okabe and Ito
    figure, axes = plt.subplots(figsize=(6, 3.8), layout="constrained")
    axes.axhline(rows[0]["bleu"], color="black", linewidth=1, label="all 72 heads, same steps")
    for how, (colour, style) in styles.items():
        chosen = [row for row in rows if row["heads"].startswith(how)]
        x = [statistics.mean(sum(run["kept"]) for run in row["per seed"]) for row in chosen]
        scores = [[run["bleu"] for run in row["per seed"]] for row in chosen]
        means = [statistics.mean(s) for s in scores]
        below, above = ([abs(pick(s) - m) for s, m in zip(scores, means, strict=True)] for pick in (min, max))
        names = {"learned": "learned, exact", "encoder": "encoder heads only"}
        axes.errorbar(x, means, [below, above], fmt=style, color=colour, capsize=3, label=names.get(how, how))
    axes.set(xlabel="heads kept of 72", ylabel="BLEU, test_2016", xscale="log", xticks=(ticks := (9, 18, 36, 53, 72)))
    axes.set_xticklabels(ticks)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save_figure(figure, "nmt")


def draw_alphas(folders: dict[str, Path]) -> None:
    """Draw the nuclear norm of each alpha over training, with and without growth loss, and the learned alphas."""
    found = {name: json.loads((folder / "alphas.json").read_text()) for name, folder in folders.items()}
    sites = list(found["alphas"])
    labels = [label_of(name) for name in sites]
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained", sharey=True)
    styles = {"enc-self": "-", "dec-self": "--", "dec-enc": ":"}
    for panel, (name, folder) in zip(panels, folders.items(), strict=True):
        for label, norms in zip(
            labels, zip(*json.loads((folder / "norms.json").read_text()), strict=True), strict=True
        ):
            role, layer = label.rsplit(" ", 1)
            panel.plot(norms, styles[role], color=plt.get_cmap("viridis")(int(layer) / 3), label=label, linewidth=1.2)
        panel.set(title=name, xlabel="optimizer step")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("nuclear norm of alpha")
    panels[1].legend(fontsize=7, ncols=2)
    save_figure(figure, "alpha_norms")
    figure, rows = plt.subplots(2, len(sites), figsize=(1.35 * len(sites), 3.2), layout="constrained")
    for row, (name, alphas) in zip(rows, found.items(), strict=True):
        bound = max(abs(v - (i == j)) for a in alphas.values() for i, r in enumerate(a) for j, v in enumerate(r))
        for panel, site, label in zip(row, sites, labels, strict=True):
            change = np.array(alphas[site]) - np.eye(len(alphas[site]))
            picture = panel.imshow(change, cmap="PuOr", vmin=-bound, vmax=bound)
            panel.set_title(label, fontsize=8)
            panel.set(xticks=[], yticks=[])
        row[0].set_ylabel(name, fontsize=8)
        figure.colorbar(picture, ax=list(row), shrink=0.8, label="alpha - identity")
    save_figure(figure, "alphas")


def label_of(name: str) -> str:
    """Return the role and layer of a parameter, such as "dec-enc 2"."""
    stack, layer, kind = re.search(r"(encoder|decoder)\.layers\.(\d+)\.(\w+)", name).groups()
    return f"{'enc-self' if stack == 'encoder' else 'dec-self' if kind == 'self_attn' else 'dec-enc'} {layer}"


def save_figure(figure, name: str) -> None:
    """Save a figure as SVG and PNG in docs/pictures/."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURES / f"{name}.svg")
    figure.savefig(PICTURES / f"{name}.png", dpi=110)
