"""The output projection with gates, and what is left of it without heads, against computation by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from collab_heads.config import GateState
from collab_heads.heads.output import (
    ConstantOutput,
    HeadOutputProjection,
    dense_weight,
    install_gates,
    keep_output_heads,
    remove_gates,
)
from families import EXACT64

HEADS, HEAD_WIDTH, WIDTH = 3, 2, 5


def linear(bias=True, dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Linear(HEADS * HEAD_WIDTH, WIDTH, bias).to(dtype).eval()


def gated(*log_alpha, bias=True):
    made = linear(bias)
    install_gates(made, GateState(), HEADS).log_alpha.data = torch.tensor(log_alpha, dtype=torch.float64)
    return made


def concatenated():
    return torch.randn(2, 4, HEADS * HEAD_WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def by_hand(projection, heads, gates):
    """Sum over heads of g_h W_h head_h, plus the bias."""
    result = 0 if projection.bias is None else projection.bias
    for h in range(HEADS):
        part = slice(h * HEAD_WIDTH, (h + 1) * HEAD_WIDTH)
        result = result + gates[h] * heads[..., part] @ projection.weight[:, part].T
    return result


@pytest.mark.parametrize("bias", (True, False))
def test_forward(bias):
    made = gated(3.0, -1.0, 0.5, bias=bias)
    expected = by_hand(made, concatenated(), (1.0, 0.0, made.gates.values()[2].double()))
    torch.testing.assert_close(made(concatenated()), expected, rtol=0, atol=EXACT64)
    assert 0 < made.gates.values()[2] < 1


def test_training_uses_one_sample_for_the_whole_batch(monkeypatch):
    made = gated(0.5, 0.5, 0.5).train()
    drawn = []
    stock = made.gates.sample
    monkeypatch.setattr(made.gates, "sample", lambda: drawn.append(stock()) or drawn[-1])
    torch.manual_seed(3)
    result = made(concatenated())
    assert len(drawn) == 1
    assert len({*drawn[0].tolist(), made.gates.values()[0].item()}) > 2
    torch.testing.assert_close(result, by_hand(made, concatenated(), drawn[0].double()), rtol=0, atol=EXACT64)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64))
def test_open_gates_change_no_bit(dtype):
    made = linear(dtype=dtype)
    expected = made(concatenated().to(dtype))
    gates = install_gates(made, GateState(), HEADS)
    assert gates.log_alpha.dtype == made(concatenated().to(dtype)).dtype == dtype
    assert torch.equal(made(concatenated().to(dtype)), expected)


def test_installing_changes_the_class_in_place():
    made = linear()
    weight, bias, calls = made.weight, made.bias, []
    made.register_forward_hook(lambda *_: calls.append(1))
    install_gates(made, GateState("fixed"), HEADS)
    assert type(made) is HeadOutputProjection
    assert not isinstance(made, nn.Linear)  # what adapts a Linear would not see the gates
    assert made.weight is weight and made.bias is bias
    assert not made.gates.training
    made(concatenated())
    assert calls == [1]
    assert list(made.state_dict()) == ["weight", "bias", "gates.alive"]
    assert install_gates(linear().train(), GateState(), HEADS).training


def test_removing_gates_folds_them():
    made = gated(3.0, -1.0, 0.5)
    expected, weight = made(concatenated()), made.weight
    torch.testing.assert_close(
        F.linear(concatenated(), made.folded_weight(), made.bias), expected, rtol=0, atol=EXACT64
    )
    assert torch.equal(dense_weight(made), made.folded_weight())
    remove_gates(made)
    assert type(made) is nn.Linear
    assert made.weight is weight
    assert list(made.state_dict()) == ["weight", "bias"]
    assert made.weight[:, 2:4].abs().max() == 0
    torch.testing.assert_close(made(concatenated()), expected, rtol=0, atol=EXACT64)
    assert torch.equal(dense_weight(made), made.weight)
    assert not dense_weight(made).requires_grad


@pytest.mark.parametrize("trained", (True, False))
def test_keeping_columns(trained):
    made, stock = linear().requires_grad_(trained), linear()
    keep_output_heads(made, [0, 2], HEADS)
    assert torch.equal(made.weight, stock.weight[:, [0, 1, 4, 5]])
    assert torch.equal(made.bias, stock.bias)
    assert (made.in_features, made.out_features) == (4, WIDTH)
    assert made.weight.requires_grad == made.bias.requires_grad == trained
    assert made.weight.is_contiguous()
    assert made.weight.untyped_storage().nbytes() == 4 * WIDTH * 8  # no view into the old weight


def test_keeping_columns_and_their_gates():
    made = gated(3.0, -1.0, 0.5)
    expected = made(concatenated())
    keep_output_heads(made, [0, 2], HEADS)
    assert made.gates.log_alpha.tolist() == [3.0, 0.5]
    torch.testing.assert_close(made(concatenated()[..., [0, 1, 4, 5]]), expected, rtol=0, atol=EXACT64)


@pytest.mark.parametrize("make", (linear, lambda bias: gated(1.0, 1.0, 1.0, bias=bias)))
def test_no_heads(make):
    for bias in (True, False):
        made = make(bias=bias)
        keep_output_heads(made, [], HEADS)
        assert type(made) is ConstantOutput
        assert list(made.state_dict()) == (["bias"] if bias else [])
        result = made(torch.zeros(2, 4, 0, dtype=torch.float64))
        expected = linear().bias if bias else torch.zeros(WIDTH, dtype=torch.float64)
        assert torch.equal(result, expected.expand(2, 4, WIDTH))
        assert made(torch.zeros(2, 0, dtype=torch.bfloat16)).dtype == torch.bfloat16
        assert "no heads" in repr(made) and str(WIDTH) in repr(made)
    assert result.requires_grad is False


def test_the_way_out_is_in_its_repr():
    assert "prune_heads or fold_heads" in repr(gated(1.0, 1.0, 1.0))
