"""Attention a block of query tokens at a time, and the gap between what heads give and are to give."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from collab_heads.fitting import refine as module
from collab_heads.fitting.refine import SquaredGap, attended

ROUNDED = 1e-10  # of sums in float64 in another order; seen: 1e-13
BIASES = {"none": None, "of keys": (2, 1, 1, 7), "of heads": (1, 3, 5, 7), "of all": (2, 3, 5, 7)}
SCALE = 0.3


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.fixture
def rows_of_blocks(monkeypatch):
    """How many query tokens the blocks have, in the order in which they are made."""
    made, blocks = [], module.blocks

    def watched(*args):
        for block in blocks(*args):
            made.append(block.heads.shape[2])
            yield block

    monkeypatch.setattr(module, "blocks", watched)
    return made


@pytest.mark.parametrize("rows", (1, 2, 4, 5))
@pytest.mark.parametrize("shape", BIASES.values(), ids=list(BIASES))
@pytest.mark.parametrize("key_heads, is_padded", ((1, False), (3, True)))
def test_blocks_are_the_whole(rows, shape, key_heads, is_padded, monkeypatch, rows_of_blocks):
    """Heads, gap and gradients, beside torch's own attention; `rows` tokens fit into a block."""
    torch.manual_seed(0)
    query, key, value = random(2, 3, 5, 4), random(2, key_heads, 7, 4), random(2, 3, 7, 6)
    bias, target, output = None if shape is None else random(*shape), random(2, 5, 18), random(8, 18)
    used = torch.tensor([[True] * 5, [True] * 3 + [False] * 2]) if is_padded else None
    monkeypatch.setitem(module.SCORES_BYTES, "cpu", rows * 2 * 3 * 7 * 8)
    expected_rows = [5] if rows == 5 else [*[rows] * (5 // rows), *[5 % rows] * bool(5 % rows)]

    inputs = [tensor.clone().requires_grad_() for tensor in (query, key)]
    wide = inputs[1].expand(-1, 3, -1, -1)
    expected = scaled_dot_product_attention(inputs[0], wide, value, attn_mask=bias, scale=SCALE)
    gap = (expected.transpose(1, 2).flatten(-2) - target) @ output.mT
    expected_gap = (gap if used is None else gap[used]).square().sum()
    expected_gradients = torch.autograd.grad(3 * expected_gap, inputs)

    torch.testing.assert_close(attended(query, key, value, SCALE, bias), expected, rtol=0, atol=ROUNDED)
    assert rows_of_blocks == expected_rows
    rows_of_blocks.clear()
    inputs = [tensor.clone().requires_grad_() for tensor in (query, key)]
    found = SquaredGap.apply(*inputs, value, SCALE, bias, target, used, output.mT @ output)
    torch.testing.assert_close(found, expected_gap, rtol=ROUNDED, atol=0)
    for one, other in zip(torch.autograd.grad(3 * found, inputs), expected_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=ROUNDED)
    assert rows_of_blocks == expected_rows  # once, gradient included


def test_even_one_token_that_is_too_large_is_a_block(monkeypatch):
    monkeypatch.setitem(module.SCORES_BYTES, "cpu", 1)
    query, key, value = random(1, 2, 3, 4), random(1, 2, 5, 4), random(1, 2, 5, 4)
    expected = scaled_dot_product_attention(query, key, value, scale=1.0)
    torch.testing.assert_close(attended(query, key, value, 1.0, None), expected, rtol=0, atol=ROUNDED)
