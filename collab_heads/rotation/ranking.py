"""Scores by which heads are ranked; place -> score, higher is stronger."""

from collections.abc import Iterable, Mapping

from transformers import PreTrainedModel

from collab_heads.analysis.measures.head_scores import head_scores
from collab_heads.attention_adapter import AttentionAdapter
from collab_heads.errors import ArgumentError
from collab_heads.heads.selection import check_scores
from collab_heads.record import CollabConfig, kept_heads
from collab_heads.rotation.role_settings import RoleSettings
from collab_heads.rotation.slots import Slot, moving
from collab_heads.words import Metric


def scores_for(
    settings: Iterable[RoleSettings],
    model: PreTrainedModel,
    batches: Iterable[Mapping] | None,
    adapter: AttentionAdapter,
    exclude: Iterable[int] | None,
) -> dict[str, dict[Slot, float]]:
    """What heads are ranked by where these settings rank them: metric -> place -> score.

    Raises:
        ArgumentError: if heads must be ranked, and there are no batches.
        CollabHeadsError: as `slot_scores`.
    """
    ranking = [each for each in settings if each.ranks]
    if not ranking:
        return {}
    if batches is None:
        first = ranking[0]
        raise ArgumentError(f"the policy {first.policy!r} ranks heads by {first.metric}: it needs batches")
    return slot_scores(model, batches, adapter, dict.fromkeys(each.metric for each in ranking), exclude)


def slot_scores(
    model: PreTrainedModel,
    batches: Iterable[Mapping],
    adapter: AttentionAdapter,
    metrics: Iterable[Metric],
    exclude: Iterable[int] | None = None,
) -> dict[str, dict[Slot, float]]:
    """Score all heads by some metrics; of those that share a key head, which move together, the first has their mean.

    The arguments are those of `head_scores`.

    Returns:
        metric -> place -> score; higher is stronger.

    Raises:
        CollabHeadsError: whatever `head_scores` refuses, and scores that do not fit the heads or are not finite.
    """
    by_metric = head_scores(model, batches, metrics, adapter, exclude=exclude)
    record, sites = CollabConfig.on(model).sites, adapter.sites_with_heads(model)
    found = {}
    for metric, values in by_metric.items():
        scores = check_scores(values, sites)
        found[metric] = {
            slot: sum(of_site[index] for index in members) / len(members)
            for site in sites
            for of_site in [scores[site.path].tolist()]
            for slot, members in moving(site, kept_heads(record, site)).items()
        }
    return found
