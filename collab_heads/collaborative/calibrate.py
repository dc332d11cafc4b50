"""Second moments of what each site sees, from real batches.

What a decomposition should preserve is the score on real inputs, not the weights: see `decompose`. Padding does not
count. A module that serves several layers accumulates over all of them.
"""

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

from collab_heads.collaborative.decompose import float64
from collab_heads.collaborative.masks import MASKS, token_masks
from collab_heads.errors import CalibrationError, CollabHeadsError, NonFiniteError
from collab_heads.registry import AttentionAdapter
from collab_heads.sites import AttentionSite


class Moments:
    """Running sums of one side (query or key) of one site, in float64.

    Attributes:
        count: tokens seen.
        total: [D], sum of the inputs.
        outer: [D, D], sum of their outer products.
        within: [D, D], the same after the mean of each sequence was taken off.
    """

    def __init__(self, like: Tensor):
        self.count = 0
        self.total = float64(torch.zeros_like(like[0, 0]))
        self.outer = torch.zeros_like(self.total).outer(self.total)
        self.within = torch.zeros_like(self.outer)

    def add(self, inputs: Tensor, mask: Tensor | None) -> None:
        """Add a batch: inputs [B, T, D], mask [B, T] (true where a token counts) or None for all."""
        if mask is None:
            mask = torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
        tokens = float64(inputs.detach().masked_fill(~mask[..., None], 0.0))  # (B, T, D)
        mask = mask.to(tokens.device)
        sums, counts = tokens.sum(1), mask.sum(1)  # (B, D), (B,)
        flat = tokens.flatten(0, 1)
        outer = flat.mT @ flat
        self.count += int(counts.sum())
        self.total += sums.sum(0)
        self.outer += outer
        self.within += outer - sums.mT @ (sums / counts.clamp(min=1)[:, None])

    def second(self) -> Tensor:
        """E[x x^T]: [D, D]."""
        return self.outer / self.count

    def augmented(self) -> Tensor:
        """E[[x; 1][x; 1]^T]: [D + 1, D + 1], for weights with the bias as a last column."""
        mean = self.total / self.count
        corner = torch.ones(1, 1, dtype=mean.dtype, device=mean.device)
        return torch.cat(
            [torch.cat([self.second(), mean[:, None]], dim=1), torch.cat([mean[None], corner], dim=1)], dim=0
        )

    def centred(self) -> Tensor:
        """E[(x - mean of its sequence)(...)^T]: [D, D]. What is constant over keys cancels in the softmax."""
        return self.within / self.count


def collect_moments(
    model: PreTrainedModel,
    adapter: AttentionAdapter,
    sites: Sequence[AttentionSite],
    batches: Sequence[Mapping],
) -> dict[str, tuple[Moments, Moments]]:
    """Run the model on calibration batches and measure what the sites' query and key projections receive.

    Args:
        model: an unchanged model; it runs in evaluation mode without gradients and is left as it was.
        adapter: its adapter.
        sites: the sites to listen to.
        batches: from `check_batches`: input dicts as the model takes them; tensors are moved to the model's device.
            For an encoder-decoder they must bring decoder inputs or labels.

    Returns:
        path -> (query-side moments, key-side moments).

    Raises:
        CalibrationError: if the model cannot take a batch, a mask does not fit, or a site saw nothing.
        NonFiniteError: if an input of a site contains NaN or inf; the site is named.
    """
    moments: dict[tuple[str, int], Moments] = {}
    masks: dict[str, Tensor | None] = {}
    with listening(model, adapter, sites, moments, masks):
        run_batches(model, batches, masks, "calibrating")
    for site, side in itertools.product(sites, range(2)):
        if (site.path, side) not in moments or moments[site.path, side].count == 0:
            raise CalibrationError(
                f"{site.path} saw no tokens: give batches that reach it "
                "(decoder sites need labels or decoder_input_ids), or leave it out with sites="
            )
    return {site.path: (moments[site.path, 0], moments[site.path, 1]) for site in sites}


def check_batches(calibration: Iterable[Mapping]) -> list[Mapping]:
    """Return the calibration batches as a list, or raise CalibrationError if there are none or they are no dicts."""
    return list(each_batch(calibration))


def each_batch(calibration: Iterable[Mapping]) -> Iterator[Mapping]:
    """The calibration batches one by one, as they are asked for; raises what `check_batches` does, when it shows."""
    if not isinstance(calibration, Iterable) or isinstance(calibration, Mapping | str):
        raise CalibrationError(
            f"calibration is a {type(calibration).__name__}, expected an iterable of input dicts, "
            "such as [tokenizer(texts, return_tensors='pt', padding=True), ...]"
        )
    index = -1
    for index, batch in enumerate(calibration):
        if not isinstance(batch, Mapping):
            raise CalibrationError(
                f"calibration batch {index} is a {type(batch).__name__}, expected a dict of model inputs"
            )
        yield batch
    if index < 0:
        raise CalibrationError("calibration is empty: pass 32 to 512 sentences as batches of model inputs")


def run_batches(
    model: PreTrainedModel,
    batches: Iterable[Mapping],
    masks: dict[str, Tensor | None],
    what: str,
    masks_of: Callable[[PreTrainedModel, Mapping], Mapping[str, Tensor | None]] | None = None,
) -> None:
    """Run the model on every batch, without gradients; one batch is held at a time.

    Args:
        model: the model.
        batches: checked as they come, see `each_batch`.
        masks: holds the token masks of the batch under way.
        what: said beside the progress bar.
        masks_of: what `masks` holds; None for `token_masks`.
    """
    total, masks_of = operator.length_hint(batches) or None, masks_of or token_masks
    with evaluating(model):
        for index, batch in enumerate(tqdm(each_batch(batches), total=total, desc=what, leave=False)):
            inputs = {k: v.to(model.device) if isinstance(v, Tensor) else v for k, v in batch.items()}
            masks.clear()
            try:
                masks.update(masks_of(model, inputs))
                model(**inputs)
            except CollabHeadsError:
                raise
            except Exception as error:  # whatever the model raises about its inputs, with the batch named
                raise CalibrationError(
                    f"{type(model).__name__} cannot take calibration batch {index} with {sorted(inputs)}: {error}"
                ) from error


@contextmanager
def listening(model, adapter, sites, moments, masks):
    """Accumulate moments from forward pre-hooks on the sites' projections while the context is open."""
    handles: list[RemovableHandle] = []

    def listen(site, side, mask_name):
        def hook(module, inputs):
            states = inputs[0]
            mask = masks.get(mask_name)
            if mask is not None and mask.shape != states.shape[:2]:
                raise CalibrationError(
                    f"{site.path}: the {mask_name} mask {tuple(mask.shape)} does not fit the inputs of its "
                    f"{SIDES[side]} {tuple(states.shape)}; give attention masks of shape (batch, tokens)"
                )
            counted = states if mask is None else states[mask]
            if not torch.isfinite(counted).all():
                raise NonFiniteError(f"{site.path}: calibration inputs of its {SIDES[side]} contain NaN or inf")
            if (site.path, side) not in moments:
                moments[site.path, side] = Moments(states)
            moments[site.path, side].add(states, mask)

        return hook

    base = model.base_model
    for site in sites:
        query_mask, key_mask = MASKS[site.role]
        query, key = adapter.projections(base.get_submodule(site.path))
        handles.append(query.register_forward_pre_hook(listen(site, 0, query_mask)))
        handles.append(key.register_forward_pre_hook(listen(site, 1, key_mask)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


SIDES = ("query", "key")


@contextmanager
def evaluating(model: PreTrainedModel):
    """Evaluation mode without gradients; every module's own mode is restored."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def plain_backend(model: PreTrainedModel) -> AbstractContextManager[None]:
    """A backend that takes plain masks and trains everywhere; that of the model and its stacks is restored."""
    return attention_backend(model, "sdpa", accepted=("eager", "sdpa"))


@contextmanager
def attention_backend(model: PreTrainedModel, backend: str, accepted: Collection[str]):
    """Use a backend where the model and its stacks have none of the accepted ones; what they had is restored."""
    # one by one: transformers 5.17 does not reach T5's stacks from the model
    stacks = {m: m.config._attn_implementation for m in model.modules() if isinstance(m, PreTrainedModel)}
    try:
        for stack, own in stacks.items():
            if own not in accepted:
                stack.set_attn_implementation(backend)
        yield
    finally:
        for stack, own in stacks.items():  # from the outside in: setting a model sets its stacks
            if stack.config._attn_implementation != own:
                stack.set_attn_implementation(own)
