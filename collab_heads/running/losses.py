"""The loss that a model computes for a batch, precise enough to compare losses that differ by little."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from collab_heads.errors import CalibrationError
from collab_heads.model.opened import input_device
from collab_heads.running.batches import moved, naming_batch

HALF = (torch.float16, torch.bfloat16)


class LossesInFloat32(TorchFunctionMode):
    """Compute losses in float32 from what a model in half precision returns: their own digits are too few to compare.

    In bfloat16 a loss of 1.5 has no neighbour within 0.007, which is more than most heads matter.
    """

    FUNCTIONS = (
        *(functional.cross_entropy, functional.nll_loss, functional.ctc_loss, functional.mse_loss, functional.l1_loss),
        *(functional.smooth_l1_loss, functional.binary_cross_entropy_with_logits),
    )

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Mapping | None = None) -> Any:
        if function in self.FUNCTIONS:
            args = tuple(each.float() if is_half(each) else each for each in args)
            kwargs = {name: each.float() if is_half(each) else each for name, each in (kwargs or {}).items()}
        return function(*args, **(kwargs or {}))


def is_half(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype in HALF


def loss_of(model: PreTrainedModel, batch: Mapping, index: int) -> Tensor:
    """Return the model's loss on a batch, in float32 where the model is in half precision.

    Raises:
        CalibrationError: if the model cannot take the batch or gives no loss; the index of the batch, from 0, is named.
    """
    inputs = moved(batch, input_device(model))
    with naming_batch(model, index, inputs), LossesInFloat32() if model.dtype in HALF else nullcontext():
        loss = getattr(model(**inputs), "loss", None)
    if loss is None:
        raise CalibrationError(
            f"{type(model).__name__} gives no loss for batch {index}: it needs labels, the model a head"
        )
    return loss


def not_finite(loss: Tensor | float, index: int) -> str:
    """Return the message for a batch whose loss is NaN or inf."""
    return f"the loss of batch {index} is {float(loss)}: does it have a label that counts (not -100)?"
