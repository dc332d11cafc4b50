"""ModernBERT: an encoder with rotary positions, and one Linear for query, key and value."""

from torch import nn
from transformers.models.modernbert import modeling_modernbert

from collab_heads.contract.feed_forward import FeedForwardNames
from collab_heads.contract.registry import register
from collab_heads.contract.special_adapters import FusedAdapter, RotaryAdapter
from collab_heads.layers.query_key import is_swapped
from collab_heads.layers.removed import is_empty
from collab_heads.layers.rotary_attention import rotary_attention


class RotaryModernBertAttention(modeling_modernbert.ModernBertAttention):
    """`ModernBertAttention` with narrower values, projected by `value`."""

    value: nn.Linear

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        heads, weights = rotary_attention(
            self,
            self.value,
            hidden_states,
            attention_mask,
            None,
            positions=position_embeddings,
            rotate=modeling_modernbert.apply_rotary_pos_emb,
            eager=modeling_modernbert.eager_attention_forward,
            dropout=self.attention_dropout,
            sliding_window=self.sliding_window,
            deterministic=self.deterministic_flash_attn,
            **kwargs,
        )
        return self.out_drop(self.Wo(heads)), weights


@register
class ModernBertAdapter(FusedAdapter, RotaryAdapter):
    """An adapter for ModernBERT."""

    model_types = ("modernbert",)
    paths = {r"layers\.(\d+)\.attn": "enc-self"}
    replacements = {modeling_modernbert.ModernBertAttention: RotaryModernBertAttention}
    gated = {modeling_modernbert.ModernBertMLP: "act"}
    roles = ("enc-self",)
    layer_configs = True
    feed_forwards = (FeedForwardNames(r"layers\.\d+\.mlp", ("Wi",), "Wo", "act", fused=True),)
    output = "Wo"

    def fused(self, module):
        """Return `Wqkv`, which makes all three."""
        return {"Wqkv": ("query", "key", "value")}

    def scale(self, module):
        """Return 1 / sqrt(width of a head): no attribute holds it."""
        return module.head_dim**-0.5

    def num_heads(self, module):
        """Return the number of heads from the shape of the weights: no attribute holds it."""
        if is_swapped(module) or is_empty(module):
            return module.query_key.num_heads
        return self.parts(module)["query"].out_features // module.head_dim

    def note_heads(self, module, heads, groups):
        """Do nothing: no attribute holds the number of heads."""
