"""Parameters that a change took out of a model, and optimizers that still hold them.

An optimizer holds parameters, not a model. One that was made before attention was changed, as that of a Trainer which
trains a second time, goes on with weights that are no longer there, and leaves those in their place as they are,
without a word. Where old parameters outlive a change, somebody holds them: from then on every torch optimizer is
checked before it steps. That is an error and no warning: no weight has moved yet, and what follows would train a model
whose attention stays as it is.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel

from collab_heads.errors import ArgumentError

REMOVED = WeakTensorKeyDictionary()  # parameter that is alive -> the model that it was in
MADE = WeakTensorKeyDictionary()  # parameters that took the place of others
CHECKED: list[Any] = []  # the hook, once there is something to check


@contextmanager
def noting_replaced(model: PreTrainedModel) -> Iterator[None]:
    """Note which parameters leave a model while the context is open, and outlive that, and which ones come."""
    before = {id(parameter): weakref.ref(parameter) for parameter in model.parameters()}
    try:
        yield
    finally:
        now = {id(parameter): parameter for parameter in model.parameters()}
        removed = [was() for key, was in before.items() if was() is not now.get(key)]
        outliving = [parameter for parameter in removed if parameter is not None]
        for key, parameter in now.items():
            if key not in before or before[key]() is not parameter:
                MADE[parameter] = True
                REMOVED.pop(parameter, None)
        for parameter in outliving:
            REMOVED[parameter] = weakref.ref(model)
        if outliving and not CHECKED:
            CHECKED.append(register_optimizer_step_pre_hook(check_optimizer))


def check_optimizer(optimizer: torch.optim.Optimizer, args: Any = (), kwargs: Any = None) -> None:
    """Raise ArgumentError if an optimizer holds removed parameters, and not trainable ones in their place."""
    if not REMOVED:
        return
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    removed = [parameter for parameter in held if parameter in REMOVED]
    models = {id(model): model for model in (REMOVED[parameter]() for parameter in removed) if model is not None}
    ids = {id(parameter) for parameter in held}
    for model in models.values():
        named = model.named_parameters()
        missing = [name for name, p in named if p.requires_grad and p in MADE and id(p) not in ids]
        if missing:
            raise ArgumentError(
                f"this {type(optimizer).__name__} was made before attention of the {type(model).__name__} was changed: "
                f"it holds {len(removed)} parameters that are no longer in the model, and not {missing[0]} and "
                f"{len(missing) - 1} others that are trainable in their place. Make a new optimizer, and its schedule, "
                "after the change (with a Trainer: make a new Trainer)"
            )
