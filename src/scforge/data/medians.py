"""Medians of normalized counts, computed in one pass over the cells."""

from __future__ import annotations

import numba
import numpy as np

from scforge._constants import TARGET_SUM
from scforge.data.cells import CellBlock
from scforge.errors import DataError

_RATIO = 1.02
"""Ratio of the edges of a bin; values differ from the bin center by less than 1%."""

_LOWEST = 1e-5
"""Smallest value: one count in a cell with a billion counts."""

_N_BINS = int(np.ceil(np.log(TARGET_SUM / _LOWEST) / np.log(_RATIO))) + 1

_CENTERS = 2 * (_LOWEST * _RATIO ** np.arange(_N_BINS, dtype=np.float64)) * _RATIO / (1 + _RATIO)
"""Value in each bin that minimizes the maximum relative error."""


class StreamingMedians:
    """Median of the nonzero CP10K values of each gene, computed from a stream of blocks of cells.

    Each gene has a histogram whose bin edges have a constant ratio. Memory is 4.2 kB per gene for any number of cells,
    the order of the blocks does not matter, and the relative error is below 1%.

    Parameters
    ----------
    n_genes
        Number of vocabulary genes.

    Examples
    --------
    >>> from scipy import sparse
    >>> counts = sparse.csr_matrix([[1, 9], [2, 8], [3, 0]])
    >>> medians = StreamingMedians(n_genes=2)
    >>> medians.update(CellBlock.from_csr(counts, totals=np.full(3, 100)))
    >>> np.allclose(medians.medians(), [200, 850], rtol=0.01)  # of 100, 200, 300 and of 900, 800
    True
    """

    def __init__(self, n_genes: int) -> None:
        self.n_genes = n_genes
        self._counts = np.zeros((n_genes, _N_BINS), dtype=np.uint32)

    def update(self, block: CellBlock) -> None:
        """Add the cells of a block to the histograms.

        Parameters
        ----------
        block
            The cells. Pass every cell exactly once.

        Raises
        ------
        DataError
            If a count is larger than the total of its cell.
        """
        if not _fill(self._counts, block.indptr, block.genes, block.counts, block.totals):
            raise DataError(
                "contains a count that is not positive or exceeds its cell's total; pass raw counts.", argument="block"
            )

    def medians(self) -> np.ndarray:
        """Return the medians, float64, shape (n_genes,); 1 for genes that no cell expresses."""
        parts = []
        for start in range(0, self.n_genes, 1024):
            below = np.cumsum(self._counts[start : start + 1024], axis=1, dtype=np.int64)
            n = below[:, -1]
            # Of an even number of values the median is the mean of the two in the middle, as NumPy has it.
            low, high = ((below > ((n - shift) // 2)[:, None]).argmax(axis=1) for shift in (1, 0))
            parts.append(np.where(n > 0, (_CENTERS[low] + _CENTERS[high]) / 2, 1.0))
        return np.concatenate(parts)


@numba.njit(cache=True, nogil=True)
def _fill(histogram, indptr, genes, counts, totals):
    n_cells = len(indptr) - 1
    for cell in range(n_cells):
        most = totals[cell] * (1.0 + 1e-6)  # counts are float32, which rounds
        least = totals[cell] * _LOWEST / TARGET_SUM
        for entry in range(indptr[cell], indptr[cell + 1]):
            if not (0.0 < counts[entry] <= most and least <= counts[entry]):
                return False
    # Gene by gene: the histograms of all genes are too large for the caches of a processor.
    stops = np.zeros(len(histogram) + 1, dtype=np.int64)
    for entry in range(indptr[0], indptr[n_cells]):
        stops[genes[entry] + 1] += 1
    stops = np.cumsum(stops)
    places = np.empty(stops[-1], dtype=np.int16)
    scale = 1.0 / np.log(_RATIO)
    logs = np.log(np.arange(1, 256)) * scale  # most counts are small
    for cell in range(n_cells):
        log_factor = np.log(TARGET_SUM / totals[cell] / _LOWEST) * scale if totals[cell] > 0 else 0.0
        for entry in range(indptr[cell], indptr[cell + 1]):
            count = counts[entry]
            small = count < 256 and count == int(count)
            column = int(log_factor + (logs[int(count) - 1] if small else np.log(count) * scale))
            places[stops[genes[entry]]] = min(max(column, 0), histogram.shape[1] - 1)
            stops[genes[entry]] += 1
    first = 0
    for gene in range(len(histogram)):
        for column in places[first : stops[gene]]:
            histogram[gene, column] += 1
        first = stops[gene]
    return True
