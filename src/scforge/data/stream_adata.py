"""An AnnData in memory, piece by piece."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import sparse

from scforge.data.checks import check_adata, counts_of
from scforge.data.stream_matrix import ENTRIES, ROWS
from scforge.data.stream_stored import check_modality, missing_column, shared_columns

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData

__all__ = ["AdataStream", "table_digest"]


class AdataStream:
    """An AnnData in memory, as :class:`scforge.data.streams.CellStream`.

    Parameters
    ----------
    adata
        The AnnData.
    layer
        Key in ``adata.layers``; None reads ``adata.X``.
    shared
        Further columns of obs, of the MuData that it is a modality of, in the order of its cells.
    """

    name = "adata"

    def __init__(self, adata: AnnData, layer: str | None = None, *, shared: pd.DataFrame | None = None) -> None:
        check_adata(adata)
        self.adata, self._layer, self._shared = adata, layer, shared
        self.n_cells: int = adata.n_obs

    @classmethod
    def of_mudata(cls, mdata: Any, modality: str | None, layer: str | None = None) -> AdataStream:
        """Take one modality of a MuData in memory, with the columns of ``mdata.obs`` behind its own."""
        check_modality(modality, list(mdata.mod), "mdata")
        adata = mdata.mod[modality]
        shared = shared_columns(mdata.obs, str(modality), adata.obs_names, list(adata.obs.columns))
        return cls(adata, layer, shared=shared)

    @property
    def var(self) -> pd.DataFrame:
        """The table of genes."""
        return self.adata.var

    @cached_property
    def counts(self) -> sparse.csr_matrix:
        """Counts of all cells and genes, checked."""
        return counts_of(self.adata, self._layer)

    @property
    def n_entries(self) -> int:
        """Number of counts above zero, about."""
        return self.counts.nnz

    @cached_property
    def _obs(self) -> pd.DataFrame:
        return self.adata.obs if self._shared is None else self.adata.obs.join(self._shared)

    def obs(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Return the table of cells, or some columns of it."""
        if columns is None:
            return self._obs
        if missing := [column for column in columns if column not in self._obs]:
            raise missing_column(missing[0], self.name, list(self._obs.columns))
        return self._obs[list(columns)]

    def chunks(self, start: int = 0) -> Iterator[tuple[int, sparse.csr_matrix]]:
        """Yield rows from `start` on, as ``(first row, CSR matrix of all genes)``."""
        counts = self.counts
        while start < self.n_cells:
            end = int(np.searchsorted(counts.indptr, counts.indptr[start] + ENTRIES, side="right")) - 1
            stop = min(max(end, start + 1), start + ROWS)
            yield start, counts[start:stop]
            start = stop

    def fingerprint(self) -> dict[str, int | float | str]:
        """Return what tells these cells from others: digests of counts, names and obs."""
        digest = hashlib.blake2b(digest_size=16)
        for part in (self.counts.indptr.astype(np.int64), self.counts.indices, self.counts.data):
            digest.update(str(part.dtype).encode())
            digest.update(np.ascontiguousarray(part))
        return {
            "counts": digest.hexdigest(),
            "obs": table_digest(self._obs),
            "var": table_digest(self.var),
            "n_cells": self.n_cells,
            "n_genes": self.adata.n_vars,
        }


def table_digest(table: pd.DataFrame) -> str:
    """Return a digest of a table and its index; columns that scvi-tools adds do not count."""
    import pandas as pd

    kept = table[[column for column in table.columns if not str(column).startswith("_scvi_")]]
    digest = hashlib.blake2b("\0".join(map(str, kept.columns)).encode(), digest_size=16)
    digest.update(pd.util.hash_pandas_object(kept.astype(str), index=True).to_numpy().tobytes())
    return digest.hexdigest()
