"""Marian: encoder, decoder and cross-attention, all of one class."""

from torch import nn
from transformers.models.marian.modeling_marian import MarianAttention, eager_attention_forward

from collab_heads.collaborative.attention import attend, cached_key_value
from collab_heads.registry import AttentionAdapter, register


class CollaborativeMarianAttention(MarianAttention):
    """`MarianAttention` with a collaborative query/key projection."""

    def forward(self, hidden_states, key_value_states=None, past_key_values=None, attention_mask=None, **kwargs):
        """As the stock class."""
        is_cross = key_value_states is not None
        states = key_value_states if is_cross else hidden_states
        key, value = cached_key_value(self, self.v_proj, states, past_key_values, is_cross=is_cross)
        output, weights = attend(
            self,
            hidden_states,
            key,
            value,
            attention_mask,
            eager=eager_attention_forward,
            dropout=self.dropout,
            **kwargs,
        )
        return self.out_proj(output), weights


@register
class MarianAdapter(AttentionAdapter):
    """Marian translation models."""

    model_types = ("marian",)
    paths = {
        r"encoder\.layers\.(\d+)\.self_attn": "enc-self",
        r"decoder\.layers\.(\d+)\.self_attn": "dec-self",
        r"decoder\.layers\.(\d+)\.encoder_attn": "dec-enc",
    }
    replacements = {MarianAttention: CollaborativeMarianAttention}
    query, key, value, heads = "q_proj", "k_proj", "v_proj", "num_heads"

    def output_projection(self, model, site) -> nn.Linear:
        """`out_proj` of the attention module."""
        return model.base_model.get_submodule(site.path + ".out_proj")
