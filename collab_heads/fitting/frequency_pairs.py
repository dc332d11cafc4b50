"""Choose the frequency pairs that a rotary key head keeps: those that preserve its attention best.

Before the softmax, the score of a head is a sum over its pairs. Removing pairs changes the scores. To second order, the
divergence of the attention is half the variance of this change over the keys, weighted by the attention. The criterion
is therefore a Gram matrix of the pairs [P, P]: the covariance of their contributions over the attended keys, summed
over queries. Heads that share a key head keep the same pairs, so their matrices are added. Kept pairs are multiplied by
factors with which they replace all pairs best (least squares; a factor and a rotation commute). Pairs are removed one
by one, each time the one that costs least (backward elimination).

Shapes: B batch, T queries, S keys, H heads, H_k key heads, d width of a head, P = d/2 pairs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from collab_heads.base.numerics import float64
from collab_heads.layers.rotary_query_key import turned
from collab_heads.running.attention_calls import Call
from collab_heads.sites.site import AttentionWeights, count_key_heads

QUERIES = 128  # that are used per sequence: an even sample of longer ones
RIDGE = 1e-6  # of the mean diagonal of a Gram matrix: pairs may give the same, or nothing
TINY = 1e-300  # keeps a Gram matrix of zeros invertible
ELEMENTS = 2**24  # contributions of pairs that are computed at a time
TOKENS = 4096  # positions that are read, about; of a real decoder, twice as many saved 0.5 % of the error at most


@torch.no_grad()
def pair_grams(weights: AttentionWeights, calls: Sequence[Call]) -> Tensor:
    """Compute the Gram matrices of the pairs of every key head from recorded calls: [H_k, P, P].

    Args:
        weights: the weights of the stock site.
        calls: its recorded calls, with positions.
    """
    heads, groups = weights.num_heads, groups_of(weights)
    grams = torch.zeros(count_key_heads(heads, groups), *[weights.dim_head // 2] * 2, dtype=torch.float64)
    grams = grams.to(weights.query.device)
    for call in calls[:: max(1, sum(call.query_inputs[..., 0].numel() for call in calls) // TOKENS)]:
        query = rotated(call.query_inputs, weights.query, weights.query_bias, call)
        key = rotated(call.key_inputs, weights.key, weights.key_bias, call)
        places = slice(None, None, -(-query.shape[2] // QUERIES))
        bias = query.new_zeros(1, 1, 1, 1)
        for each in call.biases:
            bias = bias + each.to(query.dtype)
        bias = bias.expand(*query.shape[:3], key.shape[2])[:, :, places]
        used = query.new_ones(query.shape[0], query.shape[2]) if call.used is None else call.used.to(query)
        for head, key_head in enumerate(groups):
            grams[key_head] += gram(
                query[:, head, places], key[:, key_head], bias[:, head], used[:, places], weights.scale
            )
    return grams


def groups_of(weights: AttentionWeights) -> list[int]:
    """Return the key head of every head."""
    return list(range(weights.num_heads) if weights.groups is None else weights.groups)


def in_pairs(heads: Tensor) -> Tensor:
    """Group the rows of heads into pairs: [H, d, D] -> [H, P, 2, D]."""
    return heads.unflatten(1, (2, -1)).transpose(1, 2)


def agreement(left: Tensor, right: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the inner product of the scores of two sets of pairs, on average over all angles between two tokens.

    For one pair it is that of A = left^T Q right and B = query^T Q key, with Q a rotation of the plane by any angle.

    Args:
        left: [H, n, 2, D_q], the query rows of one set, weighted.
        right: [H, n, 2, D_k], its key rows.
        query: [H, n, 2, D_q], the query rows of the other set.
        key: [H, n, 2, D_k], its key rows.
    """
    of_queries, of_keys = left @ query.mT, right @ key.mT  # (H, n, 2, 2)
    traces = [each.diagonal(dim1=-2, dim2=-1).sum(-1) for each in (of_queries, of_keys)]
    skews = [each[..., 0, 1] - each[..., 1, 0] for each in (of_queries, of_keys)]
    return (traces[0] * traces[1] + skews[0] * skews[1]).sum() / 2


def rotated(inputs: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
    """Compute queries or keys, rotated by their positions: [B, T, D] -> [B, H, T, d]."""
    dtype = torch.float32 if weight.dtype.itemsize < 4 else weight.dtype
    heads = torch.einsum("btd,hwd->bhtw", inputs.detach().to(dtype), weight.detach().to(dtype))
    if bias is not None:
        heads = heads + bias.detach().to(dtype)[:, None]
    if call.positions is None:
        return heads
    cos, sin = (angles.to(dtype).unsqueeze(1) for angles in call.positions)
    return turned(heads, cos, sin)


def gram(query: Tensor, key: Tensor, bias: Tensor, used: Tensor, scale: float) -> Tensor:
    """Compute the Gram matrix of the pairs of one head: [P, P].

    Args:
        query: [B, T, d], rotated by their positions.
        key: [B, S, d], likewise.
        bias: [B, T, S], added to the scores.
        used: [B, T], 1 for queries that count, 0 for padding.
        scale: the scale of the scores.
    """
    pairs = query.shape[-1] // 2
    query, key = query.unflatten(-1, (2, pairs)), key.unflatten(-1, (2, pairs))
    rows = max(1, ELEMENTS // (query.shape[1] * key.shape[1] * pairs))
    found = float64(query.new_zeros(pairs, pairs))
    for parts in zip(*(each.split(rows) for each in (query, key, bias, used)), strict=True):
        queries, keys, added, counts = parts
        each = torch.einsum("btcp,bscp->btsp", queries, keys) * scale
        attention = (each.sum(-1) + added).softmax(-1).unsqueeze(-1)  # (B, T, S, 1)
        centred = each - (attention * each).sum(2, keepdim=True)
        centred = (centred * (attention * counts[..., None, None]).sqrt()).flatten(0, 2)
        found += centred.mT @ centred
    return found


def grams_by_weights(weights: AttentionWeights) -> Tensor:
    """Compute the Gram matrices of the pairs of every key head from the weights alone: [H_k, P, P].

    They are diagonal: for white inputs at random positions, the contributions of pairs are uncorrelated.
    """
    sizes = []
    for weight, bias in ((weights.query, weights.query_bias), (weights.key, weights.key_bias)):
        rows = weight if bias is None else torch.cat([weight, bias[..., None]], dim=-1)
        sizes.append(float64(rows.detach()).square().sum(-1).unflatten(1, (2, -1)).sum(1))  # (H or H_k, P)
    groups = torch.tensor(groups_of(weights), device=sizes[0].device)
    queries = torch.zeros_like(sizes[1]).index_add_(0, groups, sizes[0])
    return torch.diag_embed(weights.scale**2 * queries * sizes[1] / 2)


def choose_pairs(grams: Tensor, count: int) -> Tensor:
    """Choose the pairs that every key head keeps: [H_k, P, P] -> [H_k, count], ascending."""
    return torch.stack([choose(gram, count) for gram in grams])


def choose(gram: Tensor, count: int) -> Tensor:
    """Choose the pairs of one key head: remove pairs one by one, each time the one that the others replace best."""
    kept = torch.arange(len(gram), device=gram.device)
    while len(kept) > count:
        inverse = torch.linalg.inv(regularised(gram)[kept][:, kept])
        costs = (inverse @ gram[kept].sum(1)).square() / inverse.diagonal()
        kept = kept[torch.arange(len(kept), device=kept.device) != costs.argmin()]
    return kept


def factors_of(grams: Tensor, pairs: Tensor) -> Tensor:
    """Return the factors with which the kept pairs replace all pairs best: [H_k, P, P], [H_k, n] -> [H_k, n]."""
    return torch.stack(
        [
            torch.linalg.solve(regularised(gram)[kept][:, kept], regularised(gram)[kept].sum(1))
            for gram, kept in zip(grams, pairs, strict=True)
        ]
    )


def regularised(gram: Tensor) -> Tensor:
    """Add a ridge to a Gram matrix, so that it is invertible even if pairs contribute nothing."""
    added = RIDGE * gram.diagonal().mean() + TINY
    return gram + added * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)


def share_lost(grams: Tensor, pairs: Tensor, factors: Tensor) -> float:
    """Return the root of the share of the scores' variance that is lost with the pairs that are removed."""
    missing = torch.ones(grams.shape[:2], dtype=grams.dtype, device=grams.device).scatter_add_(1, pairs, -factors)
    lost, whole = (missing[:, None] @ grams @ missing[..., None]).sum(), grams.sum()
    return float((lost / whole).clamp(0, 1).sqrt()) if whole > 0 else 0.0
