"""ALBERT: a few attention modules serve many layers, each with its own output projection, norm and residual."""

from dataclasses import replace

from transformers.models.albert.modeling_albert import AlbertAttention, eager_attention_forward

from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.contract.feed_forward import FeedForwardNames
from collab_heads.contract.registry import register
from collab_heads.layers.attention import attend, cached_key_value


class CollaborativeAlbertAttention(AlbertAttention):
    """`AlbertAttention` with a collaborative query/key projection."""

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        key, value = cached_key_value(self, self.value, hidden_states, None, is_cross=False)
        eager, dropout = eager_attention_forward, self.attention_dropout.p
        output, weights = attend(
            self, hidden_states, key, value, attention_mask, eager=eager, dropout=dropout, **kwargs
        )
        output = self.output_dropout(self.dense(output))
        return self.LayerNorm(hidden_states + output), weights


@register
class AlbertAdapter(AttentionAdapter):
    """An adapter for ALBERT with any number of groups and of inner layers."""

    model_types = ("albert",)
    paths = {r"encoder\.albert_layer_groups\.(\d+)\.albert_layers\.\d+\.attention": "enc-self"}
    replacements = {AlbertAttention: CollaborativeAlbertAttention}
    output, width = "dense", "all_head_size"
    roles = ("enc-self",)
    feed_forwards = (
        FeedForwardNames(
            r"encoder\.albert_layer_groups\.\d+\.albert_layers\.\d+", ("ffn",), "ffn_output", "activation"
        ),
    )

    def sites(self, model):
        """List the modules that serve a layer; `layer` counts inner layers one by one, as `output_attentions` does."""
        config = model.config
        layers_per_group = config.num_hidden_layers / config.num_hidden_groups
        groups = [int(layer / layers_per_group) for layer in range(config.num_hidden_layers)]  # as the stock encoder
        served = []
        for site in super().sites(model):
            if site.layer in groups:  # with more groups than layers some are never called
                inner = int(site.path.split(".")[-2])
                served.append(replace(site, layer=groups.index(site.layer) * config.inner_group_num + inner))
        return served
