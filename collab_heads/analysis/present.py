"""The original numbers of the heads that a model has now."""

from transformers import PreTrainedModel

from collab_heads.config import CollabConfig
from collab_heads.heads.gating import present_heads
from collab_heads.registry import AttentionAdapter


def head_numbers(model: PreTrainedModel, adapter: AttentionAdapter) -> dict[str, tuple[int, ...]]:
    """Per path, the numbers that its heads had before any was removed, for all sites."""
    states = CollabConfig.of(model.config).sites
    return {site.path: tuple(present_heads(states, site)) for site in adapter.sites(model)}
