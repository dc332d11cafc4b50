"""Make the attention of pretrained Transformers smaller, faster and easier to understand.

Importing the package lets `from_pretrained` load what it saved.
"""

from collab_heads import adapters
from collab_heads.collaborative.report import SiteReport, SwapReport
from collab_heads.collaborative.scratch import collaborative_config
from collab_heads.collaborative.swap import swap_to_collaborative
from collab_heads.errors import CollabHeadsError
from collab_heads.heads.adamw import HeadAdamW
from collab_heads.heads.alpha import alpha_report, swap_to_alpha
from collab_heads.heads.dynamic import DynamicRotation
from collab_heads.heads.exchange import swap_heads
from collab_heads.heads.fold import fold_heads
from collab_heads.heads.gating import gate_report, swap_to_gated
from collab_heads.heads.importance import head_importance, most_important
from collab_heads.heads.penalty import HeadPenalty
from collab_heads.heads.prune import prune_heads
from collab_heads.heads.report import AlphaReport, FoldReport, GateReport, PruneReport
from collab_heads.heads.rotation import HeadRotation
from collab_heads.persist import install_hooks
from collab_heads.registry import AttentionAdapter, get_adapter, register, supported_model_types
from collab_heads.sites import AttentionSite, AttentionWeights

install_hooks()

__all__ = [
    "AlphaReport",
    "AttentionAdapter",
    "AttentionSite",
    "AttentionWeights",
    "CollabHeadsError",
    "DynamicRotation",
    "FoldReport",
    "GateReport",
    "HeadAdamW",
    "HeadPenalty",
    "HeadRotation",
    "PruneReport",
    "SiteReport",
    "SwapReport",
    "adapters",
    "alpha_report",
    "collaborative_config",
    "fold_heads",
    "gate_report",
    "get_adapter",
    "head_importance",
    "most_important",
    "prune_heads",
    "register",
    "supported_model_types",
    "swap_heads",
    "swap_to_alpha",
    "swap_to_collaborative",
    "swap_to_gated",
]
__version__ = "0.1.0"
