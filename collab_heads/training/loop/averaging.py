"""Put stored weights back into a model: the best ones, or the mean of several checkpoints."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from collab_heads.errors import OutputError
from collab_heads.training.storage.checkpoint import check_whole, checkpoints, load_progress


def last_checkpoints(output_dir: Path, phase: int, count: int) -> list[Path]:
    """The newest checkpoints of a phase, oldest first.

    Raises:
        OutputError: if there are fewer than `count`.
    """
    found = [folder for folder in checkpoints(output_dir) if load_progress(folder)["phase"] == phase][-count:]
    if len(found) < count:
        raise OutputError(
            f"--average_checkpoints {count}: {output_dir} holds {len(found)} of this phase: lower --checkpointing_steps"
        )
    return found


@torch.no_grad()
def load_weights(model: PreTrainedModel, folders: Sequence[Path]) -> None:
    """Set a model's floating-point weights to the mean over stored models of the same shape, in float64.

    Raises:
        OutputError: if one of them is damaged.
    """
    for folder in folders:
        check_whole(folder)
    states = [type(model).from_pretrained(folder).state_dict() for folder in folders]
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(sum(state[name].double() for state in states) / len(states))
