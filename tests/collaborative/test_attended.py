"""Attention a block of query tokens at a time."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from collab_heads.collaborative import attended as blocks

ROUNDED = 1e-10  # of sums in float64 in another order; seen: 1e-15
BIASES = {"none": None, "of keys": (2, 1, 1, 7), "of heads": (1, 3, 5, 7), "of all": (2, 3, 5, 7)}


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("rows", (1, 2, 4, 5))
@pytest.mark.parametrize("shape", BIASES.values(), ids=list(BIASES))
@pytest.mark.parametrize("key_heads", (1, 3))
def test_blocks_are_the_whole(rows, shape, key_heads, monkeypatch):
    """Values and gradients, beside torch's own attention; `rows` tokens fit into a block."""
    torch.manual_seed(0)
    tensors = [random(2, 3, 5, 4), random(2, key_heads, 7, 4), random(2, 3, 7, 6)]
    bias, found = None if shape is None else random(*shape), []
    called = []
    block = blocks.block
    monkeypatch.setattr(blocks, "block", lambda query, *rest: called.append(query.shape[2]) or block(query, *rest))
    monkeypatch.setattr(blocks, "SCORES_BYTES", rows * 2 * 3 * 7 * 8)
    for attention in (
        lambda query, key, value: blocks.attended(query, key, value, 0.3, bias),
        lambda query, key, value: scaled_dot_product_attention(
            query, key.expand(-1, 3, -1, -1), value, attn_mask=bias, scale=0.3
        ),
    ):
        inputs = [tensor.clone().requires_grad_() for tensor in tensors]
        output = attention(*inputs)
        output.square().sum().backward()
        found.append([output.detach(), *(tensor.grad for tensor in inputs)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=ROUNDED)
    forward = [5] if rows == 5 else [*[rows] * (5 // rows), *[5 % rows] * bool(5 % rows)]
    assert called[: len(forward)] == forward
    assert len(called) == len(forward) * (1 if rows == 5 else 2)  # once more for the gradient
    with torch.no_grad():
        called.clear()
        torch.testing.assert_close(blocks.attended(*tensors, 0.3, bias), found[0][0], rtol=0, atol=ROUNDED)
        assert called == forward


def test_even_one_token_that_is_too_large_is_a_block(monkeypatch):
    monkeypatch.setattr(blocks, "SCORES_BYTES", 1)
    query, key, value = random(1, 2, 3, 4), random(1, 2, 5, 4), random(1, 2, 5, 4)
    expected = scaled_dot_product_attention(query, key, value, scale=1.0)
    torch.testing.assert_close(blocks.attended(query, key, value, 1.0, None), expected, rtol=0, atol=ROUNDED)
