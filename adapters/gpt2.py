"""GPT-2: a decoder with one Conv1D for query, key and value, and with or without cross-attention.

Its weights are stored as (in, out): see `collab_heads.layers.layout`.
"""

from torch import nn
from transformers.models.gpt2 import modeling_gpt2

from collab_heads.adapters.llama import TOKENIZERS  # type: ignore[import-untyped]
from collab_heads.contract.feed_forward import FeedForwardNames
from collab_heads.contract.model_forms import GgufForm
from collab_heads.contract.registry import register
from collab_heads.contract.special_adapters import FusedAdapter
from collab_heads.layers.attention import attend, cached_key_value, takes_cache


def upcast_attention(module, query, key, value, attention_mask, **kwargs):
    """Attend as with `config.reorder_and_upcast_attn`: scores in float32, whatever the model's dtype."""
    return module._upcast_and_reordered_attn(query, key, value, attention_mask)


class CollaborativeGPT2Attention(modeling_gpt2.GPT2Attention):
    """`GPT2Attention` with a collaborative query/key projection; values are projected by `value`."""

    value: nn.Linear

    @takes_cache
    def forward(
        self,
        hidden_states,
        cache=None,
        attention_mask=None,
        encoder_hidden_states=None,
        encoder_attention_mask=None,
        output_attentions=False,
        **kwargs,
    ):
        is_cross = encoder_hidden_states is not None
        states, mask = (encoder_hidden_states, encoder_attention_mask) if is_cross else (hidden_states, attention_mask)
        key, value = cached_key_value(self, self.value, states, cache, is_cross=is_cross)
        eager = upcast_attention if self.reorder_and_upcast_attn else modeling_gpt2.eager_attention_forward
        dropout = self.attn_dropout.p
        heads, weights = attend(self, hidden_states, key, value, mask, eager=eager, dropout=dropout, **kwargs)
        return self.resid_dropout(self.c_proj(heads)), weights


@register
class GPT2Adapter(FusedAdapter):
    """An adapter for GPT-2, alone or with cross-attention to another stack."""

    model_types = ("gpt2",)
    paths = {r"h\.(\d+)\.attn": "dec-self", r"h\.(\d+)\.crossattention": "dec-enc"}
    replacements = {modeling_gpt2.GPT2Attention: CollaborativeGPT2Attention}
    roles = ("dec-self", "dec-enc")
    layer_configs = True
    feed_forwards = (FeedForwardNames(r"h\.\d+\.mlp", ("c_fc",), "c_proj", "act", entry="n_inner"),)
    gguf = {
        "gpt2": GgufForm(
            even="gpt2",
            fills=True,
            norms={"attn_norm": "h.{}.ln_1", "ffn_norm": "h.{}.ln_2"},
            outside={"position_embd": "wpe", "output_norm": "ln_f"},
            fused="attn_qkv",
            epsilon=("layer_norm_eps", "layer_norm_epsilon"),
            computed={
                "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
                "scale_attn_weights": (True,),
                "scale_attn_by_inverse_layer_idx": (False,),
                "add_cross_attention": (False,),
            },
            **TOKENIZERS,
        )
    }
    output, heads, width = "c_proj", "num_heads", "split_size"  # query, key and value have no names of their own

    def fused(self, module):
        """Return `c_attn`, which makes all three; in cross-attention `q_attn` makes the query."""
        if module.is_cross_attention:
            return {"q_attn": ("query",), "c_attn": ("key", "value")}
        return {"c_attn": ("query", "key", "value")}
