"""Heads whose outputs have a part in common, and how little is lost where their values are narrowed."""

import torch

from collab_heads.calibration.input_moments import InputMoments
from collab_heads.fitting import values
from collab_heads.fitting.values import head_moments
from collab_heads.layers.values import ValueWeights

D_V, D, D_K = 6, 20, 15
TOKENS = 400


def seen(tokens):
    return InputMoments.of(tokens[None])


def correlated(groups, seed):
    """Weights of heads that share value heads, and their moments: what they put out has a part in common."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    stock = ValueWeights(drawn((max(groups) + 1) * D_V, D_K), None, drawn(D, len(groups) * D_V), drawn(D))
    tokens = [drawn(TOKENS, D_V) @ drawn(D_V, D_V) for _ in set(groups)]
    mixed = [tokens[key] + drawn(TOKENS, D_V) @ drawn(D_V, D_V) for key in groups]
    return stock, head_moments(stock, groups, seen(torch.cat(mixed, -1)), has_gates=False)


def lost_share(stock, lost, moments):
    return values.variance(lost, moments.covariance) / values.variance(stock.output, moments.covariance)


def alternated(stock, groups, width, moments, seed, rounds=40):
    """The share that is lost where B for A and A for B, each by least squares, take turns from random rows A."""
    generator = torch.Generator().manual_seed(seed)
    root = torch.linalg.cholesky(moments.covariance)
    each = root.unflatten(0, (len(groups), D_V))  # (H, d_v, n)
    wanted = stock.output @ root
    rows = torch.randn(max(groups) + 1, width, D_V, generator=generator, dtype=torch.float64)
    for _ in range(rounds):
        seen_by = torch.cat([rows[key] @ part for key, part in zip(groups, each, strict=True)])
        columns = torch.linalg.lstsq(seen_by.mT, wanted.mT).solution.mT
        parts = torch.zeros(wanted.numel(), *rows.shape, dtype=torch.float64).flatten(2)
        for key, column, part in zip(groups, columns.split(width, dim=1), each, strict=True):
            parts[:, key] += torch.kron(column, part.mT.contiguous())
        rows = torch.linalg.lstsq(parts.flatten(1), wanted.flatten()).solution.view_as(rows)
    left = wanted - columns @ seen_by
    return float(left.square().sum() / wanted.square().sum())
