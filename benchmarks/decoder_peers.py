"""Peers that make a decoder smaller without training: ReplaceMe, FLAP and 2SSP; SliceGPT and OSSCAR have own files.

They take models like Llama: norms before attention and before the gated feed-forward network, key heads that may be
shared by a group of query heads, no biases. A budget is a share of the parameters of the layers: the projections of
attention and of the feed-forward network, and all that a method adds to layers (`layer_parameters`); embeddings, the
output and the scales of norms do not count. A method keeps the budget, and stays below it by less than one of its
units. The models are for `use_cache=False`: blocks keep their numbers, and attention may be gone.

No code was copied. Each function names its source, and where it differs from it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

RIDGE = 1e-4  # of ReplaceMe, times the mean of the Gram matrix's diagonal
ALPHA = 1.5  # of 2SSP
ROUNDING = 1e-6  # of products of a budget and a count

Batches = Sequence[Mapping[str, Tensor]]


def layer_parameters(model: PreTrainedModel) -> int:
    """Count the parameters of all layers without their norms."""
    named = (pair for layer in model.model.layers for pair in layer.named_parameters())
    return sum(parameter.numel() for name, parameter in named if "norm" not in name)


@torch.no_grad()
def recorded(
    model: PreTrainedModel, batches: Batches, modules: Sequence[nn.Module]
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield for every batch the input and the output of modules."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    handles = [
        module.register_forward_hook(lambda _, inputs, output, at=at: seen.update({at: (inputs[0], output)}))
        for at, module in enumerate(modules)
    ]
    for batch in batches:
        model.base_model(**batch, use_cache=False)
        yield [seen[at] for at in range(len(modules))]
    for handle in handles:
        handle.remove()


class WithoutHeads(nn.Module):
    """Attention that has lost all heads: its output is a bias [D], or zero."""

    def __init__(self, bias: Tensor | None = None):
        super().__init__()
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, hidden_states: Tensor, **_) -> tuple[Tensor | float, None]:
        return 0.0 if self.bias is None else self.bias, None


class Units:
    """The units of the attention or of the feed-forward network of a layer: groups of heads, or neurons.

    A group is a key head with all query heads that share it, since stock attention needs groups of one size.

    Attributes:
        is_attention: its kind.
        width: the columns of the last projection that a unit has.
        count: the number of units.
        cost: the parameters of a unit.
    """

    def __init__(self, layer: nn.Module, is_attention: bool):
        self.layer, self.is_attention = layer, is_attention
        self.module = layer.self_attn if is_attention else layer.mlp
        self.width = self.module.num_key_value_groups * self.module.head_dim if is_attention else 1
        self.count = self.last.in_features // self.width
        self.cost = sum(parameter.numel() for parameter in self.module.parameters()) // self.count

    @property
    def last(self) -> nn.Linear:
        """The last projection."""
        return self.module.o_proj if self.is_attention else self.module.down_proj

    def columns(self, kept: Tensor) -> Tensor:
        """Return the columns of the last projection that belong to some units."""
        return places(kept, self.width)

    @torch.no_grad()
    def keep(self, kept: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> None:
        """Remove all units but some.

        Args:
            kept: indices of the units that stay, ascending.
            weight: [D, kept * width], the last projection for them; None for its present columns.
            bias: [D], to be added to the output; None for none.
        """
        columns, last = self.columns(kept), self.last
        bias = None if bias is None else bias.to(last.weight)
        if self.is_attention and not len(kept):
            self.layer.self_attn = WithoutHeads(bias)
            return
        if self.is_attention:
            keep_rows(self.module.q_proj, columns)
            for projection in (self.module.k_proj, self.module.v_proj):
                keep_rows(projection, places(kept, self.module.head_dim))
        else:
            keep_rows(self.module.gate_proj, columns)
            keep_rows(self.module.up_proj, columns)
        set_weight(last, last.weight[:, columns] if weight is None else weight)
        if bias is not None:
            last.bias = nn.Parameter(bias)


def units_of(model: PreTrainedModel) -> list[Units]:
    """Return the units of every layer: those of attention come first."""
    return [Units(layer, kind) for layer in model.model.layers for kind in (True, False)]


def places(units: Tensor, width: int) -> Tensor:
    """Return the indices that belong to units of some width: [units] -> [units * width]."""
    return (units[:, None] * width + torch.arange(width)).flatten()


def set_weight(linear: nn.Linear, weight: Tensor) -> None:
    """Give a linear layer another weight: [out, in]."""
    linear.weight = nn.Parameter(weight.detach().to(linear.weight.dtype).contiguous())
    linear.out_features, linear.in_features = weight.shape


def keep_rows(linear: nn.Linear, rows: Tensor) -> None:
    """Keep some outputs of a linear layer."""
    set_weight(linear, linear.weight[rows])


@torch.no_grad()
def replaced(model: PreTrainedModel, batches: Batches, budget: float) -> PreTrainedModel:
    """ReplaceMe: replace blocks beside each other by one linear map, and return the model.

    The blocks are those whose input and output have the smallest cosine distance, averaged over tokens. With M the
    output of the feed-forward network before them, Y the residual that is added to it, and L the output of the last of
    them, the map is T = (M'M + ridge)^-1 M'(L - Y), and goes into the down projection of the block before them. As
    many blocks go as the budget asks for.

    It differs from the authors' program in three places: the program takes the angular distance of the last tokens
    (the paper the cosine distance); it compares the last block's output after the final norm (ours before); and its
    ridge is 0 unless one is given (ours is small, so that few tokens can be inverted).

    Source: Shopkhoev et al. 2025, "ReplaceMe: Network Simplification via Depth Pruning and Transformer Block
    Linearization", arXiv:2505.02819, the variant with least squares and one map; github.com/mts-ai/ReplaceMe.
    """
    blocks = list(model.model.layers)
    count = math.ceil((1 - budget) * len(blocks) - ROUNDING)
    if not count:
        return model
    distances = torch.zeros(len(blocks) - count, dtype=torch.float64)  # of the blocks from 1 on: one stays before them
    for seen in recorded(model, batches, blocks):
        for at in range(len(distances)):
            similarity = functional.cosine_similarity(seen[at + 1][0], seen[at + count][1], dim=-1)
            distances[at] += float((1 - similarity).sum())
    first = int(distances.argmin()) + 1
    before, last = blocks[first - 1], blocks[first + count - 1]
    gram, right = 0.0, 0.0
    for (_, inner), (_, reached), (_, wanted) in recorded(model, batches, (before.mlp, before, last)):
        inner, target = (each.flatten(0, -2).double() for each in (inner, wanted - reached + inner))
        gram, right = gram + inner.T @ inner, right + inner.T @ target
    ridge = RIDGE * gram.diagonal().mean() * torch.eye(len(gram)).double()
    linear_map = torch.linalg.solve(gram + ridge, right)  # [D, D], for rows
    set_weight(before.mlp.down_proj, linear_map.T @ before.mlp.down_proj.weight.double())
    model.model.layers = nn.ModuleList([*blocks[:first], *blocks[first + count :]])
    model.config.num_hidden_layers = len(model.model.layers)
    return model


@torch.no_grad()
def flap(model: PreTrainedModel, batches: Batches, budget: float) -> PreTrainedModel:
    """FLAP: remove the groups of heads and the neurons that fluctuate least, and return the model.

    The score of a column of a last projection is the variance of its input times its squared norm (WIFV). Scores are
    standardized within each module, averaged over the columns of a unit, and compared over all layers and modules
    (AL-AM). The mean of what is removed becomes a bias. As in the authors' program, the scores of attention are squared
    before they are standardized, and all statistics are those of the original model.

    It differs from the program in four places: heads that share a key head go together, and count with all their
    parameters; variances are those over all tokens (the program updates them sample by sample, the first without any);
    biases count as parameters; units are taken by falling score while they fit, so that the budget is used up to a
    neuron (the program takes the nearest threshold).

    Source: An, Zhao, Yu, Tang, Wang 2024, "Fluctuation-based Adaptive Structured Pruning for Large Language Models",
    arXiv:2312.11983; github.com/CASIA-IVA-Lab/FLAP.
    """
    units = units_of(model)
    room = budget * layer_parameters(model) - sum(each.last.out_features for each in units)
    means, variances = moments(model, batches, [each.last for each in units])
    scores = [fluctuation(each, variance) for each, variance in zip(units, variances, strict=True)]
    for each, kept, mean in zip(units, filled(scores, [each.cost for each in units], room), means, strict=True):
        gone = torch.ones(len(mean), dtype=torch.bool).index_fill(0, each.columns(kept), False)
        each.keep(kept, bias=each.last.weight.double() @ (mean * gone))
    return model


def moments(
    model: PreTrainedModel, batches: Batches, modules: Sequence[nn.Module]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the mean and the variance over tokens of the inputs of modules: module -> [in], float64."""
    count, sums, squares = 0, [0.0] * len(modules), [0.0] * len(modules)
    for seen in recorded(model, batches, modules):
        for at, (inputs, _) in enumerate(seen):
            tokens = inputs.flatten(0, -2).double()
            sums[at], squares[at] = sums[at] + tokens.sum(0), squares[at] + tokens.square().sum(0)
        count += len(tokens)
    means = [each / count for each in sums]
    pairs = zip(squares, means, strict=True)
    return means, [(square - count * mean.square()).clamp(min=0) / (count - 1) for square, mean in pairs]


def fluctuation(units: Units, variance: Tensor) -> Tensor:
    """Return the standardized score of every unit from the variance of columns: [units * width] -> [units]."""
    columns = variance * units.last.weight.double().square().sum(0)
    if units.is_attention:
        columns = columns.square()
    return ((columns - columns.mean()) / columns.std()).view(units.count, units.width).mean(1)


def filled(scores: Sequence[Tensor], costs: Sequence[int], room: float) -> list[Tensor]:
    """Return the units of every module that stay, ascending: those with the highest scores that fit into a room."""
    owners = torch.cat([torch.full((len(each),), at) for at, each in enumerate(scores)]).tolist()
    kept: list[list[int]] = [[] for _ in scores]
    starts = torch.tensor([0, *map(len, scores)]).cumsum(0).tolist()
    for place in torch.cat(list(scores)).argsort(descending=True, stable=True).tolist():
        owner = owners[place]
        if costs[owner] <= room:
            room -= costs[owner]
            kept[owner].append(place - starts[owner])
    return [torch.tensor(sorted(each), dtype=torch.long) for each in kept]


@torch.no_grad()
def two_stages(model: PreTrainedModel, batches: Batches, budget: float) -> PreTrainedModel:
    """2SSP: remove neurons from every feed-forward network, then whole attention modules, and return the model.

    Of N attention modules, N (1 - budget)^(F / A / 1.5) go, rounded, with F and A the parameters of a feed-forward
    network and of an attention module; the rest is taken from all feed-forward networks alike. Neurons are ranked by
    the norm of their activation over a text, averaged over texts. Attention modules go one by one, each time the one
    whose absence raises the perplexity least, on one batch (the authors' program takes one text of 2,048 tokens; here
    a batch of 16 pieces has as many).

    It differs from the program in one place: the number of neurons is rounded down, so that the budget is kept.

    Source: Sandri, Cunegatti, Iacca 2025, "2SSP: A Two-Stage Framework for Structured Pruning of LLMs",
    arXiv:2501.17771; github.com/FabrizioSandri/2SSP.
    """
    units = units_of(model)
    attention, feed_forward = units[0::2], units[1::2]
    costs = [kind[0].cost * kind[0].count for kind in (attention, feed_forward)]
    modules = round(len(attention) * (1 - budget) ** (costs[1] / costs[0] / ALPHA))
    left = budget * layer_parameters(model) - (len(attention) - modules) * costs[0]
    neurons = math.floor(left / len(feed_forward) / feed_forward[0].cost + ROUNDING)
    norms = [0.0] * len(feed_forward)
    for seen in recorded(model, batches, [each.last for each in feed_forward]):
        norms = [norm + inputs.norm(dim=1).double().sum(0) for norm, (inputs, _) in zip(norms, seen, strict=True)]
    for each, norm in zip(feed_forward, norms, strict=True):
        each.keep(norm.topk(neurons).indices.sort().values)
    left_over = list(model.model.layers)
    for _ in range(modules):
        losses = [loss_without(model, layer, batches[0]) for layer in left_over]
        left_over.pop(losses.index(min(losses))).self_attn = WithoutHeads()
    return model


def loss_without(model: PreTrainedModel, layer: nn.Module, batch: Mapping[str, Tensor]) -> float:
    """Return the loss per token, the logarithm of the perplexity, without the attention of a layer."""
    attention, layer.self_attn = layer.self_attn, WithoutHeads()
    loss = float(model(**batch, labels=batch["input_ids"], use_cache=False).loss)
    layer.self_attn = attention
    return loss
