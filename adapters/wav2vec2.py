"""Wav2vec2 and HuBERT: audio encoders whose convolutions turn some hundred samples into one frame."""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.hubert import modeling_hubert
from transformers.models.wav2vec2 import modeling_wav2vec2

from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.contract.feed_forward import FeedForwardNames
from collab_heads.contract.registry import register
from collab_heads.layers.attention import attend, cached_key_value, replacing


def attention(self, hidden_states, key_value_states=None, attention_mask=None, output_attentions=False, **kwargs):
    """Attend, as `forward` of both classes, with the stock signature; no model passes `key_value_states`."""
    key, value = cached_key_value(self, self.v_proj, hidden_states, None, is_cross=False)
    output, weights = attend(
        self, hidden_states, key, value, attention_mask, eager=self.eager, dropout=self.dropout, **kwargs
    )
    return self.out_proj(output), weights


@register
class Wav2Vec2Adapter(AttentionAdapter):
    """An adapter for Wav2vec2 and HuBERT."""

    model_types = ("wav2vec2", "hubert")
    paths = {r"encoder\.layers\.(\d+)\.attention": "enc-self"}
    replacements = replacing(attention, modeling_hubert.HubertAttention, modeling_wav2vec2.Wav2Vec2Attention)
    query, key, value, output, heads = "q_proj", "k_proj", "v_proj", "out_proj", "num_heads"
    roles = ("enc-self",)
    feed_forwards = (
        FeedForwardNames(
            r"encoder\.layers\.\d+\.feed_forward", ("intermediate_dense",), "output_dense", "intermediate_act_fn"
        ),
    )

    def token_masks(
        self, config: PretrainedConfig, inputs: Mapping, masks: dict[str, Tensor | None]
    ) -> dict[str, Tensor | None]:
        """Turn the mask of padded samples into one of frames: [B, samples] -> [B, frames]."""
        samples = masks["encoder"]
        if samples is None or samples.ndim != 2:
            return masks
        lengths = frames(config, torch.cat([samples.sum(1), samples.new_tensor([samples.shape[1]], dtype=torch.long)]))
        mask = up_to(lengths)
        found = {**masks, "encoder": mask, "decoder": mask}
        if getattr(config, "add_adapter", False):  # convolutions after the encoder, with strides of their own
            for _ in range(config.num_adapter_layers):
                lengths = (lengths - 1) // config.adapter_stride + 1
            found["output"] = up_to(lengths)
        return found


def frames(config: PretrainedConfig, samples: Tensor) -> Tensor:
    """Return the number of frames that the convolutions make of a number of samples: [N] -> [N]."""
    for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
        samples = (samples - kernel) // stride + 1
    return samples.clamp(min=0)


def up_to(lengths: Tensor) -> Tensor:
    """Return the masks of rows, [B, T], from their lengths followed by T: [B + 1]."""
    return torch.arange(int(lengths[-1]), device=lengths.device) < lengths[:-1, None]
