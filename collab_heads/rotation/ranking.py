"""Scores by which heads are ranked (place -> score, higher is stronger), and the exchanges that are due."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from transformers import PreTrainedModel

from collab_heads.analysis.measures.head_scores import head_scores
from collab_heads.base.option_values import Metric
from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.errors import ArgumentError
from collab_heads.heads.selection import check_scores
from collab_heads.rotation.head_rows import Slot, moving
from collab_heads.rotation.role_settings import RoleSettings, Stack
from collab_heads.rotation.schedule import Direction, Exchanged
from collab_heads.sites.record import CollabConfig, kept_heads


def scores_for(
    settings: Iterable[RoleSettings],
    model: PreTrainedModel,
    batches: Iterable[Mapping] | None,
    adapter: AttentionAdapter,
    exclude: Iterable[int] | None,
) -> dict[str, dict[Slot, float]]:
    """Return the scores of heads for the settings that rank them: metric -> place -> score.

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
    """Score all heads by some metrics.

    Heads that share a key head move together; the place of the first of them has their mean score. The arguments are
    those of `head_scores`.

    Returns:
        metric -> place -> score; higher is stronger.

    Raises:
        CollabHeadsError: as `head_scores`, and for scores that do not fit the heads or are not finite.
    """
    by_metric = head_scores(model, batches, metrics, exclude=exclude)
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


SlotPairs = list[tuple[Slot, Slot]]


class Due(NamedTuple):
    """The exchange that is due for a role.

    Attributes:
        direction: "swap" or "back".
        settings: of the role.
        stack: the places of its heads, layer by layer.
        back: the pairs that change back, in order; empty for the direction "swap".
    """

    direction: Direction
    settings: RoleSettings
    stack: Stack
    back: SlotPairs


def due_before(
    epoch: int, stacks: Mapping[str, tuple[RoleSettings, Stack]], exchanged: Mapping[str, Exchanged]
) -> dict[str, Due]:
    """Return the exchanges that are due before an epoch, by role.

    Args:
        epoch: counted from 1.
        stacks: role -> its settings, and the places of its heads.
        exchanged: role -> its heads that are exchanged now.
    """
    due = {}
    for role, (settings, stack) in stacks.items():
        away = exchanged.get(role)
        if direction := settings.due(epoch, None if away is None else away.since):
            due[role] = Due(direction, settings, stack, [] if away is None else away.pairs[::-1])
    return due


def pairs_by_role(
    epoch: int, pairs: Iterable[tuple[Slot, Slot]], due: Mapping[str, Due], roles: Mapping[str, str]
) -> dict[str, SlotPairs]:
    """Group pairs by their role.

    Args:
        epoch: the epoch before which they are to be exchanged.
        pairs: of all roles.
        due: what is due before this epoch.
        roles: path of a site -> its role.

    Raises:
        ArgumentError: unless the pairs are those that are due.
    """
    by_role: dict[str, SlotPairs] = {role: [] for role in due}
    for first, second in pairs:
        role = roles.get(first.path)
        if role is None or role not in due:
            raise ArgumentError(f"{first} and {second}: nothing of {role or 'this path'} is due at epoch {epoch}")
        by_role[role].append((first, second))
    for role, what in due.items():
        if not by_role[role] or (what.direction == "back" and by_role[role] != what.back):
            raise ArgumentError(f"the pairs of {role} are not what is due before epoch {epoch}: {what.direction}")
    return by_role
