"""Run a model over data so that what it computes can be explained by gradients."""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from collab_heads.analysis.relevance.conservative import conservative
from collab_heads.attention_adapter import AttentionAdapter
from collab_heads.bars import progress_bar
from collab_heads.errors import CalibrationError, CollabHeadsError
from collab_heads.model.backends import evaluating
from collab_heads.model.batches import each_batch
from collab_heads.model.modalities import check_modalities
from collab_heads.model.offloading import input_device


def explain_batches(
    model: PreTrainedModel,
    adapter: AttentionAdapter,
    batches: Iterable[Mapping],
    see: Callable[[Mapping, ModelOutput], None],
    what: str = "propagating relevance",
    cut: Callable[[Mapping], Iterable[Mapping]] = lambda batch: (batch,),
) -> None:
    """Run the model on every batch with a conservative graph; one batch, and its graph, is held at a time.

    Args:
        model: the model; it runs as in `explaining`, so hooks must say by `leaf` where graphs begin.
        adapter: its adapter.
        batches: input dicts as the model takes them; any iterable, read once.
        see: called with the inputs, on the model's device, and with what the model returned; it takes the gradients.
        what: the label of the progress bar.
        cut: batch -> the portions of it that are run one after the other.

    Raises:
        CalibrationError: if there are no batches, or the model cannot take one (its index is named).
    """
    total = operator.length_hint(batches) or None
    with explaining(model):
        for index, batch in enumerate(progress_bar(each_batch(batches), total=total, desc=what, leave=False)):
            inputs = {k: v.to(input_device(model)) if isinstance(v, Tensor) else v for k, v in batch.items()}
            for portion in cut(inputs):
                see(portion, run(model, adapter, portion, index))  # no name keeps the graph while the next one is built


def run(model: PreTrainedModel, adapter: AttentionAdapter, inputs: Mapping, index: int) -> ModelOutput:
    """A forward pass with a conservative graph."""
    with conservative(model, adapter):
        try:
            check_modalities(model, inputs)
            return model(**{**inputs, "return_dict": True})
        except CollabHeadsError:
            raise
        except Exception as error:  # whatever the model raises about its inputs, with the batch named
            raise CalibrationError(
                f"{type(model).__name__} cannot take batch {index} with {sorted(inputs)}: {error}"
            ) from error


@contextmanager
def explaining(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode with gradients, but none of parameters: only what a hook makes a leaf has one.

    Modes, and which parameters are trained, are restored; nothing accumulates in them. Checkpointing has no effect: it
    is for training mode.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        with evaluating(model), torch.enable_grad():
            yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def leaf(tensor: Tensor) -> Tensor:
    """The tensor itself if it is part of a graph, else the same values as the start of one."""
    return tensor if tensor.requires_grad else tensor.detach().requires_grad_()
