"""Store gates and alphas beside PEFT's adapters: PEFT stores its adapters alone."""

import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from collab_heads.base.arguments import checking_arguments
from collab_heads.base.wrappers import check_passed, has_adapters, model_inside
from collab_heads.errors import ArgumentError, DataError
from collab_heads.files.atomic import write_file, writing
from collab_heads.layers.alphas import HeadAlphas
from collab_heads.layers.gates import HeadGates

FILE = "collab_heads.safetensors"


def beside_adapters(model: nn.Module) -> dict[str, Tensor]:
    """Return the gates and alphas of a model with PEFT's adapters, else {}: name in the base model -> tensor."""
    inside = model_inside(model)
    return head_tensors(inside.base_model) if has_adapters(inside) else {}


def head_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all gates and alphas of a model: name -> tensor."""
    heads = {path: module for path, module in model.named_modules() if isinstance(module, HeadGates | HeadAlphas)}
    return {f"{path}.{name}": tensor for path, each in heads.items() for name, tensor in each.state_dict().items()}


@checking_arguments
def save_heads(model: nn.Module, folder: str | Path) -> None:
    """Write the gates and alphas of a model into a file beside its PEFT adapters.

    For a model that is stored whole nothing is written; the file of an earlier call, which was of another model, is
    then deleted.

        wrapped.save_pretrained(folder)
        save_heads(wrapped, folder)

    A Trainer with a `HeadTraining` does this by itself. `load_heads` reads the file.

    Args:
        model: with adapters and with gates or alphas.
        folder: where `save_pretrained` writes the adapters.

    Raises:
        UnsupportedModelError: if `model` contains no transformers model, or takes other inputs than that one.
        OutputError: if the file cannot be written or deleted.
    """
    check_passed(model)
    if tensors := beside_adapters(model):
        write_file(Path(folder) / FILE, save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}))
    else:
        with writing(file := Path(folder) / FILE):
            file.unlink(missing_ok=True)


@checking_arguments
def load_heads(model: nn.Module, folder: str | Path) -> None:
    """Load the gates and alphas that are stored beside PEFT's adapters into a model, in place.

        swap_to_gated(model)
        wrapped = PeftModel.from_pretrained(model, folder)
        load_heads(wrapped, folder)

    A `HeadTraining` does this by itself when a training is resumed, or ends with the best model.

    Args:
        model: with gates and alphas at the same sites, of the same heads; with adapters or without.
        folder: of a checkpoint, or what `Trainer.save_model` wrote.

    Raises:
        ArgumentError: if there is no such file, or it is of other sites or heads; the model is then unchanged.
        DataError: if the file is damaged.
        UnsupportedModelError: if `model` contains no transformers model, or takes other inputs than that one.
    """
    check_passed(model)
    file, tensors = Path(folder) / FILE, head_tensors(model_inside(model).base_model)
    if not os.path.isfile(file):  # a name that is too long is none, too
        raise ArgumentError(f"there are no gates and alphas beside the adapters in {folder}: it has no {FILE}")
    try:
        stored = load_file(file)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{file} is damaged, or cannot be read: {error}") from error
    ours, theirs = ({name: tuple(each.shape) for name, each in found.items()} for found in (tensors, stored))
    if differing := sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)):
        name = differing[0]
        raise ArgumentError(
            f"{file} is of other gates and alphas: {name} is {theirs.get(name, 'not there')}, in the model "
            f"{ours.get(name, 'not there')}: change the model as it was changed before that training"
        )
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(stored[name])
