"""DistilBERT: encoders with their own names of projections."""

from transformers.models.distilbert.modeling_distilbert import DistilBertSelfAttention, eager_attention_forward

from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.contract.feed_forward import FeedForwardNames
from collab_heads.contract.registry import register
from collab_heads.layers.attention import attend, cached_key_value


class CollaborativeDistilBertSelfAttention(DistilBertSelfAttention):
    """`DistilBertSelfAttention` with a collaborative query/key projection."""

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        key, value = cached_key_value(self, self.v_lin, hidden_states, None, is_cross=False)
        eager, dropout = eager_attention_forward, self.dropout.p
        output, weights = attend(
            self, hidden_states, key, value, attention_mask, eager=eager, dropout=dropout, **kwargs
        )
        return self.out_lin(output), weights


@register
class DistilBertAdapter(AttentionAdapter):
    """An adapter for DistilBERT."""

    model_types = ("distilbert",)
    paths = {r"transformer\.layer\.(\d+)\.attention": "enc-self"}
    replacements = {DistilBertSelfAttention: CollaborativeDistilBertSelfAttention}
    query, key, value, output, heads = "q_lin", "k_lin", "v_lin", "out_lin", "n_heads"
    roles = ("enc-self",)
    feed_forwards = (
        FeedForwardNames(r"transformer\.layer\.\d+\.ffn", ("lin1",), "lin2", "activation", entry="hidden_dim"),
    )
