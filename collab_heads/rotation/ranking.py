"""The scores by which a `DynamicRotation` ranks heads."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Literal

from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.analysis.measures.map_scores import OF_MAPS, map_scores
from collab_heads.analysis.measures.results import mean_distance
from collab_heads.analysis.measures.statistics import head_statistics
from collab_heads.attention_adapter import AttentionAdapter
from collab_heads.heads.selection import check_scores
from collab_heads.record import CollabConfig, kept_heads
from collab_heads.rotation.exchange import Slot

Batches = Iterable[Mapping]
Excluded = Iterable[int] | None
Values = Mapping[str, Tensor]
Metric = Literal["confidence", "output_distance", "map_distance", "base", "wasserstein", "l2", "pairwise"]


def confidence(model: PreTrainedModel, batches: Batches, adapter: AttentionAdapter, exclude: Excluded) -> Values:
    """The mean over query tokens of the largest attention weight: path -> [H]."""
    return head_statistics(model, batches, adapter, measures=("confidence",), exclude=exclude).confidence


def output_distance(model: PreTrainedModel, batches: Batches, adapter: AttentionAdapter, exclude: Excluded) -> Values:
    """The mean over query tokens and the other heads of the Euclidean distance of outputs: path -> [H]."""
    distances = head_statistics(model, batches, adapter, measures=("l2",), exclude=exclude).l2
    return {path: mean_distance(each) for path, each in distances.items()}


def of_maps(
    measure: str, model: PreTrainedModel, batches: Batches, adapter: AttentionAdapter, exclude: Excluded
) -> Values:
    """A measure of whole attention maps: path -> [H]; of the source, which excludes no ids."""
    return map_scores(model, batches, adapter, measure)


METRICS: dict[str, Callable[[PreTrainedModel, Batches, AttentionAdapter, Excluded], Values]] = {
    "confidence": confidence,
    "output_distance": output_distance,
    **{measure: partial(of_maps, measure) for measure in OF_MAPS},
}
METRICS["l2"] = METRICS["output_distance"]  # its first name here
METRICS["pairwise"] = METRICS["map_distance"]  # its name in the source


def head_scores(
    model: PreTrainedModel,
    batches: Iterable[Mapping],
    adapter: AttentionAdapter,
    metric: Metric,
    exclude: Iterable[int] | None = None,
) -> dict[Slot, float]:
    """Score all heads.

    Args:
        model: a supported transformers model; it is left as it was.
        batches: input dicts as the model takes them.
        adapter: the family's adapter.
        metric: means over query tokens: "confidence", of the largest attention weight; "output_distance" (or "l2"), of
            the Euclidean distance of a head's output to those of the other heads of its layer. Means over sentences,
            see `map_scores`: "map_distance" (or "pairwise"), the same distance of whole attention maps; "base";
            "wasserstein".
        exclude: ids of tokens that do not count, as `head_statistics` takes them; maps are measured whole.

    Returns:
        place -> score; higher is stronger.

    Raises:
        CollabHeadsError: whatever `head_statistics` and `map_scores` refuse, and scores that do not fit the
            heads or are not finite.

    Source: Azov and Landau 2020 (MHR-NLP-Transformers).
    """
    values = METRICS[metric](model, batches, adapter, exclude)
    record, sites = CollabConfig.on(model).sites, adapter.sites_with_heads(model)
    scores = check_scores(values, sites)
    return {
        Slot(site.path, head): score
        for site in sites
        for head, score in zip(kept_heads(record, site), scores[site.path].tolist(), strict=True)
    }
