"""Gemma 3, its text model: Llama's layout with norms of queries and keys; every few layers look at a window only."""

from transformers.models.gemma3 import modeling_gemma3

from collab_heads.adapters.llama import LlamaLayout, RotaryAttention  # type: ignore[import-untyped]
from collab_heads.contract.registry import register
from collab_heads.contract.special_adapters import NormedRotaryAdapter


class RotaryGemma3Attention(RotaryAttention, modeling_gemma3.Gemma3Attention):
    """Of `Gemma3Attention`."""

    stock = modeling_gemma3


@register
class Gemma3Adapter(NormedRotaryAdapter, LlamaLayout):
    """The text model of Gemma 3, as a decoder, or as an encoder of embeddings."""

    model_types = ("gemma3_text",)
    replacements = {modeling_gemma3.Gemma3Attention: RotaryGemma3Attention}
    rms_norms = (modeling_gemma3.Gemma3RMSNorm,)
    gated = {modeling_gemma3.Gemma3MLP: "act_fn"}
    roles = ("dec-self", "enc-self")

    def role(self, role, module):
        """Gemma 3 can be an encoder of embeddings."""
        return role if module.is_causal else "enc-self"

    def decodes(self, config):
        """The others cannot."""
        return not getattr(config, "use_bidirectional_attention", False)
