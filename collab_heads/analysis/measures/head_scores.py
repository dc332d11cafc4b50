"""Scores of heads from whole attention maps, one number per sentence, as in the source of head rotation.

A map is the T x S attention weights of a head on one sentence, without padding. Where the source leaves out the ends of
sentences, it means the last query token and the last key token, whatever they are; so does this module.

Source: Azov and Landau 2020 (MHR-NLP-Transformers), `--head-confidence-method`. There padding counts, and "wasserstein"
    ends in an error because its result is never stored; this module returns the mean that it was about to compute.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.analysis.measures.passes import Attention, Batch, Observer, excluded_tokens, observe
from collab_heads.analysis.measures.results import Measure, mean_distance
from collab_heads.analysis.measures.statistics import RunningMean, Statistics
from collab_heads.base.checks import check_choice
from collab_heads.base.numerics import float64
from collab_heads.base.option_values import METRIC_WORDS, Metric
from collab_heads.contract.registry import get_adapter
from collab_heads.errors import CalibrationError, NonFiniteError
from collab_heads.model.refusals import check_wrapper
from collab_heads.sites.site import AttentionSite


class Maps:
    """The attention maps of a site on a batch.

    Attributes:
        weights: [B, H, T, S]; 0 where a query or a key is padding.
        queries: [B, T] bool, True for queries that are not padding.
        keys: [B, S] bool, True for keys that are not padding.
    """

    def __init__(self, weights: Tensor, queries: Tensor, keys: Tensor):
        self.weights = weights.masked_fill(~(queries[:, None, :, None] & keys[:, None, None, :]), 0.0)
        self.queries, self.keys = queries, keys

    def cornerless(self) -> Tensor:
        """Return the weights with 0 where the last query token looks at the last key token: [B, H, T, S]."""
        corner = last(self.queries)[:, None, :, None] & last(self.keys)[:, None, None, :]
        return self.weights.masked_fill(corner, 0.0)


def last(unpadded: Tensor) -> Tensor:
    """Mark the last token of every sentence, with padding on either side: [B, T] bool -> [B, T] bool."""
    return unpadded & (unpadded.cumsum(1) == unpadded.sum(1, keepdim=True))


def base(maps: Maps) -> tuple[Tensor, Tensor]:
    """Return the largest weight of every map, and which sentences count.

    The weight is the maximum of A[t, s] over t and s, without the weight of the last query token on the last key token:
    [B, H], from 0 to 1. In causal attention it is 1 for every head, because the first query sees a single key.
    """
    return maps.cornerless().amax((-2, -1)), maps.queries.any(1)


def map_distance(maps: Maps) -> tuple[Tensor, Tensor]:
    """Return the distance between the maps of any two heads, and which sentences count.

    The distance is √(Σ_ts (A_h[t, s] - A_j[t, s])²), without the weight of the last query token on the last key token:
    [B, H, H].
    """
    flat = float64(maps.cornerless().flatten(2))
    return torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist"), maps.queries.any(1)


def wasserstein(maps: Maps) -> tuple[Tensor, Tensor]:
    """Return how far the weights are from equal ones, as two lists of numbers, and which sentences count.

    The number, [B, H] from 0 to 2 / S, is a mean over all query tokens t but the last. It averages the first
    Wasserstein distance between the *values* of the weights and the values u of a query that looks at all S keys but
    the last alike: 1 / S for each of them, and a 0. Between lists of the same length the distance is (1 / S) Σ_i
    |A[t]₍ᵢ₎ - u₍ᵢ₎|, both sorted. The positions of the keys do not matter.
    """
    keys = maps.keys[:, None, None, :]
    count = maps.keys.sum(1)[:, None, None].to(maps.weights.dtype)  # (B, 1, 1)
    apart = (maps.weights - 1 / count[..., None]).abs().masked_fill(~keys, 0.0).sum(-1)  # (B, H, T)
    least = maps.weights.masked_fill(~keys, torch.inf).amin(-1)
    # Sorted, the least weight is compared with the 0. As it is at most 1 / S, the mean, `apart` holds 1 / S - least for
    # it, while its distance from the 0 is least.
    distances = (apart - 1 / count + 2 * least) / count
    rows = maps.queries & ~last(maps.queries)
    sums = distances.masked_fill(~rows[:, None], 0.0).sum(-1)
    return sums / rows.sum(1).clamp(min=1)[:, None], rows.any(1)


# name -> [B, H] or [B, H, H] of the sentences of a batch, and which of them count, [B] bool
OF_MAPS: dict[str, Callable[[Maps], tuple[Tensor, Tensor]]] = {
    "map_distance": map_distance,
    "base": base,
    "wasserstein": wasserstein,
}


class MapScores(Observer):
    """An observer that averages a measure of maps over sentences."""

    weights = True

    def __init__(self, measure: str):
        self.measure = measure

    def begin(self, sites: Sequence[AttentionSite]) -> None:
        self.means = {site.path: RunningMean() for site in sites}

    def see_weights(self, site: AttentionSite, attention: Attention, batch: Batch) -> None:
        values, counted = OF_MAPS[self.measure](maps_of(site, attention.weights, batch))
        self.means[site.path].add(float64(values[counted]))

    def results(self) -> dict[str, Tensor]:
        """Return path -> [H], float64 on the CPU.

        For "map_distance" it is the mean over the other heads of the site, and 0 for a lone head.
        """
        scores = {}
        for path, mean in self.means.items():
            if not mean.count:
                raise CalibrationError(
                    f"{path} saw no sentence that counts for {self.measure!r}: every one was padding or, for "
                    "'wasserstein', a single token"
                )
            scores[path] = mean_distance(mean.mean()) if self.measure == "map_distance" else mean.mean()
            if not torch.isfinite(scores[path]).all():
                raise NonFiniteError(f"{path}: the {self.measure} of its heads is NaN or inf; look at its weights")
        return scores


def maps_of(site: AttentionSite, weights: Tensor, batch: Batch) -> Maps:
    """Return the maps of a batch."""
    queries = batch.every_query(site)  # a decoder is padded where there are no labels: its keys have no other mask
    keys = batch.keys(site) if site.role == "dec-enc" else queries
    masks = []
    for name, mask, axis in (("query", queries, -2), ("key", keys, -1)):
        shape = (weights.shape[0], weights.shape[axis])
        mask = torch.ones(shape, dtype=torch.bool) if mask is None else mask.bool()
        if mask.shape != shape:
            raise CalibrationError(
                f"{site.path}: the mask {tuple(mask.shape)} does not fit its {name} tokens {shape}; give attention "
                "masks of shape (batch, tokens)"
            )
        masks.append(mask.to(weights.device))
    return Maps(weights, *masks)


# metric -> measure of `head_statistics`
OF_TOKENS: dict[str, Measure] = {"confidence": "confidence", "output_distance": "l2"}
SAME: dict[str, str] = {"l2": "output_distance", "pairwise": "map_distance"}  # other names of metrics


def head_scores(
    model: PreTrainedModel,
    batches: Iterable[Mapping],
    metrics: Iterable[Metric],
    *,
    exclude: Iterable[int] | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Score every head by some metrics, in one pass.

    Args:
        model: a supported transformers model; it runs in evaluation mode without gradients and is left as it was.
        batches: input dicts as the model takes them, read once.
        metrics: "confidence": the mean over query tokens t of max_s A[t, s], the largest attention weight.
            "output_distance" (or "l2"): the mean of ‖z_h - z_j‖ over query tokens and the other heads of the site,
            where z are the outputs. The others are means over sentences: "map_distance" (or "pairwise"), the mean of
            ‖A_h - A_j‖ over the other heads of the site (the source sums over them), of whole attention maps; "base",
            max_ts A[t, s], which is always 1 in causal attention; "wasserstein", the distance of a query's weights from
            equal ones.
        exclude: ids of tokens that do not count, as `head_statistics` takes them; maps are measured whole.

    Returns:
        metric -> path -> [H], float64 on the CPU, of every site that has heads.

    Raises:
        ArgumentError: on an unknown metric.
        CalibrationError: if no sentence counted at a site, and as `head_statistics` for the batches.
        NonFiniteError: if a score is NaN or inf; the message names the first such site.
        UnsupportedModelError: if the model is wrapped, or gives no attention weights.

    Source: Azov and Landau 2020 (MHR-NLP-Transformers); confidence: Voita et al. 2019, arXiv:1905.09418.
    """
    measured = {metric: SAME.get(metric, metric) for metric in metrics}
    for metric in measured:
        check_choice("metric", metric, METRIC_WORDS)
    check_wrapper(model)
    adapter = get_adapter(model)
    of_tokens = [OF_TOKENS[name] for name in measured.values() if name in OF_TOKENS]
    statistics = Statistics(of_tokens) if of_tokens else None
    maps = {name: MapScores(name) for name in measured.values() if name in OF_MAPS}
    excluded = () if statistics is None else excluded_tokens(model, exclude)
    observers: list[Observer] = [*maps.values(), *([] if statistics is None else [statistics])]
    observe(model, batches, observers, exclude=excluded)
    found = {name: scores.results() for name, scores in maps.items()}
    if statistics is not None:
        results = statistics.results(model, adapter, excluded)
        found["confidence"] = dict(results.confidence)
        found["output_distance"] = {path: mean_distance(each) for path, each in results.l2.items()}
    return {metric: found[name] for metric, name in measured.items()}
