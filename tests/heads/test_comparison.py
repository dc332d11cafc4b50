"""Rank correlation, against scipy."""

import pytest
import torch

from collab_heads.errors import ShapeError
from collab_heads.heads.comparison import rank_correlation


@pytest.mark.parametrize("ties", (False, True))
def test_it_is_spearmans(ties):
    stats = pytest.importorskip("scipy.stats")
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        one, other = torch.randn(2, 40, generator=generator, dtype=torch.float64)
        if ties:
            one, other = one.round(), other.round()
            assert one.unique().numel() < 10
        expected = stats.spearmanr(one.numpy(), (one + other).numpy()).statistic
        assert rank_correlation(one, one + other) == pytest.approx(expected, abs=1e-12)
        assert rank_correlation(one, one.exp()) == pytest.approx(1.0) and rank_correlation(one, -one) == pytest.approx(
            -1
        )


def test_edges():
    assert rank_correlation(torch.ones(4), torch.arange(4.0)) == 0.0
    with pytest.raises(ShapeError, match=r"\(3,\) and \(4,\)"):
        rank_correlation(torch.ones(3), torch.ones(4))
