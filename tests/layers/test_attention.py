"""The core against explicit formulas, without any model around it."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import DynamicCache
from transformers.models.bert.modeling_bert import eager_attention_forward

from collab_heads.errors import ModelStateError
from collab_heads.layers.attention import attend, cached_key_value, pad_to_one_width, takes_cache
from collab_heads.layers.query_key import split_heads
from collab_heads.layers.query_key_kinds import build_query_key
from collab_heads.layers.shared_query_key import content_bias, shared_cache_width
from collab_heads.sites.state import QueryKeyState

B, T, S, H, D_QUERY, D_KEY, D_VALUE = 2, 3, 5, 4, 14, 11, 8
SCALE = 0.37  # unlike 1 / sqrt of any width here
# float64 sums in another order; differences seen: 4e-15 in scores, 4e-14 in outputs, which get 100 times as much
EXACT64 = 1e-12


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_query_key(kind, dim, bias):
    """A projection whose parameters are all random."""
    query_key = build_query_key(QueryKeyState(kind, dim, D_VALUE, SCALE, bias), H, D_QUERY, D_KEY).double()
    for seed, parameter in enumerate(query_key.parameters()):
        parameter.data = randn(*parameter.shape, seed=100 + seed)
    return query_key


def run(query_key, x, y, mask=None, implementation="eager"):
    """What a replaced module does: outputs [B, T, H * d_v] and weights, of values that are random."""
    module = nn.Module()
    module.query_key, module.config = query_key, SimpleNamespace(_attn_implementation=implementation)
    module.is_causal = False
    value = nn.Linear(D_KEY, H * D_VALUE).double()
    value.weight.data, value.bias.data = randn(H * D_VALUE, D_KEY, seed=50), randn(H * D_VALUE, seed=51)
    key, packed = cached_key_value(module.eval(), value, y, None, is_cross=False)
    output, weights = attend(module, x, key, packed, mask, eager=eager_attention_forward, dropout=0.5)
    return output, weights, value(y).unflatten(-1, (H, D_VALUE))


def explicit_scores(query_key, x, y):
    """score_h = scale * ((W_q x) * m_h) . (W_k y) + scale * c_h . y, [B, H, T, S]."""
    scores = torch.einsum(
        "ri,bti,hr,rj,bsj->bhts",
        query_key.shared_query.weight,
        x,
        query_key.mixing,
        query_key.shared_key.weight,
        y,
    )
    if query_key.content_bias is not None:
        scores = scores + torch.einsum("hj,bsj->bhs", query_key.content_bias.weight, y)[:, :, None]
    return SCALE * scores


@torch.no_grad()
@pytest.mark.parametrize("dim", (1, 5, 13, 16, 32))
@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("implementation", ("eager", "sdpa"))
def test_shared_score_is_the_formula(dim, bias, implementation):
    query_key, x, y = random_query_key("shared", dim, bias), randn(B, T, D_QUERY), randn(B, S, D_KEY, seed=1)
    mask = torch.zeros(B, 1, T, S, dtype=torch.float64)
    mask[1, ..., 3:] = torch.finfo(torch.float64).min
    scores = explicit_scores(query_key, x, y)
    ours = SCALE * query_key.queries(x) @ query_key.split(query_key.keys(y).unsqueeze(1)).mT
    torch.testing.assert_close(ours, scores, rtol=0, atol=EXACT64 * float(scores.abs().max()))
    output, weights, values = run(query_key, x, y, mask, implementation)
    expected = (scores + mask).softmax(-1)
    if implementation == "eager":
        torch.testing.assert_close(weights, expected, rtol=0, atol=EXACT64)
    torch.testing.assert_close(
        output, torch.einsum("bhts,bshd->bthd", expected, values).flatten(-2), rtol=0, atol=100 * EXACT64
    )


@torch.no_grad()
@pytest.mark.parametrize("width", (1, 3, 4, D_VALUE))
@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("implementation", ("eager", "sdpa"))
def test_per_head_is_narrow_multi_head_attention(width, bias, implementation):
    query_key, x, y = random_query_key("per_head", H * width, bias), randn(B, T, D_QUERY), randn(B, S, D_KEY, seed=1)
    output, _, values = run(query_key, x, y, None, implementation)
    query = query_key.shared_query(x).view(B, T, H, width).transpose(1, 2)
    key = query_key.shared_key(y).view(B, S, H, width).transpose(1, 2)
    expected = scaled_dot_product_attention(query, key, values.transpose(1, 2), scale=SCALE)
    torch.testing.assert_close(output, expected.transpose(1, 2).flatten(-2), rtol=0, atol=100 * EXACT64)


@torch.no_grad()
def test_content_bias_is_exact():
    """Up to terms that are constant over the keys: the attention of biased projections, key bias included."""
    query, key, query_bias, key_bias = randn(H, 6, D_QUERY), randn(H, 6, D_KEY), randn(H, 6), randn(H, 6, seed=9)
    x, y = randn(B, T, D_QUERY), randn(B, S, D_KEY, seed=1)
    left = torch.einsum("hdi,bti->bhtd", query, x) + query_bias[:, None]
    right = torch.einsum("hdj,bsj->bhsd", key, y)
    ours = torch.einsum("hdi,hdj,bti,bsj->bhts", query, key, x, y)
    ours = ours + torch.einsum("hj,bsj->bhs", content_bias(query_bias, key), y)[:, :, None]
    stock = left @ (right + key_bias[:, None]).mT
    torch.testing.assert_close(ours.softmax(-1), stock.softmax(-1), rtol=0, atol=EXACT64)
    assert (ours - stock).abs().max() > 0.1


@pytest.mark.parametrize(
    "dim, bias, width", ((16, False, 16), (16, True, 24), (12, True, 16), (13, True, 24), (1, 0, 8))
)
def test_cached_widths(dim, bias, width):
    """R, and H columns for the content bias, rounded up to a multiple of 8."""
    query_key = random_query_key("shared", dim, bool(bias))
    assert shared_cache_width(dim, H if bias else 0) == query_key.cache_width == width
    assert query_key.keys(randn(B, S, D_KEY)).shape == (B, S, width)
    assert query_key.queries(randn(B, T, D_QUERY)).shape == (B, H, T, width)
    per_head = random_query_key("per_head", H * dim, bool(bias))
    assert per_head.cache_width == per_head.keys(randn(B, S, D_KEY)).shape[-1] == H * dim


@torch.no_grad()
@pytest.mark.parametrize("kind", ("shared", "per_head"))
def test_cache_holds_packed_keys_and_values(kind):
    module, value, cache = nn.Module(), nn.Linear(D_KEY, H * D_VALUE).double(), DynamicCache()
    module.query_key, module.layer_idx = random_query_key(kind, 12, True), 0
    states = randn(B, S, D_KEY)
    whole = cached_key_value(module, value, states, None, is_cross=False)
    for step in states.split(2, dim=1):
        stepped = cached_key_value(module, value, step, cache, is_cross=False)
    for ours, expected in zip(stepped, whole, strict=True):
        assert expected.shape[:3] == (B, 1, S)
        torch.testing.assert_close(ours, expected, rtol=0, atol=EXACT64)
    assert cache.layers[0].keys.shape == (B, 1, S, module.query_key.cache_width)


def test_values_are_not_dropped_out_in_evaluation():
    query_key, x, y = random_query_key("shared", 12, True), randn(B, T, D_QUERY), randn(B, S, D_KEY)
    outputs = [run(query_key, x, y)[0] for _ in range(2)]
    assert torch.equal(*outputs)


@takes_cache
def forward(module, states, cache=None, **kwargs):
    return states, cache, kwargs


@pytest.mark.parametrize("name", ["past_key_values", "cache"])  # before transformers 5.24, and since then
def test_a_cache_comes_under_one_name(name):
    cache = DynamicCache()
    assert forward(None, 1, **{name: cache}, scale=2) == (1, cache, {"scale": 2})
    assert forward(None, 1, **{name: None}) == forward(None, 1) == (1, None, {})
    assert forward(None, 1, cache) == (1, cache, {})


def test_a_paged_cache_is_refused():
    for given in ({"cache": object()}, {"cache": object(), "past_key_values": None}):
        with pytest.raises(ModelStateError, match=r"continuous batching.*use generate\(\)"):
            forward(None, 1, **given)


def test_a_cache_that_a_forward_leaves_aside_is_refused():
    with pytest.raises(ModelStateError, match=r"Linear\.forward takes no cache: decorate it with takes_cache"):
        attend(nn.Linear(1, 1), None, None, None, None, eager=None, dropout=0.0, cache=DynamicCache())


def test_packed_heads_split_the_same_with_and_without_the_axis_of_a_cache():
    packed = randn(B, S, H * D_VALUE)
    heads = split_heads(packed.unsqueeze(1), H)
    assert heads.data_ptr() == packed.data_ptr()  # a view
    assert torch.equal(heads, split_heads(packed, H))
    assert torch.equal(heads[:, 1], packed[..., D_VALUE : 2 * D_VALUE])


@pytest.mark.parametrize("width", [D_VALUE - 4, D_VALUE, D_VALUE + 4])
def test_padding_to_one_width_changes_no_output(width):
    query, key, value = randn(B, H, T, width), randn(B, H, S, width, seed=1), randn(B, H, S, D_VALUE, seed=2)
    expected = (query @ key.mT * SCALE).softmax(-1) @ value
    padded = pad_to_one_width(query, key, value, has_one_key=False)
    assert {tensor.shape[-1] for tensor in padded} == {max(width, D_VALUE)}
    output = scaled_dot_product_attention(*padded, scale=SCALE)[..., :D_VALUE]
    torch.testing.assert_close(output, expected, rtol=EXACT64, atol=EXACT64)
