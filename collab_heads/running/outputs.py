"""Compare the outputs of a changed model and its original, without labels and in one way for all kinds of model.

A model with a head outputs distributions (over classes, over the vocabulary at every token, or over the tokens where an
answer begins and ends) or numbers; a model that embeds texts or images outputs these embeddings; any other model the
states of its last layer. Padding does not count.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.errors import UnsupportedModelError
from collab_heads.running.batches import output_mask

KEEP = "logits_to_keep"  # the input with the positions at which a language model puts out logits
FAR = 10.0  # times the median norm: a token whose norm is beyond it is outlying
AT_ONCE = 2**20  # elements of distributions that are compared at a time: each has several copies meanwhile
EMBEDDINGS = ("text_embeds", "image_embeds")
ENDS = ("start_logits", "end_logits")  # of an answer in a text


@dataclass(frozen=True)
class Output:
    """The output of a model for one batch.

    Attributes:
        rows: [N, C], one per token or example that counts: log-probabilities, numbers or states.
        is_distribution: whether they are log-probabilities.
        are_states: whether they are hidden states, of a model without a head.
        factors: [N, 1], what the rows were multiplied by, and those of other models are to be; None for 1.
    """

    rows: Tensor
    is_distribution: bool
    are_states: bool = False
    factors: Tensor | None = None

    def square(self) -> float:
        """Return the unit of errors: the number of distributions, or the sum of squares around the mean row."""
        if self.is_distribution:
            return float(len(self.rows))
        return float((self.rows - self.rows.mean(0)).square().sum())

    def squared_gap(self, changed: "Output") -> Tensor:
        """Return the squared distance of a changed model's output from this one, summed over rows, differentiable: [].

        For distributions p and q it is 2 KL(p, q), which for small changes is the squared change of the log-odds,
        weighted by p; for numbers and states it is the squared distance.
        """
        rows = self.rows.to(changed.rows.device)
        if self.is_distribution:
            size = max(AT_ONCE // rows.shape[1], 1)
            pairs = zip(rows.split(size), changed.rows.split(size), strict=True)
            return 2 * sum((divergence(*pair) for pair in pairs), rows.new_zeros(()))
        others = changed.rows if self.factors is None else changed.rows * self.factors.to(changed.rows)
        return (rows - others).square().sum()


def divergence(rows: Tensor, changed: Tensor) -> Tensor:
    """Return the divergence of Kullback and Leibler, summed over rows of log-probabilities, differentiable: [].

    Args:
        rows: [N, C].
        changed: [N, C].
    """
    share = rows.exp()  # 0 where the logarithm is -inf: a class with probability 0 adds nothing
    return (share * (rows - changed).where(share > 0, 0.0)).sum()


def square_of(outputs: Sequence[Output]) -> float:
    """Return the unit of errors of an output that came in parts; distributions may be over fewer tokens in some."""
    if outputs[0].is_distribution:
        return sum(output.square() for output in outputs)
    return replace(outputs[0], rows=torch.cat([output.rows for output in outputs])).square()


def without_far_rows(states: Output) -> Output:
    """Return states where those of outlying norm are scaled to the median norm; the same object if there are none.

    In many decoders the first token has states of a hundred times the norm of others ("massive activations", Sun et
    al., 2024). Without this, errors of states would be those of this token alone.
    """
    norms = states.rows.norm(dim=1, keepdim=True)
    usual = norms.median()
    is_far = (norms > FAR * usual) & (usual > 0)
    if not bool(is_far.any()):
        return states
    factors = torch.where(is_far, usual / norms, 1.0)
    return replace(states, rows=states.rows * factors, factors=factors)


def read_output(model: PreTrainedModel, inputs: Mapping, outputs: Mapping) -> Output:
    """Read the output of a model, in float32.

    Args:
        model: the model, in a distributed wrapper or not: its config is used.
        inputs: the inputs of the call.
        outputs: the outputs of the call.

    Raises:
        UnsupportedModelError: if there are neither logits nor embeddings nor a last hidden state.
    """
    logits, states = outputs.get("logits"), outputs.get("last_hidden_state")
    if logits is None and (embeddings := embeddings_of(outputs)):  # not similarities, which depend on the batch
        return Output(torch.cat([each.float() for each in embeddings]), False)
    if ends := [outputs[name].float() for name in ENDS if outputs.get(name) is not None]:
        mask = output_mask(model, inputs)
        shown = [each if mask is None else each.masked_fill(~mask.to(each.device), -math.inf) for each in ends]
        return Output(torch.cat(shown).log_softmax(-1), True)
    if logits is None and states is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} returns {', '.join(outputs)}: neither logits nor embeddings nor "
            "last_hidden_state, by which its output could be compared. Pass the model without its head "
            f"(model.{model.base_model_prefix}): it changes in place"
        )
    values = cast(Tensor, states if logits is None else logits).float()
    if is_number_per_token(model, inputs, values):
        values = values[..., None]
    if values.ndim == 3:  # of tokens
        mask, kept = output_mask(model, inputs), inputs.get(KEEP)
        mask = mask[:, kept.to(mask.device)] if mask is not None and isinstance(kept, Tensor) else mask
        values = values.flatten(0, 1) if mask is None else values[mask.to(values.device)]
    is_distribution = logits is not None and values.shape[-1] > 1 and not are_numbers(model)
    return Output(values.log_softmax(-1) if is_distribution else values, is_distribution, are_states=logits is None)


def is_number_per_token(model: PreTrainedModel, inputs: Mapping, values: Tensor) -> bool:
    """Return True if values of two axes are [B, T], one number per token (ELECTRA's discriminator), not [B, C]."""
    ids = inputs.get("input_ids")
    return ids is not None and values.shape == ids.shape and values.shape[1] != model.config.num_labels


def fewer_logits(model: PreTrainedModel, inputs: Mapping, most: int) -> Mapping:
    """Return the inputs of a language model so that it puts out about as many logits as asked for, at even positions.

    The output layer of a small model with a large vocabulary takes a fifth of its time, and logits most of the memory.
    Inputs of other models are returned as they are.
    """
    ids, layer = inputs.get("input_ids"), model.get_output_embeddings()
    weight = getattr(layer, "weight", None)
    if weight is None or ids is None or ids.ndim != 2 or KEEP not in inspect.signature(model.forward).parameters:
        return inputs
    stride = math.ceil(ids.numel() * len(weight) / most)
    if stride <= 1:
        return inputs
    return {**inputs, KEEP: torch.arange((ids.shape[1] - 1) % stride, ids.shape[1], stride, device=ids.device)}


def embeddings_of(outputs: Mapping) -> list[Tensor]:
    """Return the embeddings of texts and images, one row each: [B, C] each; empty for other models."""
    return [outputs[name] for name in EMBEDDINGS if isinstance(outputs.get(name), Tensor) and outputs[name].ndim == 2]


def are_numbers(model: PreTrainedModel) -> bool:
    """Return True if the logits are not distribution over classes: in regression and multi-label classification."""
    return getattr(model.config, "problem_type", None) in ("regression", "multi_label_classification")
