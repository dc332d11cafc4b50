"""A Conv1D is read and written as a Linear is, and stays stored as it was."""

import pytest
import torch
from model_sizes import EXACT64
from torch import nn
from transformers.pytorch_utils import Conv1D

from collab_heads.layers.layout import PLAIN, become, is_transposed, set_weight, weight_of, widths
from collab_heads.layers.output import (
    ConstantOutput,
    HeadOutputProjection,
    TransposedOutputProjection,
    fold_output,
    install_alphas,
    install_gates,
    keep_output_heads,
)
from collab_heads.layers.removed import keep_rows
from collab_heads.sites.state import GateState

IN, OUT, HEADS = 6, 4, 3


def pair():
    """A Conv1D and a Linear that compute the same."""
    torch.manual_seed(0)
    conv, linear = Conv1D(OUT, IN).double().eval(), nn.Linear(IN, OUT).double().eval()
    linear.weight.data.copy_(conv.weight.mT)
    conv.bias.data.copy_(linear.bias)
    return conv, linear


def states():
    return torch.randn(2, 5, IN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_it_is_read_as_out_by_in():
    conv, linear = pair()
    assert [type(each) for each in (linear, conv)] == list(PLAIN)
    assert is_transposed(conv) and not is_transposed(linear)
    assert widths(conv) == widths(linear) == (IN, OUT)
    assert torch.equal(weight_of(conv), weight_of(linear)) and weight_of(linear) is linear.weight


@torch.no_grad()
def test_what_is_written_into_the_view_is_written_into_the_parameter():
    conv, _ = pair()
    parameter = conv.weight
    weight_of(conv)[1] = 7.0
    assert conv.weight is parameter and bool((parameter[:, 1] == 7).all()) and not bool((parameter[:, 0] == 7).any())


@pytest.mark.parametrize("trained", (True, False))
def test_another_weight_lies_as_the_class_stores_it(trained):
    """In memory of its own, in the order of its rows."""
    new = torch.randn(3, 5, dtype=torch.float64)
    for module, stored in zip(pair(), ((5, 3), (3, 5)), strict=True):
        set_weight(module, new, requires_grad=trained)
        assert tuple(module.weight.shape) == stored and module.weight.is_contiguous()
        assert torch.equal(weight_of(module), new) and widths(module) == (5, 3)
        assert module.weight.requires_grad == trained and isinstance(module.weight, nn.Parameter)
        assert module.weight.untyped_storage().data_ptr() != new.untyped_storage().data_ptr()
    assert (module.in_features, module.out_features) == (5, 3)


def test_a_change_of_class_renames_the_widths():
    conv, _ = pair()
    become(conv, ConstantOutput)
    assert (conv.in_features, conv.out_features) == (IN, OUT) and not {"nx", "nf"} & vars(conv).keys()
    become(conv, Conv1D)
    assert (conv.nx, conv.nf) == (IN, OUT) and not {"in_features", "out_features"} & vars(conv).keys()


@torch.no_grad()
def test_rows_of_heads():
    conv, linear = pair()
    for module in (conv, linear):
        keep_rows(module, [1], 2)
    torch.testing.assert_close(conv(states()), linear(states()), rtol=0, atol=EXACT64)
    assert conv(states()).shape[-1] == conv.nf == 2


def changed(module, *log_alpha):
    install_gates(module, GateState(), HEADS).log_alpha.data = torch.tensor(log_alpha, dtype=torch.float64)
    install_alphas(module, HEADS).alpha.data.add_(torch.randn(HEADS, HEADS, generator=torch.Generator().manual_seed(2)))
    return module


@torch.no_grad()
def test_gates_and_alphas_are_those_of_a_linear():
    """Of many tokens and few, folded, and with fewer heads."""
    conv, linear = (changed(module, 3.0, 0.5, -1.0) for module in pair())
    assert (type(conv), type(linear)) == (TransposedOutputProjection, HeadOutputProjection)
    assert (conv.in_features, conv.out_features, tuple(conv.weight.shape)) == (IN, OUT, (IN, OUT))
    few, many = states()[:1, :1], states()
    for tokens in (few, many):
        torch.testing.assert_close(conv(tokens), linear(tokens), rtol=0, atol=EXACT64)
    expected = linear(many)
    for module in (conv, linear):
        fold_output(module)
        torch.testing.assert_close(module(many), expected, rtol=0, atol=EXACT64)
    assert type(conv) is Conv1D and (conv.nx, conv.nf) == (IN, OUT)
    for kept in ([0, 2], []):
        for module in (conv, linear):
            keep_output_heads(module, kept, HEADS if kept else 2)
        tokens = many[..., : 2 * len(kept)]
        torch.testing.assert_close(conv(tokens), linear(tokens), rtol=0, atol=EXACT64)
    assert type(conv) is ConstantOutput and (conv.in_features, conv.out_features) == (0, OUT)


def test_it_says_why_adapters_cannot_have_it():
    conv = changed(pair()[0], 1.0, 1.0, 1.0)
    assert "in_features=6, out_features=4" in repr(conv) and not isinstance(conv, PLAIN)
