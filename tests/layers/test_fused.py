"""A part of a fused projection is a Linear to whoever reads it, and nothing of its own."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from collab_heads.layers.fused import FusedPart, identity, part_of, whole_of

IN, OUT, PARTS = 5, 4, 3
MAKE = {
    "Conv1D": lambda: Conv1D(PARTS * OUT, IN),
    "Linear": lambda: nn.Linear(IN, PARTS * OUT),
    "no bias": lambda: nn.Linear(IN, PARTS * OUT, bias=False),
}


@pytest.fixture(params=MAKE)
def whole(request):
    torch.manual_seed(0)
    made = MAKE[request.param]()
    if made.bias is not None:
        made.bias.data.normal_()
    return made


def parts_of(whole):
    return [FusedPart(whole, number, PARTS) for number in range(PARTS)]


def states():
    return torch.randn(2, 3, IN, generator=torch.Generator().manual_seed(1))


def test_it_computes_its_part(whole):
    outputs = whole(states()).split(OUT, dim=-1)
    for part, expected in zip(parts_of(whole), outputs, strict=True):
        assert (part.in_features, part.out_features, tuple(part.weight.shape)) == (IN, OUT, (OUT, IN))
        torch.testing.assert_close(nn.functional.linear(states(), part.weight, part.bias), expected)
        linear = part.as_linear()
        torch.testing.assert_close(linear(states()), expected)
        assert (
            type(linear) is nn.Linear
            and linear.weight.is_contiguous()
            and (linear.bias is None) == (whole.bias is None)
        )
        assert linear.weight.untyped_storage().data_ptr() != whole.weight.untyped_storage().data_ptr()
        assert torch.equal(torch.cat([p.flatten() for p in part.parameters()]), torch.cat(flat(linear)))


def flat(module):
    return [parameter.flatten() for parameter in module.parameters()]


def test_a_linear_of_its_own_is_trained_as_the_whole_was(whole):
    whole.requires_grad_(False).eval()
    linear = parts_of(whole)[1].as_linear()
    assert not any(parameter.requires_grad for parameter in linear.parameters()) and not linear.training


@torch.no_grad()
def test_what_is_written_into_it_is_written_into_the_whole(whole):
    before, outputs = whole.weight, whole(states()).split(OUT, dim=-1)
    for tensor in parts_of(whole)[1].parameters():
        tensor.zero_()
    after = whole(states()).split(OUT, dim=-1)
    assert whole.weight is before and after[1].abs().max() == 0
    assert torch.equal(after[0], outputs[0]) and torch.equal(after[2], outputs[2])


def test_reading_leaves_gradients_to_the_whole(whole):
    parts_of(whole)[2].weight.sum().backward()
    sums = whole.weight.grad.sum(int(isinstance(whole, nn.Linear)))
    assert sums.tolist() == [0.0] * 2 * OUT + [float(IN)] * OUT


def test_its_part_of_moments(whole):
    """Of tensors that are shaped like the whole parameter."""
    part = parts_of(whole)[1]
    assert torch.equal(part_of(part, whole.weight), part.weight)
    assert whole.bias is None or torch.equal(part_of(part, whole.bias), part.bias)
    linear = nn.Linear(2, 2)
    assert part_of(linear, linear.weight) is linear.weight


def test_hooks_are_those_of_the_whole(whole):
    """Inputs are the same for all parts; of the outputs a hook gets its own, and replaces no other."""
    heard, part = [], parts_of(whole)[1]
    expected = whole(states())
    hooks = [
        part.register_forward_pre_hook(lambda module, args: heard.append(args[0])),
        part.register_forward_hook(lambda module, args, output: heard.append(output)),
        part.register_forward_hook(lambda module, args, output: output * 0),
    ]
    found = whole(states())
    assert torch.equal(heard[0], states()) and torch.equal(heard[1], expected[..., OUT : 2 * OUT])
    assert found[..., OUT : 2 * OUT].abs().max() == 0
    others = [*range(OUT), *range(2 * OUT, 3 * OUT)]
    assert torch.equal(found[..., others], expected[..., others])
    for hook in hooks:
        hook.remove()
    assert torch.equal(whole(states()), expected)


def test_which_are_one():
    """Parts are one by what they are a part of; tied weights show."""
    first, second = Conv1D(PARTS * OUT, IN), Conv1D(PARTS * OUT, IN)
    assert FusedPart(first, 1, PARTS) == FusedPart(first, 1, PARTS) != FusedPart(first, 2, PARTS)
    assert whole_of(FusedPart(first, 1, PARTS)) is first is whole_of(first)
    names = {identity(part) for whole in (first, second) for part in parts_of(whole)}
    assert len(names) == 2 * PARTS
    second.weight = first.weight
    assert {identity(part) for part in parts_of(second)} == {identity(part) for part in parts_of(first)}
    assert identity(first) != identity(FusedPart(first, 1, PARTS))
