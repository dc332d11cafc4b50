"""Store the state of an optimizer in a safetensors file, by parameter name.

Tensors are stored under `PARAMETER/KEY`. Everything else (step counts of some optimizers, the settings of the parameter
groups) is JSON in the file's metadata.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from collab_heads.errors import OutputError
from collab_heads.files.atomic import write_file

OPTIMIZER = "optimizer.safetensors"


def write_optimizer(path: Path, state: Mapping[str, Any]) -> None:
    """Write the state of an optimizer.

    Args:
        path: the file.
        state: `state`, name of a parameter -> key -> value, and `param_groups`, as
            `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` returns a full state.

    Raises:
        OutputError: if it cannot be written; an existing file is kept.
    """
    values = {f"{name}/{key}": value for name, of_name in state["state"].items() for key, value in of_name.items()}
    tensors = {name: value.detach().cpu().contiguous() for name, value in values.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in values.items() if name not in tensors}
    record = {"state": json.dumps(others), "param_groups": json.dumps(state["param_groups"])}
    write_file(path, save({name: tensor.clone() for name, tensor in tensors.items()}, metadata=record))


def read_optimizer(path: Path) -> dict[str, Any]:
    """Read the state that `write_optimizer` wrote; pairs (AdamW's betas) are returned as tuples.

    Raises:
        OutputError: if the file is damaged or not such a state; the message names it.
    """
    try:
        with safe_open(path, framework="pt") as file:
            record = file.metadata()
            values = {name: file.get_tensor(name) for name in file.keys()} | json.loads(record["state"])
        groups = [
            {name: tuple(value) if name == "betas" else value for name, value in group.items()}
            for group in json.loads(record["param_groups"])
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise OutputError(f"{path} is no state of an optimizer, or is damaged: {error}") from error
    state: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        parameter, _, key = name.rpartition("/")
        state.setdefault(parameter, {})[key] = value
    return {"state": state, "param_groups": groups}
