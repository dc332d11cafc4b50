"""The CPU backend against transformers' own sdpa, in whatever rows and masks there can be."""

from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from collab_heads.layers import attention
from collab_heads.layers.attention import BLOCK, one_key_attention

B, H, W, D_VALUE = 2, 3, 10, 4
EXACT64 = 1e-12  # float64 sums in another order; differences seen: 3e-15
MODULE = SimpleNamespace(is_causal=False)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def left_padded(length):
    """Causal, with padding on the left of the second sentence: its padding sees nothing."""
    mask = torch.ones(length, length, dtype=torch.bool).tril().repeat(B, 1, 1, 1)
    mask[1, ..., :2] = False
    return mask


def no_source(length):
    """One row for all queries, as in cross-attention and decoding; the first sentence has no source."""
    mask = torch.ones(B, 1, 1, length, dtype=torch.bool)
    mask[0], mask[1, ..., 1] = False, False
    return mask


def additive(mask, lowest):
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, lowest)


LOWEST = torch.finfo(torch.float64).min
FORMS = {
    "booleans": lambda mask: mask,
    "lowest numbers": lambda mask: additive(mask, LOWEST),
    "infinities": lambda mask: additive(mask, -torch.inf),
}


RESULTS = ("output", "query", "key", "value")


def both(mask, length, *, biased=False, ours=one_key_attention):
    """Outputs of the two backends, and the gradients of queries, keys and values."""
    results = []
    for backend in (ours, sdpa_attention_forward):
        query, key = randn(B, H, length, W), randn(B, 1, length, W, seed=1)
        parts = query, key, randn(B, H, length, D_VALUE, seed=2)
        bias = randn(1, H, length, length, seed=3) if biased else None
        for tensor in parts:
            tensor.requires_grad_()
        one = key if backend is ours else key.expand(-1, H, -1, -1)
        output, weights = backend(MODULE, query, one, parts[2], mask, scaling=0.3, position_bias=bias)
        assert weights is None
        results.append([output, *torch.autograd.grad(output.square().sum(), parts)])
    return zip(*results, strict=True)


@pytest.mark.parametrize("biased", (False, True))
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", (5, BLOCK + 3))
@pytest.mark.parametrize("shape", (left_padded, no_source))
def test_rows_that_see_nothing(shape, length, form, biased):
    """Zeros where stock gives zeros, a uniform mean where it gives that; gradients are finite and equal, too."""
    results = dict(zip(RESULTS, both(FORMS[form](shape(length)), length, biased=biased), strict=True))
    if biased and form == "booleans":  # stock adds its lowest number: scores get a gradient that cannot move them
        del results["query"], results["key"]
    for name, (ours, stock) in results.items():
        assert torch.isfinite(stock).all()
        torch.testing.assert_close(ours, stock, rtol=0, atol=EXACT64, msg=name)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", (left_padded, no_source))
def test_compiled(shape, form):
    """One graph, which does not depend on whether a row sees nothing."""
    compiled = torch.compile(one_key_attention, fullgraph=True, backend="aot_eager")
    mask = FORMS[form](shape(5))
    for one in (FORMS[form](torch.ones(mask.shape, dtype=torch.bool)), mask):
        for ours, stock in both(one, 5, ours=compiled):
            torch.testing.assert_close(ours, stock, rtol=0, atol=EXACT64)


@pytest.mark.parametrize("form", ("booleans", "infinities"))
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace:DeprecationWarning")
def test_traced(form):
    """A trace with rows that all see something holds for rows that do not, and for other lengths."""

    def run(query, key, value, mask):
        return one_key_attention(MODULE, query, key, value, mask, scaling=0.3)[0]

    def example(length, allowed):
        parts = randn(B, H, length, W), randn(B, 1, length, W, seed=1), randn(B, H, length, D_VALUE, seed=2)
        return *parts, FORMS[form](allowed)

    traced = torch.jit.trace(run, example(5, torch.ones(B, 1, 5, 5, dtype=torch.bool)), check_trace=False)
    longer = example(BLOCK + 3, left_padded(BLOCK + 3))
    torch.testing.assert_close(traced(*longer), run(*longer), rtol=0, atol=EXACT64)


def test_nothing_is_done_where_all_rows_see_something():
    """The check is all that the common case pays."""
    mask = torch.ones(B, 1, 5, 5, dtype=torch.bool).tril()
    assert attention.blind_rows(mask, None) is None
    assert attention.blind_rows(additive(mask, -torch.inf), None) is None
    assert attention.blind_rows(left_padded(5), None).shape == (B, 1, 5, 1)
