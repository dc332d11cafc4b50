"""OPT: decoders that scale their queries before attention, by the usual factor."""

from transformers.models.opt.modeling_opt import OPTAttention, eager_attention_forward

from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.contract.feed_forward import FeedForwardNames
from collab_heads.contract.registry import register
from collab_heads.layers.attention import attend, cached_key_value, takes_cache


class CollaborativeOPTAttention(OPTAttention):
    """`OPTAttention` with a collaborative query/key projection."""

    @takes_cache
    def forward(self, hidden_states, cache=None, attention_mask=None, output_attentions=False, **kwargs):
        key, value = cached_key_value(self, self.v_proj, hidden_states, cache, is_cross=False)
        eager, dropout = eager_attention_forward, self.dropout
        output, weights = attend(
            self, hidden_states, key, value, attention_mask, eager=eager, dropout=dropout, **kwargs
        )
        return self.out_proj(output), weights


@register
class OPTAdapter(AttentionAdapter):
    """An adapter for OPT of any size, with the norm before or after attention, with biases or without."""

    model_types = ("opt",)
    paths = {r"decoder\.layers\.(\d+)\.self_attn": "dec-self"}
    replacements = {OPTAttention: CollaborativeOPTAttention}
    query, key, value, output, heads = "q_proj", "k_proj", "v_proj", "out_proj", "num_heads"
    roles = ("dec-self",)
    layer_configs = True
    feed_forwards = (FeedForwardNames(r"decoder\.layers\.\d+", ("fc1",), "fc2", "activation_fn", entry="ffn_dim"),)
