"""Peers that make MPNet, a sentence encoder, smaller without training and without labels: K-prune and GRAIL.

The methods are those of `k_prune.py` and `grail.py`, where their sources and numbers are. This file has what MPNet
needs: its blocks, whose attention adds a position bias to the scores, and budgets of parameters. A budget is a share of
the parameters of the layers as `compress` counts them: all projections with their biases, without norms. A method keeps
the budget, and stays below it by less than one of its units (GRAIL: a neuron of every layer). Padding does not count.

Differences from the papers, besides those that `k_prune.py` and `grail.py` name:

- K-prune: a sentence encoder has no classifier. Its prediction is the mean of the last hidden states over the real
  tokens, of length 1, and the divergence between predictions is the squared distance, not that of Kullback and Leibler;
  there is no temperature. The weights 1, 2.5e-4 and 64 are those for classifiers, untuned. Knowledge is per parameter;
  in the paper per operation. As in the paper, the least squares have no ridge: with 256 sentences, 3,900 tokens for
  2,300 neurons, they fit the noise. The authors take 100,000 tokens.
- GRAIL: the paper prunes decoders and images. Here the same share of heads goes as of neurons, as in its decoders.
"""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import torch
from grail import reconstructed
from k_prune import Prediction, distance, embeddings, k_pruned
from layer_blocks import Block, total_cost
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import MPNetModel

from collab_heads import prune_heads
from collab_heads.layers.position_bias import kept_columns

Batches = Sequence[Mapping[str, Tensor]]


class AttentionOutput:
    """Add the last projection of attention to its input and normalise, as `MPNetOutput` does after the neurons."""

    def __init__(self, dense: nn.Linear, norm: nn.LayerNorm):
        self.dense, self.norm = dense, norm

    def __call__(self, units: Tensor, hidden: Tensor) -> Tensor:
        return self.norm(self.dense(units) + hidden)


class MPNetBlock(Block):
    """Attention or the feed-forward block of a layer of MPNet; `cost` is the parameters of a unit."""

    def __init__(self, model: MPNetModel, number: int, is_attention: bool):
        self.model, self.path = model, f"encoder.layer.{number}.attention.attn"
        super().__init__(model.encoder.layer[number], is_attention)
        dim = self.output.dense.out_features
        self.cost = (4 * dim + 3) * self.width if is_attention else 2 * dim + 1

    @property
    def attention(self) -> nn.Module:
        return self.layer.attention.attn

    @property
    def output(self) -> AttentionOutput | nn.Module:
        if self.is_attention:
            return AttentionOutput(self.attention.o, self.layer.attention.LayerNorm)
        return self.layer.output

    def units(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """As `Block`; the model's own attention does not return this."""
        if not self.is_attention:
            return super().units(hidden, mask)
        if not self.count:
            return hidden[..., :0]
        projections = (self.attention.q, self.attention.k, self.attention.v)
        query, key, value = (each(hidden).unflatten(-1, (-1, self.width)).transpose(1, 2) for each in projections)
        bias = kept_columns(self.attention, self.model.encoder.compute_position_bias(hidden[:1]))  # [1, H, T, T]
        heads = scaled_dot_product_attention(query, key, value, attn_mask=bias if mask is None else bias + mask)
        return heads.transpose(1, 2).flatten(2)

    @torch.no_grad()
    def keep(self, kept: Tensor, weight: Tensor | None = None) -> None:
        """As `Block`, once for a block; `prune_heads` removes heads, with their columns of the position bias."""
        if not self.is_attention:
            super().keep(kept, weight)
            return
        if weight is None:
            weight = self.output.dense.weight[:, self.columns(kept)]
        gone = set(range(self.count)) - set(kept.tolist())
        prune_heads(self.model, heads={self.path: sorted(gone)})
        if len(kept):  # without heads, a bias is all that is left of the projection
            self.output.dense.weight.copy_(weight)


def mpnet_blocks(model: MPNetModel) -> list[MPNetBlock]:
    """Return the blocks in the order in which they run: attention comes first in each layer."""
    return [MPNetBlock(model, number, kind) for number in range(len(model.encoder.layer)) for kind in (True, False)]


def share_of_units(model: MPNetModel, budget: float) -> float:
    """Return the share of the units' parameters that fits into a budget, beside the biases of the last projections."""
    blocks = mpnet_blocks(model)
    units, biases = total_cost(blocks), sum(len(block.output.dense.bias) for block in blocks)
    return (budget * (units + biases) - biases) / units


def as_draw(batches: Batches) -> SimpleNamespace:
    """Return batches in the form of a draw of `classifiers.py`; it keeps no measurements."""
    return SimpleNamespace(unlabelled=batches, once=lambda name, measure: measure())


def kprune(model: MPNetModel, batches: Batches, budget: float) -> MPNetModel:
    """K-prune: remove heads and neurons in place, by the knowledge that they hold, and return the model.

    Args:
        model: a sentence encoder that averages over tokens.
        batches: dicts with `input_ids` and `attention_mask`, [B, T] each.
        budget: the share of the layers' parameters that stays.
    """
    share = share_of_units(model, budget)
    return k_pruned(model, as_draw(batches), share, Prediction(embeddings, distance), mpnet_blocks)


def grail(model: MPNetModel, batches: Batches, budget: float) -> MPNetModel:
    """GRAIL: remove heads and neurons in place, by Wanda's score, and return the model. Arguments as of `kprune`."""
    return reconstructed(model, as_draw(batches), share_of_units(model, budget), mpnet_blocks)
