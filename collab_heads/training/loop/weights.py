"""Load stored weights into a model: those of one folder, or the mean over several checkpoints."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from collab_heads.errors import OutputError
from collab_heads.files.checkpoint import check_undamaged
from collab_heads.training.storage.checkpoint import checkpoints, load_progress


def last_checkpoints(output_dir: Path, phase: int, count: int) -> list[Path]:
    """Return the newest `count` checkpoints of a phase, oldest first.

    Raises:
        OutputError: if there are fewer than `count`.
    """
    newest = [folder for folder in checkpoints(output_dir) if load_progress(folder)["phase"] == phase][-count:]
    if len(newest) < count:
        raise OutputError(
            f"--average_checkpoints {count}: {output_dir} holds {len(newest)} of this phase: lower "
            "--checkpointing_steps"
        )
    return newest


def weight_bytes(model: PreTrainedModel) -> int:
    """Return the approximate size of a stored model in bytes."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


@torch.no_grad()
def load_weights(model: PreTrainedModel, folders: Sequence[Path]) -> None:
    """Set a model's floating-point weights to the mean over stored models of the same shape, computed in float64.

    Raises:
        OutputError: if one of them is damaged.
    """
    for folder in folders:
        check_undamaged(folder)
    states = [type(model).from_pretrained(folder).state_dict() for folder in folders]
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(sum(state[name].double() for state in states) / len(states))
