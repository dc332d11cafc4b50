"""Make pretrained Transformers smaller and faster, and their attention easier to understand.

Importing the package lets `from_pretrained` load what it saved.
"""

from collab_heads.base.command_start import start_command

__version__ = "0.1.0"
start_command()  # the command's help and wrong flags need nothing of what is imported below

from typing import TYPE_CHECKING

from collab_heads import adapters
from collab_heads.analysis.analyze import analyze_heads
from collab_heads.analysis.measures.ablation import Ablation, ablation_curve, leave_one_out, mean_loss, without_heads
from collab_heads.analysis.measures.results import HeadStatistics
from collab_heads.analysis.measures.statistics import head_statistics
from collab_heads.analysis.relevance.contribution_comparison import ContributionComparison, compare_contributions
from collab_heads.analysis.relevance.contribution_results import TokenContributions
from collab_heads.analysis.relevance.contributions import token_contributions
from collab_heads.analysis.relevance.head_relevance import HeadRelevance, head_relevance
from collab_heads.analysis.report.head_report import HeadReport
from collab_heads.analysis.roles.head_roles import head_roles
from collab_heads.analysis.roles.labels import HeadRoles
from collab_heads.base.extras import check_extra
from collab_heads.collaborative.report import SiteReport, SwapReport
from collab_heads.collaborative.scratch import collaborative_config
from collab_heads.collaborative.swap import swap_to_collaborative
from collab_heads.compression.compress import compress
from collab_heads.compression.compression_plan import CompressionPlan
from collab_heads.compression.plan import plan
from collab_heads.compression.report import CompressedSite, CompressReport
from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.contract.registry import get_adapter, register, supported_model_types
from collab_heads.distillation.checkpoint import DistillReport
from collab_heads.distillation.distill import distill
from collab_heads.errors import CollabHeadsError
from collab_heads.heads.adamw import HeadAdamW
from collab_heads.heads.alpha import alpha_report, swap_to_alpha
from collab_heads.heads.criteria import HeadCriterion, head_importance, most_important
from collab_heads.heads.fold import fold_heads
from collab_heads.heads.gating import gate_report, swap_to_gated
from collab_heads.heads.penalty.head_penalty import HeadPenalty
from collab_heads.heads.prune import prune_heads
from collab_heads.heads.prune_neurons import PruneNeuronsReport, prune_neurons
from collab_heads.heads.report import AlphaReport, FoldReport, GateReport, PruneReport
from collab_heads.model.peft_targets import peft_targets
from collab_heads.rotation.exchange import rotate_heads
from collab_heads.rotation.head_rotation import HeadRotation
from collab_heads.saving.card import model_card
from collab_heads.saving.transformers_hooks import install_hooks
from collab_heads.serving.export import ExportReport, export
from collab_heads.serving.served_model import ServedModel, load_exported
from collab_heads.sites.site import AttentionSite, AttentionWeights
from collab_heads.trainer.heads_file import load_heads, save_heads
from collab_heads.vocabulary.trim import VocabularyReport, trim_vocabulary

if TYPE_CHECKING:
    from collab_heads.trainer.head_training import HeadTraining

install_hooks()

__all__ = [
    "Ablation",
    "AlphaReport",
    "AttentionAdapter",
    "AttentionSite",
    "AttentionWeights",
    "CollabHeadsError",
    "CompressReport",
    "CompressedSite",
    "CompressionPlan",
    "ContributionComparison",
    "DistillReport",
    "ExportReport",
    "FoldReport",
    "GateReport",
    "HeadAdamW",
    "HeadCriterion",
    "HeadPenalty",
    "HeadRelevance",
    "HeadReport",
    "HeadRoles",
    "HeadRotation",
    "HeadStatistics",
    "HeadTraining",
    "PruneNeuronsReport",
    "PruneReport",
    "ServedModel",
    "SiteReport",
    "SwapReport",
    "TokenContributions",
    "VocabularyReport",
    "ablation_curve",
    "adapters",
    "alpha_report",
    "analyze_heads",
    "collaborative_config",
    "compare_contributions",
    "compress",
    "distill",
    "export",
    "fold_heads",
    "gate_report",
    "get_adapter",
    "head_importance",
    "head_relevance",
    "head_roles",
    "head_statistics",
    "leave_one_out",
    "load_exported",
    "load_heads",
    "mean_loss",
    "model_card",
    "most_important",
    "peft_targets",
    "plan",
    "prune_heads",
    "prune_neurons",
    "register",
    "rotate_heads",
    "save_heads",
    "supported_model_types",
    "swap_to_alpha",
    "swap_to_collaborative",
    "swap_to_gated",
    "token_contributions",
    "trim_vocabulary",
    "without_heads",
]


def __getattr__(name: str) -> object:
    if name == "HeadTraining":  # when it is asked for: transformers' Trainer takes two seconds, and needs accelerate
        check_extra("train", "trainings with a Trainer", ["accelerate"])
        from collab_heads.trainer.head_training import HeadTraining

        return HeadTraining
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
