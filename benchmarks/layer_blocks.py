"""The blocks of a BERT, attention and feed-forward in turns, and their units: heads and neurons.

Methods that remove whole heads and neurons share this: how many multiplications a model and a unit take, removal of
units, and the passage of examples from block to block.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from retraining_free import first_inputs as first_inputs
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

TOKENS = 64  # of the sentence on which operations are counted

States = list[tuple[Tensor, Tensor | None, Tensor]]  # by batch: hidden [B, T, D], attention mask, real tokens [B, T]


@torch.no_grad()
def operations(model) -> int:
    """Return the multiplications of the layers for one sentence of `TOKENS` tokens, as torch counts them."""
    backend = model.config._attn_implementation
    model.set_attn_implementation("eager")  # torch counts none for sdpa on a CPU
    hidden = model.base_model.embeddings(torch.full((1, TOKENS), 5))
    with FlopCounterMode(display=False) as counter:
        model.base_model.encoder(hidden)
    model.set_attn_implementation(backend)
    return counter.get_total_flops() // 2  # additions count, too


class NoHeads(nn.Module):
    """Attention without any head: its output projection adds its bias, and nothing else."""

    def forward(self, hidden: Tensor, *_, **__) -> tuple[Tensor, None]:
        return hidden[..., :0], None


class Block:
    """Attention or the feed-forward block of a layer.

    Attributes:
        is_attention: its kind.
        width: the columns of the last projection that a unit has: the width of a head, or 1.
        cost: the multiplications of a unit for a sentence of `TOKENS` tokens.
    """

    def __init__(self, layer, is_attention: bool):
        self.layer, self.is_attention = layer, is_attention
        self.width = getattr(self.attention, "attention_head_size", 1) if is_attention else 1
        dim = layer.output.dense.out_features
        self.cost = TOKENS * (4 * dim + 2 * TOKENS) * self.width if is_attention else TOKENS * 2 * dim

    @property
    def attention(self) -> nn.Module:
        """The module that computes the heads of the layer."""
        return self.layer.attention.self

    @property
    def output(self):
        """The module with the last projection (`dense`), the residual connection and the layer norm."""
        return self.layer.attention.output if self.is_attention else self.layer.output

    @property
    def count(self) -> int:
        """The number of units."""
        return self.output.dense.in_features // self.width

    def units(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """Return what the units put out: [B, T, units * width], the input of the last projection."""
        return self.attention(hidden, mask)[0] if self.is_attention else self.layer.intermediate(hidden)

    def columns(self, kept: Tensor) -> Tensor:
        """Return the columns of the last projection that belong to some units."""
        return (kept[:, None] * self.width + torch.arange(self.width)).flatten()

    @torch.no_grad()
    def keep(self, kept: Tensor, weight: Tensor | None = None) -> None:
        """Remove all units but some.

        Args:
            kept: indices of the units that stay, ascending.
            weight: [D, kept * width], the last projection for them; None for its present columns.
        """
        columns, dense = self.columns(kept), self.output.dense
        if self.is_attention and not len(kept):
            self.layer.attention.self = NoHeads()
        elif self.is_attention:
            attention = self.attention
            for projection in (attention.query, attention.key, attention.value):
                keep_rows(projection, columns)
            attention.num_attention_heads, attention.all_head_size = len(kept), len(columns)
        else:
            keep_rows(self.layer.intermediate.dense, columns)
        kept_weight = dense.weight[:, columns] if weight is None else weight.to(dense.weight)
        dense.weight, dense.in_features = nn.Parameter(kept_weight.contiguous()), len(columns)


def keep_rows(linear: nn.Linear, rows: Tensor) -> None:
    """Keep some outputs of a linear layer."""
    linear.weight, linear.bias = nn.Parameter(linear.weight[rows]), nn.Parameter(linear.bias[rows])
    linear.out_features = len(rows)


def blocks_of(model) -> list[Block]:
    """Return the blocks in the order in which they run: attention comes first in each layer."""
    return [Block(layer, kind) for layer in model.base_model.encoder.layer for kind in (True, False)]


def total_cost(blocks: Sequence[Block]) -> int:
    """Return the multiplications of all units."""
    return sum(block.cost * block.count for block in blocks)


@torch.no_grad()
def through(block: Block, states: States) -> States:
    """Return the states after a block."""
    return [(block.output(block.units(hidden, mask), hidden), mask, real) for hidden, mask, real in states]


@torch.no_grad()
def units_of(block: Block, states: States) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for every batch, at real tokens, what units put out and the input of the block: [tokens, units or D]."""
    for hidden, mask, real in states:
        yield block.units(hidden, mask)[real], hidden[real]


@torch.no_grad()
def outputs_of(block: Block, states: States) -> Iterator[Tensor]:
    """Yield for every batch the output of a block with the residual added, before the norm: [tokens, D]."""
    for units, hidden in units_of(block, states):
        yield block.output.dense(units) + hidden


@torch.no_grad()
def block_outputs(model, batches: Sequence[Mapping]) -> list[list[Tensor]]:
    """Return what `outputs_of` yields for every block: block -> batch -> [tokens, D]."""
    states, found = first_inputs(model, batches), []
    for block in blocks_of(model):
        found.append(list(outputs_of(block, states)))
        states = through(block, states)
    return found


def by_unit(values: Tensor, width: int, reduce: Callable = torch.sum) -> Tensor:
    """Sum (or average) a value per column of the last projection over the columns of each unit."""
    return reduce(values.unflatten(-1, (-1, width)), dim=-1)
