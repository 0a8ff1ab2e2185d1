"""What several test files of stores share."""

from collections.abc import Callable

import anndata as ad
import numpy as np
import pytest

from scforge.data import CellBlock, GeneVocab, open_cells
from scforge.data.cells import CellSource
from scforge.data.store import StoreCells


@pytest.fixture
def twin() -> Callable[..., CellSource]:
    """Return a function that gives the same cells in memory, in the order of the store."""

    def twin(cells: StoreCells, adata: ad.AnnData, vocab: GeneVocab | None = None) -> CellSource:
        return open_cells(adata[cells.names()].copy(), vocab or cells.vocab)

    return twin


@pytest.fixture
def assert_same() -> Callable[[CellBlock, CellBlock], None]:
    """Return a function that compares two blocks of cells."""

    def assert_same(one: CellBlock, two: CellBlock) -> None:
        assert len(one) == len(two)
        for name in ("indptr", "genes", "counts", "totals", "measured"):
            here, there = getattr(one, name), getattr(two, name)
            np.testing.assert_array_equal(here, there, err_msg=name)
            assert here.dtype == there.dtype, name

    return assert_same
