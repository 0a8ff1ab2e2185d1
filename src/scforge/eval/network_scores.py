"""Scores of pairs of genes, made of what a model says of genes.

All return a table with ``source`` and ``target``, categorical, and ``weight``, one row an edge, for
:class:`scforge.eval.GeneNetwork`. An edge of a gene to itself is left out.

Shapes: G genes, D dimensions, S sources, T targets, E edges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy import sparse

from scforge._checks import check_bool
from scforge.data.mapping import gene_names
from scforge.errors import DataError, OptionError, did_you_mean, listing

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = [
    "edges_from_attention",
    "edges_from_embeddings",
    "edges_from_matrix",
    "edges_from_perturbations",
    "edges_of",
    "names_among",
]

_MOST_PAIRS = 100_000_000
"""Edges of a table at most: ten bytes each, and some more while it is made."""

_MEASURES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "cosine": lambda vectors: _units(vectors),
    "correlation": lambda vectors: _units(vectors - vectors.mean(axis=1, keepdims=True)),
    "dot": lambda vectors: vectors,
}


def edges_from_embeddings(
    embeddings: pd.DataFrame,
    tfs: Sequence[str] | None = None,
    targets: Sequence[str] | None = None,
    *,
    measure: str = "cosine",
    center: bool = False,
    absolute: bool = False,
) -> pd.DataFrame:
    """Score pairs of genes by the similarity of their vectors.

    The weights are the same in both directions, so that only the choice of sources makes a direction.

    Parameters
    ----------
    embeddings
        A vector for each gene, shape (G, D), the index their names: what ``model.get_gene_embeddings()`` returns, or
        mean moves of cells under the perturbation of each gene (:func:`scforge.insilico.mean_moves`; with `center`).
        Genes with NaN, which have no vector, are left out.
    tfs
        Sources; those without a vector are left out. None takes all genes.
    targets
        Targets; those without a vector are left out. None takes all genes.
    measure
        ``"cosine"``, ``"correlation"`` over the dimensions, or ``"dot"``, the inner product.
    center
        Take the mean over all genes off first: what is common to all vectors says nothing of two genes.
    absolute
        Score by the size alone, so that opposite vectors are as near as equal ones.

    Returns
    -------
    ``source``, ``target`` and ``weight`` (float32), one row for each pair of different genes.

    Raises
    ------
    OptionError
        If the measure is unknown, or there are too many pairs.
    DataError
        If a gene stands there twice, or none of `tfs` or of `targets` has a vector.

    Examples
    --------
    >>> vectors = pd.DataFrame([[1.0, 0.0], [0.5, 1.0], [0.0, 2.0]], index=["A", "B", "C"])
    >>> edges_from_embeddings(vectors, tfs=["C"], measure="dot").values.tolist()
    [['C', 'A', 0.0], ['C', 'B', 2.0]]
    """
    if measure not in _MEASURES:
        raise OptionError(f"measure={measure!r} is none of {listing(_MEASURES)}{did_you_mean(measure, _MEASURES)}")
    for name, value in {"center": center, "absolute": absolute}.items():
        check_bool(name, value)
    vectors = _numbers("embeddings", embeddings)
    kept = np.isfinite(vectors).all(axis=1)
    names = _unique("embeddings", embeddings.index[kept])
    vectors = vectors[kept].astype(np.float64)
    if center:
        vectors = vectors - vectors.mean(axis=0)
    vectors = _MEASURES[measure](vectors)
    rows, columns = _chosen("tfs", tfs, names), _chosen("targets", targets, names)
    _check_size(len(rows), len(columns))
    weights = vectors[rows] @ vectors[columns].T
    return edges_of(np.abs(weights) if absolute else weights, names[rows], names[columns])


def edges_from_matrix(
    matrix: Any,
    names: Sequence[str],
    targets: Sequence[str] | None = None,
    *,
    tfs: Sequence[str] | None = None,
    source: str = "rows",
    absolute: bool = False,
) -> pd.DataFrame:
    """Read a matrix of weights between genes.

    Parameters
    ----------
    matrix
        Array or sparse matrix, shape (G, G), or (S, T) with names of the columns. Of a sparse one only stored values
        other than 0 are edges; of an array all but NaN.
    names
        Names of the rows.
    targets
        Names of the columns; None for the same as of the rows.
    tfs
        Sources to keep; None keeps all.
    source
        What the rows are: ``"rows"`` if they regulate the columns, ``"columns"`` if it is the other way round.
    absolute
        Take the size of the weights.

    Returns
    -------
    ``source``, ``target`` and ``weight`` (float32).

    Raises
    ------
    OptionError
        If an argument cannot be used.
    DataError
        If names do not fit the matrix, or stand there twice.

    Examples
    --------
    >>> edges_from_matrix(np.array([[0.0, 0.5], [0.1, 0.0]]), ["A", "B"], tfs=["A"]).values.tolist()
    [['A', 'B', 0.5]]
    """
    if source not in ("rows", "columns"):
        raise OptionError(f"source={source!r} is neither 'rows' nor 'columns'.")
    check_bool("absolute", absolute)
    rows = _unique("names", names)
    columns = rows if targets is None else _unique("targets", targets)
    matrix = matrix.tocsr() if sparse.issparse(matrix) else _numbers("matrix", matrix)
    if matrix.shape != (len(rows), len(columns)):
        raise DataError(f"matrix has the shape {matrix.shape}, but there are {len(rows)} x {len(columns)} names.")
    if source == "columns":
        matrix, rows, columns = matrix.T, columns, rows
        matrix = matrix.tocsr() if sparse.issparse(matrix) else matrix
    if tfs is not None:
        kept = _chosen("tfs", tfs, rows)
        matrix, rows = matrix[kept], rows[kept]
    if sparse.issparse(matrix):
        entries = matrix.tocoo()
        found = edges_of(entries.data, rows, columns, entries.row, entries.col)
        found = found[found["weight"] != 0].reset_index(drop=True)
    else:
        _check_size(*matrix.shape)
        found = edges_of(matrix, rows, columns)
    return found.assign(weight=found["weight"].abs()) if absolute else found


def edges_from_attention(
    adata: AnnData,
    key: str = "scforge_attention",
    *,
    tfs: Sequence[str] | None = None,
    source: str = "columns",
    gene_key: str | None = None,
) -> pd.DataFrame:
    """Read the graph that ``model.get_attention()`` wrote.

    Row i, column j of it is what gene i reads of gene j. A target reads its regulator, so by default the columns are
    the sources. ``get_attention`` keeps the 20 genes that each looks at most; raise its `top_k` to score more pairs.

    Parameters
    ----------
    adata
        Annotated data with the graph in ``adata.varp``.
    key
        Key in ``adata.varp``.
    tfs
        Sources to keep; None keeps all.
    source
        ``"columns"`` or ``"rows"``: which of them regulate.
    gene_key
        Column of ``adata.var`` with the names of the genes; None takes ``adata.var_names``.

    Returns
    -------
    ``source``, ``target`` and ``weight`` (float32), one row for each pair that the graph holds.

    Raises
    ------
    DataError
        If there is no such graph.

    Examples
    --------
    >>> import anndata
    >>> adata = anndata.AnnData(np.ones((2, 3), dtype="float32"), var=pd.DataFrame(index=["TF", "A", "B"]))
    >>> adata.varp["scforge_attention"] = sparse.csr_matrix([[0, 0, 0], [0.5, 0, 0], [0.25, 0, 0]])
    >>> edges_from_attention(adata, tfs=["TF"]).values.tolist()
    [['TF', 'A', 0.5], ['TF', 'B', 0.25]]
    """
    if key not in adata.varp:
        known = list(adata.varp)
        raise DataError(
            f"key={key!r} is not in adata.varp{did_you_mean(key, known)} (adata.varp has: {listing(known)}); "
            "write it with model.get_attention(adata)."
        )
    return edges_from_matrix(
        sparse.csr_matrix(adata.varp[key]), gene_names(adata, gene_key).tolist(), tfs=tfs, source=source
    )


def edges_from_perturbations(effects: pd.DataFrame | AnnData, *, tfs: Sequence[str] | None = None) -> pd.DataFrame:
    """Score pairs of genes by what the perturbation of one does.

    Parameters
    ----------
    effects
        One of

        - what the perturbation task predicts (``predictor.predict(...)``), with ``layers["delta"]``: a perturbed gene
          regulates the genes of the largest absolute change, the largest over contexts. Combinations are left out.
        - the same as a table, the index the perturbed genes and the columns the genes that change.
        - the table of ``model.perturb_in_silico(genes, combinations=2)``. It says how far cells move, not which genes
          do, so what two genes do together counts: with a_i + a_j the best additive fit to the shifts of pairs (least
          squares), the weight is the absolute rest, the same in both directions; NaN shifts are left out. With groups
          it is the largest over them.
    tfs
        Sources to keep; None keeps all.

    Returns
    -------
    ``source``, ``target`` and ``weight`` (float32).

    Raises
    ------
    DataError
        If the table has one gene a row, or there are no effects.

    Examples
    --------
    >>> effects = pd.DataFrame([[0.5, -2.0]], index=["TF"], columns=["A", "B"])
    >>> edges_from_perturbations(effects).values.tolist()
    [['TF', 'A', 0.5], ['TF', 'B', 2.0]]
    """
    if not isinstance(effects, pd.DataFrame):
        effects = _deltas(effects)
    elif "gene" in effects and "shift" in effects:
        return _of_pairs(effects, tfs)
    size = pd.DataFrame(np.abs(_numbers("effects", effects)), index=effects.index, columns=effects.columns)
    size = size.groupby(level=0, observed=True).max()
    return edges_from_matrix(size.to_numpy(), size.index, size.columns, tfs=tfs)


def edges_of(
    weights: np.ndarray,
    sources: pd.Index,
    targets: pd.Index,
    rows: np.ndarray | None = None,
    columns: np.ndarray | None = None,
) -> pd.DataFrame:
    """Return a table of edges without NaN and without those of a gene to itself.

    Parameters
    ----------
    weights
        Shape (S, T), or (E,) with their `rows` and `columns`.
    sources, targets
        Names, each once.
    rows, columns
        Places of the edges among the names, shape (E,); None for all pairs.
    """
    if rows is None or columns is None:
        rows, columns = (axis.ravel() for axis in np.indices(weights.shape, dtype=np.int32))
    weights = weights.ravel()
    kept = ~np.isnan(weights) & (columns != targets.get_indexer(sources)[rows])
    return pd.DataFrame(
        {
            "source": pd.Categorical.from_codes(rows[kept], sources),
            "target": pd.Categorical.from_codes(columns[kept], targets),
            "weight": weights[kept].astype(np.float32),
        }
    )


def names_among(argument: str, names: Sequence[str], known: pd.Index) -> pd.Index:
    """Return those of the names that are known, each once, in their order.

    Raises
    ------
    DataError
        If none of them is.
    """
    return known[_chosen(argument, names, known)]


def _chosen(argument: str, names: Sequence[str] | None, known: pd.Index) -> np.ndarray:
    """Return where names stand among known ones, leaving out those that do not."""
    if names is None:
        return np.arange(len(known))
    if isinstance(names, str):
        raise OptionError(f"{argument}={names!r} is not a list of gene names; name them in a list.")
    asked = pd.Index(names).astype(str).unique()
    places = known.get_indexer(asked)
    if not (places >= 0).any():
        raise DataError(
            f"none of {argument} ({listing(asked, most=3)}) is among the {len(known)} genes "
            f"({listing(known, most=3)}); name genes in the same way, e.g. by symbols."
        )
    return places[places >= 0]


def _check_size(n_rows: int, n_columns: int) -> None:
    if n_rows * n_columns > _MOST_PAIRS:
        raise OptionError(
            f"{n_rows} x {n_columns} pairs are more than {_MOST_PAIRS}; name the transcription factors with tfs."
        )


def _unique(argument: str, names: Any) -> pd.Index:
    index = pd.Index(names).astype(str)
    if not index.is_unique:
        raise DataError(f"{argument} names {listing(index[index.duplicated()].unique(), most=3)} twice; keep one each.")
    return index


def _numbers(argument: str, table: Any) -> np.ndarray:
    values = np.asarray(table)
    if values.ndim != 2 or not np.issubdtype(values.dtype, np.number):
        raise DataError(f"{argument} is no table of numbers; give genes x dimensions, or genes x genes.")
    return values


def _units(vectors: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(lengths > 0, lengths, 1.0)


def _deltas(predicted: AnnData) -> pd.DataFrame:
    """Return the effects of perturbations of single genes that a task predicted."""
    if "delta" not in predicted.layers or "perturbation" not in predicted.obs:
        raise DataError(
            "effects has no layers['delta'] or no obs['perturbation']; give what the perturbation task predicts, or a "
            "table of perturbed genes x genes."
        )
    names = predicted.obs["perturbation"].astype(str).to_numpy()
    single = np.isin(names, predicted.var_names)
    if not single.any():
        raise DataError(
            f"none of the perturbations ({listing(names, most=3)}) is one of the genes of effects; predict those of "
            "single genes."
        )
    return pd.DataFrame(
        np.asarray(predicted.layers["delta"])[single], index=names[single], columns=predicted.var_names.astype(str)
    )


def _of_pairs(table: pd.DataFrame, tfs: Sequence[str] | None) -> pd.DataFrame:
    """Return how far the shifts of pairs are from a sum of what each gene does."""
    if "gene_2" not in table:
        raise DataError(
            "effects has one gene a row, which says nothing of pairs; call model.perturb_in_silico(genes, "
            "combinations=2), or give predicted effects on genes."
        )
    names = _unique("effects", pd.unique(pd.concat([table["gene"], table["gene_2"]])))
    groups = table["group"] if "group" in table else pd.Series("", index=table.index)
    found = np.full((len(names), len(names)), np.nan)
    for _, part in table[table["shift"].notna()].groupby(groups, observed=True):
        first, second = names.get_indexer(part["gene"]), names.get_indexer(part["gene_2"])
        shifts = part["shift"].to_numpy(dtype=np.float64)
        pairs = np.arange(len(part))
        design = sparse.csr_matrix(
            (np.ones(2 * len(part)), (np.tile(pairs, 2), np.concatenate([first, second]))), (len(part), len(names))
        )
        rest = np.abs(shifts - design @ sparse.linalg.lsqr(design, shifts, atol=1e-12, btol=1e-12)[0])
        found[first, second] = np.fmax(found[first, second], rest)
    if np.isnan(found).all():
        raise DataError("effects has no shift of a pair that is a number; perturb genes that are expressed together.")
    return edges_from_matrix(np.fmax(found, found.T), names, tfs=tfs)
