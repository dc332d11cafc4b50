"""How strong heads are: the scores by which a `DynamicRotation` ranks them."""

from collections.abc import Iterable, Mapping

from transformers import PreTrainedModel

from collab_heads.analysis.results import mean_distance
from collab_heads.analysis.statistics import head_statistics
from collab_heads.config import CollabConfig
from collab_heads.heads.exchange import Slot
from collab_heads.heads.gating import present_heads
from collab_heads.heads.subset import check_scores
from collab_heads.registry import AttentionAdapter

METRICS = ("confidence", "l2")


def head_strengths(
    model: PreTrainedModel,
    batches: Iterable[Mapping],
    adapter: AttentionAdapter,
    metric: str,
    exclude: Iterable[int] | None = None,
) -> dict[Slot, float]:
    """Measure all heads.

    Args:
        model: a supported transformers model; it is left as it was.
        batches: input dicts as the model takes them.
        adapter: the family's adapter.
        metric: "confidence", the mean of the largest attention weight; or "l2", the mean distance of a head's output
            to those of the other heads of its layer.
        exclude: ids of tokens that do not count, as `head_statistics` takes them.

    Returns:
        place -> score; higher is stronger.

    Raises:
        CollabHeadsError: whatever `head_statistics` refuses, and scores that do not fit the heads or are not finite.

    Source: Azov and Landau 2020 (MHR-NLP-Transformers).
    """
    values = getattr(head_statistics(model, batches, adapter, measures=(metric,), exclude=exclude), metric)
    if metric == "l2":
        values = {path: mean_distance(distances) for path, distances in values.items()}
    record, sites = CollabConfig.of(model.config).sites, adapter.sites_with_heads(model)
    scores = check_scores(values, sites)
    return {
        Slot(site.path, head): score
        for site in sites
        for head, score in zip(present_heads(record, site), scores[site.path].tolist(), strict=True)
    }
