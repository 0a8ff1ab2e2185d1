"""Checks that what is tested did not take part in the training, nor in what a method was given.

Shapes: N cells, G genes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy import sparse

from scforge.data.checks import value_problem
from scforge.data.perturbation import PerturbationKeys, parse_perturbations
from scforge.errors import DataError, warn
from scforge.eval.log_scale import log_normalised

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = ["check_disjoint", "check_features", "check_no_copies", "check_same_rows", "row_hashes"]

_FEWEST_GENES = 10
"""A cell with fewer expressed genes may well look like another one."""

_TELLING_SHARE = 0.01
"""Share of the cells that may be the same by chance."""

_DECIMALS = 3
_SAME = 1e-4
_FEWEST_ROWS = 5
_BLOCK = 512


def check_disjoint(train: Iterable[object] | AnnData, test: Iterable[object] | AnnData, *, what: str = "cells") -> None:
    """Raise where something is both in the training and in the test data.

    Parameters
    ----------
    train, test
        Identifiers, e.g. names of cells, donors or perturbations; or AnnData, whose ``obs_names`` are compared and,
        over the genes that both have, the expression of their cells in ``X``.
    what
        What the identifiers are of, for the message.

    Raises
    ------
    DataError
        If an identifier is in both, or more than 1 % of the test cells have the same expression as a training cell.

    Warns
    -----
    ScforgeWarning
        If fewer have. Cells with fewer than 10 expressed genes are not looked at.

    Examples
    --------
    >>> check_disjoint(["a", "b"], ["b", "c"], what="donors")
    Traceback (most recent call last):
        ...
    scforge.errors.DataError: 1 of 2 test donors are training donors, too (first: 'b'); take them out of one of the two.
    """
    ids = [pd.Index(_ids(some)) for some in (train, test)]
    if (both := ids[1].isin(ids[0])).any():
        raise DataError(
            f"{int(both.sum())} of {len(ids[1])} test {what} are training {what}, too (first: "
            f"{str(ids[1][both][0])!r}); take them out of one of the two."
        )
    if _is_adata(train) and _is_adata(test):
        genes = test.var_names[test.var_names.isin(train.var_names)]  # type: ignore[union-attr]
        one, other = (_matrix(some)[:, some.var_names.get_indexer(genes)] for some in (train, test))  # type: ignore[union-attr]
        check_same_rows(one, other, what=what)


def check_same_rows(train: sparse.csr_matrix, test: sparse.csr_matrix, *, what: str = "cells") -> None:
    """Raise where more than 1 % of the rows of `test`, each of which is a cell, are rows of `train`; warn below.

    Values count as the same if they round to the same three decimals.
    """
    # Logs that scanpy made are those of the same counts made here but for rounding.
    found, looked_at = row_hashes(test, decimals=_DECIMALS)
    known, telling = row_hashes(train, decimals=_DECIMALS)
    same = np.isin(found, known[telling]) & looked_at
    if not same.any():
        return
    message = f"{int(same.sum())} of {len(same)} test {what} have the same expression of all genes as a training cell"
    if same.mean() > _TELLING_SHARE:
        raise DataError(f"{message}: they are copies under another name; take them out of one of the two.")
    warn(f"{message}; look whether they are copies.")


def check_no_copies(
    made: sparse.csr_matrix, real: sparse.csr_matrix, *, what: str = "predicted cells", argument: str = "predictions"
) -> None:
    """Raise where what was predicted is a copy of what was to be predicted.

    Parameters
    ----------
    made, real
        Expression of predicted and of held-out cells (or profiles, one a row) on the same scale, CSR, shapes (N, G) and
        (M, G). Values count as the same if they round to the same three decimals.
    what
        What the rows are, for the message.
    argument
        Where they come from, for the message.

    Raises
    ------
    DataError
        If more than 1 % of the rows of `made` are rows of `real`; rows with fewer than 10 genes are not looked at.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> real, other = (sparse.csr_matrix(rng.poisson(3.0, size=(20, 40)).astype("float32")) for _ in range(2))
    >>> check_no_copies(other, real)
    >>> check_no_copies(real, real)
    Traceback (most recent call last):
        ...
    scforge.errors.DataError: ...
    """
    found, looked_at = row_hashes(made, decimals=_DECIMALS)
    known, telling = row_hashes(real, decimals=_DECIMALS)
    same = np.isin(found, known[telling]) & looked_at
    if len(same) and same.mean() > _TELLING_SHARE:
        raise DataError(
            f"{int(same.sum())} of {len(same)} {what} of {argument} are copies of held-out cells (first: row "
            f"{int(np.flatnonzero(same)[0])}); a prediction may not see what it is scored on."
        )


def check_features(
    features: pd.DataFrame,
    real: AnnData,
    *,
    perturbation_key: str,
    control: str,
    separator: str | None = "+",
    argument: str = "gene_features",
) -> None:
    """Raise where the features of a held-out perturbation were made from its own cells.

    The mean embedding of the cells under a perturbation is not known before the experiment. A regression that is fed
    with it, in place of something known of the gene, reads the answer.

    Parameters
    ----------
    features
        One row a perturbation or target, by name; any columns.
    real
        Held-out cells.
    perturbation_key, control, separator
        Columns of obs, as for :func:`evaluate_perturbations`.
    argument
        What `features` is called in the message.

    Raises
    ------
    DataError
        If a row is the mean, or the mean less that of the controls, of ``X``, of a layer (of counts also of their
        log1p CP10K) or of an entry of ``obsm`` over the cells of that perturbation, up to a factor; or, for at least
        five perturbations, if a column is any column of such means up to a factor and an offset. Columns of fewer than
        five values, e.g. indicators, are too easily met by chance to be told.

    Examples
    --------
    >>> import anndata
    >>> rng, names = np.random.default_rng(0), np.repeat(["control", "A", "B"], 10)
    >>> obs = pd.DataFrame({"target": names}, index=[f"cell{i}" for i in range(30)])
    >>> real = anndata.AnnData(rng.normal(size=(30, 12)), obs)
    >>> keys = {"perturbation_key": "target", "control": "control"}
    >>> check_features(pd.DataFrame(rng.normal(size=(2, 12)), index=["A", "B"]), real, **keys)
    >>> check_features(real.to_df().groupby(names).mean(), real, **keys)
    Traceback (most recent call last):
        ...
    scforge.errors.DataError: gene_features has for 'A' the mean of X over the held-out cells under 'A' themselves...
    """
    keys = PerturbationKeys(perturbation_key, control=control, separator=separator)
    parsed = parse_perturbations(real.obs, keys)
    cells_of: dict[str, list[int]] = {}
    for row, targets in enumerate(parsed.targets):
        cells_of.setdefault((separator or "+").join(targets), []).append(row)
    controls = cells_of.pop("", [])
    named = [(str(name), row) for row, name in enumerate(features.index) if str(name) in cells_of]
    if not named:
        return
    values = features.to_numpy(dtype=np.float64)
    for where, matrix in _representations(real):
        plain = _mean(matrix, controls)
        means = np.array([_mean(matrix, cells_of[name]) for name, _ in named])
        own = values[[row for _, row in named]]
        copied = []
        if own.shape == means.shape:
            copied = [i for i in range(len(named)) if _same(own[i], means[i]) or _same(own[i], means[i] - plain)]
        if not copied and _same_columns(own, means):
            copied = [0]
        if copied:
            name = named[copied[0]][0]
            raise DataError(
                f"{argument} has for {name!r} the mean of {where} over the held-out cells under {name!r} themselves, "
                "which nobody knows before the experiment; give features of the gene that need no such cells."
            )


def row_hashes(matrix: sparse.csr_matrix, *, decimals: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return a hash of each row, uint64, and which rows have enough genes to be told from others, bool, shape (N,).

    Parameters
    ----------
    matrix
        Shape (N, G).
    decimals
        Round values to these first; None takes them as float32.
    """
    matrix = matrix.tocsr().copy()
    matrix.sum_duplicates()
    values = matrix.data.astype(np.float64) if decimals is None else np.round(matrix.data.astype(np.float64), decimals)
    matrix = sparse.csr_matrix((values, matrix.indices, matrix.indptr), shape=matrix.shape)
    matrix.eliminate_zeros()
    # An order-free sum of a hash of each pair of gene and value, modulo 2^64.
    mixed = pd.util.hash_array(matrix.data.astype(np.float32).view(np.uint32).astype(np.uint64))
    mixed = pd.util.hash_array(mixed ^ pd.util.hash_array(matrix.indices.astype(np.uint64)))
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    sums = np.zeros(matrix.shape[0], dtype=np.uint64)
    np.add.at(sums, rows, mixed)
    return sums, np.diff(matrix.indptr) >= _FEWEST_GENES


def _ids(some: Iterable[object] | AnnData) -> list[object]:
    return list(some.obs_names) if _is_adata(some) else list(some)  # type: ignore[union-attr]


def _is_adata(some: object) -> bool:
    import anndata

    return isinstance(some, anndata.AnnData)


def _matrix(adata: AnnData) -> sparse.csr_matrix:
    matrix = adata.X.astype(np.float32) if adata.X.dtype == np.float16 else adata.X
    return matrix.tocsr() if sparse.issparse(matrix) else sparse.csr_matrix(np.asarray(matrix))


def _representations(adata: AnnData) -> list[tuple[str, np.ndarray | sparse.csr_matrix]]:
    found = [(f"obsm[{key!r}]", np.asarray(adata.obsm[key])) for key in adata.obsm]
    found += [(f"layers[{key!r}]", adata.layers[key]) for key in adata.layers if key is not None]
    if adata.X is not None:
        found.append(("X", adata.X))
    for key in [None, *(key for key in adata.layers if key is not None)]:
        matrix = adata.X if key is None else adata.layers[key]
        if matrix is not None and value_problem(matrix.data if sparse.issparse(matrix) else np.ravel(matrix)) is None:
            where = "X" if key is None else f"layers[{key!r}]"
            found.append((f"the log1p CP10K of {where}", log_normalised(adata, key, argument="real")))
    return [(where, matrix) for where, matrix in found if len(matrix.shape) == 2]


def _mean(matrix: np.ndarray | sparse.csr_matrix, rows: list[int]) -> np.ndarray:
    if not rows:
        return np.zeros(matrix.shape[1])
    return np.asarray(matrix[np.array(rows)].mean(axis=0), dtype=np.float64).ravel()


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether two vectors are the same up to a factor; without one where a direction is soon met by chance."""
    lengths = np.linalg.norm(one) * np.linalg.norm(other)
    if not np.isfinite(lengths) or lengths == 0:
        return False
    if len(one) < 3:
        return bool(np.allclose(one, other, rtol=_SAME, atol=0))
    return bool(one @ other / lengths > 1 - _SAME**2)


def _same_columns(ours: np.ndarray, means: np.ndarray) -> bool:
    """Return whether a column is one of the others, scaled and shifted, e.g. standardised."""
    if len(ours) < _FEWEST_ROWS or not np.isfinite(ours).all():
        return False
    one, other = (_unit_columns(values) for values in (ours, means))
    blocks = (one[:, start : start + _BLOCK].T @ other for start in range(0, one.shape[1], _BLOCK))
    return any(bool(np.abs(alike).max(initial=0.0) > 1 - _SAME**2) for alike in blocks)


def _unit_columns(values: np.ndarray) -> np.ndarray:
    """Return centred columns of length 1, of those that take enough values to be told from others."""
    values = values[:, np.isfinite(values).all(axis=0)]
    size = np.abs(values).max(axis=0, initial=0.0)
    steps = np.diff(np.sort(values, axis=0), axis=0) > 1e-6 * size
    centred = values[:, steps.sum(axis=0) >= _FEWEST_ROWS - 1]
    centred = centred - centred.mean(axis=0)
    return centred / np.linalg.norm(centred, axis=0)
