"""T5 and mT5: a position bias, no biases of projections, scores without a scale.

The first layer of a stack computes the position bias for all its layers. So every layer takes and returns the bias of
all heads and, where it has fewer heads, selects their columns (`kept_heads`, original numbers).
"""

import torch
from transformers.models.mt5 import modeling_mt5
from transformers.models.t5 import modeling_t5

from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.contract.feed_forward import FeedForwardNames
from collab_heads.contract.model_forms import Blueprint, CTranslate2Form, VocabularyForm
from collab_heads.contract.registry import register
from collab_heads.layers.attention import attend, cached_key_value, replacing, takes_cache
from collab_heads.layers.position_bias import kept_columns, note_kept_heads

STOCK = modeling_mt5.MT5Attention, modeling_t5.T5Attention
FEED_FORWARD = r"(?:en|de)coder\.block\.\d+\.layer\.\d+\.DenseReluDense"


@takes_cache
def attention(self, hidden_states, mask=None, key_value_states=None, position_bias=None, cache=None, **kwargs):
    """Attend, as `forward` of both classes, with the stock signature; returns the position bias for later layers."""
    past_length = seen_length(self, cache)
    is_cross = key_value_states is not None
    states = key_value_states if is_cross else hidden_states
    key, value = cached_key_value(self, self.v, states, cache, is_cross=is_cross)
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
        position_bias=kept_columns(self, position_bias),
        **kwargs,
    )
    return self.o(output), position_bias, weights


@takes_cache
def shrunk_attention(self, hidden_states, mask=None, key_value_states=None, position_bias=None, cache=None, **kwargs):
    """Call the stock `forward` with fewer heads, on the columns of the position bias that belong to them."""
    past_length = seen_length(self, cache)
    columns = kept_columns(self, position_bias)
    output, columns, weights = self.stock.forward(self, hidden_states, mask, key_value_states, columns, cache, **kwargs)
    if position_bias is None:
        position_bias = new_position_bias(self, hidden_states, columns.shape[-1], past_length)
    return output, position_bias, weights


def shrunk_bias(self, *args, **kwargs):
    """Compute the position bias of the heads that are left, as `compute_bias` for the stock forward."""
    return kept_columns(self, self.stock.compute_bias(self, *args, **kwargs))


def seen_length(module, cache):
    """Return the number of tokens in the cache before this call."""
    length = 0 if cache is None else cache.get_seq_length(module.layer_idx)
    return length.clone() if isinstance(length, torch.Tensor) else length  # a static cache counts on in its tensor


def new_position_bias(module, hidden_states, key_length, past_length):
    """Return the relative position bias of block 0, zeros for cross-attention: [1, all heads, T, S]."""
    query_length, device = hidden_states.shape[1], hidden_states.device
    if module.has_relative_attention_bias:
        compute_bias = module.stock.compute_bias
        return compute_bias(module, query_length, key_length, device=device, past_seen_tokens=past_length)
    shape = (1, module.config.num_heads, query_length, key_length)
    bias = torch.zeros(shape, device=device, dtype=hidden_states.dtype)
    if module.gradient_checkpointing and module.training:
        bias.requires_grad = True  # as the stock class: reentrant checkpointing wants a differentiable input
    return bias


class ScaledForm(CTranslate2Form):
    """T5 for CTranslate2's converter, which takes tied embeddings to mean that states are scaled before the logits."""

    def complete(self, prepared, model):
        """State whether T5 scales the states."""
        super().complete(prepared, model)
        prepared.config.tie_word_embeddings = prepared.config.scale_decoder_outputs


@register
class T5Adapter(AttentionAdapter):
    """An adapter for T5 and mT5, encoder-decoders and encoders."""

    model_types = ("t5", "mt5")
    paths = {
        r"encoder\.block\.(\d+)\.layer\.0\.SelfAttention": "enc-self",
        r"decoder\.block\.(\d+)\.layer\.0\.SelfAttention": "dec-self",
        r"decoder\.block\.(\d+)\.layer\.1\.EncDecAttention": "dec-enc",
    }
    replacements = replacing(attention, *STOCK)
    shrunk = replacing(shrunk_attention, *STOCK, prefix="Shrunk", compute_bias=shrunk_bias)
    blueprints = {
        "t5": Blueprint(
            sizes={
                "d_model": ("d_model",),
                "num_layers": ("num_layers", "num_decoder_layers"),
                "num_heads": ("num_heads",),
                "d_head": ("d_kv",),
                "d_ff": ("d_ff",),
                "dropout": ("dropout_rate",),
            },
            vocabulary=VocabularyForm(
                "T5Tokenizer", special={"pad_id": 0, "eos_id": 1, "unk_id": 2}, files=("spiece.model",)
            ),
        )
    }
    ctranslate2 = {"t5": ScaledForm(), "mt5": CTranslate2Form(entries={"tie_word_embeddings": False})}  # never scaled
    rms_norms = (modeling_mt5.MT5LayerNorm, modeling_t5.T5LayerNorm)
    gated = {modeling_mt5.MT5DenseGatedActDense: "act", modeling_t5.T5DenseGatedActDense: "act"}
    query, key, value, output, heads, width = "q", "k", "v", "o", "n_heads", "inner_dim"
    head_width, head_counts = ("d_kv", "key_value_proj_dim"), ("num_heads", None)
    position_table = "relative_attention_bias"
    feed_forwards = (
        FeedForwardNames(FEED_FORWARD, ("wi",), "wo", "act", entry="d_ff"),
        FeedForwardNames(FEED_FORWARD, ("wi_0", "wi_1"), "wo", "act", entry="d_ff"),
    )

    def shrink(self, module, kept):
        """As `AttentionAdapter`; also note which columns of the position bias are left."""
        super().shrink(module, kept)
        note_kept_heads(module, kept)

    def restore(self, module, stock, kept):
        """As `AttentionAdapter`; the module then uses all columns of the position bias again."""
        super().restore(module, stock, kept)
        del module.kept_heads
