"""Benchmarks of gene regulatory networks: files of reference networks, scores, baselines and reports."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numba
import numpy as np
import pandas as pd
from scipy import sparse

from scforge._checks import check_bool, check_count, check_positive, check_seed
from scforge._constants import TARGET_SUM
from scforge.data.checks import check_adata, check_is_adata, counts_of, gene_names
from scforge.errors import DataError, MissingFileError, OptionError, did_you_mean, first_line, listing
from scforge.eval.base import Benchmark, register_benchmark
from scforge.eval.harness import compare
from scforge.eval.report import bootstrap_weights

if TYPE_CHECKING:
    from anndata import AnnData

    from scforge.eval.report import Kind, Report


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


_MODES = {"activation": 1.0, "repression": -1.0, "unknown": np.nan}
_SOURCE_COLUMNS = ("source", "tf", "regulator", "gene1", "transcription_factor")
_TARGET_COLUMNS = ("target", "gene", "gene2", "target_gene")
_CHIP_ATLAS = re.compile(r"(?P<tf>.+)\|Average", re.IGNORECASE)


def read_network(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    kind: str = "auto",
    source: str | int | None = None,
    target: str | int | None = None,
    confidence: str | None = None,
    min_score: float = 0.0,
) -> pd.DataFrame:
    r"""Read the known targets of transcription factors.

    Parameters
    ----------
    path
        Text, tab- or comma-separated and maybe compressed, or Parquet. Or a list of such files, whose edges are put
        together; ChIP-Atlas has one for each factor.
    kind
        What the file is; ``"auto"`` tells by its columns:

        ``"trrust"``
            ``trrust_rawdata.*.tsv``, without a header: factor, target, mode, PubMed ids; or with one.
        ``"collectri"``
            ``source``, ``target``, ``weight`` of 1 or -1, as from decoupler.
        ``"dorothea"``
            ``source`` (or ``tf``), ``confidence``, ``target``, and ``weight`` (or ``mor``).
        ``"omnipath"``
            CollecTRI or DoRothEA from OmniPath: ``source_genesymbol``, ``target_genesymbol``, ``is_stimulation`` ...
        ``"encode"``
            ``gene_attribute_edges.txt.gz`` of Harmonizome. Genes stand in ``source`` there, and the factors that bind
            near them in ``target``; both change places.
        ``"chip_atlas"``
            Target genes of ChIP-Atlas: one row a gene, ``FACTOR|Average`` and a column for each experiment.
        ``"edges"``
            Any table with a column of sources and one of targets, and maybe ``weight``.
    source, target
        Columns of transcription factors and of targets, for tables whose names are none of the usual ones; numbers from
        0 for a file without a header. They make it ``"edges"``.
    confidence
        Levels of DoRothEA to keep, e.g. ``"AB"``; None keeps all.
    min_score
        ChIP-Atlas only: targets whose average binding score (of MACS2, -10 log10 q) is larger than this.

    Returns
    -------
    ``source`` and ``target``, one row an edge, in the order of the file; and where the kind tells, ``sign`` (1
    activation, -1 repression, NaN unknown, or said both ways), ``weight`` (the largest, where an edge stands there more
    than once) and ``confidence`` (the best).

    Raises
    ------
    MissingFileError
        If there is no such file.
    DataError
        If it cannot be read, is not of this kind, or lacks names.
    OptionError
        If an argument cannot be used.

    Examples
    --------
    >>> with open("trrust_rawdata.human.tsv", "w") as file:
    ...     _ = file.write("AATF\tBAX\tRepression\t22909821\nAATF\tMYC\tActivation\t20549547\n")
    >>> read_network("trrust_rawdata.human.tsv").values.tolist()
    [['AATF', 'BAX', -1.0], ['AATF', 'MYC', 1.0]]
    """
    paths = [path] if isinstance(path, str | os.PathLike) else list(path)
    if not paths:
        raise OptionError("path=[] names no file; name at least one.")
    if (source is None) != (target is None):
        raise OptionError(f"source={source!r} and target={target!r} name one column; name both, or none.")
    if kind not in ("auto", *_READERS):
        raise OptionError(
            f"kind={kind!r} is not known{did_you_mean(kind, _READERS)} (known: {listing(['auto', *_READERS])})"
        )
    if source is not None and kind not in ("auto", "edges"):
        raise OptionError(f"source={source!r} has no use with kind={kind!r}; leave it out, or say kind='edges'.")
    check_positive("min_score", min_score, or_zero=True)
    found = []
    for one in paths:
        place = Path(one)
        table = _read(place, isinstance(source, int))
        if source is not None:
            made, of_kind = _of_columns(table, place, source, target), "edges"
        else:
            of_kind = _kind_of(table, place) if kind == "auto" else kind
            made = _READERS[of_kind](table, place)
        if min_score > 0:
            _only_for("min_score", min_score, "chip_atlas", of_kind, place)
        if confidence is not None:
            _only_for("confidence", confidence, "dorothea", of_kind, place)
            made = made[made["confidence"].isin(list(confidence))]
        if of_kind == "chip_atlas":
            made = made[made["weight"] > min_score]
        found.append(_checked(made, place))
    edges = _merged(pd.concat(found, ignore_index=True))
    if edges.empty:
        raise DataError(f"no edge is left of {listing(paths, most=3)}; ask for less with min_score or confidence.")
    return edges


def _read(path: Path, headless: bool) -> pd.DataFrame:
    """Return the table of a file as text (of Parquet, as it is); columns are numbers where the file names none."""
    if not path.is_file():
        raise MissingFileError(f"path={str(path)!r} is not a file; say where the network is.")
    try:
        if path.suffix == ".parquet":
            return pd.read_parquet(path)
        # No text has this character: the first line as a whole, whatever the compression.
        first = pd.read_csv(path, sep="\0", header=None, nrows=1, dtype=str, encoding="utf-8-sig", engine="python")
        line = str(first.iloc[0, 0])
        separator = "\t" if "\t" in line else ","
        table = pd.read_csv(
            path, sep=separator, header=None, dtype=str, keep_default_na=False, encoding="utf-8-sig", quotechar='"'
        )
    except (ValueError, OSError) as error:
        raise DataError(f"path={str(path)!r} cannot be read as a table: {first_line(error)}.") from error
    table = table.apply(lambda column: column.str.strip())
    if headless or _is_trrust(table):
        return table
    names = table.iloc[0].str.lstrip("#").str.strip()
    return table.iloc[1:].set_axis(names.to_numpy(), axis=1).reset_index(drop=True)


def _is_trrust(table: pd.DataFrame) -> bool:
    """Return whether this is TRRUST's file without a header: its third column is the mode."""
    return table.shape[1] >= 3 and bool(table.iloc[:, 2].str.lower().isin(_MODES).all())


def _kind_of(table: pd.DataFrame, path: Path) -> str:
    """Return what a table is, by its columns."""
    if table.columns.dtype.kind == "i":
        return "trrust"
    names = {str(name).lower() for name in table.columns}
    if any(_CHIP_ATLAS.fullmatch(str(name)) for name in table.columns):
        return "chip_atlas"
    if {"source", "source_desc", "target", "target_desc"} <= names:
        return "encode"
    if {"source_genesymbol", "target_genesymbol"} <= names:
        return "omnipath"
    if "confidence" in names and "target" in names:
        return "dorothea"
    if {"source", "target", "mode"} <= names:
        return "trrust"
    if {"source", "target", "weight"} <= names and _are_signs(_column(table, path, "weight")):
        return "collectri"
    if names & set(_SOURCE_COLUMNS) and names & set(_TARGET_COLUMNS):
        return "edges"
    raise DataError(
        f"path={str(path)!r} has no columns of a known kind (it has: {listing(table.columns)}); name those of the "
        "factors and of the targets with source=..., target=..., by numbers if there is no header."
    )


def _are_signs(weights: pd.Series) -> bool:
    """Return whether weights are 1 and -1, and both: a list of edges may have the weight 1 throughout."""
    numbers = set(pd.to_numeric(weights, errors="coerce").unique())
    return numbers == {1.0, -1.0}


def _column(table: pd.DataFrame, path: Path, *names: str) -> pd.Series:
    """Return the first column with one of these names, whatever the case."""
    by_name = {str(name).lower(): place for place, name in reversed(list(enumerate(table.columns)))}
    for name in names:
        if name in by_name:
            return table.iloc[:, by_name[name]]
    raise DataError(f"path={str(path)!r} has no column {' or '.join(names)} (it has: {listing(table.columns)}).")


def _weights(values: pd.Series, path: Path) -> pd.Series:
    try:
        return pd.to_numeric(values).astype(np.float64)
    except (ValueError, TypeError) as error:
        raise DataError(f"path={str(path)!r} has text where numbers are needed: {first_line(error)}.") from error


def _signs(values: pd.Series, path: Path) -> pd.Series:
    numbers = _weights(values, path)
    return pd.Series(np.sign(numbers), index=values.index).replace(0.0, np.nan)


def _trrust(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    if table.columns.dtype.kind == "i":
        table = table.set_axis(["source", "target", "mode", *table.columns[3:].astype(str)], axis=1)
    modes = _column(table, path, "mode").str.lower()
    if not modes.isin(_MODES).all():
        odd = modes[~modes.isin(_MODES)].unique()
        raise DataError(f"path={str(path)!r} has the modes {listing(odd, most=3)}, none of {listing(_MODES)}.")
    return _named(table, path).assign(sign=modes.map(_MODES))


def _collectri(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    return _named(table, path).assign(sign=_signs(_column(table, path, "weight"), path))


def _dorothea(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    levels = _column(table, path, "confidence")
    made = _named(table, path).assign(confidence=levels)
    names = {str(name).lower() for name in table.columns}
    if names & {"weight", "mor"}:
        made.insert(2, "sign", _signs(_column(table, path, "weight", "mor"), path))
    return made


def _omnipath(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    made = pd.DataFrame(
        {
            "source": _column(table, path, "source_genesymbol"),
            "target": _column(table, path, "target_genesymbol"),
        }
    )
    flags = [
        _column(table, path, name).astype(str).str.lower().isin(["1", "true"])
        for name in ("is_stimulation", "is_inhibition")
    ]
    up, down = flags
    return made.assign(sign=np.select([up & ~down, down & ~up], [1.0, -1.0], np.nan))


def _encode(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    # The line below the header says what the columns are; it is no edge.
    if len(table) and str(_column(table, path, "source").iloc[0]).lower() in ("genesym", "gene symbol", "na", "n/a"):
        table = table.iloc[1:]
    made = pd.DataFrame({"source": _column(table, path, "target"), "target": _column(table, path, "source")})
    n_factors, n_genes = made["source"].nunique(), made["target"].nunique()
    if n_factors > n_genes:
        raise DataError(
            f"path={str(path)!r} would have {n_factors} factors but {n_genes} targets, as if its columns were the "
            "other way round; name them with source=..., target=..."
        )
    return made


def _chip_atlas(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    matches = [match for name in table.columns if (match := _CHIP_ATLAS.fullmatch(str(name)))]
    if len(matches) != 1:
        raise DataError(
            f"path={str(path)!r} has {len(matches)} columns that end in '|Average' (it has: {listing(table.columns)}); "
            "take a file of target genes of ChIP-Atlas."
        )
    return pd.DataFrame(
        {
            "source": matches[0]["tf"],
            "target": table.iloc[:, 0],
            "weight": _weights(table[matches[0].string], path),
        }
    )


def _edges(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    made = _named(table, path)
    if any(str(name).lower() == "weight" for name in table.columns):
        made["weight"] = _weights(_column(table, path, "weight"), path)
    return made


def _named(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    return pd.DataFrame(
        {"source": _column(table, path, *_SOURCE_COLUMNS), "target": _column(table, path, *_TARGET_COLUMNS)}
    )


def _of_columns(table: pd.DataFrame, path: Path, *columns: Any) -> pd.DataFrame:
    """Return the columns that the user named."""
    found = {}
    for argument, column in zip(("source", "target"), columns, strict=True):
        if column not in table.columns:
            raise DataError(
                f"{argument}={column!r} is not a column of {str(path)!r}{did_you_mean(column, table.columns)} "
                f"(it has: {listing(table.columns)})"
            )
        found[argument] = table[column]
    return pd.DataFrame(found)


def _only_for(argument: str, value: Any, wanted: str, kind: str, path: Path) -> None:
    if kind != wanted:
        raise OptionError(f"{argument}={value!r} is for kind={wanted!r}, but {str(path)!r} is {kind!r}; leave it out.")


def _checked(edges: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Return edges whose names are all there."""
    for column in ("source", "target"):
        names = edges[column]
        missing = np.asarray(names.isna() | (names.astype(str) == ""))
        if missing.any():
            raise DataError(
                f"path={str(path)!r} has {int(missing.sum())} edges without a {column} (first: row "
                f"{int(edges.index[missing][0]) + 1}); fill or remove them."
            )
    return edges.astype({"source": str, "target": str})


def _merged(edges: pd.DataFrame) -> pd.DataFrame:
    """Return one row an edge."""
    grouped = edges.groupby(["source", "target"], sort=False)
    best = {name: how for name, how in {"weight": "max", "confidence": "min"}.items() if name in edges}
    merged = grouped.agg(best).reset_index() if best else edges[["source", "target"]].drop_duplicates()
    merged = merged.reset_index(drop=True)
    if "sign" in edges:
        spread = grouped["sign"].agg(["min", "max"])
        sign = np.where(spread["min"] == spread["max"], spread["min"], np.nan)
        merged.insert(2, "sign", sign)
    return merged


_READERS: dict[str, Callable[[pd.DataFrame, Path], pd.DataFrame]] = {
    "trrust": _trrust,
    "collectri": _collectri,
    "dorothea": _dorothea,
    "omnipath": _omnipath,
    "encode": _encode,
    "chip_atlas": _chip_atlas,
    "edges": _edges,
}


_KINDS_OF_TARGETS = ("truth", "measured")


@dataclass(frozen=True)
class Universe:
    """The pairs that are scored.

    Attributes
    ----------
    tfs, genes
        Names of the T transcription factors and of the G genes.
    edges
        True edges, bool, shape (T, G).
    pairs
        Pairs that take part: all but those of a gene with itself, bool, shape (T, G).
    n_left_out
        True edges that were given and take no part.
    """

    tfs: pd.Index
    genes: pd.Index
    edges: np.ndarray
    pairs: np.ndarray
    n_left_out: int

    def describe(self) -> dict[str, int | float]:
        """Return how many transcription factors, genes, pairs and true edges there are."""
        n_pairs, n_edges = int(self.pairs.sum()), int(self.edges.sum())
        return {
            "transcription factors": len(self.tfs),
            "genes": len(self.genes),
            "pairs": n_pairs,
            "true edges": n_edges,
            "share of true edges": round(n_edges / n_pairs, 6),
            "true edges left out": self.n_left_out,
        }

    def matrix(self, made: pd.DataFrame) -> np.ndarray:
        """Return the weights of edges as float64, shape (T, G); -inf for pairs without one.

        Raises
        ------
        DataError
            If columns are missing, a weight is not a number, or a pair stands there twice.
        """
        _check_edges("the scores", made, "weight")
        rows, columns = _places(made["source"], self.tfs), _places(made["target"], self.genes)
        inside = (rows >= 0) & (columns >= 0)
        if not pd.api.types.is_numeric_dtype(made["weight"]):
            raise DataError(f"the weights of the scores have the dtype {made['weight'].dtype}; give numbers.")
        weights = made["weight"].to_numpy(dtype=np.float64)[inside]
        if not np.isfinite(weights).all():
            raise DataError(
                f"{int((~np.isfinite(weights)).sum())} weights of the scores are not numbers; leave those edges out."
            )
        places = rows[inside].astype(np.int64) * len(self.genes) + columns[inside]
        found = np.full(len(self.tfs) * len(self.genes), -np.inf)
        found[places] = weights
        n_found = int(np.isfinite(found).sum())
        if n_found < len(places):
            raise DataError(
                f"{len(places) - n_found} edges of the scores stand there twice; give one weight for each source and "
                "target, e.g. with scores.groupby(['source', 'target'], as_index=False)['weight'].max()."
            )
        return found.reshape(len(self.tfs), len(self.genes))


@dataclass(frozen=True)
class RankedPairs:
    """Pairs by falling weight.

    Attributes
    ----------
    tfs
        Number of the transcription factor of each pair, int32, shape (P,).
    true
        Whether it is a true edge, bool, shape (P,).
    ties
        Number of the group of pairs of the same weight, int32, ascending, shape (P,).
    n_scored
        Pairs that had a weight; those without stand behind and tie with each other.
    of_tf
        True edges, and pairs, of each transcription factor, float64, shape (2, T).
    """

    tfs: np.ndarray
    true: np.ndarray
    ties: np.ndarray
    n_scored: int
    of_tf: np.ndarray

    @classmethod
    def of(cls, made: pd.DataFrame, universe: Universe) -> RankedPairs:
        """Rank the pairs of a universe by the weights of edges."""
        kept = np.flatnonzero(universe.pairs.ravel())
        weights = universe.matrix(made).ravel()[kept]
        order = np.argsort(-weights)
        ranked = weights[order]
        ties = np.zeros(len(ranked), dtype=np.int32)
        np.cumsum(ranked[1:] != ranked[:-1], out=ties[1:])
        kept = kept[order]
        tfs = (kept // len(universe.genes)).astype(np.int32)
        of_tf = np.array([universe.edges.sum(axis=1), universe.pairs.sum(axis=1)], dtype=np.float64)
        return cls(tfs, universe.edges.ravel()[kept], ties, int(np.isfinite(ranked).sum()), of_tf)

    def figures(self, weights: np.ndarray, within: np.ndarray) -> dict[str, float]:
        """Return the metrics where each transcription factor counts as often as `weights` (T,) says."""
        n_true, n_pairs = float(weights @ self.of_tf[0]), float(weights @ self.of_tf[1])
        auroc, auprc, early, share = _figures(self.tfs, self.true, self.ties, self.n_scored, weights, n_true, n_pairs)
        defined = np.isfinite(within) & (weights > 0)
        return {
            "auprc_ratio": auprc / share,
            "auprc": auprc,
            "auroc": auroc,
            "early_precision_ratio": early / share,
            "early_precision": early,
            "auroc_within_tf": float(np.average(within[defined], weights=weights[defined]))
            if defined.any()
            else float("nan"),
        }

    def within(self) -> np.ndarray:
        """Return the AUROC among the pairs of each transcription factor, shape (T,); NaN where all are true."""
        return _within(self.tfs, self.true, self.ties, self.of_tf.shape[1])


@register_benchmark("gene_network")
class GeneNetwork(Benchmark):
    """Known edges found among all pairs of a transcription factor and a gene.

    The pairs are those of all transcription factors that regulate something in the truth, with all genes that something
    regulates there (or all measured ones), without pairs of a gene with itself. What is not in the truth counts as
    wrong, although many true edges are unknown: figures compare methods, and are no error rates. Edges with more than
    one row in the truth count once; signs take no part.

    **Pairs without a score** get the lowest of all, and tie with each other. So a method that names few edges is not
    scored on these alone.

    Parameters
    ----------
    genes
        Genes that were measured. Others take no part, neither as targets nor as transcription factors, since no method
        could score them; None restricts nothing.
    tfs
        Transcription factors to restrict the pairs to; None takes all of the truth.
    targets
        ``"truth"``: genes with an edge in the truth. ``"measured"``: all of `genes`; then what is well studied, and
        highly expressed, is found without knowing any edge.

    Notes
    -----
    ``auprc_ratio``
        ``auprc`` over the share of true edges, which is what random scores have.
    ``auprc``
        Average precision: ``sum_n (R_n - R_(n-1)) P_n`` over the distinct weights, as in scikit-learn. No trapezoids,
        which would credit ties, and pairs without a score, with more than they know (Davis and Goadrich 2006).
    ``auroc``
        Share of pairs of a true and another edge that are in the right order; ties count half.
    ``early_precision``, ``early_precision_ratio``
        Precision among the k pairs of highest weight, k the number of true edges; all pairs that tie with the last of
        them are taken (Pratapa et al., Nat Methods 2020, BEELINE). Where fewer than k have a score, BEELINE takes these
        alone; here the missing ones are taken at random from the pairs without a score, in expectation. The ratio is
        that to random.
    ``auroc_within_tf``
        Mean over transcription factors of the AUROC among their own pairs. That some have more known targets than
        others does not help here.

    :meth:`resampled` is a bootstrap of transcription factors: the edges of one are no independent observations.

    Examples
    --------
    >>> truth = pd.DataFrame({"source": ["A", "A", "B"], "target": ["x", "y", "z"]})
    >>> scores = pd.DataFrame({"source": ["A", "A", "B"], "target": ["x", "y", "x"], "weight": [3.0, 2.0, 1.0]})
    >>> figures = GeneNetwork().run(scores, truth)
    >>> round(figures["auroc"], 3), round(figures["early_precision"], 3)
    (0.778, 0.667)
    """

    subject: ClassVar[str] = "network"
    metrics = ("auprc_ratio", "auprc", "auroc", "early_precision_ratio", "early_precision", "auroc_within_tf")
    n_draws: ClassVar[int] = 100

    def __init__(
        self, genes: Sequence[str] | None = None, tfs: Sequence[str] | None = None, targets: str = "truth"
    ) -> None:
        for argument, names in {"genes": genes, "tfs": tfs}.items():
            if names is not None and (isinstance(names, str) or not len(names)):
                raise OptionError(f"{argument}={names!r} is not a list of gene names; name at least one, or None.")
        if targets not in _KINDS_OF_TARGETS:
            raise OptionError(f"targets={targets!r} is none of {listing(_KINDS_OF_TARGETS)}.")
        if targets == "measured" and genes is None:
            raise OptionError("targets='measured' needs to know what was measured; give genes.")
        self.genes = None if genes is None else list(genes)
        self.tfs = None if tfs is None else list(tfs)
        self.targets = targets

    def check(self, reference: pd.DataFrame) -> None:
        """Raise :class:`~scforge.errors.DataError` where :meth:`run` would for any scores."""
        self.universe(reference)

    def universe(self, reference: pd.DataFrame) -> Universe:
        """Return the pairs that are scored against these true edges.

        Parameters
        ----------
        reference
            True edges, with the columns ``source`` and ``target``.

        Raises
        ------
        DataError
            If columns or names are missing, or no true edge is left, or nothing else.
        """
        _check_edges("the truth", reference)
        given = reference[["source", "target"]].astype(str).drop_duplicates()
        kept = given[given["source"] != given["target"]]
        if self.tfs is not None:
            kept = kept[kept["source"].isin(self.tfs)]
        if self.genes is not None:
            kept = kept[kept["source"].isin(self.genes) & kept["target"].isin(self.genes)]
        if kept.empty:
            raise DataError(
                f"none of the {len(given)} true edges is left{self._why_empty(given)}; name genes as the truth does, "
                f"e.g. by symbols (its sources: {listing(given['source'].unique(), most=3)})."
            )
        tfs = pd.Index(np.sort(kept["source"].unique()))
        targets = kept["target"] if self.targets == "truth" or self.genes is None else pd.Series(self.genes)
        genes = pd.Index(np.sort(targets.unique()))
        edges = np.zeros((len(tfs), len(genes)), dtype=np.bool_)
        edges[tfs.get_indexer(kept["source"]), genes.get_indexer(kept["target"])] = True
        own = genes.get_indexer(tfs)
        pairs = np.ones(edges.shape, dtype=np.bool_)
        pairs[np.flatnonzero(own >= 0), own[own >= 0]] = False
        if edges.sum() == pairs.sum():
            raise DataError("all pairs are true edges, so that there is nothing to tell them from; give more edges.")
        return Universe(tfs, genes, edges, pairs, len(given) - len(kept))

    def run(self, made: pd.DataFrame, reference: pd.DataFrame) -> dict[str, float]:
        """Return the figures; ``auroc_within_tf`` is NaN where each transcription factor regulates all genes.

        Parameters
        ----------
        made
            Scores of edges, with the columns ``source``, ``target`` and ``weight``: more is more likely. Edges outside
            the pairs that are scored do no harm. Categorical columns are the quickest.
        reference
            True edges, with the columns ``source`` and ``target``.
        """
        universe = self.universe(reference)
        ranked = RankedPairs.of(made, universe)
        return ranked.figures(np.ones(len(universe.tfs)), ranked.within())

    def resampled(self, made: pd.DataFrame, reference: pd.DataFrame, *, n: int, seed: int) -> pd.DataFrame:
        """Return the figures on bootstrapped transcription factors; NaN where those drawn regulate all genes."""
        universe = self.universe(reference)
        ranked = RankedPairs.of(made, universe)
        within = ranked.within()
        draws = bootstrap_weights(len(universe.tfs), n, seed=seed).astype(np.float64)
        return pd.DataFrame([ranked.figures(weights, within) for weights in draws], columns=list(self.metrics))

    def n_units(self, reference: pd.DataFrame) -> int:
        """Return the number of transcription factors."""
        return len(self.universe(reference).tfs)

    def _why_empty(self, given: pd.DataFrame) -> str:
        reasons = []
        if self.tfs is not None and not given["source"].isin(self.tfs).any():
            reasons.append(f"none of tfs ({listing(self.tfs, most=3)}) is a source")
        if self.genes is not None:
            n_known = len(set(self.genes) & (set(given["source"]) | set(given["target"])))
            reasons.append(f"{n_known} of the {len(self.genes)} genes ({listing(self.genes, most=3)}) are in the truth")
        return f": {' and '.join(reasons)}" if reasons else ""


def _check_edges(what: str, edges: Any, *more: str) -> None:
    """Raise unless this is a table with ``source``, ``target`` and more columns, without missing names."""
    if not isinstance(edges, pd.DataFrame):
        raise OptionError(f"{what} are of type {type(edges).__name__!r}; give a pandas.DataFrame of edges.")
    for column in ("source", "target", *more):
        if column not in edges:
            raise DataError(
                f"{what} have no column {column!r} (there is: {listing(edges.columns)}); rename the one that it is."
            )
        n_missing = int(edges[column].isna().sum())
        if n_missing and column not in more:
            raise DataError(f"{n_missing} edges of {what} have no {column}; leave them out.")


def _places(names: pd.Series, index: pd.Index) -> np.ndarray:
    """Return where names stand in an index, -1 for nowhere."""
    if not isinstance(names.dtype, pd.CategoricalDtype):
        names = names.astype("category")
    of_categories = index.get_indexer(pd.Index(names.cat.categories.astype(str)))
    return of_categories[names.cat.codes.to_numpy()]


@numba.njit(cache=True, nogil=True)
def _figures(tfs, true, ties, n_scored, weights, n_true, n_pairs):
    """Return AUROC, average precision, early precision and the share of true edges."""
    if n_true == 0.0 or n_true == n_pairs:
        return np.nan, np.nan, np.nan, np.nan
    hits, misses, some_hits, some_misses = 0.0, 0.0, 0.0, 0.0
    ordered, precisions, early = 0.0, 0.0, -1.0
    for pair in range(len(tfs)):
        if true[pair]:
            some_hits += weights[tfs[pair]]
        else:
            some_misses += weights[tfs[pair]]
        if pair + 1 < len(tfs) and ties[pair + 1] == ties[pair]:
            continue
        taken = hits + misses
        some = some_hits + some_misses
        ordered += some_misses * (hits + some_hits / 2.0)
        if some_hits > 0.0:
            precisions += some_hits * (hits + some_hits) / (taken + some)
        if early < 0.0 and some > 0.0 and taken + some >= n_true:
            expected = (hits + (n_true - taken) * some_hits / some) / n_true
            early = (hits + some_hits) / (taken + some) if pair < n_scored else expected
        hits += some_hits
        misses += some_misses
        some_hits, some_misses = 0.0, 0.0
    return ordered / (n_true * (n_pairs - n_true)), precisions / n_true, early, n_true / n_pairs


@numba.njit(cache=True, nogil=True)
def _within(tfs, true, ties, n_tfs):
    """Return the AUROC of each transcription factor, in one pass over all pairs."""
    hits, misses, ordered = np.zeros(n_tfs), np.zeros(n_tfs), np.zeros(n_tfs)
    some_hits, some_misses, tie = np.zeros(n_tfs), np.zeros(n_tfs), np.full(n_tfs, -1)
    for pair in range(len(tfs)):
        tf = tfs[pair]
        if tie[tf] != ties[pair]:
            ordered[tf] += some_misses[tf] * (hits[tf] + some_hits[tf] / 2.0)
            hits[tf] += some_hits[tf]
            misses[tf] += some_misses[tf]
            some_hits[tf], some_misses[tf], tie[tf] = 0.0, 0.0, ties[pair]
        if true[pair]:
            some_hits[tf] += 1.0
        else:
            some_misses[tf] += 1.0
    ordered += some_misses * (hits + some_hits / 2.0)
    n_true, n_other = hits + some_hits, misses + some_misses
    found = np.full(n_tfs, np.nan)
    for tf in range(n_tfs):
        if n_true[tf] > 0 and n_other[tf] > 0:
            found[tf] = ordered[tf] / (n_true[tf] * n_other[tf])
    return found


NETWORK_BASELINES = ("pearson", "spearman", "mean_expression", "degree", "in_degree", "random")


def network_baselines(
    adata: AnnData,
    truth: pd.DataFrame,
    names: Sequence[str] = NETWORK_BASELINES,
    *,
    benchmark: GeneNetwork | None = None,
    layer: str | None = None,
    gene_key: str | None = None,
    n_random: int = 3,
    max_cells: int = 10_000,
    seed: int = 0,
) -> dict[str, pd.DataFrame]:
    """Score all pairs of a benchmark in the ways that a model has to beat.

    Parameters
    ----------
    adata
        Annotated data with raw counts.
    truth
        True edges, with the columns ``source`` and ``target``.
    names
        Which:

        ``"pearson"``, ``"spearman"``
            Absolute correlation of log1p CP10K over the cells.
        ``"mean_expression"``
            Product of the means of log1p CP10K of both genes.
        ``"degree"``
            How many edges either gene has in the truth apart from the one in question (cross-fitted). It sees true
            edges, which a model does not, and no cell: it says how far popularity alone gets.
        ``"in_degree"``
            The same of the target alone, which is the fair one to compare the order within a transcription factor with.
        ``"random"``
            Chance.
    benchmark
        Says which pairs there are; None takes all pairs of the truth with measured genes.
    layer
        Key in ``adata.layers`` with raw counts; None reads ``adata.X``.
    gene_key
        Column of ``adata.var`` with names as in the truth; None takes ``adata.var_names``.
    n_random
        Random scores to draw, each a method of its own.
    max_cells
        Cells to correlate at most, drawn at random.
    seed
        Seed of what is drawn.

    Returns
    -------
    Name of a baseline to its edges.

    Raises
    ------
    OptionError
        If a name is unknown.
    DataError
        If there are no raw counts, or no true edge is between measured genes.

    Examples
    --------
    >>> import anndata, numpy as np, pandas as pd
    >>> counts = np.random.default_rng(0).poisson(3.0, size=(50, 6)).astype("float32")
    >>> adata = anndata.AnnData(counts, var=pd.DataFrame(index=list("ABCDEF")))
    >>> truth = pd.DataFrame({"source": ["A", "A", "B"], "target": ["C", "D", "E"]})
    >>> made = network_baselines(adata, truth, ["pearson", "degree"])
    >>> list(made), list(made["degree"])
    (['co-expression (pearson)', 'degree'], ['source', 'target', 'weight'])
    """
    for name in names:
        if name not in NETWORK_BASELINES:
            raise OptionError(
                f"names has {name!r}, which is no baseline of networks{did_you_mean(name, NETWORK_BASELINES)} "
                f"(known: {listing(NETWORK_BASELINES)})"
            )
    check_count("n_random", n_random, "random scores")
    check_adata(adata)
    of_cells: dict[str, Any] = {"layer": layer, "gene_key": gene_key, "max_cells": max_cells, "seed": seed}
    measured = sorted(set(gene_names(adata, gene_key)))
    universe = (GeneNetwork(genes=measured) if benchmark is None else benchmark).universe(truth)
    found: dict[str, pd.DataFrame] = {}
    for name in names:
        if name in ("pearson", "spearman"):
            found[f"co-expression ({name})"] = coexpression_edges(
                adata, universe.tfs, universe.genes, method=name, **of_cells
            )
        elif name == "mean_expression":
            found["mean expression"] = mean_expression_edges(adata, universe.tfs, universe.genes, **of_cells)
        elif name in ("degree", "in_degree"):
            found[name.replace("_", "-")] = degree_edges(universe, out=name == "degree", seed=seed)
        else:
            for number in range(n_random):
                title = "random" if n_random == 1 else f"random {number + 1}"
                found[title] = random_edges(universe.tfs, universe.genes, seed=seed + number)
    return found


def coexpression_edges(
    adata: AnnData,
    tfs: Sequence[str],
    targets: Sequence[str],
    *,
    method: str = "pearson",
    absolute: bool = True,
    layer: str | None = None,
    gene_key: str | None = None,
    max_cells: int = 10_000,
    seed: int = 0,
) -> pd.DataFrame:
    """Score pairs of genes by the correlation of their log1p CP10K over cells.

    Parameters
    ----------
    adata
        Annotated data with raw counts. Genes of the same name are added up.
    tfs, targets
        Sources and targets; those that were not measured are left out.
    method
        ``"pearson"`` or ``"spearman"`` (ties have their mean rank).
    absolute
        Score by the size alone, since transcription factors also repress.
    layer, gene_key, max_cells, seed
        As in :func:`network_baselines`.

    Returns
    -------
    ``source``, ``target`` and ``weight`` (float32). A gene without variance correlates 0 with all.
    """
    if method not in ("pearson", "spearman"):
        raise OptionError(f"method={method!r} is neither 'pearson' nor 'spearman'.")
    expression, names = _expression(adata, layer, gene_key, max_cells, seed)
    sources, genes = names_among("tfs", tfs, names), names_among("targets", targets, names)
    used = names.isin(sources) | names.isin(genes)
    expression, names = expression[:, used], names[used]
    if method == "spearman":
        expression = _ranks(expression)
    n_cells = expression.shape[0]
    mean = np.asarray(expression.mean(axis=0)).ravel()
    square = np.asarray(expression.multiply(expression).mean(axis=0)).ravel()
    scale = np.sqrt(np.maximum(square - mean**2, 0.0))
    # A constant gene has a variance of rounding errors.
    scale[scale <= 1e-7 * np.sqrt(square)] = np.inf
    rows, columns = names.get_indexer(sources), names.get_indexer(genes)
    products = (expression[:, rows].T @ expression[:, columns]).toarray() / n_cells
    weights = (products - np.outer(mean[rows], mean[columns])) / np.outer(scale[rows], scale[columns])
    return edges_of(np.abs(weights) if absolute else weights, sources, genes)


def mean_expression_edges(
    adata: AnnData,
    tfs: Sequence[str],
    targets: Sequence[str],
    *,
    layer: str | None = None,
    gene_key: str | None = None,
    max_cells: int = 10_000,
    seed: int = 0,
) -> pd.DataFrame:
    """Score pairs of genes by the product of their mean log1p CP10K: what is highly expressed is well known.

    Parameters
    ----------
    adata, tfs, targets, layer, gene_key, max_cells, seed
        As in :func:`coexpression_edges`.

    Returns
    -------
    ``source``, ``target`` and ``weight`` (float32).
    """
    expression, names = _expression(adata, layer, gene_key, max_cells, seed)
    mean = np.asarray(expression.mean(axis=0)).ravel()
    sources, genes = names_among("tfs", tfs, names), names_among("targets", targets, names)
    return edges_of(np.outer(mean[names.get_indexer(sources)], mean[names.get_indexer(genes)]), sources, genes)


def degree_edges(universe: Universe, *, out: bool = True, n_folds: int = 5, seed: int = 0) -> pd.DataFrame:
    """Score pairs of genes by the share of true edges of either, apart from what is asked for.

    The weight of an edge is the out-degree of its source times the in-degree of its target, both as shares. They are
    cross-fitted: transcription factors and genes are dealt into folds, and for a pair of fold a and fold b the
    out-degree is counted over the genes outside b, the in-degree over the transcription factors outside a. To take one
    edge off each count would not do: among the pairs of a gene, true ones would then have the lower counts, by which
    they could be told. Folds keep some of that. Among the pairs of one transcription factor, the out-degree brings
    random edges somewhat below chance (AUROC 0.47 where 60 have 20 of 200 genes each). And where most genes of the
    truth have one edge, to know that they have no other tells the true one, the wrong way round: figures below chance
    say that the truth is too small for degrees. Shares are shrunk towards that of all pairs by one pseudo-observation.

    Parameters
    ----------
    universe
        The pairs and the true edges, of :meth:`scforge.eval.GeneNetwork.universe`.
    out
        Whether the out-degree counts as well.
    n_folds
        Number of folds of either.
    seed
        Seed of the folds.

    Returns
    -------
    ``source``, ``target`` and ``weight`` (float32).
    """
    check_count("n_folds", n_folds, "folds", least=2)
    rng = np.random.default_rng(check_seed(seed))
    edges, pairs = universe.edges, universe.pairs
    of_tf, of_gene = (rng.permutation(size) % n_folds for size in edges.shape)
    share = edges.sum() / pairs.sum()
    weights = np.empty(edges.shape)
    for fold in range(n_folds):
        rest = of_tf != fold
        weights[~rest] = (edges[rest].sum(axis=0) + share) / (pairs[rest].sum(axis=0) + 1.0)
    for fold in range(n_folds) if check_bool("out", out) else ():
        rest = of_gene != fold
        weights[:, ~rest] *= ((edges[:, rest].sum(axis=1) + share) / (pairs[:, rest].sum(axis=1) + 1.0))[:, None]
    return edges_of(weights, universe.tfs, universe.genes)


def random_edges(tfs: Sequence[str], targets: Sequence[str], *, seed: int = 0) -> pd.DataFrame:
    """Score pairs of genes by random numbers between 0 and 1.

    Parameters
    ----------
    tfs, targets
        Sources and targets.
    seed
        Seed.

    Returns
    -------
    ``source``, ``target`` and ``weight`` (float32).
    """
    sources, genes = pd.Index(tfs), pd.Index(targets)
    return edges_of(np.random.default_rng(check_seed(seed)).random((len(sources), len(genes))), sources, genes)


def _expression(
    adata: AnnData, layer: str | None, gene_key: str | None, max_cells: int, seed: int
) -> tuple[sparse.csc_matrix, pd.Index]:
    """Return log1p CP10K of some cells, shape (N, G), float64, and the names of the genes, each once."""
    check_adata(adata)
    check_count("max_cells", max_cells, "cells", least=3)
    counts = counts_of(adata, layer).astype(np.float64)
    if counts.shape[0] > max_cells:
        rows = np.random.default_rng(check_seed(seed)).choice(counts.shape[0], max_cells, replace=False)
        counts = counts[np.sort(rows)]
    totals = np.asarray(counts.sum(axis=1)).ravel()
    codes, names = pd.factorize(gene_names(adata, gene_key))
    if len(names) < len(codes):
        same = sparse.csr_matrix((np.ones(len(codes)), (np.arange(len(codes)), codes)), (len(codes), len(names)))
        counts = counts @ same
    scaled = sparse.diags_array(TARGET_SUM / totals) @ counts
    return sparse.csc_matrix(scaled).log1p(), pd.Index(names)


def _ranks(expression: sparse.csc_matrix) -> sparse.csc_matrix:
    """Return the ranks of cells for each gene, less that of cells without it, which leaves them sparse."""
    from scipy.stats import rankdata

    ranks = expression.copy()
    ranks.eliminate_zeros()
    n_cells = ranks.shape[0]
    for start, stop in zip(ranks.indptr[:-1], ranks.indptr[1:], strict=True):
        n_zeros = n_cells - (stop - start)
        # The mean rank of zeros is (n_zeros + 1) / 2, and the first of the others comes after them.
        ranks.data[start:stop] = rankdata(ranks.data[start:stop]) + n_zeros - (n_zeros + 1) / 2
    return ranks


def evaluate_network(
    scores: Mapping[str, pd.DataFrame],
    truth: pd.DataFrame,
    adata: AnnData,
    *,
    layer: str | None = None,
    gene_key: str | None = None,
    genes: Sequence[str] | None = None,
    tfs: Sequence[str] | None = None,
    targets: str = "truth",
    kinds: Mapping[str, Kind] | None = None,
    baselines: Sequence[str] = NETWORK_BASELINES,
    n_random: int = 3,
    max_cells: int = 10_000,
    seed: int = 0,
    intervals: bool = True,
    title: str = "Gene networks compared",
) -> Report:
    """Score networks of genes against known edges, beside baselines on the same pairs.

    Parameters
    ----------
    scores
        Name of a method to its edges, with the columns ``source``, ``target`` and ``weight``: from
        :func:`scforge.eval.edges_from_embeddings` and its like.
    truth
        True edges, with the columns ``source`` and ``target``: from :func:`scforge.eval.read_network`.
    adata
        Annotated data with raw counts: says which genes were measured, and is what baselines correlate.
    layer
        Key in ``adata.layers`` with raw counts; None reads ``adata.X``.
    gene_key
        Column of ``adata.var`` with names as in the truth; None takes ``adata.var_names``.
    genes
        Genes to restrict the pairs to, among those that were measured: e.g. those that a model knows, if the question
        is what it knows of them. Pairs without a score count as its last ones otherwise. None takes all.
    tfs
        Transcription factors to restrict the pairs to; None takes all of the truth that are among the genes.
    targets
        ``"truth"``: genes with an edge in the truth. ``"measured"``: all genes.
    kinds
        Name of a method to ``"model"``, ``"baseline"``, ``"untrained"`` or ``"ceiling"``; those that are not named are
        models.
    baselines
        Names of :func:`scforge.eval.network_baselines`; at least one unless `scores` has one.
    n_random
        Random scores to draw.
    max_cells
        Cells to correlate at most.
    seed
        Seed of what baselines draw.
    intervals
        Add 95 % intervals from a bootstrap of transcription factors, and tests against the best baseline.
    title
        Heading of the report.

    Returns
    -------
    The report: metrics of :class:`scforge.eval.GeneNetwork`; its facts say what the pairs are, its notes which methods
    left pairs without a score.

    Raises
    ------
    OptionError
        If there are no scores, a kind names no method, or there is no baseline.
    DataError
        If scores or true edges cannot be used, or there are no raw counts.

    Examples
    --------
    >>> import anndata, numpy as np, pandas as pd
    >>> counts = np.random.default_rng(0).poisson(3.0, size=(50, 6)).astype("float32")
    >>> adata = anndata.AnnData(counts, var=pd.DataFrame(index=list("ABCDEF")))
    >>> truth = pd.DataFrame({"source": ["A", "A", "B"], "target": ["C", "D", "E"]})
    >>> mine = {"mine": truth.assign(weight=1.0)}
    >>> report = evaluate_network(mine, truth, adata, baselines=["pearson"], intervals=False)
    >>> report.to_table()["auprc"].idxmax()
    'mine'
    """
    if not isinstance(scores, Mapping) or not scores:
        raise OptionError("scores names no method; give a mapping of names to tables of edges.")
    check_is_adata(adata)
    if unknown := [name for name in kinds or {} if name not in scores]:
        raise OptionError(f"kinds names {listing(unknown)}, not among the scores ({listing(scores)}).")
    benchmark = GeneNetwork(genes=_among(genes, gene_names(adata, gene_key).tolist()), tfs=tfs, targets=targets)
    universe = benchmark.universe(truth)
    made = dict(scores)
    of_kind: dict[str, Kind] = {**dict.fromkeys(scores, "model"), **(kinds or {})}
    simple = network_baselines(
        adata,
        truth,
        baselines,
        benchmark=benchmark,
        layer=layer,
        gene_key=gene_key,
        n_random=n_random,
        max_cells=max_cells,
        seed=seed,
    )
    if taken := [name for name in simple if name in made]:
        raise OptionError(f"scores calls a method {taken[0]!r}, which is the name of a baseline; call it otherwise.")
    made |= simple
    of_kind |= dict.fromkeys(simple, "baseline")
    report = compare(benchmark, made, truth, kinds=of_kind, intervals=intervals, title=title)
    report.facts |= universe.describe()
    report.notes += _notes(scores, universe, simple)
    return report


def network_curves(
    scores: Mapping[str, pd.DataFrame],
    truth: pd.DataFrame,
    *,
    benchmark: GeneNetwork | None = None,
    n_points: int = 500,
) -> pd.DataFrame:
    """Return precision over recall of networks, for a plot.

    Parameters
    ----------
    scores
        Name of a method to its edges, as in :func:`evaluate_network`.
    truth
        True edges.
    benchmark
        Says which pairs there are; None takes all pairs of the truth.
    n_points
        Points of a curve at most, evenly spaced along the ranks of true edges.

    Returns
    -------
    ``method``, ``recall``, ``precision`` and ``auprc``, by rising recall. ``auprc`` is the average precision of the
    whole network, as :class:`GeneNetwork` has it, the same on all its rows. Points stand where the weight changes, so
    that pairs that tie are one step. The last point, at recall 1, is where all pairs are taken: its precision is that
    of random scores.

    Examples
    --------
    >>> truth = pd.DataFrame({"source": ["A", "B"], "target": ["x", "y"]})
    >>> scores = pd.DataFrame({"source": ["A"], "target": ["x"], "weight": [1.0]})
    >>> network_curves({"mine": scores}, truth).values.tolist()
    [['mine', 0.5, 1.0, 0.75], ['mine', 1.0, 0.5, 0.75]]
    """
    check_count("n_points", n_points, "points", least=2)
    universe = (GeneNetwork() if benchmark is None else benchmark).universe(truth)
    curves = []
    for method, made in scores.items():
        ranked = RankedPairs.of(made, universe)
        last = np.flatnonzero(np.append(np.diff(ranked.ties) > 0, True))
        hits = np.cumsum(ranked.true)[last]
        # Only where another true edge was found: between these precision just falls.
        found = np.flatnonzero(np.diff(hits, prepend=0) > 0)
        found = found if found[-1] == len(last) - 1 else np.append(found, len(last) - 1)
        if len(found) > n_points:
            found = found[np.unique(np.linspace(0, len(found) - 1, n_points).round().astype(np.int64))]
        curves.append(
            pd.DataFrame(
                {
                    "method": method,
                    "recall": hits[found] / hits[-1],
                    "precision": hits[found] / (last[found] + 1.0),
                    "auprc": ranked.figures(np.ones(len(universe.tfs)), ranked.within())["auprc"],
                }
            )
        )
    return pd.concat(curves, ignore_index=True)


def _among(genes: Sequence[str] | None, measured: Sequence[str]) -> list[str]:
    """Return the genes that are asked for and were measured."""
    if genes is None:
        return sorted(set(measured))
    found = [] if isinstance(genes, str) else sorted(set(genes) & set(measured))
    if not found:
        raise OptionError(
            f"genes={listing([genes] if isinstance(genes, str) else genes, most=3)} names none of the measured genes "
            f"({listing(measured, most=3)}); give a list of names like these."
        )
    return found


def _notes(scores: Mapping[str, pd.DataFrame], universe: Universe, simple: Mapping[str, pd.DataFrame]) -> list[str]:
    """Say what a reader would not guess."""
    n_pairs = int(universe.pairs.sum())
    notes = []
    for name, made in scores.items():
        n_scored = int((np.isfinite(universe.matrix(made)) & universe.pairs).sum())
        if n_scored < n_pairs:
            notes.append(
                f"{name} has a score for {n_scored:,} of {n_pairs:,} pairs; the others tie behind all that have one."
            )
    if {"degree", "in-degree"} & set(simple):
        notes.append(
            "Baselines of degree know how many true edges a gene has apart from the pair in question, and no cell."
        )
    notes.append("An edge that is not in the truth counts as wrong, although it may only be unknown.")
    return notes
