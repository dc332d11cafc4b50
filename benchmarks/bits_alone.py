"""Store the weights of a model in few bits, and change no size: GPTQ for linear layers, rounding for embeddings."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_heads.fitting.weight_grid import gptq, nearest_on_grid
from collab_heads.layers.weight_grid import BLOCK
from collab_heads.running.portions import portions

TABLE_BITS = 8  # of embeddings


@torch.no_grad()
def on_grid(
    model: PreTrainedModel, batches: Iterable[Mapping[str, Tensor]], bits: int, table_bits: int = TABLE_BITS
) -> float:
    """Put the weights of a model on a grid, in place, and return the bytes that it takes then.

    Moments of the inputs of linear layers are those of the original. Embeddings are rounded to `table_bits`, and so are
    linear layers that share their weights. Norms, biases and tables narrower than a block (biases of positions) stay
    in float32.
    """
    tables = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    linear = {
        each: Moments() for each in model.modules() if isinstance(each, nn.Linear) and id(each.weight) not in tables
    }
    handles = [layer.register_forward_pre_hook(seen.add) for layer, seen in linear.items()]
    for batch in batches:
        for portion in portions(batch, False):
            for seen in linear.values():
                seen.mask = portion.get("attention_mask")
            model(**portion)
    for handle in handles:
        handle.remove()
    size, done = 0.0, set()
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if isinstance(layer, nn.Linear | nn.Embedding) and id(weight) not in done and weight.shape[1] >= BLOCK:
            if layer in linear and (second := linear[layer].sum) is not None:
                found = gptq(weight, second, bits)
            else:
                found = nearest_on_grid(weight, table_bits)
            weight.copy_(found.weight())
            size += found.num_bytes
            done.add(id(weight))
    return size + sum(each.nbytes for each in model.parameters() if id(each) not in done)


class Moments:
    """The second moments of what a layer reads, without padding: a sum over tokens."""

    def __init__(self) -> None:
        self.mask: Tensor | None = None
        self.sum: Tensor | None = None  # [n, n]

    def add(self, layer: nn.Module, args: tuple[Tensor]) -> None:
        rows = args[0]
        if self.mask is not None and rows.shape[:-1] == self.mask.shape:
            rows = rows[self.mask.bool()]
        rows = rows.flatten(0, -2)
        found = (rows.mT @ rows).double()
        self.sum = found if self.sum is None else self.sum + found
