"""Fused projections, such as one Linear for query, key and value: each of their parts acts like a Linear.

Shapes: D_in width of the inputs, D_out width of one part, P parts of one width, one after the other.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from collab_heads.layers.layout import is_transposed, weight_of, widths


@dataclass(frozen=True)
class FusedPart:
    """A part of the outputs of a projection, with the attributes of a Linear; it is not a module and owns no tensors.

    Weight and bias are views: writing to them writes to the projection.

    Attributes:
        whole: the projection that makes all parts: a Linear, or a Conv1D.
        number: the index of the part, from 0.
        parts: the number of parts.
    """

    whole: nn.Module
    number: int
    parts: int

    @property
    def in_features(self) -> int:
        return widths(self.whole)[0]

    @property
    def out_features(self) -> int:
        return widths(self.whole)[1] // self.parts

    @property
    def rows(self) -> slice:
        """The slice of the part in the outputs of the projection."""
        return slice(self.number * self.out_features, (self.number + 1) * self.out_features)

    @property
    def weight(self) -> Tensor:
        """The weight of the part: [D_out, D_in], a view."""
        return weight_of(self.whole)[self.rows]

    @property
    def bias(self) -> Tensor | None:
        """The bias of the part: [D_out], a view, or None."""
        bias = cast(Tensor | None, self.whole.bias)
        return None if bias is None else bias[self.rows]

    @property
    def training(self) -> bool:
        return self.whole.training

    def of(self, tensor: Tensor) -> Tensor:
        """Return this part of a tensor that is shaped like a parameter of the projection.

        It is [D_out, D_in] or [D_out], a view.
        """
        return (tensor.mT if is_transposed(self.whole) and tensor.ndim > 1 else tensor)[self.rows]

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield weight and bias, as views; the parameters themselves, which all parts share, belong to `whole`."""
        yield from ((name, self.of(parameter)) for name, parameter in self.whole.named_parameters())

    def parameters(self) -> Iterator[Tensor]:
        yield from (parameter for _, parameter in self.named_parameters())

    def register_forward_pre_hook(self, hook: Callable, **more: Any) -> RemovableHandle:
        """Hook the projection: all parts have the same inputs."""
        return self.whole.register_forward_pre_hook(hook, **more)

    def register_forward_hook(self, hook: Callable[[Any, tuple, Tensor], Tensor | None]) -> RemovableHandle:
        """Hook the projection; the hook gets, and may replace, this part of its output."""

        def on_part(whole: nn.Module, inputs: tuple, output: Tensor) -> Tensor | None:
            start, stop = self.rows.start, self.rows.stop
            changed = hook(self, inputs, output[..., self.rows])
            return None if changed is None else torch.cat([output[..., :start], changed, output[..., stop:]], dim=-1)

        return self.whole.register_forward_hook(on_part)

    def as_linear(self) -> nn.Linear:
        """Return a separate Linear that computes this part, on the same device and in the same dtype."""
        weight, bias = self.weight, self.bias
        linear = nn.Linear(self.in_features, self.out_features, bias is not None, device="meta")
        for name, tensor in (("weight", weight), ("bias", bias)):
            if tensor is not None:
                copied = tensor.detach().clone(memory_format=torch.contiguous_format)
                setattr(linear, name, nn.Parameter(copied, tensor.requires_grad))
        return linear.train(self.training)


Projection = nn.Linear | FusedPart


def whole_of(projection: nn.Module | FusedPart) -> nn.Module:
    """Return the module that holds the parameters of a projection: the projection itself, or the fused one."""
    return projection.whole if isinstance(projection, FusedPart) else projection


def part_of(projection: nn.Module | FusedPart, tensor: Tensor) -> Tensor:
    """Return a projection's part of a tensor that is shaped like a parameter of its whole: [out, in] or [out]."""
    return projection.of(tensor) if isinstance(projection, FusedPart) else tensor


def identity(projection: object) -> tuple[int, int]:
    """Return a key that two projections share if, and only if, they compute with the same weight."""
    if isinstance(projection, FusedPart):
        return id(projection.whole.weight), projection.number
    return id(getattr(projection, "weight", projection)), 0
