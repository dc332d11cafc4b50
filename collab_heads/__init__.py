"""Make the attention of pretrained Transformers smaller, faster and easier to understand.

Importing the package lets `from_pretrained` load what it saved.
"""

from collab_heads import adapters
from collab_heads.collaborative.report import SiteReport, SwapReport
from collab_heads.collaborative.scratch import collaborative_config
from collab_heads.collaborative.swap import swap_to_collaborative
from collab_heads.errors import CollabHeadsError
from collab_heads.persist import install_hooks
from collab_heads.registry import AttentionAdapter, get_adapter, register, supported_model_types
from collab_heads.sites import AttentionSite, AttentionWeights

install_hooks()

__all__ = [
    "AttentionAdapter",
    "AttentionSite",
    "AttentionWeights",
    "CollabHeadsError",
    "SiteReport",
    "SwapReport",
    "adapters",
    "collaborative_config",
    "get_adapter",
    "register",
    "supported_model_types",
    "swap_to_collaborative",
]
__version__ = "0.1.0"
