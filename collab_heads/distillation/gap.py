"""Compare two models by the hidden states of every layer and by the output. Padding does not count."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.base.numerics import float64
from collab_heads.base.processes import copy_from_first
from collab_heads.contract.registry import is_lone_decoder
from collab_heads.distillation.checkpoint import HeldOutError
from collab_heads.distillation.examples import are_joined, inputs_of
from collab_heads.distillation.processes import Processes
from collab_heads.errors import NonFiniteError, UnsupportedModelError
from collab_heads.model.opened import input_device
from collab_heads.running.batches import Batch, Part, moved, naming_batch, num_rows, output_mask, token_masks
from collab_heads.running.outputs import Output, embeddings_of, is_number_per_token, read_output, without_far_rows
from collab_heads.running.portions import PORTION, portions

# name of the hidden states in an output -> side of the model whose padding they have
STATES = {"encoder_hidden_states": "encoder", "decoder_hidden_states": "decoder", "hidden_states": "decoder"}
STATES |= {"text_model_output.hidden_states": "text", "vision_model_output.hidden_states": "vision"}


def read_parts(model: PreTrainedModel, inputs: Mapping, outputs: Mapping, by_example: bool = False) -> list[Output]:
    """Return the hidden states of every layer, then the output. Embeddings are left out.

    Args:
        model: the model.
        inputs: the inputs of the call.
        outputs: the outputs of the call, with hidden states.
        by_example: return the mean of the hidden states over the tokens of an example, a row per example.
    """
    masks, parts = token_masks(model, inputs), []
    for name, side in STATES.items():
        for states in (nested(outputs, name) or ())[1:]:
            mask, rows = masks[side], states.float().flatten(0, 1)
            if by_example:
                parts.append(Output(mean_over_tokens(states, mask), False))
            else:
                parts.append(Output(rows if mask is None else rows[mask.flatten().to(rows.device)], False))
    if not parts:
        raise UnsupportedModelError(f"{type(model).__name__} returns no hidden states by which it could be distilled")
    logits = outputs.get("logits")
    if by_example and logits is not None and (logits.ndim > 2 or is_number_per_token(model, inputs, logits)):
        raise UnsupportedModelError(
            f"{type(model).__name__} puts out logits for every token, which cannot be compared across two "
            "vocabularies: trim the original with the same texts, too, and leave original_batches out"
        )
    return [*parts, whole_output(model, inputs, outputs)]


def nested(outputs: Mapping | None, name: str) -> tuple[Tensor, ...] | None:
    """Return an entry of a model's output or, as in "text_model_output.hidden_states", of a stack's; None if absent."""
    first, _, rest = name.partition(".")
    found = None if outputs is None else outputs.get(first)
    return nested(cast(Mapping | None, found), rest) if rest else found


def whole_output(model: PreTrainedModel, inputs: Mapping, outputs: Mapping) -> Output:
    """Return the output of a model; without a head, the mean of the last hidden state over tokens, a row per example.

    The last hidden state itself is compared like the other layers. Its systematic errors add up in the mean, and such
    models are mostly used for this mean.
    """
    states = outputs.get("last_hidden_state")
    if outputs.get("logits") is not None or embeddings_of(outputs) or states is None or states.ndim != 3:
        return read_output(model, inputs, outputs)
    return Output(mean_over_tokens(states, output_mask(model, inputs)), False)


def mean_over_tokens(states: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean of states [B, T, D] over the tokens that count, [B, T]: [B, D], in float32."""
    used = torch.ones(states.shape[:2], device=states.device) if mask is None else mask.to(states.device).float()
    sums = (states.float() * used[..., None]).sum(1)
    return sums / used.sum(1, keepdim=True).clamp(min=1)


class Spread:
    """The mean square of rows around their mean, accumulated over portions in float64."""

    def __init__(self):
        self.count, self.square, self.mean = 0.0, 0.0, torch.zeros(())
        self.raw = 0.0

    def add(self, part: Output) -> None:
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
        """Return the mean square per row around the mean; around 0 if all rows are equal, and 1 if all are zero."""
        return next((square / self.count for square in (self.square, self.raw) if square > 0), 1.0)


def row_counts(parts: list[Output]) -> Tensor:
    """Count the rows of every part: [parts], float64."""
    return torch.tensor([len(part.rows) for part in parts], dtype=torch.float64)


def num_tokens(model: PreTrainedModel, inputs: Batch) -> int:
    """Count the tokens of a batch without padding, on both sides of an encoder-decoder."""
    masks = token_masks(model, inputs)
    sides = masks.values() if model.config.is_encoder_decoder else [masks["decoder"]]
    return sum(every_token(inputs) if mask is None else int(mask.sum()) for mask in sides)


def every_token(inputs: Batch) -> int:
    """Count the positions of a batch without a mask; an image counts as one."""
    ids = inputs.get("input_ids")
    return ids.numel() if isinstance(ids, Tensor) else num_rows(inputs) or 1


@dataclass(frozen=True)
class Gap:
    """The gap between two models.

    Attributes:
        model: the changed model.
        original: the model that it should reproduce.
        processes: the processes that share the work.
        scales: [parts], float64, on the CPU: divisors of the squared error of a row, for every layer and the output.
        weights: [parts], likewise: the weight of each in the loss.
    """

    model: PreTrainedModel
    original: PreTrainedModel
    processes: Processes
    scales: Tensor
    weights: Tensor

    @classmethod
    def measured(
        cls,
        model: PreTrainedModel,
        original: PreTrainedModel,
        processes: Processes,
        held_out: Part,
        output_weight: float,
    ) -> "Gap":
        """Make the gap, with scales measured on the original.

        Every process runs all batches; all use the scales of the first process.
        """
        spreads: list[Spread] = []
        alone = cls(model, original, processes.alone(), torch.ones(()), torch.ones(()))
        is_distribution = False
        for index, batch in held_out:
            for _, parts in alone.references(index, batch):
                spreads = spreads or [Spread() for _ in parts]
                for spread, part in zip(spreads, parts, strict=True):
                    if not part.is_distribution:
                        spread.add(part)
                is_distribution = parts[-1].is_distribution
        scales = [spread.value() for spread in spreads[:-1]] + [1.0 if is_distribution else spreads[-1].value()]
        weights = [1 / (len(scales) - 1)] * (len(scales) - 1) + [output_weight]
        found = torch.tensor([scales, weights], dtype=torch.float64)
        copy_from_first(processes, [found])
        return cls(model, original, processes, *found)

    def references(self, index: int, batch: Batch) -> Iterator[tuple[Batch, list[Output]]]:
        """Yield this process's portions of a batch, each with the parts of the original."""
        for number, portion in enumerate(self.portions(batch)):
            if number % self.processes.num_processes == self.processes.process_index:
                with torch.no_grad():
                    *states, output = self.run(self.original, index, portion)
                    yield portion, [*map(without_far_rows, states), output]

    def portions(self, batch: Batch) -> Iterator[Batch]:
        """Yield the portions of a batch, without unneeded padding: small ones on a CPU, else about one per process.

        A batch that stays whole keeps its padding.
        """
        size, count = PORTION, self.processes.num_processes
        if self.model.device.type != "cpu":
            rows = num_rows(batch)
            if count == 1 or rows is None:
                yield batch
                return
            positions = max(value.numel() for value in batch.values() if isinstance(value, Tensor))
            size = -(-positions // count)
        yield from map(dict, portions(batch, self.model.config.is_encoder_decoder, size))

    def run(self, model: PreTrainedModel, index: int, portion: Batch) -> list[Output]:
        """Run a model on a portion and return its parts; an error of the model names the batch."""
        inputs = moved(inputs_of(portion, original=model is self.original), input_device(model))
        caches = model.config.is_encoder_decoder or is_lone_decoder(model.config)
        more = {"use_cache": False} if caches else {}
        with naming_batch(model, index, inputs):
            with self.processes.autocast(input_device(model)):
                outputs = model(**{**inputs, **more, "output_hidden_states": True, "return_dict": True})
            return read_parts(model, inputs, outputs, by_example=are_joined(portion))

    def squares(self, index: int, portion: Batch, references: list[Output]) -> Tensor:
        """Return the squared errors of the changed model, summed over rows, differentiable: [parts]."""
        parts = self.run(self.model, index, portion)
        return torch.stack(
            [
                reference.squared_gap(part).to(self.model.device)
                for reference, part in zip(references, parts, strict=True)
            ]
        )

    def backward(self, index: int, batch: Batch) -> tuple[float, int]:
        """Add the gradient of this process's share of the loss on a batch to the gradients of the parameters.

        Returns:
            The loss and the tokens of the batch, over all processes.
        """
        found = list(self.references(index, batch))
        counts = sum((row_counts(parts) for _, parts in found), torch.zeros(len(self.scales), dtype=torch.float64))
        counts = self.processes.sum(counts).clamp(min=1)
        factors = (self.weights / self.scales / counts).float().to(self.model.device)
        total, tokens = torch.zeros((), device=factors.device), 0
        for portion, parts in found:
            loss = (self.squares(index, portion, parts) * factors).sum()
            loss.backward()
            total += loss.detach()
            tokens += num_tokens(self.model, portion)
        mine = torch.tensor([float(total), tokens], dtype=torch.float64)
        loss_of_all, tokens_of_all = self.processes.sum(mine).tolist()
        check_finite(loss_of_all, index, "training")
        return loss_of_all, int(tokens_of_all)

    @torch.no_grad()
    def error(self, held_out: Part) -> HeldOutError:
        """Return the error on some batches, which the processes divide among them."""
        squares, counts = torch.zeros_like(self.scales), torch.zeros_like(self.scales)
        whole = replace(self, processes=self.processes.alone())
        for index, batch in held_out[self.processes.process_index :: self.processes.num_processes]:
            for portion, parts in whole.references(index, batch):
                found = whole.squares(index, portion, parts).cpu().double()
                check_finite(float(found.sum()), index, "held-out")
                squares += found
                counts += row_counts(parts)
        squares, counts = self.processes.sum(squares), self.processes.sum(counts)
        # a divergence of distributions that hardly differ is rounded to less than 0
        errors = (squares / counts.clamp(min=1) / self.scales).clamp(min=0)
        return HeldOutError(float(errors[:-1].mean()), float(errors[-1]))


def check_finite(loss: float, index: int, part: str) -> None:
    """Raise NonFiniteError unless a loss is finite."""
    if not loss - loss == 0:
        raise NonFiniteError(
            f"the gap to the original is {loss} on {part} batch {index}: one of the models puts out NaN or inf there, "
            "or the learning rate is too high"
        )
