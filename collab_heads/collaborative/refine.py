"""Refine a decomposed site on what it computes: its own output on the calibration batches.

The decomposition minimises the error of scores under second moments, as if queries and keys were independent and every
key mattered alike. Neither holds. A few dozen Adam steps on the site's recorded inputs, against its recorded outputs,
close most of the gap. No labels and no gradient through the rest of the model: every site is fitted on its own.

The score error of the decomposition stays in the loss as a penalty. It stands for all pairs of tokens that the
calibration could have shown, and keeps the fit from learning the few it did show.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_heads.collaborative.calibrate import MASKS, run_batches
from collab_heads.heads.output import dense_weight
from collab_heads.registry import AttentionAdapter
from collab_heads.sites import AttentionSite

RELATIVE_RATE = 0.03  # Adam's step per parameter, relative to the root mean square of its tensor
PENALTY = 1.0  # weight of the squared relative score error


@dataclass(frozen=True)
class Call:
    """One recorded call of an attention module: its inputs, its first output, and which tokens count [B, T]."""

    args: tuple
    kwargs: dict
    target: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class Refinement:
    """Relative error of a site's output on the calibration batches, before and after; None if not measured."""

    error_before: float | None
    error_after: float | None


def record_calls(
    model: PreTrainedModel, sites: Sequence[AttentionSite], batches: Sequence[Mapping]
) -> dict[str, list[Call]]:
    """Run the unchanged model once and keep what goes in and out of every site.

    Memory: about tokens * width * 2 elements per site.
    """
    calls: dict[str, list[Call]] = {site.path: [] for site in sites}

    def keep(site, masks):
        def hook(module, args, kwargs, output):
            kwargs = {name: value for name, value in kwargs.items() if name != "past_key_values"}
            calls[site.path].append(Call(args, kwargs, output[0], masks.get(MASKS[site.role][0])))

        return hook

    masks: dict[str, Tensor | None] = {}
    handles = [
        model.base_model.get_submodule(site.path).register_forward_hook(keep(site, masks), with_kwargs=True)
        for site in sites
    ]
    try:
        run_batches(model, batches, masks, "recording")
    finally:
        for handle in handles:
            handle.remove()
    return calls


class Twin:
    """A copy of a stock site that computes with a new projection, to be compared with what the site computed.

    Args:
        model: the unchanged model.
        adapter: its adapter.
        site: the site.
        query_key: the projection; it is not part of the model yet, and takes the dtype of the copy.
        calls: from `record_calls`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        adapter: AttentionAdapter,
        site: AttentionSite,
        query_key: nn.Module,
        calls: Sequence[Call],
    ):
        module = model.base_model.get_submodule(site.path)
        projection = adapter.output_projection(model, site)
        inside = any(part is projection for part in module.modules())
        self.calls = calls
        weight = dense_weight(projection)
        self.dtype = torch.float32 if weight.dtype.itemsize < 4 else weight.dtype
        self.module = copy.deepcopy(module)
        adapter.install(self.module, query_key)
        self.module.to(self.dtype).eval().requires_grad_(False)
        for part in self.module.modules():  # a user's hooks are not meant for a copy
            part._forward_hooks.clear()
            part._forward_pre_hooks.clear()
        # the error counts after W_O; some families apply it outside the attention module
        self.weight = None if inside else weight.to(self.dtype)
        self.size = sum(float(centred_square(self.rows(call.target, call.mask))) for call in calls)

    def rows(self, output: Tensor, mask: Tensor | None) -> Tensor:
        """[B, T, ...] -> the rows that count, after W_O."""
        rows = selected(output.to(self.dtype), mask)
        return rows if self.weight is None else rows @ self.weight.mT

    def gap(self, call: Call) -> Tensor:
        """How far the copy is from a recorded call: [tokens, D]."""
        args, kwargs = (to_dtype(value, self.dtype) for value in (call.args, call.kwargs))
        return self.rows(self.module(*args, **kwargs)[0] - call.target.to(self.dtype), call.mask)

    @torch.no_grad()
    def output_error(self) -> float:
        """Relative error of the site's output over all calls."""
        return (
            (sum(float(self.gap(call).square().sum()) for call in self.calls) / self.size) ** 0.5 if self.size else 0.0
        )


def refine(
    model: PreTrainedModel,
    adapter: AttentionAdapter,
    site: AttentionSite,
    query_key: nn.Module,
    calls: Sequence[Call],
    score_error: Callable[[nn.Module], Callable[[], Tensor]],
    steps: int,
    seed: int,
) -> Refinement:
    """Fit a site's new query/key projection to the recorded calls, in place.

    Args:
        model: the unchanged model.
        adapter: its adapter.
        site: the site.
        query_key: the projection, already decomposed, in float64; it is not part of the model yet.
        calls: from `record_calls`.
        score_error: gives a function that computes the squared relative score error of a projection, differentiable.
        steps: Adam steps; one recorded call each.
        seed: of the order of the calls.

    Returns:
        The errors before and after. If the fit made the output worse, the projection is left as it was.
    """
    twin = Twin(model, adapter, site, query_key, calls)
    query_key.requires_grad_(True)
    penalty = score_error(query_key)
    before, start = twin.output_error(), copy.deepcopy(query_key.state_dict())
    parameters = [
        {"params": [parameter], "lr": RELATIVE_RATE * float(parameter.detach().square().mean().sqrt())}
        for parameter in query_key.parameters()
    ]
    optimizer = torch.optim.Adam(parameters)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator, order = torch.Generator().manual_seed(seed), []
    with torch.enable_grad():
        for _ in range(steps):
            order = order or torch.randperm(len(calls), generator=generator).tolist()
            scale = twin.size / len(calls)
            loss = twin.gap(calls[order.pop()]).square().sum() / max(scale, 1e-30) + PENALTY * penalty()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    optimizer.zero_grad()
    after = twin.output_error()
    if not after < before:
        query_key.load_state_dict(start)
        after = before
    return Refinement(before, after)


def selected(rows: Tensor, mask: Tensor | None) -> Tensor:
    """[B, T, D] -> [tokens that count, D]."""
    return rows.flatten(0, 1) if mask is None else rows[mask]


def centred_square(rows: Tensor) -> Tensor:
    """Sum of squares around the mean row."""
    return (rows - rows.mean(0)).square().sum()


def to_dtype(value, dtype: torch.dtype):
    """Cast floating-point tensors in a tuple or dict of arguments."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(to_dtype(item, dtype) for item in value)
    if isinstance(value, dict):
        return {name: to_dtype(item, dtype) for name, item in value.items()}
    return value
