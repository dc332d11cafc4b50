"""Head pruning without retraining, with labels: the framework of Kwon et al. 2022, for heads, written from the paper.

Every head has a mask, a factor on its output. There are three steps. First, the heads with the largest diagonal of the
Fisher information of the masks stay; all heads cost the same, so the search under a budget is a ranking over the whole
model. Second, heads of a layer change places while that lowers the loss, as estimated by the layer's block of the
Fisher information. Third, the masks that are left are fitted layer by layer, by damped least squares, so that the
output of the layer matches that in the original. The masks are then multiplied into W_O, and heads with mask 0 are
removed.

The ranking over the whole model can remove all heads of a layer that matter only together, which none of them shows
alone (the last layers of all-MiniLM-L6-v2 on MRPC). A second row, which the paper does not have, therefore takes the
same three steps with the same number of heads in every layer.

Source: Kwon, Kim, Mahoney, Hassoun, Keutzer, Gholami 2022, arXiv:2204.09656, section 3.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from collab_heads import prune_heads

DAMPING = 1.0  # of the least squares on masks, around 1
LARGEST = 10.0  # larger masks mean that the fit failed: the tuning stops at that layer


def retraining_free(model, draw, budget: float, *, everywhere: bool = True):
    """Remove heads in place and return the model.

    Args:
        model: a BERT.
        draw: labelled examples.
        budget: the share of heads that stay.
        everywhere: rank the heads of all layers together, as the paper does; otherwise all layers keep equally many.
    """
    layers = model.base_model.encoder.layer
    gradients = draw.once("gradients of masks", lambda: mask_gradients(model, draw.batches))
    targets = draw.once("outputs of layers", lambda: attention_outputs(model, draw.batches))
    masks = searched(gradients, budget, everywhere)
    masks = torch.stack([rearranged(mask, gradients[:, i]) for i, mask in enumerate(masks)])
    masks = tuned(model, draw.batches, masks, targets)
    with torch.no_grad():
        for layer, mask in zip(layers, masks, strict=True):
            width = layer.attention.self.attention_head_size
            layer.attention.output.dense.weight.mul_(mask.repeat_interleave(width))
    removed = [(mask == 0).nonzero().flatten().tolist() for mask in masks]
    prune_heads(model, heads={"enc-self": removed})
    return model


def mask_gradients(model, batches: Sequence[Mapping]) -> Tensor:
    """Return the gradient of every example's loss with respect to the masks: [examples, layers, heads]."""
    found, masks = [], []
    heads = model.config.num_attention_heads

    def masked(module, inputs):
        split = inputs[0].unflatten(-1, (heads, -1))  # (B, T, H, d)
        masks.append(torch.ones(len(split), heads, requires_grad=True))
        return ((split * masks[-1][:, None, :, None]).flatten(-2), *inputs[1:])

    hooks = [layer.attention.output.register_forward_pre_hook(masked) for layer in model.base_model.encoder.layer]
    for batch in batches:
        masks.clear()
        loss = model(**batch).loss * len(batch["labels"])  # the sum: each example has masks of its own
        found.append(torch.stack(torch.autograd.grad(loss, masks), dim=1))
    for hook in hooks:
        hook.remove()
    return torch.cat(found)


def searched(gradients: Tensor, budget: float, everywhere: bool) -> Tensor:
    """Keep the heads with the largest diagonal of the Fisher information: [layers, heads] of 0 and 1."""
    fisher = gradients.square().mean(0)
    ranked = fisher.flatten()[None] if everywhere else fisher
    best = ranked.topk(round(budget * ranked.shape[1])).indices
    return torch.zeros_like(ranked).scatter(1, best, 1.0).view_as(fisher)


def rearranged(mask: Tensor, gradients: Tensor) -> Tensor:
    """Exchange kept and removed heads of a layer where this lowers the estimated loss; the number kept stays the same.

    Args:
        mask: [heads] of 0 and 1.
        gradients: [examples, heads].
    """
    fisher = gradients.double().T @ gradients.double()
    gone = (mask == 0).nonzero().flatten().tolist()
    stay = sorted((mask != 0).nonzero().flatten().tolist(), key=lambda head: float(fisher[head, head]))
    for head in stay if gone else ():
        choices = [[other for other in [*gone, head] if other != back] for back in [*gone, head]]
        gone = min(choices, key=lambda heads: float(fisher[heads][:, heads].sum()))  # (1 - m)^T I (1 - m)
    mask = torch.ones_like(mask)
    mask[gone] = 0
    return mask


@contextmanager
def stopped_before(layer) -> Iterator[list]:
    """Yield a function that runs the model up to a layer and returns the layer's inputs."""
    calls: list = []

    class Reached(Exception):
        pass

    def hook(module, args, kwargs):
        calls.append((args[0], args[1] if len(args) > 1 else kwargs.get("attention_mask")))
        raise Reached

    def run(model, batch):
        try:
            model(**batch)
        except Reached:
            return calls.pop()

    handle = layer.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield run
    finally:
        handle.remove()


@torch.no_grad()
def first_inputs(model, batches: Sequence[Mapping]) -> list[tuple[Tensor, Tensor | None, Tensor]]:
    """Return the inputs of the first layer: hidden states [B, T, D], the attention mask, and the real tokens [B, T]."""
    with stopped_before(model.base_model.encoder.layer[0]) as run:
        return [(*run(model, batch), batch["attention_mask"].bool()) for batch in batches]


@torch.no_grad()
def attention_outputs(model, batches: Sequence[Mapping]) -> list[list[Tensor]]:
    """Return the attention output of every layer with the residual added: layer -> batch -> [tokens, D]."""
    states, found = first_inputs(model, batches), []
    for layer in model.base_model.encoder.layer:
        outputs, after = [], []
        for hidden, mask, counts in states:
            heads = layer.attention.self(hidden, mask)[0]
            outputs.append((layer.attention.output.dense(heads) + hidden)[counts])
            after.append((rest_of_layer(layer, heads, hidden), mask, counts))
        found.append(outputs)
        states = after
    return found


def rest_of_layer(layer, heads: Tensor, hidden: Tensor) -> Tensor:
    """Compute the output of a layer from its concatenated heads."""
    hidden = layer.attention.output(heads, hidden)
    return layer.output(layer.intermediate(hidden), hidden)


@torch.no_grad()
def tuned(model, batches: Sequence[Mapping], masks: Tensor, targets: Sequence[Sequence[Tensor]]) -> Tensor:
    """Fit the masks that are not 0, layer by layer, each after the fitted ones before it: [layers, heads]."""
    states, masks, fits = first_inputs(model, batches), masks.clone(), True
    for number, layer in enumerate(model.base_model.encoder.layer):
        heads = [layer.attention.self(hidden, mask)[0] for hidden, mask, _ in states]
        if fits and masks[number].any():
            wanted = [
                target - hidden[counts] for target, (hidden, _, counts) in zip(targets[number], states, strict=True)
            ]
            seen = [z[counts] for z, (*_, counts) in zip(heads, states, strict=True)]
            fitted = least_squares(layer.attention.output.dense, seen, wanted, masks[number])
            fits = bool((fitted.abs() <= LARGEST).all())
            masks[number] = fitted if fits else masks[number]
        factors = masks[number].repeat_interleave(layer.attention.self.attention_head_size)
        states = [
            (rest_of_layer(layer, z * factors, hidden), mask, counts)
            for z, (hidden, mask, counts) in zip(heads, states, strict=True)
        ]
    return masks


def least_squares(dense, heads: Sequence[Tensor], wanted: Sequence[Tensor], mask: Tensor) -> Tensor:
    """Fit the masks of a layer, damped around 1: argmin |A m - b|^2 + damping^2 |m - 1|^2.

    A column of A is the contribution of a head to the output, b is the desired output.

    Args:
        dense: the output projection.
        heads: batch -> [tokens, heads * d], its input.
        wanted: batch -> [tokens, D], the desired output.
        mask: [heads] of 0 and 1; a 0 stays 0.
    """
    count = len(mask)
    weight = dense.weight.double()
    moments = sum(z.double().T @ z.double() for z in heads)
    with_wanted = sum((b - dense.bias).double().T @ z.double() for z, b in zip(heads, wanted, strict=True))
    products = ((weight.T @ weight) * moments).unflatten(0, (count, -1)).unflatten(-1, (count, -1)).sum((1, 3))
    right = (weight * with_wanted).sum(0).unflatten(0, (count, -1)).sum(-1)
    kept = mask.bool()
    products, right = products[kept][:, kept], right[kept]
    step = torch.linalg.solve(products + DAMPING**2 * torch.eye(len(right)).double(), right - products.sum(1))
    fitted = torch.zeros_like(mask)
    fitted[kept] = (1 + step).to(mask)
    return fitted
