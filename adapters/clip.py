"""CLIP and SigLIP: a stack for texts and one for images, together or alone."""

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.clip import modeling_clip
from transformers.models.siglip import modeling_siglip

from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.contract.feed_forward import FeedForwardNames
from collab_heads.contract.registry import register
from collab_heads.layers.attention import attend, cached_key_value, replacing
from collab_heads.sites.site import AttentionSite, Role


def attention(self, hidden_states, attention_mask=None, **kwargs):
    """Attend, as `forward` of both classes, with the stock signature."""
    key, value = cached_key_value(self, self.v_proj, hidden_states, None, is_cross=False)
    output, weights = attend(
        self, hidden_states, key, value, attention_mask, eager=self.eager, dropout=self.dropout, **kwargs
    )
    return self.out_proj(output), weights


# The model type of a stack's config -> the name of the stack, by its inputs.
STACKS = {
    "clip_text_model": "text",
    "clip_vision_model": "vision",
    "siglip_text_model": "text",
    "siglip_vision_model": "vision",
}


@register
class CLIPAdapter(AttentionAdapter):
    """An adapter for CLIP and SigLIP: both stacks, or one of them."""

    model_types = (
        "clip",
        "siglip",
        "clip_text_model",
        "clip_vision_model",
        "siglip_text_model",
        "siglip_vision_model",
    )
    paths = {r"(?:(?:text|vision)_model\.)?encoder\.layers\.(\d+)\.self_attn": "enc-self"}
    replacements = replacing(attention, modeling_clip.CLIPAttention, modeling_siglip.SiglipAttention)
    query, key, value, output, heads = "q_proj", "k_proj", "v_proj", "out_proj", "num_heads"
    roles = ("enc-self", "dec-self")
    feed_forwards = (
        FeedForwardNames(r"(?:(?:text|vision)_model\.)?encoder\.layers\.\d+\.mlp", ("fc1",), "fc2", "activation_fn"),
    )

    def role(self, role: Role, module: nn.Module) -> Role:
        """Return "dec-self" for CLIP's text stack, which reads from left to right."""
        config = cast(PretrainedConfig, module.config)
        return "dec-self" if config.model_type == "clip_text_model" else role

    def scale(self, module: nn.Module) -> float:
        """Return the attribute `scale`."""
        return float(cast(float, module.scale))

    def sites(self, model: PreTrainedModel) -> list[AttentionSite]:
        """List the sites with their stacks.

        Where both stacks have the same role (SigLIP), the layers of the image stack are numbered after those of the
        text stack.
        """
        sites: list[AttentionSite] = []
        for site in super().sites(model):
            config = cast(PretrainedConfig, model.base_model.get_submodule(site.path).config)
            stack = STACKS[config.model_type]
            before = sum(each.role == site.role and each.stack != stack for each in sites)
            sites.append(replace(site, stack=stack, layer=site.layer + before))
        return sites

    def token_masks(
        self, config: PretrainedConfig, inputs: Mapping, masks: dict[str, Tensor | None]
    ) -> dict[str, Tensor | None]:
        """Return the masks with the encoder's mask for texts, and none for images."""
        return {**masks, "text": masks["encoder"], "vision": None}
