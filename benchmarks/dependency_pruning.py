"""Pruning with Torch-Pruning, in its usual way: a dependency graph and an importance of groups of weights.

A removed head takes its rows of query, key and value and its columns of W_O along, a removed neuron of a feed-forward
block its row of the first projection and its column of the last one. Torch-Pruning prunes heads only in layers that
have a pruning ratio for their width, so the query, key and value projections have one, as have first projections where
neurons are pruned, and no other layers; `prune_head_dims=False` keeps it from narrowing heads.

Source: Fang et al. 2023, arXiv:2301.12900; github.com/VainF/Torch-Pruning, 1.6.1.
"""

import sys

import torch

try:
    import torch_pruning
except ImportError:
    sys.exit("Torch-Pruning is missing: pip install --no-deps --target DIR torch-pruning==1.6.1, and DIR in PYTHONPATH")

SLACK = 1e-6  # of a ratio: Torch-Pruning rounds the number of heads that go up (or the number that stay down)


def magnitude(model, draw) -> torch_pruning.importance.Importance:
    """Return the importance of a head by the norm of its weights; needs no data."""
    return torch_pruning.importance.GroupMagnitudeImportance(p=2)


def taylor(model, draw) -> torch_pruning.importance.Importance:
    """Return the importance of a head by its weights times the gradients of the summed loss over the examples."""
    gradients = draw.once("gradients of weights", lambda: weight_gradients(model, draw.batches))
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name].clone()
    return torch_pruning.importance.GroupTaylorImportance()


def weight_gradients(model, batches) -> dict[str, torch.Tensor]:
    """Return the gradients of the summed loss by name; parameters that the loss does not reach have zeros."""
    model.zero_grad()
    for batch in batches:
        (model(**batch).loss * len(batch["labels"])).backward()
    found = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def dependency_pruned(model, draw, budget: float, *, importance, everywhere: bool, neurons: float = 1.0):
    """Remove heads, and neurons if asked to, in place and return the model.

    Args:
        model: a BERT.
        draw: labelled examples.
        budget: the share of heads that stay.
        importance: `magnitude` or `taylor`.
        everywhere: rank the heads of all layers together, and the neurons; otherwise each layer loses the same number.
        neurons: the share of neurons that stay.
    """
    attentions = [layer.attention.self for layer in model.base_model.encoder.layer]
    projections = [p for a in attentions for p in (a.query, a.key, a.value)]
    heads = {p: model.config.num_attention_heads for p in projections}
    first = [layer.intermediate.dense for layer in model.base_model.encoder.layer] if neurons < 1 else []
    ratios = dict.fromkeys([tuple(first)] if everywhere and first else first, 1 - neurons)
    removed = round((1 - budget) * len(attentions) * model.config.num_attention_heads)
    ratio = removed / (len(attentions) * model.config.num_attention_heads)
    pruner = torch_pruning.pruner.BasePruner(
        model,
        {name: tensor[:1] for name, tensor in draw.batches[0].items() if name != "labels"},
        importance=importance(model, draw),
        global_pruning=everywhere,
        pruning_ratio=0.0,
        pruning_ratio_dict=dict.fromkeys(projections, 0.5) | ratios,
        num_heads=heads,
        prune_num_heads=True,
        prune_head_dims=False,
        head_pruning_ratio=ratio - SLACK,
        ignored_layers=[p for p in model.modules() if isinstance(p, torch.nn.Linear) and p not in [*heads, *first]],
        output_transform=lambda output: output[0].sum(),
    )
    pruner.step()
    model.zero_grad(set_to_none=True)
    for attention in attentions:
        attention.num_attention_heads = pruner.num_heads[attention.query]
        attention.all_head_size = attention.query.out_features
    return model
