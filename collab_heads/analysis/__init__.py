"""Measure what heads do: statistics, roles, relevance, contributions of tokens, and what the loss of a head costs."""

from collab_heads.analysis.measures.ablation import Ablation, ablation_curve, leave_one_out, mean_loss, without_heads
from collab_heads.analysis.measures.maps_in_place import maps_in_place
from collab_heads.analysis.measures.results import HeadStatistics
from collab_heads.analysis.measures.statistics import head_statistics
from collab_heads.analysis.measures.worth import HeadWorth, head_worth
from collab_heads.analysis.relevance.contribution_comparison import ContributionComparison, compare_contributions
from collab_heads.analysis.relevance.contribution_results import TokenContributions
from collab_heads.analysis.relevance.contributions import token_contributions
from collab_heads.analysis.relevance.head_relevance import HeadRelevance, head_relevance
from collab_heads.analysis.report.head_report import HeadReport
from collab_heads.analysis.roles.head_roles import head_roles
from collab_heads.analysis.roles.labels import HeadRoles
from collab_heads.heads.criteria import HeadCriterion, head_importance, most_important

__all__ = [
    "Ablation",
    "ContributionComparison",
    "HeadCriterion",
    "HeadRelevance",
    "HeadReport",
    "HeadRoles",
    "HeadStatistics",
    "HeadWorth",
    "TokenContributions",
    "ablation_curve",
    "compare_contributions",
    "head_importance",
    "head_relevance",
    "head_roles",
    "head_statistics",
    "head_worth",
    "leave_one_out",
    "maps_in_place",
    "mean_loss",
    "most_important",
    "token_contributions",
    "without_heads",
]
