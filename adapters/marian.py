"""The BART lineage (BART, mBART, Marian, Pegasus, M2M100): one class per model for all three roles."""

from transformers.models.bart import modeling_bart
from transformers.models.m2m_100 import modeling_m2m_100
from transformers.models.marian import modeling_marian
from transformers.models.mbart import modeling_mbart
from transformers.models.pegasus import modeling_pegasus

from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.contract.blueprints import Blueprint, VocabularyForm
from collab_heads.contract.feed_forward import FeedForwardNames
from collab_heads.contract.registry import register
from collab_heads.layers.attention import attend, cached_key_value


def attention(self, hidden_states, key_value_states=None, past_key_values=None, attention_mask=None, **kwargs):
    """Attend, as `forward` of every class, with the stock signature."""
    is_cross = key_value_states is not None
    states = key_value_states if is_cross else hidden_states
    key, value = cached_key_value(self, self.v_proj, states, past_key_values, is_cross=is_cross)
    output, weights = attend(
        self, hidden_states, key, value, attention_mask, eager=self.eager, dropout=self.dropout, **kwargs
    )
    return self.out_proj(output), weights


class CollaborativeBartAttention(modeling_bart.BartAttention):
    """`BartAttention` with a collaborative query/key projection."""

    eager = staticmethod(modeling_bart.eager_attention_forward)
    forward = attention


class CollaborativeM2M100Attention(modeling_m2m_100.M2M100Attention):
    """`M2M100Attention` with a collaborative query/key projection."""

    eager = staticmethod(modeling_m2m_100.eager_attention_forward)
    forward = attention


class CollaborativeMBartAttention(modeling_mbart.MBartAttention):
    """`MBartAttention` with a collaborative query/key projection."""

    eager = staticmethod(modeling_mbart.eager_attention_forward)
    forward = attention


class CollaborativeMarianAttention(modeling_marian.MarianAttention):
    """`MarianAttention` with a collaborative query/key projection."""

    eager = staticmethod(modeling_marian.eager_attention_forward)
    forward = attention


class CollaborativePegasusAttention(modeling_pegasus.PegasusAttention):
    """`PegasusAttention` with a collaborative query/key projection."""

    eager = staticmethod(modeling_pegasus.eager_attention_forward)
    forward = attention


@register
class MarianAdapter(AttentionAdapter):
    """An adapter for BART, mBART, Marian, Pegasus and M2M100: encoder-decoders, and their decoders alone."""

    model_types = ("marian", "bart", "mbart", "pegasus", "m2m_100")
    paths = {
        r"encoder\.layers\.(\d+)\.self_attn": "enc-self",
        r"decoder\.layers\.(\d+)\.self_attn": "dec-self",
        r"decoder\.layers\.(\d+)\.encoder_attn": "dec-enc",
    }
    replacements = {
        modeling_bart.BartAttention: CollaborativeBartAttention,
        modeling_m2m_100.M2M100Attention: CollaborativeM2M100Attention,
        modeling_mbart.MBartAttention: CollaborativeMBartAttention,
        modeling_marian.MarianAttention: CollaborativeMarianAttention,
        modeling_pegasus.PegasusAttention: CollaborativePegasusAttention,
    }
    blueprints = {
        "marian": Blueprint(
            sizes={
                "d_model": ("d_model",),
                "num_layers": ("encoder_layers", "decoder_layers"),
                "num_heads": ("encoder_attention_heads", "decoder_attention_heads"),
                "d_ff": ("encoder_ffn_dim", "decoder_ffn_dim"),
                "dropout": ("dropout",),
                "max_length": ("max_position_embeddings",),
            },
            usual={"scale_embedding": True, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
            vocabulary=VocabularyForm(
                "MarianTokenizer",
                special={"eos_id": 0, "unk_id": 1, "pad_id": -1},
                files=("source.spm", "target.spm"),
                table=True,
            ),
        )
    }
    query, key, value, output, heads = "q_proj", "k_proj", "v_proj", "out_proj", "num_heads"
    feed_forwards = (
        FeedForwardNames(r"encoder\.layers\.\d+", ("fc1",), "fc2", "activation_fn", entry="encoder_ffn_dim"),
        FeedForwardNames(r"decoder\.layers\.\d+", ("fc1",), "fc2", "activation_fn", entry="decoder_ffn_dim"),
    )
