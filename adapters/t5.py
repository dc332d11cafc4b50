"""T5 and mT5: position bias, no projection biases, a score that is not scaled."""

import torch
from transformers.models.mt5 import modeling_mt5
from transformers.models.t5 import modeling_t5

from collab_heads.collaborative.attention import attend, cached_key_value
from collab_heads.registry import AttentionAdapter, register


def attention(
    self, hidden_states, mask=None, key_value_states=None, position_bias=None, past_key_values=None, **kwargs
):
    """`forward` of both classes, with the stock signature. The position bias is handed on: later layers reuse it."""
    past_length = 0 if past_key_values is None else past_key_values.get_seq_length(self.layer_idx)
    if isinstance(past_length, torch.Tensor):
        past_length = past_length.clone()  # a static cache counts on in the tensor it returns
    is_cross = key_value_states is not None
    states = key_value_states if is_cross else hidden_states
    key, value = cached_key_value(self, self.v, states, past_key_values, is_cross=is_cross)
    if position_bias is None:
        position_bias = new_position_bias(self, hidden_states, key.shape[-2], past_length)
    output, weights = attend(
        self,
        hidden_states,
        key,
        value,
        mask,
        eager=self.eager,
        dropout=self.dropout,
        position_bias=position_bias,
        **kwargs,
    )
    return self.o(output), position_bias, weights


def new_position_bias(module, hidden_states, key_length, past_length):
    """[1, H, T, S]: the relative position bias of block 0, zeros for cross-attention."""
    query_length, device = hidden_states.shape[1], hidden_states.device
    if module.has_relative_attention_bias:
        return module.compute_bias(query_length, key_length, device=device, past_seen_tokens=past_length)
    shape = (1, module.n_heads, query_length, key_length)
    bias = torch.zeros(shape, device=device, dtype=hidden_states.dtype)
    if module.gradient_checkpointing and module.training:
        bias.requires_grad = True  # as the stock class: reentrant checkpointing wants a differentiable input
    return bias


class CollaborativeMT5Attention(modeling_mt5.MT5Attention):
    """`MT5Attention` with a collaborative query/key projection."""

    eager = staticmethod(modeling_mt5.eager_attention_forward)
    forward = attention


class CollaborativeT5Attention(modeling_t5.T5Attention):
    """`T5Attention` with a collaborative query/key projection."""

    eager = staticmethod(modeling_t5.eager_attention_forward)
    forward = attention


@register
class T5Adapter(AttentionAdapter):
    """T5 and mT5, encoder-decoders and encoders."""

    model_types = ("t5", "mt5")
    paths = {
        r"encoder\.block\.(\d+)\.layer\.0\.SelfAttention": "enc-self",
        r"decoder\.block\.(\d+)\.layer\.0\.SelfAttention": "dec-self",
        r"decoder\.block\.(\d+)\.layer\.1\.EncDecAttention": "dec-enc",
    }
    replacements = {
        modeling_mt5.MT5Attention: CollaborativeMT5Attention,
        modeling_t5.T5Attention: CollaborativeT5Attention,
    }
    query, key, value, output, heads = "q", "k", "v", "o", "n_heads"
