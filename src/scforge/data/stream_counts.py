"""Pieces of a matrix, checked to be counts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from scipy import sparse

from scforge.data.checks import value_problem
from scforge.data.compressed import row_sums
from scforge.data.stream_matrix import Matrix
from scforge.errors import DataError

__all__ = ["checked_chunks", "estimated_entries"]


def checked_chunks(matrix: Matrix, start: int = 0) -> Iterator[tuple[int, sparse.csr_matrix]]:
    """Yield the rows of a matrix from `start` on, see :meth:`Matrix.row_chunks`, after checking that they are counts.

    Raises
    ------
    DataError
        If a value is no whole number of at least zero, or a cell has no count.
    """
    for first, chunk in matrix.row_chunks(start=start):
        if problem := value_problem(chunk.data):
            raise DataError(
                f"{matrix.place} {problem} in the rows from {first} on, but raw counts are needed; "
                "name the layer that holds them."
            )
        totals = row_sums(chunk)
        if not totals.all():
            raise DataError(
                f"{matrix.place} has cells without any count (first: row {first + int((totals == 0).argmax())}); "
                "remove them with sc.pp.filter_cells(adata, min_counts=1)."
            )
        yield first, chunk


def estimated_entries(matrix: Matrix) -> int:
    """Return how many entries above zero a matrix has; of a dense one what its first rows let expect."""
    if matrix.kind != "dense":
        return matrix.n_stored
    _, chunk = next(matrix.row_chunks())
    return int(np.ceil(chunk.nnz / chunk.shape[0] * matrix.shape[0]))
