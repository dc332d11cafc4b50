"""MPNet: its own eager attention, with one position bias from the encoder for all heads of all layers."""

from types import SimpleNamespace

from torch.nn.functional import dropout as drop
from transformers.models.mpnet.modeling_mpnet import MPNetSelfAttention

from collab_heads.adapters.bert import FEED_FORWARD  # type: ignore[import-untyped]
from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.contract.registry import register
from collab_heads.layers.attention import attend, cached_key_value
from collab_heads.layers.position_bias import kept_columns, note_kept_heads


def eager_attention(module, query, key, value, attention_mask, *, scaling, dropout, position_bias=None, **kwargs):
    """Attend as the stock class, in the form of a backend; those of other families ignore a position bias."""
    scores = query @ key.mT * scaling
    for bias in (position_bias, attention_mask):
        scores = scores if bias is None else scores + bias
    weights = drop(scores.softmax(-1), dropout) if dropout else scores.softmax(-1)
    return (weights @ value).transpose(1, 2), weights


class CollaborativeMPNetSelfAttention(MPNetSelfAttention):
    """`MPNetSelfAttention` with a collaborative query/key projection."""

    config = SimpleNamespace(_attn_implementation="eager")  # a stock module has none, and the model no other backend

    def forward(self, hidden_states, attention_mask=None, position_bias=None, output_attentions=False, **kwargs):
        key, value = cached_key_value(self, self.v, hidden_states, None, is_cross=False)
        output, weights = attend(
            self,
            hidden_states,
            key,
            value,
            attention_mask,
            eager=eager_attention,
            dropout=self.dropout.p,
            position_bias=kept_columns(self, position_bias),
        )
        return (self.o(output), weights) if output_attentions else (self.o(output),)


class ShrunkMPNetSelfAttention(MPNetSelfAttention):
    """`MPNetSelfAttention` with fewer heads."""

    def forward(self, hidden_states, attention_mask=None, position_bias=None, output_attentions=False, **kwargs):
        columns = kept_columns(self, position_bias)
        return super().forward(hidden_states, attention_mask, columns, output_attentions)


@register
class MPNetAdapter(AttentionAdapter):
    """An adapter for MPNet, the base of many sentence-transformers."""

    model_types = ("mpnet",)
    paths = {r"encoder\.layer\.(\d+)\.attention\.attn": "enc-self"}
    replacements = {MPNetSelfAttention: CollaborativeMPNetSelfAttention}
    shrunk = {MPNetSelfAttention: ShrunkMPNetSelfAttention}
    query, key, value, output, width = "q", "k", "v", "o", "all_head_size"
    weights_argument, uses_interface = "output_attentions", False
    roles = ("enc-self",)
    feed_forwards = (FEED_FORWARD,)

    def scale(self, module):
        """Return 1 / sqrt(width of a head)."""
        return module.attention_head_size**-0.5

    def score_biases(self, module, arguments):
        """Return the mask and the position bias of a call."""
        biases = arguments.get("attention_mask"), kept_columns(module, arguments.get("position_bias"))
        return tuple(bias for bias in biases if bias is not None)

    def shrink(self, module, kept):
        """As `AttentionAdapter`; also note which columns of the position bias are left."""
        super().shrink(module, kept)
        note_kept_heads(module, kept)

    def restore(self, module, stock, kept):
        """As `AttentionAdapter`; the module then uses all columns of the position bias again."""
        super().restore(module, stock, kept)
        del module.kept_heads
