"""Scores of heads from whole attention maps, one number per sentence, as the source of head rotation takes them.

A map is the T x S attention weights of a head on one sentence, without padding. Where the source leaves the ends of
sentences out, it means the last query token and the last key token, whatever they are; so is it here.

Source: Azov and Landau 2020 (MHR-NLP-Transformers), `--head-confidence-method`. There padding counts, and "wasserstein"
ends in an error, as nothing keeps what it computes: here is the mean that it is on the way to.
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
        queries: [B, T] bool, which are no padding.
        keys: [B, S] bool, the same.
    """

    def __init__(self, weights: Tensor, queries: Tensor, keys: Tensor):
        self.weights = weights.masked_fill(~(queries[:, None, :, None] & keys[:, None, None, :]), 0.0)
        self.queries, self.keys = queries, keys

    def cornerless(self) -> Tensor:
        """The weights, 0 where the last query token looks at the last key token: [B, H, T, S]."""
        corner = last(self.queries)[:, None, :, None] & last(self.keys)[:, None, None, :]
        return self.weights.masked_fill(corner, 0.0)


def last(unpadded: Tensor) -> Tensor:
    """The last token of every sentence, padding on either side: [B, T] bool -> [B, T] bool."""
    return unpadded & (unpadded.cumsum(1) == unpadded.sum(1, keepdim=True))


def base(maps: Maps) -> tuple[Tensor, Tensor]:
    """Max over t, s of A[t, s], the largest weight of the map, without that corner: [B, H], from 0 to 1.

    In causal attention it is 1 for every head: the first query sees a single key.
    """
    return maps.cornerless().amax((-2, -1)), maps.queries.any(1)


def map_distance(maps: Maps) -> tuple[Tensor, Tensor]:
    """√(Σ_ts (A_h[t, s] - A_j[t, s])²), the distance between the maps of two heads, without that corner: [B, H, H]."""
    flat = float64(maps.cornerless().flatten(2))
    return torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist"), maps.queries.any(1)


def wasserstein(maps: Maps) -> tuple[Tensor, Tensor]:
    """How far the weights are from equal ones, as two lists of numbers: [B, H], from 0 to 2 / S.

    The mean over query tokens t, without the last, of the first Wasserstein distance between the *values* of the
    weights and those of a query that looks at all S keys alike but not at the last, u: 1/S so many times, and a 0.
    Between lists of one length it is (1/S) Σ_i |A[t]₍ᵢ₎ - u₍ᵢ₎|, both sorted; where keys are does not matter.
    """
    keys = maps.keys[:, None, None, :]
    count = maps.keys.sum(1)[:, None, None].to(maps.weights.dtype)  # (B, 1, 1)
    apart = (maps.weights - 1 / count[..., None]).abs().masked_fill(~keys, 0.0).sum(-1)  # (B, H, T)
    least = maps.weights.masked_fill(~keys, torch.inf).amin(-1)
    # sorted, the least weight meets the 0; being a mean's least it was 1 / S - least from 1 / S, and is least from 0
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
    """Means over sentences of a measure of maps.

    Args:
        measure: its name.

    Raises:
        ArgumentError: on an unknown one.
    """

    weights = True

    def __init__(self, measure: str):
        check_choice("measure of maps", measure, OF_MAPS)
        self.measure = measure

    def begin(self, sites: Sequence[AttentionSite]) -> None:
        """Begin at zero."""
        self.means = {site.path: RunningMean() for site in sites}

    def see_weights(self, site: AttentionSite, attention: Attention, batch: Batch) -> None:
        """Add a batch."""
        values, counted = OF_MAPS[self.measure](maps_of(site, attention.weights, batch))
        self.means[site.path].add(float64(values[counted]))

    def results(self) -> dict[str, Tensor]:
        """Path -> [H], float64 on the CPU; of distances the mean over the other heads of the site, 0 for a lone one.

        Raises:
            CalibrationError: if no sentence counted at a site.
            NonFiniteError: if a score is NaN or inf; the first such site is named.
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
    """The maps of a batch.

    Raises:
        CalibrationError: if a mask of the batch does not fit; both shapes are named.
    """
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


def map_scores(
    model: PreTrainedModel,
    batches: Iterable[Mapping],
    measure: str,
) -> dict[str, Tensor]:
    """Measure every head on its attention maps, in one pass; memory does not grow with the number of batches.

    Args:
        model: a supported transformers model; it runs in evaluation mode without gradients and is left as it was.
        batches: input dicts as the model takes them, read once.
        measure: "map_distance": the mean Euclidean distance of the head's map to those of the other heads of its site
            (there called "pairwise", and summed over heads). "base": the largest weight of the map (in causal
            attention always 1: it ranks nothing there). "wasserstein": how far the values of its weights are from equal
            ones. Of each, the mean over sentences.

    Returns:
        path -> [H], float64, of every site that has heads.

    Raises:
        ArgumentError: on an unknown measure.
        CalibrationError: if there are no batches, the model cannot take one (its index is named), a mask does not fit,
            or no sentence counted at a site.
        NonFiniteError: if a score is NaN or inf; the first such site is named.
        UnsupportedModelError: if the model is wrapped, or gives no attention weights.
    """
    scores = MapScores(measure)
    observe(model, batches, [scores], exclude=())  # the source knows no ids that do not count
    return scores.results()


OF_TOKENS: dict[str, Measure] = {"confidence": "confidence", "output_distance": "l2"}  # -> of `head_statistics`
SAME: dict[str, str] = {"l2": "output_distance", "pairwise": "map_distance"}  # its first name here; the source's


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
            "output_distance" (or "l2"): the mean over query tokens, and the other heads of the site, of ‖z_h - z_j‖,
            z the outputs. Means over sentences, see `map_scores`: "map_distance" (or "pairwise"), ‖A_h - A_j‖ of whole
            attention maps; "base", max_ts A[t, s]; "wasserstein", of the weights of a query from equal ones.
        exclude: ids of tokens that do not count, as `head_statistics` takes them; maps are measured whole.

    Returns:
        metric -> path -> [H], float64 on the CPU, of every site that has heads.

    Raises:
        ArgumentError: on an unknown metric.
        CollabHeadsError: whatever `head_statistics` and `map_scores` refuse.

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
