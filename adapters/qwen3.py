"""Qwen3: Llama's layout with norms of the queries and keys of each head, which therefore keep their width."""

from transformers.models.qwen3 import modeling_qwen3

from collab_heads.adapters.llama import LlamaLayout, attention, window  # type: ignore[import-untyped]
from collab_heads.contract.registry import register
from collab_heads.contract.special_adapters import NormedRotaryAdapter
from collab_heads.layers.attention import replacing


@register
class Qwen3Adapter(NormedRotaryAdapter, LlamaLayout):
    """An adapter for Qwen3."""

    model_types = ("qwen3",)
    replacements = replacing(attention, modeling_qwen3.Qwen3Attention, prefix="Rotary", window=window)
    rms_norms = (modeling_qwen3.Qwen3RMSNorm,)
    gated = {modeling_qwen3.Qwen3MLP: "act_fn"}
