"""Training on FSDP2 through Accelerate: every process holds a part of each weight.

Gates and alphas are not sharded (`heads/whole.py`). For evaluations and checkpoints the full weights are gathered, so
the model in a checkpoint is stored as without FSDP, and the run can be resumed with the same number of processes.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from transformers import PreTrainedModel

from collab_heads.errors import ArgumentError, OutputError
from collab_heads.files.atomic import write_file
from collab_heads.heads.adamw import HeadAdamW
from collab_heads.heads.whole import check_version, is_sharded

OPTIMIZER = "optimizer.safetensors"


def check_sharding(accelerator: Accelerator, refused: Mapping[str, object]) -> None:
    """Check that the options of a run work with sharded weights.

    Args:
        accelerator: of the run.
        refused: flag of an option that needs full weights during training -> whether it is given.
    """
    check_version(accelerator)
    given = [flag for flag, is_given in refused.items() if is_given]
    if is_sharded(accelerator) and given:
        raise ArgumentError(f"{', '.join(given)} cannot be with FSDP, which divides the weights of a head: use DDP")


def whole_copy(model: PreTrainedModel, kind: type[PreTrainedModel]) -> PreTrainedModel:
    """Return a copy of a sharded model with full weights, on every process; all processes must call it.

    Args:
        model: sharded.
        kind: its class before it was sharded.
    """
    state: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    with torch.device("meta"):
        copy = kind(model.config)  # the config records the changes, so the modules are the changed ones
    copy.load_state_dict({name: tensor.detach().clone() for name, tensor in state.items()}, strict=False, assign=True)
    for name, buffer in model.named_buffers():
        owner, _, last = name.rpartition(".")
        copy.get_submodule(owner)._buffers[last] = buffer
    copy.tie_weights()
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, parameter in copy.named_parameters():
        parameter.requires_grad_(trained[name])
    return copy.train(model.training)


def become(model: PreTrainedModel, whole: PreTrainedModel) -> None:
    """Turn a sharded model into the full one, in place: whoever refers to it has a plain model again."""
    model.__class__ = type(whole)
    model.__dict__ = whole.__dict__


@contextmanager
def without_divided(accelerator: Accelerator) -> Iterator[None]:
    """Hide a sharded model and optimizer from Accelerate, which would store their parts as pickles."""
    if not is_sharded(accelerator):
        yield
        return
    models, optimizers = accelerator._models, accelerator._optimizers
    accelerator._models, accelerator._optimizers = [], []
    try:
        yield
    finally:
        accelerator._models, accelerator._optimizers = models, optimizers


def save_optimizer(accelerator: Accelerator, folder: Path) -> None:
    """Write the full state of a sharded optimizer, if there is one. All processes must call it."""
    if is_sharded(accelerator):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = prepared(accelerator)
        optimizer.complete_state()
        state = get_optimizer_state_dict(model, optimizer, options=options)
        if accelerator.is_main_process:
            write_optimizer(folder / OPTIMIZER, state)


def load_optimizer(accelerator: Accelerator, folder: Path) -> None:
    """Load a stored state into a sharded optimizer, if there is one. All processes must call it."""
    if is_sharded(accelerator):
        state = read_optimizer(folder / OPTIMIZER)
        model, optimizer = prepared(accelerator)
        set_optimizer_state_dict(
            model, optimizer, optim_state_dict=state, options=StateDictOptions(full_state_dict=True)
        )


def prepared(accelerator: Accelerator) -> tuple[Any, HeadAdamW]:
    """Return the model and the optimizer that Accelerate prepared last."""
    return accelerator._models[-1], accelerator._optimizers[-1].optimizer


def write_optimizer(path: Path, state: Mapping[str, Any]) -> None:
    """Write the state of an optimizer into a safetensors file.

    Tensors are stored under `PARAMETER/KEY`. Everything else (step counts of some optimizers, the settings of the
    parameter groups) is JSON in the file's metadata.

    Args:
        path: the file.
        state: `state`, name of a parameter -> key -> value, and `param_groups`, as
            `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` returns a full state.
    """
    values = {f"{name}/{key}": value for name, of_name in state["state"].items() for key, value in of_name.items()}
    tensors = {name: value.detach().cpu().contiguous() for name, value in values.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in values.items() if name not in tensors}
    record = {"state": json.dumps(others), "param_groups": json.dumps(state["param_groups"])}
    write_file(path, save({name: tensor.clone() for name, tensor in tensors.items()}, metadata=record))


def read_optimizer(path: Path) -> dict[str, Any]:
    """Read the state that `write_optimizer` wrote; pairs (AdamW's betas) are returned as tuples."""
    try:
        with safe_open(path, framework="pt") as file:
            record = file.metadata()
            values = {name: file.get_tensor(name) for name in file.keys()} | json.loads(record["state"])
        groups = [
            {name: tuple(value) if name == "betas" else value for name, value in group.items()}
            for group in json.loads(record["param_groups"])
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise OutputError(f"{path} is not a state of an optimizer, or is damaged: {error}") from error
    state: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        parameter, _, key = name.rpartition("/")
        state.setdefault(parameter, {})[key] = value
    return {"state": state, "param_groups": groups}
