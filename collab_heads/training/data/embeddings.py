"""Sentence embeddings, and how far two models agree on them: a measure that needs no labels."""

import torch


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
