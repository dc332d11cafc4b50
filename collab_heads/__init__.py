"""Make pretrained Transformers smaller and faster, and their attention easier to understand.

Importing the package lets `from_pretrained` load what it saved. Measures of heads are in `collab_heads.analysis`, what
trainings need in `collab_heads.training`, errors in `collab_heads.errors`.
"""

from collab_heads.base.command_start import start_command

__version__ = "0.1.0"
start_command()  # the command's help and wrong flags need nothing of what is imported below

from collab_heads import adapters
from collab_heads.analysis.analyze import analyze_heads
from collab_heads.analysis.inspect import inspect
from collab_heads.collaborative.scratch import collaborative_config
from collab_heads.collaborative.swap import swap_to_collaborative
from collab_heads.compression.compress import compress
from collab_heads.compression.compression_plan import CompressionPlan
from collab_heads.compression.plan import plan
from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.contract.registry import get_adapter, register, supported_model_types
from collab_heads.distillation.distill import distill
from collab_heads.errors import CollabHeadsError
from collab_heads.evaluation.evaluate import evaluate, scorer
from collab_heads.heads.alpha import swap_to_alpha
from collab_heads.heads.fold import fold_heads
from collab_heads.heads.gating import swap_to_gated
from collab_heads.heads.prune import prune_heads
from collab_heads.heads.prune_neurons import prune_neurons
from collab_heads.model.peft_targets import peft_targets
from collab_heads.rotation.exchange import rotate_heads
from collab_heads.running.generation import generate_batches
from collab_heads.saving.card import model_card
from collab_heads.saving.transformers_hooks import install_hooks
from collab_heads.serving.export import export
from collab_heads.serving.loading import load_exported
from collab_heads.serving.served_gguf import ServedGguf
from collab_heads.serving.served_model import ServedModel
from collab_heads.serving.served_program import ServedProgram
from collab_heads.sites.site import AttentionSite, AttentionWeights
from collab_heads.vocabulary.trim import trim_vocabulary

install_hooks()

__all__ = [
    "AttentionAdapter",
    "AttentionSite",
    "AttentionWeights",
    "CollabHeadsError",
    "CompressionPlan",
    "ServedGguf",
    "ServedModel",
    "ServedProgram",
    "adapters",
    "analyze_heads",
    "collaborative_config",
    "compress",
    "distill",
    "evaluate",
    "export",
    "fold_heads",
    "generate_batches",
    "get_adapter",
    "inspect",
    "load_exported",
    "model_card",
    "peft_targets",
    "plan",
    "prune_heads",
    "prune_neurons",
    "register",
    "rotate_heads",
    "scorer",
    "supported_model_types",
    "swap_to_alpha",
    "swap_to_collaborative",
    "swap_to_gated",
    "trim_vocabulary",
]
