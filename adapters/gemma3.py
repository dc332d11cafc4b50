"""Gemma 3, text only: Llama's layout with norms of queries and keys; most layers attend to a window only."""

from transformers.models.gemma3 import modeling_gemma3

from collab_heads.adapters.llama import LlamaLayout, attention, window  # type: ignore[import-untyped]
from collab_heads.contract.registry import register
from collab_heads.contract.special_adapters import NormedRotaryAdapter
from collab_heads.layers.attention import replacing


@register
class Gemma3Adapter(NormedRotaryAdapter, LlamaLayout):
    """An adapter for the text model of Gemma 3, as a decoder, or as an encoder of embeddings."""

    model_types = ("gemma3_text",)
    replacements = replacing(attention, modeling_gemma3.Gemma3Attention, prefix="Rotary", window=window)
    rms_norms = (modeling_gemma3.Gemma3RMSNorm,)
    gated = {modeling_gemma3.Gemma3MLP: "act_fn"}
    roles = ("dec-self", "enc-self")

    def role(self, role, module):
        """Return "enc-self" for a model that is an encoder of embeddings."""
        return role if module.is_causal else "enc-self"

    def decodes(self, config):
        """Return True unless the config makes the model a bidirectional encoder of embeddings."""
        return not getattr(config, "use_bidirectional_attention", False)
