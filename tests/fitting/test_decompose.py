"""Decompositions are pure functions: what they report is checked against the dense tensor that they never build."""

import pytest
import torch

from collab_heads.errors import ArgumentError, ShapeError
from collab_heads.fitting.decompose import decompose_per_head, decompose_shared, input_root
from collab_heads.fitting.solvers import MAX_SWEEPS, largest_triplets
from collab_heads.layers.shared_query_key import block_mixing

H, D_HEAD, D_QUERY, D_KEY = 4, 5, 14, 11
EXACT = H * D_HEAD
EXACT64 = 1e-12  # float64 sums in another order; differences seen: 2e-15, and 1e-14 in norms, compared relatively
# An error comes out of the difference of squares, so of 1e-16 relative rounding its root, 1e-8, is left near zero.
# Errors seen of exact fits: 7e-8.
NEAR_ZERO = 1e-6
# Both methods end in local optima, and parafac's may be the better one: seen, over 4 seeds, by 2e-4 at rank 7.
LOCAL_OPTIMA = 1e-3


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def weights():
    """Random heads of unequal size."""
    size = torch.arange(1.0, H + 1, dtype=torch.float64)[:, None, None]
    return randn(H, D_HEAD, D_QUERY, seed=1) * size, randn(H, D_HEAD, D_KEY, seed=2)


def projections_of_rank(rank):
    """Heads that mix the same `rank` <= d_k query/key rows, hidden by an invertible map within every head."""
    query_rows, key_rows, mixing = randn(rank, D_QUERY, seed=3), randn(rank, D_KEY, seed=4), randn(H, rank, seed=5)
    basis, _ = torch.linalg.qr(randn(H, D_HEAD, rank, seed=6))
    return basis @ query_rows, (basis * mixing[:, None]) @ key_rows


def samples(count, dim, seed):
    """Correlated inputs of very unequal variance, with a mean."""
    spread = torch.logspace(-1, 1, dim, dtype=torch.float64)
    return (randn(count, dim, seed=seed) * spread) @ randn(dim, dim, seed=seed + 1) + randn(dim, seed=seed + 2)


def roots(ridge=0.0):
    x, y = samples(40, D_QUERY, 10), samples(50, D_KEY, 20)
    return {"query_root": input_root(x.T @ x / len(x), ridge), "key_root": input_root(y.T @ y / len(y), ridge)}


def dense(query, key):
    return torch.einsum("hdi,hdj->hij", query, key)


def rebuilt(found):
    if found.mixing is None:
        return dense(found.query.unflatten(0, (H, -1)), found.key.unflatten(0, (H, -1)))
    return torch.einsum("ri,hr,rj->hij", found.query, found.mixing, found.key)


def dense_error(query, key, found, query_root=None, key_root=None):
    truth, approximation = dense(query.double(), key.double()), rebuilt(found)
    if query_root is not None:
        truth, approximation = (query_root.T @ tensor @ key_root for tensor in (truth, approximation))
    return float((truth - approximation).norm() / truth.norm())


@pytest.mark.parametrize("rank", (1, 3, D_HEAD))
@pytest.mark.parametrize("weighted", (False, True))
def test_planted_rank_is_recovered(rank, weighted):
    query, key = projections_of_rank(rank)
    found = decompose_shared(query, key, rank, tol=0, max_sweeps=3000, **(roots() if weighted else {}))
    assert found.relative_error < NEAR_ZERO
    assert dense_error(query, key, found) < 100 * NEAR_ZERO  # undoing the roots magnifies; seen: 5e-7
    if rank > 1:
        assert decompose_shared(query, key, rank - 1, tol=0, max_sweeps=300).relative_error > 0.01


@pytest.mark.parametrize("rank", (1, 2, 7, 13, EXACT - 1, EXACT))
@pytest.mark.parametrize("weighted", (False, True))
def test_reported_error_is_that_of_the_dense_tensor(rank, weighted):
    (query, key), given = weights(), roots() if weighted else {}
    for sweeps in (0, 3, 100):
        found = decompose_shared(query, key, rank, max_sweeps=sweeps, **given)
        assert found.query.shape == (rank, D_QUERY)
        assert found.key.shape == (rank, D_KEY)
        assert found.mixing.shape == (H, rank)
        assert found.relative_error == pytest.approx(dense_error(query, key, found, **given), abs=NEAR_ZERO)
    if rank < EXACT:
        assert 100 * NEAR_ZERO < found.relative_error < 1


@pytest.mark.parametrize("width", range(1, D_HEAD + 1))
@pytest.mark.parametrize("weighted", (False, True))
def test_per_head_is_the_eckart_young_optimum(width, weighted):
    (query, key), given = weights(), roots() if weighted else {}
    found = decompose_per_head(query, key, width, **given)
    truth = dense(query, key)
    if weighted:
        truth = given["query_root"].T @ truth @ given["key_root"]
    values = torch.linalg.svdvals(truth)
    optimum = float((values[:, width:].square().sum() / values.square().sum()).sqrt())
    assert found.query.shape == (H * width, D_QUERY)
    assert found.relative_error == pytest.approx(optimum, abs=EXACT64)
    assert dense_error(query, key, found, **given) == pytest.approx(optimum, abs=EXACT64)


@pytest.mark.parametrize("rank", (2, 7, 13))
@pytest.mark.parametrize("weighted", (False, True))
def test_error_never_grows_with_sweeps(rank, weighted):
    (query, key), given = weights(), roots() if weighted else {}

    def run(sweeps):
        found = decompose_shared(query, key, rank, tol=0, max_sweeps=sweeps, **given)
        assert found.sweeps == sweeps
        return found.relative_error

    errors = [run(sweeps) for sweeps in (0, 1, 2, 5, 10, 30)]
    assert errors == sorted(set(errors), reverse=True)
    assert errors[-1] < errors[0] - 0.005


def test_start_is_the_largest_triplets_over_all_heads():
    query, key = weights()
    values = torch.linalg.svdvals(dense(query, key)).flatten().sort(descending=True).values
    for rank in (1, 7, 13):
        start_query, start_key, mixing = largest_triplets(query, key, rank)
        error = (dense(query, key) - torch.einsum("ri,hr,rj->hij", start_query, mixing, start_key)).norm()
        assert float(error) == pytest.approx(float(values[rank:].norm()), rel=EXACT64)
        assert (mixing.sum(0) == 1).all()
        found = decompose_shared(query, key, rank, max_sweeps=0)
        assert found.relative_error == pytest.approx(float(error / dense(query, key).norm()), rel=1e-9)


def test_tolerance_ends_the_sweeps():
    query, key = weights()
    sweeps = [decompose_shared(query, key, 7, tol=tol).sweeps for tol in (0.1, 1e-3, 1e-5)]
    assert sweeps[0] == 1 < sweeps[1] < sweeps[2] == MAX_SWEEPS


def test_exact_at_full_width():
    query, key = weights()
    for found in (decompose_shared(query, key, EXACT, **roots()), decompose_per_head(query, key, D_HEAD, **roots())):
        assert found.relative_error == 0
        assert torch.equal(found.query, query.flatten(0, 1))
        assert torch.equal(found.key, key.flatten(0, 1))
    torch.testing.assert_close(rebuilt(decompose_shared(query, key, EXACT)), dense(query, key), rtol=0, atol=EXACT64)


@pytest.mark.parametrize("rank", (1, 3, 4, 7, 20))
def test_block_mixing(rank):
    mixing = block_mixing(H, rank)
    assert mixing.shape == (H, rank)
    assert (mixing.sum(0) == 1).all()
    assert mixing.sum(1).max() - mixing.sum(1).min() <= 1
    owners = mixing.argmax(0)
    assert torch.equal(owners, owners.sort().values)


@pytest.mark.parametrize("kind", ("shared", "per_head"))
def test_weighted_error_is_that_of_scores_on_samples(kind):
    """sqrt(E[(x^T dT y)^2] / E[(x^T T y)^2]) over all pairs of the samples that the moments come from."""
    query, key = weights()
    x, y = samples(40, D_QUERY, 10), samples(50, D_KEY, 20)
    if kind == "shared":
        found = decompose_shared(query, key, 7, **roots())
    else:
        found = decompose_per_head(query, key, 2, **roots())
    scores, ours = (torch.einsum("ni,hij,mj->hnm", x, tensor, y) for tensor in (dense(query, key), rebuilt(found)))
    expected = float(((scores - ours).square().mean() / scores.square().mean()).sqrt())
    assert found.relative_error == pytest.approx(expected, rel=1e-6)
    assert found.relative_error < dense_error(query, key, decompose_shared(query, key, 7), **roots())


def test_any_root_of_the_moments_gives_the_same():
    """Column signs of a lower-triangular root are free, and so is its scale."""
    (query, key), given = weights(), roots()
    signs = {name: torch.randint(0, 2, (len(root),), generator=generator()) * 2.0 - 1 for name, root in given.items()}
    others = [
        {name: root * signs[name] for name, root in given.items()},
        {name: root * 3.0 for name, root in given.items()},
    ]
    for decompose, size in ((decompose_shared, 7), (decompose_per_head, 2)):
        expected = decompose(query, key, size, **given)
        assert (rebuilt(expected) - rebuilt(decompose(query, key, size))).norm() > 0.1
        for other in others:
            assert not torch.equal(other["query_root"], given["query_root"])
            found = decompose(query, key, size, **other)
            assert found.relative_error == pytest.approx(expected.relative_error, rel=1e-6)
            torch.testing.assert_close(rebuilt(found), rebuilt(expected), rtol=0, atol=1e-9)  # seen: 5e-12


def test_identity_roots_are_no_roots():
    query, key = weights()
    given = {"query_root": torch.eye(D_QUERY).double(), "key_root": torch.eye(D_KEY).double()}
    found, expected = decompose_shared(query, key, 7, **given), decompose_shared(query, key, 7)
    torch.testing.assert_close(found.query, expected.query, rtol=0, atol=EXACT64)
    assert found.relative_error == pytest.approx(expected.relative_error, abs=EXACT64)


def test_moments_that_rounding_makes_indefinite_have_a_root():
    """As the moments of heads that put out nearly the same for all tokens, around their mean."""
    moments = torch.diag(torch.tensor([1.0, 1e-3, -4e-9], dtype=torch.float64))
    root = input_root(moments, 0.0, 1e-10)  # 30 times this is too little, 1,000 times is enough
    torch.testing.assert_close(root @ root.mT, moments + 1e-7 * torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-15)
    with pytest.raises(torch.linalg.LinAlgError):
        input_root(moments, 0.0, 1e-13)


def test_input_root():
    x = samples(5, D_QUERY, 10)  # fewer samples than dimensions: the ridge makes the root exist
    moments = x.T @ x / len(x)
    root = input_root(moments.float(), 1e-3)
    assert root.dtype == torch.float64
    assert torch.equal(root, root.tril())
    expected = moments + 1e-3 * moments.trace() / D_QUERY * torch.eye(D_QUERY)
    torch.testing.assert_close(root @ root.T, expected, rtol=0, atol=float(1e-5 * moments.abs().max()))  # float32 input


def zero(query, key):
    return torch.zeros_like(query), key


def zero_head(query, key):
    return query * torch.tensor([1.0, 0, 1, 0])[:, None, None], key


def equal_heads(query, key):
    return query[:1].expand_as(query), key[:1].expand_as(key)


def low_rank(query, key):
    return query[:, :1].expand_as(query), key


@pytest.mark.parametrize("spoil", (zero, zero_head, equal_heads, low_rank))
@pytest.mark.parametrize("weighted", (False, True))
def test_degenerate_weights_stay_finite(spoil, weighted):
    (query, key), given = spoil(*weights()), roots() if weighted else {}
    found = [decompose_shared(query, key, rank, **given) for rank in (1, 6, 13, EXACT - 1, EXACT)]
    found += [decompose_per_head(query, key, width, **given) for width in range(1, D_HEAD + 1)]
    for each in found:
        tensors = [each.query, each.key] + ([] if each.mixing is None else [each.mixing])
        assert all(torch.isfinite(tensor).all() for tensor in tensors)
        assert 0 <= each.relative_error < 1
        if spoil is zero:
            assert each.relative_error == 0
            assert rebuilt(each).abs().max() == 0
        else:
            assert each.relative_error == pytest.approx(dense_error(query, key, each, **given), abs=NEAR_ZERO)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_float64_inside(dtype):
    query, key = (tensor.to(dtype) for tensor in weights())
    for found, expected in (
        (decompose_shared(query, key, 7, **roots()), decompose_shared(query.double(), key.double(), 7, **roots())),
        (decompose_per_head(query, key, 2), decompose_per_head(query.double(), key.double(), 2)),
        (decompose_shared(query, key, EXACT), decompose_shared(query.double(), key.double(), EXACT)),
    ):
        assert found.query.dtype == found.key.dtype == torch.float64
        assert found.mixing is None or found.mixing.dtype == torch.float64
        assert torch.equal(found.query, expected.query)
        assert found.relative_error == expected.relative_error


def test_factors_share_the_size():
    """Query and key rows of a component are equally long and its largest mixing entry is 1 in magnitude."""
    found = decompose_shared(*weights(), 7)
    torch.testing.assert_close(found.query.norm(dim=1), found.key.norm(dim=1), rtol=EXACT64, atol=0)
    torch.testing.assert_close(found.mixing.abs().amax(0), torch.ones(7).double(), rtol=EXACT64, atol=0)


@pytest.mark.parametrize("weighted", (False, True))
def test_parafac_is_seeded_and_als_is_no_worse(weighted):
    pytest.importorskip("tensorly")
    (query, key), given = weights(), roots() if weighted else {}
    for rank in (3, 7, 13):
        first, again, other = (
            decompose_shared(query, key, rank, method="parafac", seed=seed, **given) for seed in (0, 0, 1)
        )
        assert torch.equal(first.query, again.query)
        assert torch.equal(first.mixing, again.mixing)
        assert not torch.equal(first.query, other.query)
        assert first.relative_error == pytest.approx(dense_error(query, key, first, **given), abs=NEAR_ZERO)
        ours = decompose_shared(query, key, rank, tol=0, **given)
        assert ours.relative_error <= first.relative_error + LOCAL_OPTIMA


@pytest.mark.parametrize("rank", (0, -1, EXACT + 1))
def test_bad_ranks(rank):
    with pytest.raises(ArgumentError, match=rf"rank {rank} .*1\.\.{EXACT} \({H} heads of width {D_HEAD}\)"):
        decompose_shared(*weights(), rank)


@pytest.mark.parametrize("width", (0, -1, D_HEAD + 1))
def test_bad_head_widths(width):
    with pytest.raises(ArgumentError, match=rf"width {width} .*1\.\.{D_HEAD}"):
        decompose_per_head(*weights(), width)


def test_unknown_method():
    with pytest.raises(ArgumentError, match=r"'svd'.*als, parafac"):
        decompose_shared(*weights(), 3, method="svd")


@pytest.mark.parametrize("shape", ((H, D_HEAD + 1, D_KEY), (H - 1, D_HEAD, D_KEY), (EXACT, D_KEY)))
def test_shapes_that_do_not_fit(shape):
    query, _ = weights()
    for decompose in (decompose_shared, decompose_per_head):
        with pytest.raises(ShapeError) as caught:
            decompose(query, torch.zeros(shape), 3)
        assert str(tuple(query.shape)) in str(caught.value)
        assert str(shape) in str(caught.value)
