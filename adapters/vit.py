"""ViT, DeiT and DINOv2: encoders of image patches, with no padding unless the caller passes a mask."""

import transformers
from packaging import version
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.models.deit import modeling_deit
from transformers.models.dinov2 import modeling_dinov2
from transformers.models.vit import modeling_vit

from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.contract.feed_forward import FeedForwardNames
from collab_heads.contract.model_forms import ImageBlueprint
from collab_heads.contract.registry import register
from collab_heads.layers.attention import attend, cached_key_value, replacing

SIZES = {
    "d_model": ("hidden_size",),
    "num_layers": ("num_hidden_layers",),
    "num_heads": ("num_attention_heads",),
    "dropout": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "image_size": ("image_size",),
    "patch_size": ("patch_size",),
}
INNER = {"d_ff": ("intermediate_size",)}
PROCESSOR = "ViTImageProcessorPil"  # those of DeiT and DINOv2 crop the edges of images


def attention(self, hidden_states, attention_mask=None, **kwargs):
    """Attend, as `forward` of all classes, with the stock signature."""
    key, value = cached_key_value(self, self.v_proj, hidden_states, None, is_cross=False)
    output, weights = attend(
        self, hidden_states, key, value, attention_mask, eager=self.eager, dropout=self.attention_dropout, **kwargs
    )
    return self.o_proj(output), weights


# Before 5.21 transformers also matched the old name "attention.query" in "attention.query_key", which is ours.
if version.parse(transformers.__version__) < version.parse("5.21"):
    for name in ("ViTModel", "DeiTModel"):
        renamings = [*get_checkpoint_conversion_mapping(name)]
        whole = WeightRenaming(r"attention.query(?!\w)", "q_proj")
        renamings = [whole if each.target_patterns == whole.target_patterns else each for each in renamings]
        register_checkpoint_conversion_mapping(name, renamings, overwrite=True)


@register
class ViTAdapter(AttentionAdapter):
    """An adapter for ViT, DeiT and DINOv2."""

    model_types = ("vit", "deit", "dinov2")
    paths = {r"layers\.(\d+)\.attention": "enc-self", r"encoder\.layer\.(\d+)\.attention": "enc-self"}
    replacements = replacing(
        attention, modeling_deit.DeiTAttention, modeling_dinov2.Dinov2Attention, modeling_vit.ViTAttention
    )
    image_blueprints = {
        "vit": ImageBlueprint(SIZES | INNER, PROCESSOR),
        "deit": ImageBlueprint(SIZES | INNER, PROCESSOR),
        "dinov2": ImageBlueprint(SIZES | {"d_ff_ratio": ("mlp_ratio",)}, PROCESSOR),
    }
    query, key, value, output = "q_proj", "k_proj", "v_proj", "o_proj"
    head_width, head_counts = ("head_dim", "head_dim"), ("num_attention_heads", None)
    roles = ("enc-self",)
    feed_forwards = (
        FeedForwardNames(r"(?:encoder\.layer|layers)\.\d+\.mlp", ("fc1",), "fc2", "activation_fn"),
        FeedForwardNames(r"encoder\.layer\.\d+\.mlp", ("gate_proj", "up_proj"), "down_proj", "act_fn"),
    )
