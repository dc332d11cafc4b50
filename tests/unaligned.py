"""`--unaligned`: every model that a test loads computes with other roundings than before it was saved.

Loaded weights lie in the memory of their file, at any address. Some processors sum products of such weights in another
order, and others do not, so a test that compares two computations bit for bit may pass on one and fail on another. With
this option it fails everywhere: `from_pretrained` puts all tensors 16 bytes behind a boundary of 64, and a linear layer
whose weight lies there adds the two halves of its products. `model_runs.aligned` undoes the first, as it does without
the option. `make test-portable` runs with it.
"""

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

BOUNDARY, OFFSET = 64, 16  # bytes: where torch puts its own tensors, and how far behind that loaded ones lie


def pytest_addoption(parser):
    parser.addoption("--unaligned", action="store_true", help="loaded models compute with other roundings")


@pytest.fixture(autouse=True, scope="session")
def _unaligned(request):
    if not request.config.getoption("unaligned"):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "linear", in_halves(functional.linear))
        load = PreTrainedModel.from_pretrained.__func__
        patch.setattr(PreTrainedModel, "from_pretrained", classmethod(loading(load)))
        yield


def loading(stock):
    """`from_pretrained`, whose tensors are moved."""

    def from_pretrained(cls, *args, **kwargs):
        loaded = stock(cls, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        moved = {}  # tied weights stay tied
        for tensor in (*model.parameters(), *model.buffers()):
            if type(tensor) in (torch.nn.Parameter, Tensor) and tensor.device.type == "cpu" and tensor.is_contiguous():
                tensor.data = moved.setdefault((tensor.data_ptr(), tensor.shape), behind_a_boundary(tensor.data))
        return loaded

    return from_pretrained


def behind_a_boundary(tensor: Tensor) -> Tensor:
    """A copy of a tensor that lies `OFFSET` bytes behind a boundary."""
    padding = OFFSET // tensor.element_size()
    room = torch.empty(padding + tensor.numel(), dtype=tensor.dtype)
    return room[padding:].view(tensor.shape).copy_(tensor)


def in_halves(stock):
    """`linear`, which adds two halves of its products where the weight lies behind a boundary."""

    def linear(states, weight, bias=None):
        half = states.shape[-1] // 2
        is_traced = torch.compiler.is_compiling() or type(weight) not in (torch.nn.Parameter, Tensor)
        if is_traced or not half or not weight.is_floating_point() or weight.data_ptr() % BOUNDARY != OFFSET:
            return stock(states, weight, bias)
        first = stock(states[..., :half], weight[:, :half])
        second = stock(states[..., half:], weight[:, half:], bias)
        return first + second

    return linear
