"""ESM: BERT's layout for proteins, with queries scaled before attention. ESM-2 has rotary positions."""

from transformers.models.esm.modeling_esm import EsmSelfAttention, apply_rotary_pos_emb, eager_attention_forward

from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.contract.feed_forward import FeedForwardNames
from collab_heads.contract.registry import register
from collab_heads.contract.special_adapters import RotaryAdapter
from collab_heads.layers.attention import attend, cached_key_value
from collab_heads.layers.rotary_attention import rotary_attention

ROTARY = "rotary"  # its name in configs


class CollaborativeEsmSelfAttention(EsmSelfAttention):
    """`EsmSelfAttention` with a collaborative query/key projection."""

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        encoder_hidden_states=None,
        encoder_attention_mask=None,
        position_embeddings=None,
        **kwargs,
    ):
        """Attend as the stock class does where positions are absolute and there is no encoder."""
        key, value = cached_key_value(self, self.value, hidden_states, None, is_cross=False)
        eager, dropout = eager_attention_forward, self.dropout
        return attend(self, hidden_states, key, value, attention_mask, eager=eager, dropout=dropout, **kwargs)


class RotaryEsmSelfAttention(EsmSelfAttention):
    """`EsmSelfAttention` with narrower heads, rotated to their positions."""

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        encoder_hidden_states=None,
        encoder_attention_mask=None,
        position_embeddings=None,
        **kwargs,
    ):
        """Attend as the stock class does where positions are rotations and there is no encoder."""
        return rotary_attention(
            self,
            self.value,
            hidden_states,
            attention_mask,
            None,
            positions=position_embeddings,
            rotate=apply_rotary_pos_emb,
            eager=eager_attention_forward,
            dropout=self.dropout,
            **kwargs,
        )


class EsmLayout(AttentionAdapter):
    """The layout of attention in ESM.

    Cross-attention is not supported: the stock class cannot attend to a source of another length.
    """

    model_types = ("esm",)
    paths = {r"encoder\.layer\.(\d+)\.attention\.self": "enc-self"}
    replacements = {EsmSelfAttention: CollaborativeEsmSelfAttention}
    roles = ("enc-self", "dec-self")
    output, width = "../output.dense", "all_head_size"
    feed_forwards = (FeedForwardNames(r"encoder\.layer\.\d+", ("intermediate.dense",), "output.dense", None),)

    def role(self, role, module):
        """Return "dec-self" for a model with `config.is_decoder`, which has the paths of an encoder."""
        return "dec-self" if role == "enc-self" and module.is_decoder else role

    def scale(self, module):
        """Return 1 / sqrt(width of a head); `scaling` is what remains after the query was scaled."""
        return module.attention_head_size**-0.5


class RotaryEsmAdapter(RotaryAdapter, EsmLayout):
    """An adapter for ESM with rotary positions (ESM-2)."""

    replacements = {EsmSelfAttention: RotaryEsmSelfAttention}


@register
class EsmAdapter(EsmLayout):
    """An adapter for ESM with absolute positions (ESM-1b)."""

    variants = {"position_embedding_type": {ROTARY: RotaryEsmAdapter}}
