"""What a distillation trains: the projections of the sites that were changed, and nothing else."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_heads.attention_adapter import AttentionAdapter
from collab_heads.errors import ArgumentError
from collab_heads.layers.fused import whole_of
from collab_heads.layers.output import HeadOutputProjection
from collab_heads.layers.removed import NoHeads
from collab_heads.model.open_site import OpenSite, open_sites
from collab_heads.model.refusals import check_unshared
from collab_heads.record import CollabConfig


def trained_parameters(model: PreTrainedModel, adapter: AttentionAdapter) -> dict[str, nn.Parameter]:
    """The parameters of the query/key, value and output projections of changed sites, by name; no gates, no alphas.

    What the user froze stays frozen.

    Raises:
        ArgumentError: if no site was changed, all is frozen, or one is in a dtype that cannot be trained.
        SwapError: if a projection of a changed site is another one's, too.
    """
    changed = CollabConfig.on(model).sites
    sites = [site for site in adapter.sites(model) if site.path in changed]
    with_heads = [site for site in sites if site.num_heads]
    check_unshared(model, adapter, with_heads, ("query", "key", "value", "output"))
    ours = {id(p) for site in open_sites(model, adapter, sites) for p in site_parameters(site)}
    found = {name: p for name, p in model.named_parameters() if id(p) in ours}
    if not found:
        raise ArgumentError(
            f"nothing in this {type(model).__name__} was changed, so there is nothing to train: change it first "
            "(swap_to_collaborative, prune_heads), or load what you saved with collab_heads imported"
        )
    found = {name: p for name, p in found.items() if p.requires_grad}
    if not found:
        raise ArgumentError(
            f"everything that was changed in this {type(model).__name__} is frozen, so there is nothing to train: call "
            "model.requires_grad_(True), or set it for what is to be trained"
        )
    for name, parameter in found.items():
        if parameter.dtype not in (torch.float32, torch.float64, torch.bfloat16):
            raise ArgumentError(
                f"{name} is in {parameter.dtype}, in which small gradients are lost: distill in float32 or bfloat16 "
                "(model.float()), and convert the model after it"
            )
    return found


def site_parameters(site: OpenSite) -> Iterator[nn.Parameter]:
    """The parameters of a site's projections; those of gates and alphas stay as they are."""
    inner = getattr(site.module, "query_key", None)
    modules = [] if isinstance(inner, NoHeads) else [*([inner] if site.is_swapped else site.projections), site.value]
    for module in modules:
        yield from whole_of(module).parameters()
    output = site.output
    yield from output.parameters(recurse=not isinstance(output, HeadOutputProjection))


@contextmanager
def trained_alone(model: PreTrainedModel, trained: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Let only some parameters have gradients; what had gradients, and which, is as before afterwards.

    After an error their values are, too.
    """
    before = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    values = {name: parameter.detach().clone() for name, parameter in trained.items()}
    try:
        for parameter, _, _ in before:
            parameter.requires_grad_(False)
            parameter.grad = None
        for parameter in trained.values():
            parameter.requires_grad_(True)
        with torch.enable_grad():
            yield
    except BaseException:
        put_back(trained, values)
        raise
    finally:
        for parameter, required, gradient in before:
            parameter.requires_grad_(required)
            parameter.grad = gradient


@torch.no_grad()
def put_back(trained: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Set parameters to what they were, or are to be."""
    for name, parameter in trained.items():
        parameter.copy_(values[name])
