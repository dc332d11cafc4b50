"""BioGPT: a decoder without an encoder, with BART's attention."""

from transformers.models.biogpt import modeling_biogpt

from collab_heads.adapters.marian import attention  # type: ignore[import-untyped]
from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.contract.feed_forward import FeedForwardNames
from collab_heads.contract.registry import register
from collab_heads.layers.attention import replacing


@register
class BioGptAdapter(AttentionAdapter):
    """An adapter for BioGPT with any head."""

    model_types = ("biogpt",)
    paths = {r"layers\.(\d+)\.self_attn": "dec-self"}
    replacements = replacing(attention, modeling_biogpt.BioGptAttention)
    query, key, value, output, heads = "q_proj", "k_proj", "v_proj", "out_proj", "num_heads"
    roles = ("dec-self",)
    layer_configs = True
    feed_forwards = (FeedForwardNames(r"layers\.\d+", ("fc1",), "fc2", "activation_fn"),)
