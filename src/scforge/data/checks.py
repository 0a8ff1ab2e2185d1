"""Check the counts and columns of an AnnData, with numba kernels that copy rows of CSR matrices."""

from __future__ import annotations

import re
import weakref
import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import h5py
import numba
import numpy as np
from scipy import sparse

from scforge._checks import check_known
from scforge._columns import texts_of
from scforge._constants import TARGET_SUM
from scforge.errors import DataError, OptionError, listing, warn

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData


_CHECKED: dict[int, tuple[Any, ...]] = {}
"""A mapping from id to fingerprint of matrices whose counts were checked; a changed matrix is checked again."""

_MAX_COUNT = float(np.finfo(np.float32).max)
"""Largest count: models compute with counts as float32."""

REPAIR = "write the file again, or rebuild the matrix"
"""Advice for a corrupted matrix."""

_FEW_VALUES = 50
"""Maximum number of distinct values, including fractions, that are accepted as batches, e.g. time points or doses."""

_BARCODE = re.compile(r"(?:.*[_:#])?[ACGT]{10,}(?:[-_.].*)?")
"""Pattern of barcodes as cell names, with optional prefixes and suffixes from concatenated data sets."""

_NORMALIZED = "pass the layer that contains raw counts, or undo the normalization"
"""Advice for values that are not counts, if no layer with counts is found."""

_UNMEASURED = "remove genes that were not measured in all cells, e.g. with anndata.concat(..., join='inner')"
"""Advice for missing values, usually from an outer join of data sets with different genes."""

_NUMERIC = "biuf"
"""Kinds of the dtypes of numbers."""

_SAMPLED, _EQUAL, _DEEP = 1000, 0.1, 20
"""Number of cells to inspect; coefficient of variation below which library sizes are nearly equal (typical data have
about 0.5); and mean number of counts per cell from which on some gene should have a count above 1."""


def sound_csr(matrix: Any, where: str) -> sparse.csr_matrix:
    """Return `matrix` as CSR, without a copy if possible. Raises a DataError that names `where` if it is corrupted."""
    if problem := compressed_problem(matrix):
        raise DataError(f"is corrupted: {problem}; {REPAIR}.", argument=where)
    if isinstance(matrix, sparse.csr_matrix) and len(matrix.data) == len(matrix.indices) == matrix.indptr[-1]:
        return matrix
    return sparse.csr_matrix(matrix)


def canonical(matrix: sparse.csr_matrix) -> sparse.csr_matrix:
    """Return a copy with sorted rows, without zeros, and with duplicate entries summed; integers become int64."""
    matrix = matrix.astype(np.int64 if matrix.dtype.kind in "iu" else matrix.dtype, copy=True)
    matrix.sum_duplicates()
    matrix.eliminate_zeros()
    return matrix


def compressed_problem(matrix: Any) -> str | None:
    """Return the problem with the arrays of a compressed matrix, or None if there is none or it is not compressed."""
    if not sparse.issparse(matrix) or matrix.format not in ("csr", "csc"):
        return None
    for name in ("data", "indices", "indptr"):
        part = getattr(matrix, name)
        # What anndata reads from a corrupted file may be no array.
        if not isinstance(part, np.ndarray) or part.ndim != 1 or (name != "data" and part.dtype.kind not in "iu"):
            return f"{name} is not a one-dimensional array of numbers"
    n_major, n_minor = matrix.shape if matrix.format == "csr" else matrix.shape[::-1]
    if len(matrix.indptr) != n_major + 1:
        return f"indptr has {len(matrix.indptr)} values, expected {n_major + 1}"
    n_entries = min(len(matrix.indices), len(matrix.data))
    return boundary_problem(matrix.indptr, n_entries) or index_problem(matrix.indices[: matrix.indptr[-1]], n_minor)


def boundary_problem(indptr: np.ndarray, n_entries: int) -> str | None:
    """Return the problem with boundaries that should start at 0 and fit `n_entries` entries, or None."""
    if (indptr[1:] < indptr[:-1]).any():
        return "indptr is not in ascending order"
    if int(indptr[0]) != 0 or int(indptr[-1]) > n_entries:
        return f"indptr runs from {indptr[0]} to {indptr[-1]}, but there are {n_entries} entries"
    return None


def index_problem(indices: np.ndarray, n_minor: int) -> str | None:
    """Return the problem with an index that is out of range, or None."""
    if not len(indices):
        return None
    low, high = int(indices.min()), int(indices.max())
    if low >= 0 and high < n_minor:
        return None
    return f"it contains the index {low if low < 0 else high}, which is not in the range 0 to {n_minor - 1}"


def row_sums(matrix: sparse.csr_matrix) -> np.ndarray:
    """Return the sum of each row, float64 for any dtype of the matrix, shape (number of rows,)."""
    return np.asarray(matrix.sum(axis=1, dtype=np.float64)).ravel()


def log1p_cp10k_rows(counts: sparse.csr_matrix, totals: np.ndarray) -> sparse.csr_matrix:
    """Return log1p of counts per 10,000, given the total counts of each cell, as a new float32 matrix."""
    values = counts.astype(np.float32, copy=True)
    values.data *= np.repeat((TARGET_SUM / totals).astype(np.float32), np.diff(values.indptr))
    np.log1p(values.data, out=values.data)
    return values


def row_checksums(indptr: np.ndarray, genes: np.ndarray, counts: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Return a checksum of the genes, counts and total of each row, uint32, shape (number of rows,).

    The checksum depends on the order of the entries, but not on the types of the arrays.
    """
    sums = np.empty(len(indptr) - 1, dtype=np.uint32)
    # Bits of a positive number are those of an unsigned one, which is mixed in half the time.
    parts = (part.view(f"u{part.itemsize}") if part.dtype.kind == "i" else part for part in (genes, counts))
    bits = np.ascontiguousarray(totals, dtype=np.float64).view(np.uint64)
    _checksums(indptr.astype(np.int64, copy=False), *parts, bits, sums)  # type: ignore[call-arg]
    return sums


def pick_genes(counts: sparse.csr_matrix, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return boundaries, new gene indices (int32) and counts (float32) of sorted rows, without columns mapped to -1.

    The new indices in `columns` must be ascending, so that rows need not be sorted again.
    """
    indptr = np.empty(len(counts.indptr), dtype=np.int64)
    genes = np.empty(len(counts.indices), dtype=np.int32)
    kept = np.empty(len(counts.indices), dtype=np.float32)
    _pick(counts.indptr, counts.indices, counts.data, columns, indptr, genes, kept)
    return indptr, genes[: indptr[-1]], kept[: indptr[-1]]


@numba.njit(cache=True, nogil=True)
def unsound_row(indptr, indices, data, n_genes):
    """Return the first row with unsorted genes, an explicit zero or a gene that is out of range, or -1."""
    for row in range(len(indptr) - 1):
        last = np.int64(-1)
        for entry in range(indptr[row], indptr[row + 1]):
            gene = np.int64(indices[entry])
            if gene <= last or gene >= n_genes or data[entry] == 0:
                return row
            last = gene
    return -1


@numba.njit(cache=True, nogil=True)
def _checksums(indptr, genes, counts, totals, sums):
    """Sum a mix of the position, gene and count of each entry, so that any single change is seen."""
    odd, other = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
    step, high = np.uint64(0xD1342543DE82EF95), np.uint64(32)
    for row in range(len(indptr) - 1):
        total = (totals[row] + odd) * other
        offset = np.uint64(0)
        for entry in range(indptr[row], indptr[row + 1]):
            offset += step
            mixed = ((np.uint64(genes[entry]) << high | np.uint64(counts[entry])) ^ offset) * odd
            total += (mixed ^ (mixed >> high)) * other
        sums[row] = np.uint32(total ^ (total >> high))


@numba.njit(cache=True, nogil=True)
def _pick(indptr, indices, data, columns, out_indptr, genes, counts):
    out = 0
    out_indptr[0] = 0
    for row in range(len(indptr) - 1):
        for entry in range(indptr[row], indptr[row + 1]):
            column = columns[indices[entry]]
            # Written in any case and taken back if the gene is not wanted: no processor could guess which are.
            genes[out] = column
            counts[out] = data[entry]
            out += column >= 0
        out_indptr[row + 1] = out


def check_is_adata(adata: Any, *, argument: str = "adata") -> None:
    """Raise an OptionError if `adata` is not an AnnData; it may be empty or backed."""
    import anndata

    if not isinstance(adata, anndata.AnnData):
        kind = type(adata).__name__
        hint = "read it with anndata.read_h5ad first" if isinstance(adata, str) else "pass an anndata.AnnData"
        if isinstance(adata, list | tuple):
            hint = "open several files with scforge.data.open_cells([...]), or read them with scforge.data.read_h5ad"
        if kind == "MuData":
            hint = "call setup_mudata, or pass one of its modalities, mdata.mod[...]"
        raise OptionError(f"is of type {kind!r}; {hint}.", argument=argument)


def check_adata(adata: Any, *, argument: str = "adata") -> None:
    """Raise an error if `adata` is not an AnnData with cells and genes, in memory or backed."""
    import pandas as pd

    check_is_adata(adata, argument=argument)
    if adata.n_obs == 0 or adata.n_vars == 0:
        raise DataError(
            f"is empty ({adata.n_obs} cells x {adata.n_vars} genes); pass non-empty data.", argument=argument
        )
    if not isinstance(adata.obs, pd.DataFrame):
        raise DataError(
            f"was read lazily and is not in memory; load it with {argument}.to_memory() first.",
            argument=argument,
        )


def listed_columns(obs: Any) -> list[str] | None:
    """Return names of obs columns as a list, or None. Raises an OptionError if they are a string or not iterable."""
    if obs is None:
        return None
    if isinstance(obs, str) or not isinstance(obs, Iterable):
        raise OptionError("is not a list of columns; pass e.g. obs=['cell_type'].", obs=obs)
    return list(obs)


def check_obs_column(adata: AnnData, key: str | None, *, argument: str) -> None:
    """Raise an error if `key` is neither None nor a valid column of ``adata.obs``; batches must not be measurements."""
    if key is None:
        return
    if not isinstance(key, str | int):
        raise OptionError(
            f"is of type {type(key).__name__!r}; pass the name of one column of obs.", argument=argument, value=key
        )
    if key in adata.obs and adata.obs[key].ndim > 1:
        raise DataError(
            "is the name of several columns of adata.obs; rename all but one of them.", argument=argument, value=key
        )
    if key not in adata.obs:
        columns = [column for column in adata.obs.columns if not str(column).startswith("_scvi_")]
        check_known(argument, key, columns, "adata.obs")
    if argument == "batch_key":
        texts = texts_of(adata.obs[key], key=key, argument=argument)
        names, n_cells = texts.categories, int(texts.notna().sum())
        measured = adata.obs[key].dtype.kind == "f" and any("." in name for name in names)
        if (measured and len(names) > max(_FEW_VALUES, n_cells // 2)) or names_each_cell(texts):
            raise DataError(
                f"has {len(names):,} different values in {adata.n_obs:,} cells (first: "
                f"{texts.dropna()[0]}) and does not look like a batch column; choose another column, omit batch_key, "
                "or bin the values, e.g. with pandas.cut.",
                batch_key=key,
            )


def names_each_cell(texts: pd.Categorical) -> bool:
    """Return whether the text of an obs column has many values that are all different, like barcodes."""
    return len(texts) > _FEW_VALUES and len(texts.categories) + bool(texts.isna().any()) == len(texts)


def inherited_batch_key(obs: pd.DataFrame, key: str | None) -> str | None:
    """Return the `batch_key` of other data, or None if it is missing here or differs for each cell."""
    if key is None or key not in obs or names_each_cell(texts_of(obs[key], key=key, argument="batch_key")):
        return None
    return key


def warn_if_transposed(adata: AnnData) -> None:
    """Warn if genes are named like cells and cells are not, as in matrices with a row for each gene."""
    genes, cells = (
        sum(_BARCODE.fullmatch(str(name)) is not None for name in names[:100]) / max(len(names[:100]), 1)
        for names in (adata.var_names, adata.obs_names)
    )
    if genes > 0.5 > cells:
        warn(
            f"adata.var_names look like cell names (first: {str(adata.var_names[0])!r}); if cells and genes are "
            "swapped, pass adata.T."
        )


def warn_if_transformed(counts: sparse.csr_matrix, layer: str | None) -> None:
    """Warn if integers are probably not counts: rounded after normalization, or only 0 and 1."""
    if counts.shape[0] <= _FEW_VALUES:
        return
    sample = counts[:: max(counts.shape[0] // _SAMPLED, 1)].astype(np.float64)
    sample.eliminate_zeros()
    totals = np.asarray(sample.sum(axis=1)).ravel()
    smallest = np.minimum.reduceat(sample.data, sample.indptr[:-1])
    where = "adata.X" if layer is None else f"adata.layers[{layer!r}]"
    if sample.data.max() == 1 and totals.mean() >= _DEEP:
        warn(f"{where} contains only 0 and 1, as if it had been binarized; pass the layer that contains raw counts.")
    elif totals.std() < _EQUAL * totals.mean() and np.median(smallest) > 1 and 2 * sample.nnz < np.prod(sample.shape):
        warn(
            f"{where} has nearly the same total in all cells (median {np.median(totals):,.0f}) and no count of 1 in "
            "most of them, as if normalized values had been rounded; pass the layer that contains raw counts."
        )


def counts_of(adata: AnnData, layer: str | None = None) -> sparse.csr_matrix:
    """Return the raw counts of `adata` as CSR with sorted indices, after checking that they are counts.

    Counts of a backed AnnData are read into memory.

    Parameters
    ----------
    adata
        Annotated data.
    layer
        Key in ``adata.layers``. If None, reads ``adata.X``.

    Returns
    -------
    Matrix of shape (n_obs, n_vars). A CSR matrix is returned without copying, unless its indices are unsorted.

    Raises
    ------
    DataError
        If the layer does not exist, is corrupted, contains negative, missing or fractional values, or has cells without
        counts. The message names a layer that contains counts, if there is one.
    """
    where = "adata.X" if layer is None else f"adata.layers[{layer!r}]"
    if layer is not None:
        check_known("layer", layer, adata.layers, "adata.layers", fix="use layer=None to read adata.X")
        matrix = adata.layers[layer]
    elif adata.X is None:
        raise DataError(f"is None; {_where_counts_are(adata, layer)}.", argument="adata.X")
    else:
        matrix = _in_memory(adata.X)
    if matrix.dtype.kind not in _NUMERIC:
        raise DataError(
            f"has dtype {matrix.dtype}, but raw counts are needed; convert it to a numeric dtype.", argument=where
        )
    mark = content_mark(matrix)
    if mark is not None and _CHECKED.get(id(matrix)) == mark:
        return matrix if isinstance(matrix, sparse.csr_matrix) else _as_csr(matrix, where)
    counts = _as_csr(matrix, where)
    if problem := value_problem(counts.data):
        way_out = _UNMEASURED if np.isnan(counts.data).any() else _NORMALIZED
        raise DataError(
            f"{problem}, but raw counts are needed; {_where_counts_are(adata, layer, way_out)}.", argument=where
        )
    empty = np.flatnonzero(np.asarray(counts.sum(axis=1)).ravel() == 0)
    if len(empty):
        names = listing(adata.obs_names[empty[:3]])
        raise DataError(
            f"has {len(empty)} cell{'s' * (len(empty) > 1)} without counts (first: {names}); "
            "remove them with sc.pp.filter_cells(adata, min_counts=1).",
            argument=where,
        )
    if mark is not None and (counts is matrix or not isinstance(matrix, sparse.csr_matrix)):
        _CHECKED[id(matrix)] = mark
        weakref.finalize(matrix, _CHECKED.pop, id(matrix), None)
    return counts


def content_mark(matrix: Any) -> tuple[Any, ...] | None:
    """Return checksums of the arrays of a matrix in memory, which change with its values; None for other types."""
    if getattr(matrix, "dtype", None) is None or matrix.dtype.kind not in _NUMERIC:
        return None
    if type(matrix) is np.ndarray:
        parts = [matrix.ravel(order="K")]
    elif isinstance(matrix, sparse.csr_matrix | sparse.csc_matrix):
        parts = [matrix.data, matrix.indices, matrix.indptr]
    else:
        return None
    sums = ((part.dtype.str, zlib.crc32(np.ascontiguousarray(part).view(np.uint8))) for part in parts)
    return (type(matrix).__name__, matrix.shape, getattr(matrix, "strides", None), *sums)


def _in_memory(matrix: Any) -> Any:
    """Return a matrix in memory, reading it from its file if the AnnData is backed."""
    if isinstance(matrix, h5py.Dataset):
        return matrix[()]
    return matrix.to_memory() if hasattr(matrix, "to_memory") else matrix


def _as_csr(matrix: Any, where: str) -> sparse.csr_matrix:
    if isinstance(matrix, np.ma.MaskedArray) and (n_masked := np.ma.count_masked(matrix)):
        raise DataError(
            f"contains {n_masked:,} masked values; replace them, e.g. with matrix.filled(0).", argument=where
        )
    if hasattr(matrix, "compute"):  # a dask array; SciPy takes one of sparse blocks for something else
        matrix = matrix.compute()
    dtype = getattr(matrix, "dtype", np.dtype(np.float32))
    if dtype == np.float16 or not dtype.isnative:  # scipy has no sparse matrices of these
        matrix = matrix.astype(np.float32 if dtype == np.float16 else dtype.newbyteorder("="))
    matrix = sound_csr(matrix, where)
    return matrix if matrix.has_canonical_format else canonical(matrix)


def value_problem(data: np.ndarray) -> str | None:
    """Return the problem with values that should be counts, or None."""
    if data.dtype.kind == "f" and not np.isfinite(data).all():
        return f"contains {int((~np.isfinite(data)).sum())} missing or infinite values"
    if len(data) and data.min() < 0:
        return f"contains negative values (smallest: {data.min():g})"
    if data.dtype.kind == "f" and len(data) and data.max() > _MAX_COUNT:
        return f"contains values above the largest float32, {_MAX_COUNT:.1e} (largest: {data.max():g})"
    if data.dtype.kind == "f" and (fractional := data != np.floor(data)).any():
        return f"contains values that are not whole numbers (first: {data[fractional][0]})"
    return None


def _where_counts_are(adata: AnnData, layer: str | None, way_out: str = _NORMALIZED) -> str:
    others: list[str | None] = [key for key in adata.layers if key is not None and key != layer]
    if layer is not None and adata.X is not None:
        others.append(None)
    for key in others:
        if _holds_counts(adata.X if key is None else adata.layers[key]):
            source = "adata.X" if key is None else f"adata.layers[{key!r}]"
            return f"pass layer={key!r}, because {source} contains raw counts"
    if adata.raw is not None and _holds_counts(adata.raw.X):
        return "pass adata.raw.to_adata(), because adata.raw contains raw counts"
    return way_out


def _holds_counts(matrix: Any) -> bool:
    matrix = _in_memory(matrix)
    if matrix.dtype.kind not in _NUMERIC or compressed_problem(matrix):
        return False
    return value_problem(_as_csr(matrix, "").data) is None


def names_place(gene_key: str | None) -> str:
    """Return the location of the gene names: ``adata.var_names`` or a column of ``adata.var``."""
    return "adata.var_names" if gene_key is None else f"adata.var[{gene_key!r}]"


def gene_names(source: Any, gene_key: str | None = None) -> np.ndarray:
    """Return the gene names in the ``var`` of an AnnData or another source, without spaces around them, str, (n_vars,).

    Raises a DataError if a name is missing. Duplicate names are allowed: their counts are summed during gene mapping.
    """
    var, where = source.var, names_place(gene_key)
    if gene_key is not None:
        check_known("gene_key", gene_key, var.columns, "adata.var")
    names = var.index if gene_key is None else var[gene_key]
    missing = np.asarray(names.isna())
    if missing.any():
        raise DataError(
            f"has {int(missing.sum())} missing gene names; fill in the names or drop these genes.", argument=where
        )
    texts = np.asarray(names, dtype=object).astype(str)
    return np.char.strip(texts) if len(texts) else texts
