"""DeBERTa-v2 and v3: eager attention whose queries and keys also meet projections of relative positions.

Scores are sums of three products: of contents, of a query with the key of a position, and of a key with the query of a
position. All three are made by the same two projections (`share_att_key`).
"""

from types import SimpleNamespace

import numpy as np
import torch
from torch.nn.functional import dropout as drop
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention

from collab_heads.adapters.bert import FEED_FORWARD  # type: ignore[import-untyped]
from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.contract.registry import register
from collab_heads.layers.attention import attend, cached_key_value

TERMS = "c2p", "p2c"  # products with positions, beside that of contents


def eager_attention(
    module, query, key, value, attention_mask, *, scaling, dropout, relative_pos=None, rel_embeddings=None, **kwargs
):
    """Attend as the stock class, in the form of a backend.

    Args:
        module: the attention module.
        query: [B, H, T, d].
        key: the same.
        value: [B, H, T, d_v].
        attention_mask: [B, 1, T, T], 1 where a token attends.
        scaling: the factor of all terms.
        dropout: of the weights.
        relative_pos: [1, T, T], the bucket of every query behind every key.
        rel_embeddings: [P, D], of all buckets.
        kwargs: are not used.
    """
    scores = query @ key.mT
    if module.relative_attention:
        span = module.pos_ebd_size
        table = module.pos_dropout(rel_embeddings)[None, : 2 * span]
        shape = *query.shape[:3], key.shape[2]
        if "c2p" in module.pos_att_type:
            terms = query @ module.query_key.split(module.query_key.keys(table)[:, None]).mT
            scores = scores + terms.gather(-1, (relative_pos + span).clamp(0, 2 * span - 1)[:, None].expand(shape))
        if "p2c" in module.pos_att_type:
            terms = key @ module.query_key.queries(table).mT
            scores = scores + terms.gather(-1, (span - relative_pos).clamp(0, 2 * span - 1)[:, None].expand(shape)).mT
    scores = (scores * scaling).masked_fill(~attention_mask.bool(), torch.finfo(scores.dtype).min)
    weights = drop(scores.softmax(-1), dropout) if dropout else scores.softmax(-1)
    return (weights @ value).transpose(1, 2), weights


class WholeDisentangledSelfAttention(DisentangledSelfAttention):
    """`DisentangledSelfAttention` with queries and keys from a `query_key` that holds them unchanged, or no heads."""

    config = SimpleNamespace(_attn_implementation="eager")  # a stock module has none, and the model no other backend

    def forward(
        self,
        hidden_states,
        attention_mask,
        output_attentions=False,
        query_states=None,
        relative_pos=None,
        rel_embeddings=None,
    ):
        states = hidden_states if query_states is None else query_states
        key, value = cached_key_value(self, self.value_proj, hidden_states, None, is_cross=False)
        output, weights = attend(
            self,
            states,
            key,
            value,
            attention_mask,
            eager=eager_attention,
            dropout=self.dropout.p,
            relative_pos=relative_pos,
            rel_embeddings=rel_embeddings,
        )
        return output, weights if output_attentions else None


class DebertaV2Layout(AttentionAdapter):
    """The layout of attention in DeBERTa-v2 and DeBERTa-v3."""

    model_types = ("deberta-v2",)
    paths = {r"encoder\.layer\.(\d+)\.attention\.self": "enc-self"}
    replacements = {DisentangledSelfAttention: WholeDisentangledSelfAttention}
    query, key, value, output = "query_proj", "key_proj", "value_proj", "../output.dense"
    width = "all_head_size"
    weights_argument, uses_interface = "output_attentions", False
    roles = ("enc-self",)
    feed_forwards = (FEED_FORWARD,)
    exact_kind = "rotary"  # which keeps the bias of the keys: with the queries of positions, it counts

    def scale(self, module):
        """Return 1 / sqrt(width of a head * number of terms of a score), rounded to float32 as in the stock class."""
        return 1 / float(np.sqrt(np.float32(module.attention_head_size * terms(module))))

    def positions_met(self, module):
        """Return those of all terms; their projections, made once a batch, are no work of a token."""
        return 2 * module.pos_ebd_size * (terms(module) - 1) if module.relative_attention else 0

    def score_biases(self, module, arguments):
        """Return the mask and the terms of the positions of a call."""
        states, relative, table = (arguments[name] for name in ("hidden_states", "relative_pos", "rel_embeddings"))
        mask = arguments["attention_mask"].bool()
        hidden = torch.zeros_like(mask, dtype=states.dtype).masked_fill(~mask, torch.finfo(states.dtype).min)
        if not module.relative_attention:
            return (hidden,)
        heads, projections = module.num_attention_heads, (module.query_proj, module.key_proj)
        query, key = (module.transpose_for_scores(projection(states), heads) for projection in projections)
        bias = module.disentangled_attention_bias(query, key, relative, table, terms(module))
        return hidden, bias.unflatten(0, (-1, heads))


class OwnPositionsAdapter(DebertaV2Layout):
    """An adapter for models whose positions have projections of their own, which heads cannot leave here."""

    capabilities = frozenset({"neurons"})
    why_not = dict.fromkeys(
        ("collaborative", "per_head", "gated", "alpha", "prune", "values"),
        "its positions have projections of their own (share_att_key is not true); prune_neurons() works",
    )


@register
class DebertaV2Adapter(DebertaV2Layout):
    """An adapter for DeBERTa-v2 and DeBERTa-v3."""

    capabilities = frozenset({"gated", "alpha", "prune", "values", "neurons"})
    why_not = dict.fromkeys(
        ("collaborative", "per_head"),
        "its queries and keys also meet projections of relative positions; narrower values (dim_value=), fewer heads "
        "and compress() work",
    )

    def variant(self, config):
        """Return another adapter where positions have projections of their own."""
        is_shared = getattr(config, "share_att_key", False) or not getattr(config, "relative_attention", False)
        return self if is_shared else OwnPositionsAdapter()


def terms(module) -> int:
    """Return the number of products that a score is the sum of."""
    return 1 + sum(term in module.pos_att_type for term in TERMS)
