"""EuroBERT: Llama's layout in an encoder, whose tokens attend to both sides."""

from transformers.models.eurobert import modeling_eurobert

from collab_heads.adapters.llama import LlamaLayout, attention  # type: ignore[import-untyped]
from collab_heads.contract.registry import register
from collab_heads.layers.attention import replacing


@register
class EuroBertAdapter(LlamaLayout):
    """An adapter for EuroBERT."""

    model_types = ("eurobert",)
    paths = dict.fromkeys(LlamaLayout.paths, "enc-self")
    roles = ("enc-self",)
    replacements = replacing(attention, modeling_eurobert.EuroBertAttention, prefix="Rotary")
    rms_norms = (modeling_eurobert.EuroBertRMSNorm,)
    gated = {modeling_eurobert.EuroBertMLP: "act_fn"}
