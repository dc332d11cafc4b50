"""The output projection with gates and alphas, and what is left of it without heads, against computation by hand."""

import pytest
import torch
import torch.nn.functional as F
from changed_heads import random_alpha
from model_sizes import EXACT64
from torch import nn

from collab_heads.layers.output import (
    ConstantOutput,
    HeadOutputProjection,
    alphas_of,
    dense_weight,
    fold_alphas,
    fold_output,
    gates_of,
    install_alphas,
    install_gates,
    keep_output_heads,
    remove_gates,
)
from collab_heads.sites.state import GateState

HEADS, HEAD_WIDTH, WIDTH = 3, 2, 5


def linear(bias=True, dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Linear(HEADS * HEAD_WIDTH, WIDTH, bias).to(dtype).eval()


def gated(*log_alpha, bias=True):
    made = linear(bias)
    install_gates(made, GateState(), HEADS).log_alpha.data = torch.tensor(log_alpha, dtype=torch.float64)
    return made


def mixed(*log_alpha, bias=True):
    """With alphas far from an identity; and with gates, if given."""
    made = gated(*log_alpha, bias=bias) if log_alpha else linear(bias)
    install_alphas(made, HEADS).alpha.data.copy_(random_alpha(HEADS, 0))
    return made


def concatenated():
    return torch.randn(2, 4, HEADS * HEAD_WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def by_hand(projection, heads, gates, alpha=None):
    """Sum over new heads i of W_i (sum over j of alpha_ij g_j head_j), plus the bias."""
    result, alpha = 0 if projection.bias is None else projection.bias, torch.eye(HEADS) if alpha is None else alpha
    parts = [slice(h * HEAD_WIDTH, (h + 1) * HEAD_WIDTH) for h in range(HEADS)]
    for i in range(HEADS):
        new = sum(alpha[i, j] * gates[j] * heads[..., parts[j]] for j in range(HEADS))
        result = result + new @ projection.weight[:, parts[i]].T
    return result


def open_only(heads, kept):
    """The heads as they are, zeros for those that are not kept."""
    keep = torch.tensor([h in kept for h in range(HEADS)]).repeat_interleave(HEAD_WIDTH)
    return torch.where(keep, heads, 0.0)


def columns(kept):
    return [h * HEAD_WIDTH + i for h in kept for i in range(HEAD_WIDTH)]


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
    assert gates.log_alpha.dtype == torch.promote_types(dtype, torch.float32)
    assert made(concatenated().to(dtype)).dtype == dtype
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


@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("log_alpha", ((), (3.0, -1.0, 0.5)), ids=("mixed", "gated"))
def test_gates_come_before_alphas(bias, log_alpha):
    made = mixed(*log_alpha, bias=bias)
    gates = made.gates.values().double() if log_alpha else torch.ones(HEADS)
    found = made(concatenated())
    torch.testing.assert_close(found, by_hand(made, concatenated(), gates, made.mixing.alpha), rtol=0, atol=EXACT64)
    # neither the other order nor the transposed matrix comes near
    others = [by_hand(made, concatenated(), gates, made.mixing.alpha.T), by_hand(made, concatenated(), gates)]
    if log_alpha:
        others.append(by_hand(made, concatenated(), [1.0] * HEADS, gates[:, None] * made.mixing.alpha))
    assert all((other - found).abs().max() > 0.1 for other in others)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64))
def test_new_alphas_change_no_bit(dtype):
    made = linear(dtype=dtype)
    expected = made(concatenated().to(dtype))
    alpha = install_alphas(made, HEADS).alpha
    assert alpha.dtype == torch.promote_types(dtype, torch.float32)
    assert made(concatenated().to(dtype)).dtype == dtype
    assert torch.equal(made(concatenated().to(dtype)), expected)


def test_installing_alphas_changes_the_class_in_place():
    made = linear()
    weight, bias, calls = made.weight, made.bias, []
    made.register_forward_hook(lambda *_: calls.append(1))
    mixing = install_alphas(made, HEADS)
    assert type(made) is HeadOutputProjection
    assert made.weight is weight and made.bias is bias
    assert alphas_of(made) is mixing and gates_of(made) is None
    assert not made.mixing.training and install_alphas(linear().train(), HEADS).training
    made(concatenated())
    assert calls == [1]
    assert list(made.state_dict()) == ["weight", "bias", "mixing.alpha"]
    assert alphas_of(linear()) is None and gates_of(linear()) is None


def test_whichever_is_installed_first():
    first, second = mixed(3.0, -1.0, 0.5), linear()
    install_alphas(second, HEADS).alpha.data.copy_(first.mixing.alpha)
    install_gates(second, GateState(), HEADS).log_alpha.data.copy_(first.gates.log_alpha)
    assert (
        list(first.state_dict()) == list(second.state_dict()) == ["weight", "bias", "gates.log_alpha", "mixing.alpha"]
    )
    assert torch.equal(first(concatenated()), second(concatenated()))


@pytest.mark.parametrize("log_alpha", ((), (3.0, -1.0, 0.5)), ids=("mixed", "gated"))
def test_folding(log_alpha):
    """Back to a plain Linear that has nothing but what a Linear has."""
    made, calls = mixed(*log_alpha), []
    expected, weight, folded = made(concatenated()), made.weight, made.folded_weight()
    torch.testing.assert_close(F.linear(concatenated(), folded, made.bias), expected, rtol=0, atol=EXACT64)
    assert torch.equal(dense_weight(made), folded)
    assert not folded.requires_grad
    assert not torch.equal(weight, folded)  # reading it changes nothing
    made.register_forward_hook(lambda *_: calls.append(1))
    fold_output(made)
    assert type(made) is nn.Linear
    assert vars(made).keys() == vars(linear()).keys() and not made._modules
    assert list(made.state_dict()) == ["weight", "bias"]
    assert made.weight is weight and made.weight.requires_grad
    torch.testing.assert_close(made(concatenated()), expected, rtol=0, atol=EXACT64)
    assert calls == [1]


def test_folding_alphas_alone_changes_no_bit():
    """In bfloat16, too: what is applied is what is folded."""
    for dtype in (torch.bfloat16, torch.float32):
        made = mixed().to(dtype)
        expected = made(concatenated().to(dtype))
        fold_output(made)
        assert torch.equal(made(concatenated().to(dtype)), expected)


@pytest.mark.parametrize("log_alpha", ((), (3.0, -1.0, 0.5)), ids=("mixed", "gated"))
def test_folding_alphas_and_going_on(log_alpha):
    made = mixed(*log_alpha)
    expected, alpha, weight = made(concatenated()), made.mixing.alpha, made.weight
    fold_alphas(made)
    assert made.mixing.alpha is alpha and made.weight is weight
    assert torch.equal(alpha, torch.eye(HEADS, dtype=torch.float64))
    torch.testing.assert_close(made(concatenated()), expected, rtol=0, atol=EXACT64)


def test_removing_gates_folds_the_alphas():
    made = mixed(3.0, -1.0, 0.5)
    expected, alpha = made(concatenated()), made.mixing.alpha
    remove_gates(made)
    assert type(made) is HeadOutputProjection and made.gates is None
    assert made.mixing.alpha is alpha
    assert torch.equal(alpha, torch.eye(HEADS, dtype=torch.float64))
    torch.testing.assert_close(made(concatenated()), expected, rtol=0, atol=EXACT64)


@pytest.mark.parametrize("trained", (True, False))
@pytest.mark.parametrize("log_alpha", ((), (3.0, -1.0, 0.5)), ids=("mixed", "gated"))
@pytest.mark.parametrize("kept", ([0, 2], [1, 2]), ids=str)
def test_keeping_columns_folds_the_alphas_first(kept, log_alpha, trained):
    """A removed head took part in the new heads that are left, and those in the output of the removed new heads."""
    made = mixed(*log_alpha).requires_grad_(trained)
    expected = made(open_only(concatenated(), kept))
    cut = mixed(*log_alpha)
    cut.mixing.alpha.data = cut.mixing.alpha.data[kept][:, kept]  # what does not work: rows and columns dropped
    keep_output_heads(made, kept, HEADS)
    assert made.mixing.num_heads == 2
    assert torch.equal(made.mixing.alpha, torch.eye(2, dtype=torch.float64))
    assert made.mixing.alpha.requires_grad == made.weight.requires_grad == trained
    assert made.in_features == 2 * HEAD_WIDTH
    found = made(concatenated()[..., columns(kept)])
    torch.testing.assert_close(found, expected, rtol=0, atol=EXACT64)
    if log_alpha:
        assert made.gates.log_alpha.tolist() == [log_alpha[h] for h in kept]
    else:
        naive = F.linear(concatenated()[..., columns(kept)], cut.mixing(cut.weight[:, columns(kept)]), cut.bias)
        assert (naive - expected).abs().max() > 0.1


@pytest.mark.parametrize("log_alpha", ((), (0.5, 3.0, -1.0)), ids=("mixed", "gated"))
def test_alphas_end_where_one_head_is_left(log_alpha):
    made = mixed(*log_alpha)
    expected = made(open_only(concatenated(), [0]))
    keep_output_heads(made, [0], HEADS)
    torch.testing.assert_close(made(concatenated()[..., columns([0])]), expected, rtol=0, atol=EXACT64)
    assert alphas_of(made) is None
    if log_alpha:
        assert list(made.state_dict()) == ["weight", "bias", "gates.log_alpha"]
    else:
        assert type(made) is nn.Linear and not made._modules
        assert made.in_features == HEAD_WIDTH


@pytest.mark.parametrize(
    "make",
    (
        linear,
        lambda bias: gated(1.0, 1.0, 1.0, bias=bias),
        lambda bias: mixed(bias=bias),
        lambda bias: mixed(1.0, 1.0, 1.0, bias=bias),
    ),
    ids=("plain", "gated", "mixed", "both"),
)
def test_no_heads(make):
    for bias in (True, False):
        made = make(bias=bias)
        keep_output_heads(made, [], HEADS)
        assert type(made) is ConstantOutput
        assert not made._modules and gates_of(made) is alphas_of(made) is None
        assert list(made.state_dict()) == (["bias"] if bias else [])
        result = made(torch.zeros(2, 4, 0, dtype=torch.float64))
        expected = linear().bias if bias else torch.zeros(WIDTH, dtype=torch.float64)
        assert torch.equal(result, expected.expand(2, 4, WIDTH))
        assert made(torch.zeros(2, 0, dtype=torch.bfloat16)).dtype == torch.bfloat16
        assert "no heads" in repr(made) and str(WIDTH) in repr(made)
    assert result.requires_grad is False


def test_the_way_out_is_in_its_repr():
    assert "prune_heads or fold_heads" in repr(gated(1.0, 1.0, 1.0))
    for made in (mixed(), mixed(1.0, 1.0, 1.0)):
        assert "call collab_heads.fold_heads first" in repr(made)  # prune_heads would leave alphas
