"""Double precision where the device has it, ridges that suffice, and threads where they help."""

from collections.abc import Callable
from contextlib import contextmanager, nullcontext, suppress

import torch
from torch import Tensor

PANEL = 384  # columns of a triangular matrix that are inverted together
COLUMNS = 128  # of a block of products, at least; blocks below the diagonal are left out
BLOCKS = 8  # over all columns, at most
STRONGER = (1, 30, 1000)  # times a ridge, until a matrix of moments is positive definite
ONE_THREAD = 1024  # the largest size for which one thread is quickest


def float64(tensor: Tensor) -> Tensor:
    """Convert to double precision, on the CPU where the device has no double precision (Apple's MPS)."""
    return tensor.to("cpu" if tensor.device.type == "mps" else tensor.device, torch.float64)


def add_products_(sums: Tensor, rows: Tensor) -> None:
    """Add the products of columns, rows^T rows, to sums, on and above their diagonal.

    Args:
        sums: [n, n]; products are computed in the precision of the rows, and added in its own.
        rows: [N, n].
    """
    for own in column_blocks(rows.shape[1]):
        sums[own, own.start :] += (rows[:, own].mT @ rows[:, own.start :]).to(sums.device)


def mirror_(sums: Tensor) -> Tensor:
    """Copy what a matrix [n, n] has above its diagonal to the places below, and return it."""
    for own in column_blocks(len(sums)):
        sums[own, own] = sums[own, own].triu() + sums[own, own].triu(1).mT
        sums[own.stop :, own] = sums[own, own.stop :].mT
    return sums


def column_blocks(count: int) -> list[slice]:
    """Cut columns into blocks of products."""
    width = max(COLUMNS, -(-count // BLOCKS))
    return [slice(start, min(start + width, count)) for start in range(0, count, width)]


def cholesky_(matrix: Tensor) -> Tensor:
    """Overwrite a symmetric positive definite matrix by its lower Cholesky factor, and return this: [n, n].

    Only what is on and above its diagonal is read.
    """
    columns = matrix.mT  # the layout of LAPACK: no copy is made
    return torch.linalg.cholesky(columns, out=columns)


def invert_lower_(matrix: Tensor) -> Tensor:
    """Overwrite a lower triangular matrix, with zeros above its diagonal, by its inverse, and return this: [n, n]."""
    panels = [slice(start, min(start + PANEL, len(matrix))) for start in range(0, len(matrix), PANEL)]
    for index, own in enumerate(panels):
        before, corner = matrix[own, : own.start], matrix[own, own]
        identity = torch.eye(len(corner), dtype=matrix.dtype, device=matrix.device)
        corner.copy_(torch.linalg.solve_triangular(corner, identity, upper=False))
        for cols in panels[:index]:  # what is right of them is as it was
            before[:, cols] = corner @ (before[:, cols.start :] @ matrix[cols.start : own.start, cols]).neg_()
    return matrix


def positive_inverse_(matrix: Tensor) -> Tensor:
    """Invert a symmetric and positive definite matrix [n, n] in its memory, on one thread, see `one_thread`."""
    with one_thread():
        return torch.cholesky_inverse(cholesky_(matrix), out=matrix)


def solve_positive(matrix: Tensor, right: Tensor) -> Tensor:
    """Solve matrix @ x = right in the memory of the matrix, which is lost.

    Args:
        matrix: [n, n], symmetric and positive definite; what is below its diagonal is not read.
        right: [n, k].
    """
    factor = cholesky_(matrix)
    half = torch.linalg.solve_triangular(factor, right, upper=False)
    return torch.linalg.solve_triangular(factor.mT, half, upper=True)


def with_ridge(compute: Callable[[float], Tensor]) -> Tensor:
    """Return what a matrix of moments gives with the least multiple of its ridge that makes it positive definite.

    Few texts, or equal ones, leave directions with nothing but the rounding of float32 products, which may exceed the
    ridge.

    Args:
        compute: takes what the ridge is multiplied by.

    Raises:
        torch.linalg.LinAlgError: if the strongest ridge does not suffice.
    """
    *weaker, strongest = STRONGER
    for times in weaker:
        with suppress(torch.linalg.LinAlgError):
            return compute(times)
    return compute(strongest)


@contextmanager
def keeping_threads():
    """Restore the number of torch's threads when the context ends; engines set it, too."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def one_thread():
    """Use one torch thread while the context is open, for what waits for every thread many times.

    These are inverses from a Cholesky factor, and eigenvectors. Measured at n = 1,536 on two cores: an inverse takes
    0.11 s with one thread and 0.08 with two; beside two busy processes 0.5 s with one, and 24 with two.
    """
    with keeping_threads():
        torch.set_num_threads(1)
        yield


@contextmanager
def few_threads(size: int):
    """Use one torch thread for sizes up to `ONE_THREAD` while the context is open, torch's own number for larger ones.

    On a busy machine the threads of many small solves mostly wait for each other. Measured on two busy cores at
    12 x 768, R=256: 43 s with two threads, 2 s with one.
    """
    with one_thread() if size <= ONE_THREAD else nullcontext():
        yield
