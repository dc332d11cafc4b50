"""The alpha matrix of a site, against computation by hand."""

import pytest
import torch
import torch.nn.functional as F
from changed_heads import random_alpha
from model_sizes import EXACT64

from collab_heads.layers.alphas import HeadAlphas
from collab_heads.layers.output import install_alphas

HEADS, HEAD_WIDTH, WIDTH = 3, 2, 5
ONE_AND_A_BIT = 1 + 2**-12  # bfloat16 and float16 have no room for the bit


def mixing(dtype=torch.float64):
    made = HeadAlphas(HEADS).to(dtype)
    made.alpha.data.copy_(random_alpha(HEADS, 0))
    return made


def output_weight(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(WIDTH, HEADS * HEAD_WIDTH, dtype=torch.float64, generator=generator).to(dtype)


def mixed_by_hand(weight, alpha):
    """The columns of head j are the sum over new heads i of W_i alpha_ij."""
    parts = weight.split(HEAD_WIDTH, dim=1)
    return torch.cat([sum(parts[i] * alpha[i, j] for i in range(HEADS)) for j in range(HEADS)], dim=1)


def test_heads_are_mixed_before_the_output_weight():
    """W_O Concat(Z'_1, ..., Z'_H) with Z'_i = sum_j alpha_ij Z_j."""
    made, weight = mixing(), output_weight()
    heads = torch.randn(4, HEADS, HEAD_WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    new = torch.stack([sum(made.alpha[i, j] * heads[:, j] for j in range(HEADS)) for i in range(HEADS)], dim=1)
    found = F.linear(heads.flatten(1), made(weight))
    torch.testing.assert_close(found, F.linear(new.flatten(1), weight), rtol=0, atol=EXACT64)
    torch.testing.assert_close(made(weight), mixed_by_hand(weight, made.alpha), rtol=0, atol=EXACT64)
    assert made(weight).is_contiguous()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16, torch.float64))
def test_it_starts_as_an_identity_that_changes_no_bit(dtype):
    made, weight = HeadAlphas(HEADS).to(dtype), output_weight(dtype)
    assert made.alpha.tolist() == torch.eye(HEADS).tolist()
    assert made(weight).dtype == dtype
    assert torch.equal(made(weight), weight)
    assert not torch.equal(mixing(dtype)(weight), weight)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_half_precision_computes_in_float32(dtype):
    """It rounds once, at the end: alphas in float32 beside a weight in half precision keep their digits."""
    made, weight = mixing(torch.float32), output_weight(dtype)
    expected = mixed_by_hand(weight.float(), made.alpha).to(dtype)
    assert torch.equal(made(weight), expected)
    assert not torch.equal(mixed_by_hand(weight, made.alpha.to(dtype)), expected)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_autocast_does_not_round_alphas(dtype):
    made, weight = HeadAlphas(HEADS), output_weight(torch.float32)
    made.alpha.data.fill_diagonal_(ONE_AND_A_BIT)
    assert torch.tensor(ONE_AND_A_BIT).to(dtype) == 1
    with torch.autocast("cpu", dtype):
        found = made(weight)
        assert F.linear(weight, weight).dtype == dtype  # autocast goes on
    assert found.dtype == torch.float32
    assert torch.equal(found, weight * ONE_AND_A_BIT)
    found.sum().backward()
    expected = torch.einsum("oid,ojd->ij", weight.unflatten(1, (HEADS, -1)), torch.ones(WIDTH, HEADS, HEAD_WIDTH))
    torch.testing.assert_close(made.alpha.grad, expected, rtol=0, atol=1e-6)  # float32 sums of 10 in another order


def test_gradients():
    made, weight = mixing(), output_weight().requires_grad_()

    def forward(alpha, weight):
        return torch.func.functional_call(made, {"alpha": alpha}, (weight,))

    assert torch.autograd.gradcheck(forward, (made.alpha, weight))
    made(weight).square().sum().backward()
    assert (made.alpha.grad != 0).all() and (weight.grad != 0).all()


def test_reset():
    made = mixing()
    alpha = made.alpha
    made.reset()
    assert made.alpha is alpha  # an optimizer may hold it
    assert torch.equal(alpha, torch.eye(HEADS, dtype=torch.float64))


@pytest.mark.parametrize("trained", (True, False))
def test_reset_to_another_size(trained):
    made = mixing(torch.bfloat16).requires_grad_(trained)
    made.reset(2)
    assert made.num_heads == 2
    assert made.alpha.tolist() == [[1, 0], [0, 1]]
    assert made.alpha.dtype == torch.bfloat16
    assert made.alpha.requires_grad == trained
    assert [name for name, _ in made.named_parameters()] == ["alpha"]
    alpha = made.alpha
    made.reset(2)
    assert made.alpha is alpha


def test_meta_device():
    """Where whole models are built, and run, without weights."""
    made = HeadAlphas(HEADS).to("meta")
    made.reset()
    assert made(output_weight().to("meta")).shape == (WIDTH, HEADS * HEAD_WIDTH)


@pytest.mark.parametrize("tokens", (1, 40))
def test_few_tokens_and_many(tokens):
    """Few: the heads are mixed; many: the weight. The same function either way, and under autocast."""
    torch.manual_seed(0)
    projection = torch.nn.Linear(12, 10).double()
    mixing = install_alphas(projection, 3)
    mixing.alpha.data += torch.randn(3, 3)
    inputs = torch.randn(1, tokens, 12, dtype=torch.float64)
    called = []
    forward = mixing.forward
    mixing.forward = lambda each, **of: called.append("heads" if of else "weight") or forward(each, **of)
    found = projection(inputs)
    assert called == ["heads" if tokens < 10 else "weight"]
    expected = torch.einsum("ij,btjd->btid", mixing.alpha, inputs.unflatten(-1, (3, 4))).flatten(-2)
    expected = expected @ projection.weight.T + projection.bias
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
