"""BERT: self-attention of encoders and decoders, and cross-attention."""

from torch import nn
from transformers.models.bert.modeling_bert import BertCrossAttention, BertSelfAttention, eager_attention_forward

from collab_heads.collaborative.attention import attend, cached_key_value
from collab_heads.registry import AttentionAdapter, register


class CollaborativeBertSelfAttention(BertSelfAttention):
    """`BertSelfAttention` with a collaborative query/key projection."""

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, **kwargs):
        """As the stock class."""
        key, value = cached_key_value(self, self.value, hidden_states, past_key_values, is_cross=False)
        return attend(
            self,
            hidden_states,
            key,
            value,
            attention_mask,
            eager=eager_attention_forward,
            dropout=self.dropout.p,
            **kwargs,
        )


class CollaborativeBertCrossAttention(BertCrossAttention):
    """`BertCrossAttention` with a collaborative query/key projection."""

    def forward(self, hidden_states, encoder_hidden_states=None, attention_mask=None, past_key_values=None, **kwargs):
        """As the stock class."""
        key, value = cached_key_value(self, self.value, encoder_hidden_states, past_key_values, is_cross=True)
        return attend(
            self,
            hidden_states,
            key,
            value,
            attention_mask,
            eager=eager_attention_forward,
            dropout=self.dropout.p,
            **kwargs,
        )


@register
class BertAdapter(AttentionAdapter):
    """BERT, as encoder or as decoder."""

    model_types = ("bert",)
    paths = {
        r"encoder\.layer\.(\d+)\.attention\.self": "enc-self",
        r"encoder\.layer\.(\d+)\.crossattention\.self": "dec-enc",
    }
    replacements = {
        BertSelfAttention: CollaborativeBertSelfAttention,
        BertCrossAttention: CollaborativeBertCrossAttention,
    }

    def role(self, role, module):
        """A BERT with `config.is_decoder` has the paths of an encoder."""
        return "dec-self" if role == "enc-self" and module.config.is_decoder else role

    def output_projection(self, model, site) -> nn.Linear:
        """`attention.output.dense`, a sibling of `attention.self`."""
        return model.base_model.get_submodule(site.path.removesuffix("self") + "output.dense")
