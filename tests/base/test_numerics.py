"""Systems with symmetric positive definite matrices are solved in the memory of the matrix."""

import re
from pathlib import Path

import pytest
import torch

from collab_heads.base import numerics
from collab_heads.base.numerics import (
    STRONGER,
    add_products_,
    cholesky_,
    invert_lower_,
    mirror_,
    positive_inverse_,
    solve_positive,
    with_ridge,
)

ROUNDING = 1e-9  # float64; differences seen: 1e-14


def positive(size: int) -> torch.Tensor:
    rows = torch.randn(2 * size + 1, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return rows.mT @ rows / len(rows)


@pytest.mark.parametrize("size", (0, 1, 60, 300))
def test_products_are_added_above_the_diagonal_and_mirrored(size):
    rows = torch.randn(2, 9, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sums = torch.zeros(size, size, dtype=torch.float64)
    for part in rows:
        add_products_(sums, part)
    expected = rows.flatten(0, 1).mT @ rows.flatten(0, 1)
    torch.testing.assert_close(sums.triu(), expected.triu(), rtol=ROUNDING, atol=ROUNDING)
    assert mirror_(sums) is sums
    torch.testing.assert_close(sums, expected, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("size", (1, 7, 60))
def test_a_system_is_read_from_the_upper_triangle(size):
    matrix, right = positive(size), torch.ones(size, 2, dtype=torch.float64)
    expected = solve_positive(matrix.clone(), right)
    torch.testing.assert_close(solve_positive(matrix.triu(), right), expected, rtol=0, atol=0)


@pytest.mark.parametrize("size", (0, 1, 7, 60))
def test_a_factor_takes_the_place_of_its_matrix(size):
    matrix = positive(size)
    expected, place = torch.linalg.cholesky(matrix), matrix.data_ptr()
    factor = cholesky_(matrix)
    assert factor.data_ptr() == place
    torch.testing.assert_close(factor, expected, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("size", (0, 1, 7, 16, 60))
def test_an_inverse_takes_the_place_of_its_factor(size, monkeypatch):
    """In one panel, in whole ones, and with a smaller last one."""
    monkeypatch.setattr(numerics, "PANEL", 8)
    factor = cholesky_(positive(size))
    expected, place = torch.linalg.inv(factor), factor.data_ptr()
    inverse = invert_lower_(factor)
    assert inverse.data_ptr() == place
    torch.testing.assert_close(inverse, expected, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("size", (0, 1, 60))
def test_the_inverse_of_a_positive_matrix_takes_its_place_on_one_thread(size, monkeypatch):
    """More threads wait for each other in it: beside two busy processes an inverse took fifty times as long."""
    invert, seen, threads = torch.cholesky_inverse, [], torch.get_num_threads()
    monkeypatch.setattr(
        torch, "cholesky_inverse", lambda *a, **k: seen.append(torch.get_num_threads()) or invert(*a, **k)
    )
    matrix = positive(size)
    expected, place = torch.linalg.inv(matrix), matrix.data_ptr()
    torch.set_num_threads(2)
    try:
        inverse = positive_inverse_(matrix)
        assert torch.get_num_threads() == 2 and seen == [1]
    finally:
        torch.set_num_threads(threads)
    assert inverse.data_ptr() == place
    torch.testing.assert_close(inverse, expected, rtol=ROUNDING, atol=ROUNDING)


def test_nothing_else_inverts_or_finds_eigenvectors_on_many_threads():
    files = [path for path in Path(numerics.__file__).parents[1].rglob("*.py") if path.name != "numerics.py"]
    found = [path.name for path in files if "cholesky_inverse(" in path.read_text()]
    bare = [
        path.name for path in files if re.search(r"(?<!with one_thread\(\):)\n +.*linalg\.eigh\(", path.read_text())
    ]
    assert files and not found and not bare


@pytest.mark.parametrize("size", (1, 7, 60))
def test_a_solution_is_that_of_the_inverse(size):
    matrix, right = positive(size), torch.randn(size, 3, dtype=torch.float64)
    expected = torch.linalg.inv(matrix) @ right
    torch.testing.assert_close(solve_positive(matrix, right), expected, rtol=ROUNDING, atol=ROUNDING)
    assert solve_positive(torch.ones(0, 0), torch.ones(0, 3)).shape == (0, 3)


def test_the_least_ridge_that_suffices_is_taken():
    """A matrix with a direction below zero, as rounding leaves it; the strongest ridge fails aloud."""
    below = torch.tensor([1.0, -2e-6], dtype=torch.float64).diag()

    def factor(times: float, ridge: float = 1e-7) -> torch.Tensor:
        return torch.linalg.cholesky(below + times * ridge * torch.eye(2, dtype=torch.float64))

    torch.testing.assert_close(with_ridge(factor), factor(STRONGER[1]), rtol=0, atol=0)
    with pytest.raises(torch.linalg.LinAlgError):
        with_ridge(lambda times: factor(times, 1e-10))
