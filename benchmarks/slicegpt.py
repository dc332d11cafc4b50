"""SliceGPT: remove directions of the residual stream that a decoder uses little, without training.

The scales of the norms are folded into the matrices behind them, after which every block may read and write the
residual stream in an orthogonal basis of its own. The bases are the principal components of the stream, without its
mean removed; of each, the first few are kept. The skip connections of attention and of the feed-forward network go from
one basis to the next by a matrix each. The stream is sliced before every block, but not before the output, and each
basis is computed from the stream that the sliced model before it has: both as in the authors' program.

A budget counts the two skip matrices of every layer among its parameters, so that the width of the stream is less than
the budget's share of it. The embeddings do not count, as with all methods,
but they change: those of the tokens are sliced [V, width], those of the output are not [V, D], and where the original
shares one matrix for both, the sliced model has two. `num_parameters` counts both; a table that shows it has to say so.

Differences from the program: the width is the largest that keeps the budget (theirs is a multiple of 8 that leaves the
skip matrices out of account); bases are in order of variance (they rotate them at random afterwards, which changes
nothing in float32); the last layer writes into the original basis, which is its rotation undone; the diagonal of the
Gram matrix is not damped, which moves no eigenvector. The paper computes components of what the norms put out; we do as
the program does, of what they take in.

Source: Ashkboos, Croci, do Nascimento, Hoefler, Hensman 2024, "SliceGPT: Compress Large Language Models by Deleting
Rows and Columns", arXiv:2401.15024; github.com/microsoft/TransformerCompression.
"""

from collections.abc import Iterable, Mapping

import torch
from decoder_peers import Batches, layer_parameters, set_weight
from torch import Tensor, nn
from transformers import PreTrainedModel

States = list[tuple[Tensor, Mapping]]  # by batch: hidden [B, T, width], what else a layer is called with


class SlicedNorm(nn.Module):
    """A root mean square over the directions of the original stream, without scale: those that are gone count as 0."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.dim, self.epsilon = len(norm.weight), norm.variance_epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * torch.rsqrt(hidden.square().sum(-1, keepdim=True) / self.dim + self.epsilon)


class SlicedLayer(nn.Module):
    """A layer whose skip connections are matrices: `attention_skip` [width, width], `skip` [width, width or D]."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_norm, self.norm = SlicedNorm(layer.input_layernorm), SlicedNorm(layer.post_attention_layernorm)
        self.attention_skip = self.skip = None

    def forward(self, hidden_states: Tensor, **arguments) -> Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_norm(hidden_states), **arguments)
        hidden = hidden_states @ self.attention_skip + attended
        return hidden @ self.skip + self.mlp(self.norm(hidden))


@torch.no_grad()
def sliced(model: PreTrainedModel, batches: Batches, budget: float) -> PreTrainedModel:
    """Slice the model in place and return it; see the module for what a budget counts."""
    layers, embeddings = model.model.layers, model.model.embed_tokens
    width = width_for(model, budget)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    model.config.tie_word_embeddings = False
    states = first_inputs(model, batches)
    basis = components(hidden for hidden, _ in states)[:, :width]
    embeddings.weight = nn.Parameter(embeddings.weight @ basis)
    embeddings.embedding_dim = width
    states = [(hidden @ basis, rest) for hidden, rest in states]
    for number, layer in enumerate(layers):
        layers[number], states, basis = sliced_layer(layer, states, basis, is_last=number == len(layers) - 1)
    return model


def sliced_layer(
    layer: nn.Module, states: States, basis: Tensor, *, is_last: bool
) -> tuple[SlicedLayer, States, Tensor]:
    """Slice a layer, and return it, the states behind it, and their basis.

    Args:
        layer: the layer, whose matrices are changed in place.
        states: what reaches it, in its basis.
        basis: [D, width].
        is_last: write into the original basis.
    """
    attention, mlp, small, width = layer.self_attn, layer.mlp, SlicedLayer(layer), basis.shape[1]
    read_through(layer.input_layernorm, basis, attention.q_proj, attention.k_proj, attention.v_proj)
    whole = [hidden @ basis.T + attention(hidden_states=small.input_norm(hidden), **rest)[0] for hidden, rest in states]
    middle = components(whole)[:, :width]
    set_weight(attention.o_proj, middle.T @ attention.o_proj.weight)
    small.attention_skip = nn.Parameter(basis.T @ middle)
    read_through(layer.post_attention_layernorm, middle, mlp.gate_proj, mlp.up_proj)
    inner = [hidden @ middle for hidden in whole]
    whole = [hidden @ middle.T + mlp(small.norm(hidden)) for hidden in inner]
    after = torch.eye(len(basis)).to(basis) if is_last else components(whole)[:, :width]
    set_weight(mlp.down_proj, after.T @ mlp.down_proj.weight)
    small.skip = nn.Parameter(middle.T @ after)
    return small, [(hidden @ after, rest) for hidden, (_, rest) in zip(whole, states, strict=True)], after


def read_through(norm: nn.Module, basis: Tensor, *projections: nn.Linear) -> None:
    """Let projections read a stream in a basis, and fold the scale of the norm before them into them."""
    for projection in projections:
        set_weight(projection, (projection.weight * norm.weight) @ basis)


def components(states: Iterable[Tensor]) -> Tensor:
    """Return the principal components of states [B, T, D], the first one first: [D, D], in their precision."""
    gram, kind = 0.0, None
    for hidden in states:
        kind, tokens = hidden.dtype, hidden.flatten(0, -2).double()
        gram = gram + tokens.T @ tokens
    return torch.linalg.eigh(gram).eigenvectors.flip(-1).to(kind)


def width_for(model: PreTrainedModel, budget: float) -> int:
    """Return the largest width of the stream at which the layers, with their skip matrices, keep the budget."""
    layers, dim, before = model.model.layers, model.config.hidden_size, layer_parameters(model)
    neurons = layers[-1].mlp.down_proj.in_features

    def parameters(width: int) -> int:
        unsliced = (dim - width) * (neurons + width)  # of the last layer's output
        return before // dim * width + 2 * len(layers) * width**2 + unsliced

    return max(width for width in range(1, dim + 1) if parameters(width) <= budget * before)


def first_inputs(model: PreTrainedModel, batches: Batches) -> States:
    """Return what the first layer is called with."""
    found: States = []
    handle = model.model.layers[0].register_forward_pre_hook(
        lambda _, inputs, rest: found.append((inputs[0], rest)), with_kwargs=True
    )
    for batch in batches:
        model.base_model(**batch, use_cache=False)
    handle.remove()
    return found
