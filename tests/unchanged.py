"""A refused call says what is wrong and leaves the model as it was: the one check that all refusals share."""

import dataclasses
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file, save_file

from collab_heads import CollabHeadsError
from collab_heads.saving.ties import read_metadata


def snapshot(model) -> dict:
    """Everything about a model that a refused call might have changed."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "classes": {name: type(module) for name, module in model.named_modules()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "hooks": {
            name: (list(module._forward_hooks), list(module._forward_pre_hooks))
            for name, module in model.named_modules()
        },
        "attributes": {name: attributes(module) for name, module in model.named_modules()},
        "tensors": {name: (id(t), t.dtype, t.device, t.requires_grad, t.grad is None) for name, t in tensors.items()},
        "state": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "config": model.config.to_dict() if hasattr(model, "config") else None,
    }


def attributes(module) -> dict:
    """What a module has beside tensors and modules: values where they compare by themselves, else of which type."""
    plain = bool | int | float | str | type(None)
    return {
        name: value if isinstance(value, plain) or dataclasses.is_dataclass(value) else type(value)
        for name, value in vars(module).items()
        if not name.startswith("_")
    } | {"private": sorted(name for name in vars(module) if name.startswith("_"))}


def assert_unchanged(model, before: dict) -> None:
    after, before = snapshot(model), dict(before)
    states = [after.pop("state"), before.pop("state")]
    assert after == before
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        if not tensor.is_meta:
            torch.testing.assert_close(tensor, states[1][name], rtol=0, atol=0, equal_nan=True, msg=name)


@contextmanager
def refused(model, error: type[CollabHeadsError], *fragments: str):
    """The block must raise `error` with every fragment in its message, and leave `model` unchanged."""
    before, grad_mode = snapshot(model), torch.is_grad_enabled()
    with pytest.raises(error) as caught:
        yield caught
    assert issubclass(error, CollabHeadsError)
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert torch.is_grad_enabled() == grad_mode
    assert_unchanged(model, before)


def without(folder, part):
    """Delete the first tensor whose name ends with `part` from a checkpoint."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    deleted = next(key for key in tensors if key.endswith(part))
    del tensors[deleted]
    save_file(tensors, file, metadata=read_metadata(file))
    return deleted


def load_without(model, folder, part, warnings_logged):
    """The start value of a tensor that a checkpoint lacks; everything else is as saved, and a warning names it."""
    deleted = without(folder, part)
    torch.manual_seed(0)
    loaded = type(model).from_pretrained(folder).eval()
    state, expected = loaded.state_dict(), model.state_dict()
    assert state.keys() == expected.keys()
    (lost,) = [key for key in expected if not torch.equal(state[key], expected[key])]
    assert lost == deleted or (lost.endswith(part) and deleted not in expected)  # ViT's files have names of their own
    assert lost in warnings_logged.text and "missing" in warnings_logged.text.lower()
    return state[lost]
