"""What is compared of two models: the hidden states of every layer, and the output. Padding does not count."""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.errors import UnsupportedModelError
from collab_heads.model.examples import Batch, num_rows
from collab_heads.model.masks import output_mask, token_masks
from collab_heads.model.outputs import Output, embeddings_of, read_output
from collab_heads.numerics import float64

# the hidden states of a model -> whose padding they have
STATES = {"encoder_hidden_states": "encoder", "decoder_hidden_states": "decoder", "hidden_states": "decoder"}
STATES |= {"text_model_output.hidden_states": "text", "vision_model_output.hidden_states": "vision"}


def read_parts(model: PreTrainedModel, inputs: Mapping, outputs: Mapping) -> list[Output]:
    """The hidden states of every layer, after that the output; embeddings are left out, nothing changes them.

    Raises:
        UnsupportedModelError: if a model returns no hidden states, or no output that can be compared.
    """
    masks, parts = token_masks(model, inputs), []
    for name, side in STATES.items():
        for states in (nested(outputs, name) or ())[1:]:
            mask, rows = masks[side], states.float().flatten(0, 1)
            parts.append(Output(rows if mask is None else rows[mask.flatten().to(rows.device)], False))
    if not parts:
        raise UnsupportedModelError(f"{type(model).__name__} returns no hidden states by which it could be distilled")
    return [*parts, whole_output(model, inputs, outputs)]


def nested(outputs: Mapping | None, name: str) -> tuple[Tensor, ...] | None:
    """An entry of what a model returns, or of what one of its stacks does: "text_model_output.hidden_states"."""
    first, _, rest = name.partition(".")
    found = None if outputs is None else outputs.get(first)
    return nested(cast(Mapping | None, found), rest) if rest else found


def whole_output(model: PreTrainedModel, inputs: Mapping, outputs: Mapping) -> Output:
    """The output of a model; of one without a head the mean of the last hidden state over tokens, a row per example.

    The last hidden state itself is a layer like the others. What is systematic about its errors adds up in a mean,
    and a mean is what such models mostly serve for.
    """
    states = outputs.get("last_hidden_state")
    if outputs.get("logits") is not None or embeddings_of(outputs) or states is None or states.ndim != 3:
        return read_output(model, inputs, outputs)
    mask = output_mask(model, inputs)
    used = torch.ones(states.shape[:2], device=states.device) if mask is None else mask.to(states.device).float()
    sums = (states.float() * used[..., None]).sum(1)
    return Output(sums / used.sum(1, keepdim=True).clamp(min=1), False)


class Spread:
    """The mean square of rows around their mean, summed up over portions in float64."""

    def __init__(self):
        self.count, self.square, self.mean = 0.0, 0.0, torch.zeros(())
        self.raw = 0.0

    def add(self, part: Output) -> None:
        """Take some rows in."""
        rows, count = float64(part.rows), len(part.rows)
        if not count:
            return
        mean, total = rows.mean(0).cpu(), self.count + count
        away = float((mean - self.mean).square().sum()) * self.count * count / total
        self.square += float((rows - rows.mean(0)).square().sum()) + away
        self.raw += float(rows.square().sum())
        self.mean = self.mean + (mean - self.mean) * (count / total)
        self.count = total

    def value(self) -> float:
        """The mean square per row; around 0 where all rows are one, 1 where they are 0."""
        return next((square / self.count for square in (self.square, self.raw) if square > 0), 1.0)


def row_counts(parts: list[Output]) -> Tensor:
    """How many rows count: [parts], float64."""
    return torch.tensor([len(part.rows) for part in parts], dtype=torch.float64)


def num_tokens(model: PreTrainedModel, inputs: Batch) -> int:
    """How many tokens of a batch count, on both sides of an encoder-decoder."""
    masks = token_masks(model, inputs)
    sides = masks.values() if model.config.is_encoder_decoder else [masks["decoder"]]
    return sum(every_token(inputs) if mask is None else int(mask.sum()) for mask in sides)


def every_token(inputs: Batch) -> int:
    """Positions of a batch without a mask; an image counts as one."""
    ids = inputs.get("input_ids")
    return ids.numel() if isinstance(ids, Tensor) else num_rows(inputs) or 1
