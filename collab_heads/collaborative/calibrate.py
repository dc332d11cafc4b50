"""Second moments of what each site sees, from real batches.

What a decomposition should preserve is the score on real inputs, not the weights: see `decompose`. Padding does not
count. A module that serves several layers accumulates over all of them.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

from collab_heads.collaborative.decompose import float64
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
    if not isinstance(calibration, Iterable) or isinstance(calibration, Mapping | str):
        raise CalibrationError(
            f"calibration is a {type(calibration).__name__}, expected an iterable of input dicts, "
            "such as [tokenizer(texts, return_tensors='pt', padding=True), ...]"
        )
    batches = list(calibration)
    if not batches:
        raise CalibrationError("calibration is empty: pass 32 to 512 sentences as batches of model inputs")
    for index, batch in enumerate(batches):
        if not isinstance(batch, Mapping):
            raise CalibrationError(
                f"calibration batch {index} is a {type(batch).__name__}, expected a dict of model inputs"
            )
    return batches


def run_batches(model: PreTrainedModel, batches: Sequence[Mapping], masks: dict[str, Tensor | None], what: str) -> None:
    """Run the model on every batch, without gradients; `masks` holds the token masks of the batch under way."""
    with evaluating(model):
        for index, batch in enumerate(tqdm(batches, desc=what, leave=False)):
            inputs = {k: v.to(model.device) if isinstance(v, Tensor) else v for k, v in batch.items()}
            masks.clear()
            masks.update(token_masks(model, inputs))
            try:
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
# role -> whose padding counts on the query side and on the key side
MASKS = {"enc-self": ("encoder", "encoder"), "dec-self": ("decoder", "decoder"), "dec-enc": ("decoder", "encoder")}


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


@contextmanager
def plain_backend(model: PreTrainedModel):
    """A backend that takes plain masks and trains everywhere; that of the model and its stacks is restored."""
    stacks = {m: m.config._attn_implementation for m in model.modules() if isinstance(m, PreTrainedModel)}
    special = {stack: backend for stack, backend in stacks.items() if backend not in ("eager", "sdpa")}
    for stack in special:
        stack.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        for stack, backend in special.items():
            stack.set_attn_implementation(backend)


def token_masks(model: PreTrainedModel, inputs: Mapping) -> dict[str, Tensor | None]:
    """Which tokens count, on the encoder side and on the decoder side: [B, T] bool, or None where all do."""
    config = model.config
    attention_mask = as_bool(inputs.get("attention_mask"))
    if not config.is_encoder_decoder:
        if getattr(config, "is_decoder", False):  # it cross-attends to what the caller passes in
            return {"encoder": as_bool(inputs.get("encoder_attention_mask")), "decoder": attention_mask}
        return {"encoder": attention_mask, "decoder": attention_mask}
    decoder_mask = as_bool(inputs.get("decoder_attention_mask"))
    if decoder_mask is None:
        if inputs.get("decoder_input_ids") is not None:
            decoder_mask = inputs["decoder_input_ids"] != config.pad_token_id
            decoder_mask[:, 0] = True  # the start token is often the padding token
        elif inputs.get("labels") is not None:
            labels = inputs["labels"]
            real = (labels != -100) & (labels != config.pad_token_id)
            # labels shifted right: position t holds the label of t - 1
            decoder_mask = torch.cat([torch.ones_like(real[:, :1]), real[:, :-1]], dim=1)
    return {"encoder": attention_mask, "decoder": decoder_mask}


def as_bool(mask: Tensor | None) -> Tensor | None:
    """An attention mask as booleans of shape [B, T]; multiple-choice models flatten (B, choices, T) the same way."""
    return None if mask is None else mask.bool().flatten(0, -2)
