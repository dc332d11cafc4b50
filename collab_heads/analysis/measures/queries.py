"""Which tokens count as queries: those that attend, padding and ends of sentences left out."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.errors import ArgumentError
from collab_heads.model.masks import decoder_ids, token_masks
from collab_heads.registry import is_lone_decoder

LARGEST = 2**63 - 1  # that a tensor of ids holds


def end_tokens(model: PreTrainedModel) -> tuple[int, ...]:
    """The ids that end a sentence, as the config and the generation config name them; BERT's configs name none."""
    ids: set[int] = set()
    for config in (model.config, model.config.get_text_config(), getattr(model, "generation_config", None)):
        for name in ("eos_token_id", "sep_token_id"):
            value = getattr(config, name, None)
            ids.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return tuple(sorted(ids))


def check_exclude(exclude: Iterable[int]) -> tuple[int, ...]:
    """The token ids that do not count, ascending, or an ArgumentError if they are no ids."""
    ids = list(exclude) if isinstance(exclude, Iterable) and not isinstance(exclude, str) else [exclude]
    if any(isinstance(each, bool) or not isinstance(each, int) or abs(each) > LARGEST for each in ids):
        raise ArgumentError(f"exclude={exclude!r:.200}: expected token ids, such as [tokenizer.sep_token_id]")
    return tuple(sorted(set(ids)))


def query_masks(model: PreTrainedModel, inputs: Mapping, exclude: tuple[int, ...]) -> dict[str, Tensor | None]:
    """Which query tokens count, on the encoder side and on the decoder side.

    The decoder's queries are the tokens that it reads: decoder_input_ids, or the labels shifted right. Its first token
    counts whatever it is, and with labels a position counts where there is a label to predict: these are its steps.

    Args:
        model: the model.
        inputs: a batch as the model takes it.
        exclude: ids of tokens that do not count.

    Returns:
        "encoder" and "decoder" -> [B, T] bool, or None where all count. A lone decoder has its own under "decoder",
        stacks of a model with several under their names.
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
    """Take tokens out of a mask [B, T]; `starts` leaves the first token of every row, which may lie after padding."""
    if ids is None:
        return mask
    if mask is None:
        mask = torch.ones_like(ids, dtype=torch.bool)
    counts = ~torch.isin(ids, torch.tensor(exclude, dtype=ids.dtype, device=ids.device))
    if starts:
        counts.scatter_(1, mask.int().argmax(1, keepdim=True), True)
    return mask & counts
