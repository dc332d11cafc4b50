"""Forward passes over data that show attention to observers, and which query tokens count."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from collab_heads.contract.registry import get_adapter, is_lone_decoder
from collab_heads.errors import ArgumentError, CalibrationError
from collab_heads.model.refusals import check_wrapper
from collab_heads.running.batches import IMAGES, decoder_ids, run_batches, sides, token_masks
from collab_heads.running.recording import recording
from collab_heads.sites.site import AttentionSite

LARGEST = 2**63 - 1  # that a tensor of ids holds


def end_tokens(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the ids that end a sentence, as the config and the generation config name them; BERT's name none."""
    ids: set[int] = set()
    for config in (model.config, model.config.get_text_config(), getattr(model, "generation_config", None)):
        for name in ("eos_token_id", "sep_token_id"):
            value = getattr(config, name, None)
            ids.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return tuple(sorted(ids))


def check_exclude(exclude: Iterable[int]) -> tuple[int, ...]:
    """Return the ids that do not count, ascending; raise ArgumentError if they are not token ids."""
    ids = list(exclude) if isinstance(exclude, Iterable) and not isinstance(exclude, str) else [exclude]
    if any(isinstance(each, bool) or not isinstance(each, int) or abs(each) > LARGEST for each in ids):
        raise ArgumentError(f"exclude={exclude!r:.200}: expected token ids, such as [tokenizer.sep_token_id]")
    return tuple(sorted(set(ids)))


def query_masks(model: PreTrainedModel, inputs: Mapping, exclude: tuple[int, ...]) -> dict[str, Tensor | None]:
    """Return which query tokens count, on the encoder side and on the decoder side.

    The decoder's queries are the tokens that it reads: decoder_input_ids, or the labels shifted right. Its first token
    counts whatever its id is. With labels, a position counts if there is a label to predict: these are its steps.

    Returns:
        "encoder" and "decoder" -> [B, T] bool, or None if all count. The mask of a lone decoder is under "decoder"; a
        model with several stacks has a mask for each, under its name.
    """
    config, masks = model.config, token_masks(model, inputs)
    source = inputs.get("input_ids")
    source = None if source is None else source.flatten(0, -2)  # multiple-choice models: (B, choices, T)
    if config.is_encoder_decoder:
        target, labels = decoder_ids(model, inputs), inputs.get("labels")
        masks["encoder"] = without(masks["encoder"], source, exclude)
        masks["decoder"] = without(masks["decoder"], target, exclude, starts=True)
        if target is not None and labels is not None and labels.shape == target.shape:
            labelled, decoder = (labels != -100) & (labels != config.pad_token_id), masks["decoder"]
            masks["decoder"] = labelled if decoder is None else decoder & labelled
    elif is_lone_decoder(config):
        masks["decoder"] = without(masks["decoder"], source, exclude, starts=True)
    else:
        for side in {"encoder", "text"} & masks.keys():
            masks[side] = without(masks[side], source, exclude)
    return masks


def without(
    mask: Tensor | None, ids: Tensor | None, exclude: tuple[int, ...], *, starts: bool = False
) -> Tensor | None:
    """Remove excluded ids from a mask [B, T]; `starts` keeps the first token of every row, even after padding."""
    if ids is None:
        return mask
    if mask is None:
        mask = torch.ones_like(ids, dtype=torch.bool)
    counts = ~torch.isin(ids, torch.tensor(exclude, dtype=ids.dtype, device=ids.device))
    if starts:
        counts.scatter_(1, mask.int().argmax(1, keepdim=True), True)
    return mask & counts


logger = logging.get_logger("transformers.collab_heads")


class Attention:
    """The attention of a site on the current batch; all observers share what is computed from it.

    Attributes:
        weights: [B, H, T, S], from query tokens T to key tokens S; float32 if the model has half precision.
    """

    def __init__(self, weights: Tensor):
        self.weights = weights if weights.element_size() >= 4 else weights.float()

    @cached_property
    def largest(self) -> tuple[Tensor, Tensor]:
        """The largest weight of every query token, and the key position on which it falls: both [B, H, T]."""
        return self.weights.max(-1)


class Batch:
    """The current batch: its tokens, and which of them count.

    Attributes:
        inputs: the inputs of the model, on its device.
        index: the number of the batch, from 0.
    """

    def __init__(self, model: PreTrainedModel, inputs: Mapping, index: int, exclude: tuple[int, ...]):
        self.inputs, self.index = inputs, index
        self._model = model
        self._queries, self._tokens = query_masks(model, inputs, exclude), token_masks(model, inputs)

    @cached_property
    def _whole(self) -> dict[str, Tensor | None]:
        return query_masks(self._model, self.inputs, ())

    def ids(self, side: str) -> Tensor | None:
        """Return the tokens that the "encoder" or the "decoder" reads, [B, T], or None if the inputs hold embeddings.

        Position 0 of the decoder of an encoder-decoder is the start token; the id there has no meaning.
        """
        if side == "decoder" and self._model.config.is_encoder_decoder:
            return decoder_ids(self._model, self.inputs)
        ids = None if side == IMAGES else self.inputs.get("input_ids")
        return None if ids is None else ids.flatten(0, -2)  # multiple-choice models: (B, choices, T)

    def queries(self, site: AttentionSite) -> Tensor | None:
        """Return which query tokens of a site are neither padding nor excluded: [B, T] bool, or None if all count."""
        return self._queries[sides(site)[0]]

    def every_query(self, site: AttentionSite) -> Tensor | None:
        """Return the same as `queries`, but with no ids excluded."""
        return self._whole[sides(site)[0]]

    def keys(self, site: AttentionSite) -> Tensor | None:
        """Return which key tokens of a site are not padding: [B, S] bool; None if there is no padding."""
        return self._tokens[sides(site)[1]]

    def unpadded_queries(self, site: AttentionSite) -> Tensor | None:
        """Return which query tokens of a site are not padding: [B, T] bool; None if there is no padding."""
        return self._tokens[sides(site)[0]]

    def counted(self, site: AttentionSite, values: Tensor) -> Tensor:
        """Select the values of the query tokens that count: [B, T, ...] -> [N, ...]."""
        mask = self.queries(site)
        if mask is None:
            return values.flatten(0, 1)
        if mask.shape != values.shape[:2]:
            raise CalibrationError(
                f"{site.path}: the {sides(site)[0]} mask {tuple(mask.shape)} does not fit its query tokens "
                f"{tuple(values.shape[:2])}; give attention masks of shape (batch, tokens)"
            )
        return values[mask.to(values.device)]


class Observer:
    """A measure that is taken during a pass.

    Subclasses override the methods that they need. They keep sums, never batches.

    Attributes:
        weights: whether it needs attention weights, which only the eager backend gives.
        outputs: whether it needs the outputs of heads.
    """

    weights = False
    outputs = False

    def begin(self, sites: Sequence[AttentionSite]) -> None:
        """Prepare for a pass; called once, with the sites that have heads, before the first batch."""

    def see_weights(self, site: AttentionSite, attention: Attention, batch: Batch) -> None:
        """See a site's attention weights in every batch; a module with several layers (ALBERT) calls once per layer."""

    def see_outputs(self, site: AttentionSite, outputs: Tensor, batch: Batch) -> None:
        """See the outputs of the heads, [B, T, H, d_v], before gates and alphas; called like `see_weights`."""


def observe(
    model: PreTrainedModel,
    batches: Iterable[Mapping],
    observers: Sequence[Observer],
    *,
    exclude: Iterable[int] | None = None,
    what: str = "measuring heads",
) -> list[AttentionSite]:
    """Run the model once over all batches, without gradients, and show every site to the observers.

    Args:
        model: a supported transformers model; it runs in evaluation mode and is left as it was.
        batches: input dicts as the model takes them; any iterable, read once, one batch held at a time.
        observers: the measures to take.
        exclude: ids of tokens that do not count as queries; None for the default of `excluded_tokens`.
        what: the label of the progress bar.

    Returns:
        The sites that have heads, in model order.

    Raises:
        ArgumentError: if `exclude` holds anything but token ids.
        CalibrationError: if there are no batches, or the model cannot take one (the message holds its index).
        UnsupportedModelError: if there is no adapter for the model, it is wrapped, or it gives no attention weights.
    """
    check_wrapper(model)
    adapter, exclude = get_adapter(model), excluded_tokens(model, exclude)
    sites = adapter.sites_with_heads(model)
    for observer in observers:
        observer.begin(sites)
    if not sites:
        return sites
    current: list[Batch] = []  # at most one

    def begin(model: PreTrainedModel, inputs: Mapping) -> dict:
        current[:] = [Batch(model, inputs, current[0].index + 1 if current else 0, exclude)]
        return {}

    def see_weights(site: AttentionSite, weights: Tensor) -> None:
        attention = Attention(weights)
        for observer in of_weights:
            observer.see_weights(site, attention, current[0])

    def see_outputs(site: AttentionSite, outputs: Tensor) -> None:
        for observer in of_outputs:
            observer.see_outputs(site, outputs, current[0])

    of_weights = [observer for observer in observers if observer.weights]
    of_outputs = [observer for observer in observers if observer.outputs]
    with recording(model, weights=see_weights if of_weights else None, outputs=see_outputs if of_outputs else None):
        run_batches(model, batches, {}, what, begin)
    return sites


def excluded_tokens(model: PreTrainedModel, exclude: Iterable[int] | None) -> tuple[int, ...]:
    """Return the ids that do not count as queries: the given ones, else those that end a sentence in the configs.

    If the configs name none (BERT), all tokens count, and a warning says so once.
    """
    if exclude is not None:
        return check_exclude(exclude)
    ends = end_tokens(model)
    if not ends and model.main_input_name == "input_ids":
        logger.warning_once(
            f"the config of this {type(model).__name__} names no end-of-sentence token, so ends of sentences count in "
            "head statistics: pass exclude=[tokenizer.sep_token_id], or exclude=[] if that is right"
        )
    return ends
