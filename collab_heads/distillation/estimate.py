"""Estimate the time and the memory of a distillation from the speed of a forward pass.

A step runs the original and the changed model, and goes back through the latter, which takes twice as long as forward.
"""

from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel

from collab_heads.base.estimates import Estimate
from collab_heads.running.portions import PORTION
from collab_heads.running.speed import measure_speed

BESIDE = 1.2  # what a step takes beside these passes: losses, the optimizer, evaluations on the part that is held out
COPIES = 4  # of what is trained: gradients, two moments, and the best weights
STATES = 20  # of the model's width that a layer keeps of a position for the way back, about


def estimate_distillation(
    original: PreTrainedModel,
    model: PreTrainedModel,
    batches: Sequence[Mapping],
    steps: int,
    trained: float,
    left: float = 1.0,
) -> Estimate | None:
    """Estimate what a distillation of all its steps will take; None where it cannot be known.

    Args:
        original: the original.
        model: the changed model; the original before it is changed.
        batches: input dicts as both take them.
        steps: the steps.
        trained: the bytes of what is trained.
        left: the share of the time of `model` that will be left when it is trained.
    """
    if model.device.type != "cpu":
        return None
    speed = measure_speed(original, batches)
    changed = speed if model is original else measure_speed(model, batches)
    if speed is None or changed is None:
        return None
    seconds = BESIDE * steps * (speed.seconds + 3 * left * changed.seconds) / speed.batches
    config = model.config.get_text_config()
    kept = 4 * STATES * config.hidden_size * config.num_hidden_layers * PORTION
    return Estimate(seconds, COPIES * trained + kept, torch.get_num_threads())
