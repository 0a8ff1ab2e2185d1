"""Benchmarks of gene regulatory networks: known edges from files, edge scores, baselines and reports."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd
from scipy import sparse

from scforge._checks import check_known
from scforge._constants import TARGET_SUM
from scforge.data.checks import check_is_adata, counts_of, gene_names
from scforge.errors import DataError, MissingFileError, OptionError, first_line, listing
from scforge.eval.base import Benchmark, register_benchmark
from scforge.eval.generation import compare_beside
from scforge.eval.report import bootstrap_weights

if TYPE_CHECKING:
    from anndata import AnnData

    from scforge.eval.report import Kind, Report


_MAX_PAIRS = 100_000_000
"""Maximum number of edges in a table, at about ten bytes each."""

_MEASURES = ("cosine", "correlation", "dot")

_MODES = {"activation": 1.0, "repression": -1.0, "unknown": np.nan}

_SOURCES = ("source", "tf", "regulator", "gene1", "transcription_factor")

_TARGETS = ("target", "gene", "gene2", "target_gene")

_CHIP_ATLAS = re.compile(r"(?P<tf>.+)\|Average", re.IGNORECASE)

_BEST = {"sign": "mean", "weight": "max", "confidence": "min"}

NETWORK_BASELINES = ("pearson", "spearman", "mean_expression", "degree", "in_degree", "random")

_N_FOLDS = 5
"""Number of cross-fitting folds, in which degrees are counted without the scored edges."""

_N_RANDOM = 3
"""Number of random scores, each a separate method."""


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

    The weights are symmetric, so only the choice of sources defines a direction.

    Parameters
    ----------
    embeddings
        One vector per gene, shape (G, D), with gene names as index: the result of ``model.get_gene_embeddings()``, or
        mean shifts of cells when each gene is perturbed (:func:`scforge.insilico.screening.mean_moves`; use `center`).
        Genes with NaN are left out.
    tfs
        Source genes; genes without a vector are left out. If None, uses all genes.
    targets
        Target genes; genes without a vector are left out. If None, uses all genes.
    measure
        ``"cosine"``, ``"correlation"`` over the dimensions, or ``"dot"``, the inner product.
    center
        Whether to subtract the mean over all genes first, because the shared part of all vectors is not informative
        about pairs.
    absolute
        Whether to use absolute values, so that opposite vectors are as similar as equal vectors.

    Returns
    -------
    A table with the columns ``source``, ``target`` and ``weight`` (float32), one row for each pair of different genes.

    Raises
    ------
    OptionError
        If the measure is unknown, or there are too many pairs.
    DataError
        If a gene occurs twice, or none of `tfs` or of `targets` has a vector.

    Examples
    --------
    >>> vectors = pd.DataFrame([[1.0, 0.0], [0.5, 1.0], [0.0, 2.0]], index=["A", "B", "C"])
    >>> edges_from_embeddings(vectors, tfs=["C"], measure="dot").values.tolist()
    [['C', 'A', 0.0], ['C', 'B', 2.0]]
    """
    from sklearn.preprocessing import normalize

    check_known("measure", measure, _MEASURES, "the measures", error=OptionError)
    vectors = embeddings.to_numpy(dtype=np.float64)
    kept = np.isfinite(vectors).all(axis=1)
    names, vectors = _unique(embeddings.index[kept]), vectors[kept]
    if center:
        vectors = vectors - vectors.mean(axis=0)
    if measure == "correlation":
        vectors = vectors - vectors.mean(axis=1, keepdims=True)
    if measure != "dot":
        vectors = normalize(vectors)
    rows, columns = _chosen("tfs", tfs, names), _chosen("targets", targets, names)
    if len(rows) * len(columns) > _MAX_PAIRS:
        raise OptionError(
            f"{len(rows)} x {len(columns)} gene pairs are more than the limit of {_MAX_PAIRS}; pass the transcription "
            "factors as tfs."
        )
    weights = vectors[rows] @ vectors[columns].T
    return edges_of(np.abs(weights) if absolute else weights, names[rows], names[columns])


def edges_from_matrix(
    matrix: Any, names: Any, targets: Any = None, *, tfs: Sequence[str] | None = None
) -> pd.DataFrame:
    """Convert a weight matrix of shape (S, T), with regulators in rows and targets in columns, to edges.

    In a sparse matrix, stored nonzero values are edges; in an array, all values except NaN.
    """
    rows = _unique(names)
    columns = rows if targets is None else _unique(targets)
    if tfs is not None:
        kept = _chosen("tfs", tfs, rows)
        matrix, rows = matrix[kept], rows[kept]
    if not sparse.issparse(matrix):
        return edges_of(matrix, rows, columns)
    entries = matrix.tocoo()
    stored = entries.data != 0
    return edges_of(entries.data[stored], rows, columns, entries.row[stored], entries.col[stored])


def edges_from_attention(
    adata: AnnData,
    key: str = "scforge_attention",
    *,
    tfs: Sequence[str] | None = None,
    source: str = "columns",
    gene_key: str | None = None,
) -> pd.DataFrame:
    """Read edges from the graph that ``model.get_attention()`` wrote.

    The entry in row i and column j is the attention of gene i to gene j. Targets attend to their regulators, so by
    default the columns are the sources. ``get_attention`` keeps, for each gene, the 20 genes to which it attends most;
    increase its `top_k` to score more pairs.

    Parameters
    ----------
    adata
        Annotated data with the graph in ``adata.varp``.
    key
        Key in ``adata.varp``.
    tfs
        Sources to keep. If None, keeps all.
    source
        Axis of the regulators, ``"columns"`` or ``"rows"``.
    gene_key
        Column of ``adata.var`` with the names of the genes. If None, uses ``adata.var_names``.

    Returns
    -------
    A table with the columns ``source``, ``target`` and ``weight`` (float32), one row for each pair in the graph.

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
    check_known("key", key, adata.varp, "adata.varp", fix="compute it with model.get_attention(adata)")
    check_known("source", source, ("rows", "columns"), "the graph", error=OptionError)
    graph = sparse.csr_matrix(adata.varp[key])
    return edges_from_matrix(graph.T.tocsr() if source == "columns" else graph, gene_names(adata, gene_key), tfs=tfs)


def edges_from_perturbations(effects: pd.DataFrame | AnnData, *, tfs: Sequence[str] | None = None) -> pd.DataFrame:
    """Score pairs of genes by the effect of perturbing one of them.

    Parameters
    ----------
    effects
        One of the following:

        - the prediction of the perturbation task (``predictor.predict(...)``), with ``layers["delta"]``. The weight is
          the absolute change of a gene, the largest over contexts. Combinations are left out.
        - the same as a table, with perturbed genes in rows and changed genes in columns.
        - the table of ``model.perturb_in_silico(genes, combinations=2)``. It measures how far cells move, not which
          genes change, so weights are interactions: an additive model a_i + a_j is fitted to the shifts of pairs by
          least squares, and the weight is the absolute residual, the same in both directions. NaN shifts are left out.
          With groups, the weight is the maximum over groups.
    tfs
        Sources to keep. If None, keeps all.

    Returns
    -------
    A table with the columns ``source``, ``target`` and ``weight`` (float32).

    Raises
    ------
    DataError
        If the table has one gene per row, or there are no effects.

    Examples
    --------
    >>> effects = pd.DataFrame([[0.5, -2.0]], index=["TF"], columns=["A", "B"])
    >>> edges_from_perturbations(effects).values.tolist()
    [['TF', 'A', 0.5], ['TF', 'B', 2.0]]
    """
    if not isinstance(effects, pd.DataFrame):
        names = effects.obs.get("perturbation", pd.Series("", index=effects.obs_names)).astype(str).to_numpy()
        single = np.isin(names, effects.var_names)
        if "delta" not in effects.layers or not single.any():
            perturbations = listing(dict.fromkeys(names), most=3)
            raise DataError(
                f"must have layers['delta'] and perturbations of single genes, but obs['perturbation'] contains "
                f"{perturbations}; pass predicted effects of single-gene perturbations.",
                argument="effects",
            )
        deltas, genes = np.asarray(effects.layers["delta"])[single], effects.var_names.astype(str)
        effects = pd.DataFrame(deltas, index=names[single], columns=genes)
    elif "gene" in effects and "shift" in effects:
        return _pair_residuals(effects, tfs)
    size = effects.abs().groupby(level=0, observed=True).max()
    return edges_from_matrix(size.to_numpy(), size.index, size.columns, tfs=tfs)


def edges_of(
    weights: np.ndarray,
    sources: pd.Index,
    targets: pd.Index,
    rows: np.ndarray | None = None,
    columns: np.ndarray | None = None,
) -> pd.DataFrame:
    """Return a table of edges without NaN and self-loops.

    `weights` has the shape (S, T), or the shape (E,) with `rows` and `columns` as positions in the names.
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


def _chosen(argument: str, names: Sequence[str] | None, available: pd.Index) -> np.ndarray:
    """Return the positions of names among the known names, without unknown names."""
    if names is None:
        return np.arange(len(available))
    asked = pd.Index(names).astype(str).unique()
    places = available.get_indexer(asked)
    if not (places >= 0).any():
        measured = f"{len(available)} genes ({listing(available, most=3)})"
        raise DataError(
            f"({listing(asked, most=3)}) has no overlap with the {measured}; use the same gene ids.", argument=argument
        )
    return places[places >= 0]


def _unique(names: Any) -> pd.Index:
    """Return names as text. Raises an error if a name occurs more than once."""
    index = pd.Index(names).astype(str)
    if not index.is_unique:
        twice = listing(index[index.duplicated()].unique(), most=3)
        raise DataError(f"gene names are duplicated ({twice}); keep one entry per gene.")
    return index


def _pair_residuals(table: pd.DataFrame, tfs: Sequence[str] | None) -> pd.DataFrame:
    """Return the residuals of pair shifts from an additive model."""
    if "gene_2" not in table:
        raise DataError(
            "contains no gene pairs; use model.perturb_in_silico(genes, combinations=2).", argument="effects"
        )
    names = pd.Index(pd.unique(pd.concat([table["gene"], table["gene_2"]]))).astype(str)
    groups = table["group"] if "group" in table else pd.Series("", index=table.index)
    residuals = np.full((len(names), len(names)), np.nan)
    for _, part in table[table["shift"].notna()].groupby(groups, observed=True):
        first, second = names.get_indexer(part["gene"]), names.get_indexer(part["gene_2"])
        shifts = part["shift"].to_numpy(dtype=np.float64)
        pairs = np.arange(len(part))
        design = sparse.csr_matrix(
            (np.ones(2 * len(part)), (np.tile(pairs, 2), np.concatenate([first, second]))), (len(part), len(names))
        )
        rest = np.abs(shifts - design @ sparse.linalg.lsqr(design, shifts, atol=1e-12, btol=1e-12)[0])
        residuals[first, second] = np.fmax(residuals[first, second], rest)
    return edges_from_matrix(np.fmax(residuals, residuals.T), names, tfs=tfs)


def read_network(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    source: str | int | None = None,
    target: str | int | None = None,
) -> pd.DataFrame:
    r"""Read the known targets of transcription factors.

    Parameters
    ----------
    path
        A tab- or comma-separated text file, which may be compressed, or a Parquet file. The edges of several files are
        combined (ChIP-Atlas has one file per factor). The format is detected from the columns:

        TRRUST
            ``trrust_rawdata.*.tsv``, with or without a header: factor, target, mode, PubMed ids.
        CollecTRI
            ``source``, ``target``, ``weight`` of 1 or -1, as from decoupler.
        DoRothEA
            ``source`` (or ``tf``), ``confidence``, ``target``, and ``weight`` (or ``mor``).
        OmniPath
            CollecTRI or DoRothEA from OmniPath: ``source_genesymbol``, ``target_genesymbol``, ``is_stimulation`` ...
        ENCODE
            ``gene_attribute_edges.txt.gz`` from Harmonizome. It contains genes in ``source`` and the factors that bind
            near them in ``target``; scforge swaps the two.
        ChIP-Atlas
            Target gene files: one row per gene, with ``FACTOR|Average`` and a column for each experiment. Targets with
            an average binding score (from MACS2, -10 log10 q) of 0 are left out.
        other tables
            with a source column, a target column and optionally ``weight``.
    source, target
        Columns of the transcription factors and targets, for tables with other column names. For files without a
        header, pass column positions, starting at 0.

    Returns
    -------
    ``source`` and ``target``, one row per edge, in the order of the file. If the file contains them, also ``sign`` (1
    activation, -1 repression, NaN unknown or contradictory), ``weight`` (the maximum over duplicate edges) and
    ``confidence`` (the best over duplicate edges).

    Raises
    ------
    MissingFileError
        If there is no such file.
    DataError
        If it cannot be read, or lacks columns or names.

    Examples
    --------
    >>> with open("trrust_rawdata.human.tsv", "w") as file:
    ...     _ = file.write("AATF\tBAX\tRepression\t22909821\nAATF\tMYC\tActivation\t20549547\n")
    >>> read_network("trrust_rawdata.human.tsv").values.tolist()
    [['AATF', 'BAX', -1.0], ['AATF', 'MYC', 1.0]]
    """
    paths = [path] if isinstance(path, str | os.PathLike) else list(path)
    if (source is None) != (target is None):
        raise OptionError(f"and target={target!r} must be given together; pass both, or neither.", source=source)
    edges = pd.concat([_read_edges(Path(file), source, target) for file in paths], ignore_index=True)
    best = {name: how for name, how in _BEST.items() if name in edges}
    if not best:
        return edges.drop_duplicates(ignore_index=True)
    merged = edges.groupby(["source", "target"], sort=False).agg(best).reset_index()
    if "sign" in merged:
        merged["sign"] = merged["sign"].where(merged["sign"].abs() == 1)
    return merged


def _read_edges(path: Path, source: str | int | None, target: str | int | None) -> pd.DataFrame:
    """Return the edges in a file unchanged."""
    if not path.is_file():
        raise MissingFileError("is not a file; pass the path of a network file.", path=str(path))
    try:
        edges = _parse_edges(_table(path, isinstance(source, int)), source, target)
    except (ValueError, OSError) as error:
        raise DataError(f"cannot be read as a network: {first_line(error)}.", path=str(path)) from error
    missing = (edges[["source", "target"]].isna() | (edges[["source", "target"]] == "")).any(axis=1)
    if missing.any():
        n_missing = int(missing.sum())
        raise DataError(f"has {n_missing} edges without a source or target; remove these edges.", path=str(path))
    return edges.astype({"source": str, "target": str})


def _table(path: Path, headless: bool) -> pd.DataFrame:
    """Return a file's table as text (Parquet files are read unchanged); columns are numbered if there is no header."""
    if path.suffix == ".parquet":
        return pd.read_parquet(path)
    options: dict[str, Any] = {"header": None, "dtype": str, "keep_default_na": False, "encoding": "utf-8-sig"}
    table = pd.read_csv(path, sep="\t", **options)
    if table.shape[1] == 1:
        table = pd.read_csv(path, sep=",", **options)
    table = table.apply(lambda column: column.str.strip())
    # TRRUST's file has no header: its third column is the mode from the first row on.
    if headless or (table.shape[1] > 2 and table[2].str.lower().isin(_MODES).all()):
        return table if headless else table.rename(columns={0: "source", 1: "target", 2: "mode"})
    names = table.iloc[0].str.lstrip("#").str.strip()
    return table.iloc[1:].set_axis(names.to_numpy(), axis=1).reset_index(drop=True)


def _parse_edges(table: pd.DataFrame, source: str | int | None, target: str | int | None) -> pd.DataFrame:
    """Return the edges of a table in the format that its columns indicate; see :func:`read_network`."""
    columns = {str(name).lower(): table[name] for name in table.columns}

    def column(*names: str) -> pd.Series:
        for name in names:
            if name in columns:
                return columns[name]
        raise DataError(
            f"the column {' or '.join(names)} is missing (columns: {listing(table.columns)}); set source=... and "
            "target=..., or pass column positions if the file has no header"
        )

    if source is not None:
        return pd.DataFrame({"source": column(str(source).lower()), "target": column(str(target).lower())})
    if chip := next((match for name in table.columns if (match := _CHIP_ATLAS.fullmatch(str(name)))), None):
        weights = pd.to_numeric(table[chip.string])
        edges = pd.DataFrame({"source": chip["tf"], "target": table.iloc[:, 0], "weight": weights})
        return edges[edges["weight"] > 0]
    if {"source_desc", "target_desc"} <= set(columns):
        # The line below the header describes the columns; it is not an edge.
        edges = pd.DataFrame({"source": column("target"), "target": column("source")})
        edges = edges[~edges["target"].str.lower().isin(["genesym", "gene symbol", "na", "n/a"])]
        if edges["source"].nunique() > edges["target"].nunique():
            raise DataError("there are more factors than targets; swap the columns with source=... and target=...")
        return edges
    if "source_genesymbol" in columns:
        up, down = (
            column(name).astype(str).str.lower().isin(["1", "true"]) for name in ("is_stimulation", "is_inhibition")
        )
        sign = np.select([up & ~down, down & ~up], [1.0, -1.0], np.nan)
        return pd.DataFrame(
            {"source": column("source_genesymbol"), "target": column("target_genesymbol"), "sign": sign}
        )
    edges = pd.DataFrame({"source": column(*_SOURCES), "target": column(*_TARGETS)})
    if "mode" in columns:
        return edges.assign(sign=columns["mode"].str.lower().map(_MODES))
    weighted = [name for name in ("weight", "mor") if name in columns]
    numbers = pd.to_numeric(columns[weighted[0]]).astype(np.float64) if weighted else None
    if "confidence" in columns:
        signs = {} if numbers is None else {"sign": np.sign(numbers).replace(0.0, np.nan)}
        return edges.assign(**signs, confidence=columns["confidence"])
    if numbers is None:
        return edges
    # CollecTRI has both signs: a list of edges may have the weight 1 throughout.
    return edges.assign(**{"sign" if set(numbers) == {1.0, -1.0} else "weight": numbers})


@dataclass(frozen=True)
class Universe:
    """The pairs to score.

    Attributes
    ----------
    tfs, genes
        Names of the T transcription factors and the G genes.
    edges
        True edges, bool, shape (T, G).
    pairs
        Pairs that are scored: all except self-loops, bool, shape (T, G).
    n_left_out
        Number of given true edges that are not scored.
    """

    tfs: pd.Index
    genes: pd.Index
    edges: np.ndarray
    pairs: np.ndarray
    n_left_out: int

    def matrix(self, made: pd.DataFrame) -> np.ndarray:
        """Return the edge weights, float64, shape (T, G), with -inf for pairs without a weight.

        Raises
        ------
        DataError
            If columns are missing, a weight is NaN, or a pair occurs twice.
        """
        check_edges("the scores", made, "weight")
        rows, columns = _places(made["source"], self.tfs), _places(made["target"], self.genes)
        inside = (rows >= 0) & (columns >= 0)
        weights = made["weight"].to_numpy(dtype=np.float64)[inside]
        places = rows[inside].astype(np.int64) * len(self.genes) + columns[inside]
        full = np.full(self.edges.size, -np.inf)
        full[places] = weights
        n_known, n_found = int(np.isfinite(weights).sum()), int(np.isfinite(full).sum())
        if not n_found == n_known == len(places):
            wrong = f"{len(places) - n_known} non-finite weights and {n_known - n_found} duplicate edges"
            raise DataError(f"the scores contain {wrong}; keep one finite weight per pair of source and target.")
        return full.reshape(self.edges.shape)


class RankedPairs:
    """Pairs of a universe, sorted by decreasing edge weight.

    Attributes
    ----------
    tfs
        Index of the transcription factor of each pair, shape (P,).
    true
        Ranks of the true edges, ascending, shape (E,).
    starts, ends
        Position of the first pair that ties with each true edge, and of the first pair after these ties, shape (E,).
    n_scored
        Number of pairs with a weight. Pairs without a weight come last and tie with each other.
    within
        AUROC among the pairs of each transcription factor, shape (T,); NaN if all pairs are true.
    bounds
        Positions at which ties begin, followed by the number of pairs.
    """

    def __init__(self, made: pd.DataFrame, universe: Universe) -> None:
        from scipy.stats import rankdata

        matrix = universe.matrix(made)
        kept = np.flatnonzero(universe.pairs)
        kept = kept[np.argsort(-matrix.ravel()[kept])]
        ranked = matrix.ravel()[kept]
        self.tfs, self.n_scored = kept // len(universe.genes), int(np.isfinite(ranked).sum())
        self.bounds = np.concatenate([[0], np.flatnonzero(ranked[1:] != ranked[:-1]) + 1, [len(ranked)]])
        self.true = np.flatnonzero(universe.edges.ravel()[kept])
        tie = np.searchsorted(self.bounds, self.true, side="right")
        self.starts, self.ends = self.bounds[tie - 1], self.bounds[tie]
        # The area is how often a true pair is ranked above another one (Mann and Whitney 1947).
        ranks = rankdata(np.where(universe.pairs, matrix, np.nan), axis=1, nan_policy="omit")
        n_true = universe.edges.sum(axis=1)
        n_other = universe.pairs.sum(axis=1) - n_true
        above = np.where(universe.edges, ranks, 0.0).sum(axis=1) - n_true * (n_true + 1) / 2
        self.within = np.divide(above, n_true * n_other, out=np.full(len(above), np.nan), where=n_other > 0)

    def figures(self, weights: np.ndarray) -> dict[str, float]:
        """Return the metrics with transcription factors weighted by `weights` (T,).

        The metrics agree with scikit-learn with `sample_weight`, without sorting all pairs again in each of 100 draws.
        """
        taken = np.concatenate([[0.0], np.cumsum(weights[self.tfs])])
        drawn = weights[self.tfs[self.true]]
        hits = np.concatenate([[0.0], np.cumsum(drawn)])
        n_true, n_pairs = hits[-1], taken[-1]
        if n_true in (0.0, n_pairs):
            return dict.fromkeys(GeneNetwork.metrics, float("nan"))
        # Ties are taken as one: the hits above a true edge and its ties, and those with them.
        above, upto = (hits[np.searchsorted(self.true, places)] for places in (self.starts, self.ends))
        misses = (taken[self.ends] - upto + taken[self.starts] - above) / 2
        precision = np.divide(upto, taken[self.ends], out=np.zeros_like(upto), where=drawn > 0)
        tie = np.searchsorted(self.bounds, np.searchsorted(taken, n_true))
        start, end = self.bounds[tie - 1], self.bounds[tie]
        hits_above, hits_upto = hits[np.searchsorted(self.true, [start, end])]
        early = hits_upto / taken[end]
        if end > self.n_scored:
            share_of_ties = (hits_upto - hits_above) / (taken[end] - taken[start])
            early = (hits_above + (n_true - taken[start]) * share_of_ties) / n_true
        auprc, share = drawn @ precision / n_true, n_true / n_pairs
        scored = np.isfinite(self.within) & (weights > 0)
        figures = {
            "auprc_ratio": auprc / share,
            "auprc": auprc,
            "auroc": 1 - drawn @ misses / (n_true * (n_pairs - n_true)),
            "early_precision_ratio": early / share,
            "early_precision": early,
            "auroc_within_tf": np.average(self.within[scored], weights=weights[scored]) if scored.any() else np.nan,
        }
        return {name: float(value) for name, value in figures.items()}


@register_benchmark("gene_network")
class GeneNetwork(Benchmark):
    """Score the recovery of known edges among all pairs of a transcription factor and a gene.

    The pairs combine all transcription factors that have a target in the truth with all genes that have a regulator in
    the truth (or with all measured genes), without self-loops. Edges outside the truth count as wrong, although many
    true edges are unknown. Scores therefore compare methods, and are not error rates. Duplicate edges of the truth
    count once; signs are ignored.

    **Pairs without a score** receive the lowest score and tie with each other. A method with few edges is therefore not
    scored on these edges only.

    Parameters
    ----------
    genes
        Measured genes. Other genes are not scored, either as targets or as transcription factors, because no method
        could score them. If None, uses all genes.
    tfs
        Transcription factors to restrict the pairs to. If None, uses all transcription factors in the truth.
    targets
        ``"truth"``: genes with an edge in the truth. ``"measured"``: all of `genes`. In this case, well-studied and
        highly expressed genes are easy to find without any information about edges.

    Notes
    -----
    ``auprc_ratio``
        ``auprc`` divided by the fraction of true edges, which is the ``auprc`` of random scores.
    ``auprc``
        Average precision: ``sum_n (R_n - R_(n-1)) P_n`` over the distinct weights, as in scikit-learn. The trapezoidal
        rule is not used, because it overrates ties and pairs without a score (Davis and Goadrich 2006).
    ``auroc``
        Probability that a true edge is ranked above another edge; ties count half.
    ``early_precision``, ``early_precision_ratio``
        Precision among the k pairs with the highest weight, where k is the number of true edges. All pairs that tie
        with the last of these pairs are included (Pratapa et al., Nat Methods 2020, BEELINE). If fewer than k pairs
        have a score, BEELINE uses only these pairs. Here, the value is the expectation when the rest is sampled at
        random from the pairs without a score. The ratio is relative to random scores.
    ``auroc_within_tf``
        AUROC among the pairs of each transcription factor, averaged over factors. It does not reward identifying the
        factors with more known targets.

    :meth:`resampled` bootstraps transcription factors, because the edges of one factor are not independent
    observations.

    Examples
    --------
    >>> truth = pd.DataFrame({"source": ["A", "A", "B"], "target": ["x", "y", "z"]})
    >>> scores = pd.DataFrame({"source": ["A", "A", "B"], "target": ["x", "y", "x"], "weight": [3.0, 2.0, 1.0]})
    >>> scores = GeneNetwork().run(scores, truth)
    >>> round(scores["auroc"], 3), round(scores["early_precision"], 3)
    (0.778, 0.667)
    """

    subject: ClassVar[str] = "network"
    metrics = ("auprc_ratio", "auprc", "auroc", "early_precision_ratio", "early_precision", "auroc_within_tf")
    n_draws: ClassVar[int] = 100

    def __init__(
        self, genes: Sequence[str] | None = None, tfs: Sequence[str] | None = None, targets: str = "truth"
    ) -> None:
        if targets not in ("truth", "measured") or (targets == "measured" and genes is None):
            raise OptionError("must be 'truth', or 'measured' together with genes.", targets=targets)
        self.genes = None if genes is None else list(genes)
        self.tfs = None if tfs is None else list(tfs)
        self.targets = targets

    def check(self, reference: pd.DataFrame) -> None:
        """Raise :class:`~scforge.errors.DataError` in the cases in which :meth:`run` would for any scores."""
        self.universe(reference)

    def universe(self, reference: pd.DataFrame) -> Universe:
        """Return the gene pairs that are scored against the true edges in `reference`.

        Parameters
        ----------
        reference
            True edges, with the columns ``source`` and ``target``.

        Raises
        ------
        DataError
            If columns or names are missing, or no true edge remains.
        """
        check_edges("the true edges", reference)
        given = reference[["source", "target"]].astype(str).drop_duplicates()
        kept = given[given["source"] != given["target"]]
        if self.tfs is not None:
            kept = kept[kept["source"].isin(self.tfs)]
        if self.genes is not None:
            kept = kept[kept["source"].isin(self.genes) & kept["target"].isin(self.genes)]
        if kept.empty:
            sources = listing(given["source"].unique(), most=3)
            raise DataError(
                f"none of the {len(given)} true edges (sources: {sources}) is between the scored genes; use the same "
                "gene identifiers."
            )
        tfs = pd.Index(np.sort(kept["source"].unique()))
        targets = kept["target"] if self.targets == "truth" else pd.Series(self.genes)
        genes = pd.Index(np.sort(targets.unique()))
        edges = np.zeros((len(tfs), len(genes)), dtype=np.bool_)
        edges[tfs.get_indexer(kept["source"]), genes.get_indexer(kept["target"])] = True
        pairs = tfs.to_numpy()[:, None] != genes.to_numpy()
        return Universe(tfs, genes, edges, pairs, len(given) - len(kept))

    def run(self, made: pd.DataFrame, reference: pd.DataFrame) -> dict[str, float]:
        """Return the scores; NaN if all pairs (for ``auroc_within_tf``, all pairs of each factor) are true edges.

        Parameters
        ----------
        made
            Edge scores, with the columns ``source``, ``target`` and ``weight`` (higher is more likely). Edges outside
            the scored pairs are ignored. Categorical columns are fastest.
        reference
            True edges, with the columns ``source`` and ``target``.
        """
        universe = self.universe(reference)
        return RankedPairs(made, universe).figures(np.ones(len(universe.tfs)))

    def resampled(self, made: pd.DataFrame, reference: pd.DataFrame, *, n: int, seed: int) -> pd.DataFrame:
        """Return the scores on bootstrapped transcription factors, or NaN if the sampled factors regulate all genes."""
        universe = self.universe(reference)
        ranked = RankedPairs(made, universe)
        draws = bootstrap_weights(len(universe.tfs), n, seed=seed).astype(np.float64)
        return pd.DataFrame([ranked.figures(weights) for weights in draws], columns=list(self.metrics))

    def n_units(self, reference: pd.DataFrame) -> int:
        """Return the number of transcription factors."""
        return len(self.universe(reference).tfs)


def check_edges(what: str, edges: pd.DataFrame, *more: str) -> None:
    """Raise an error if a table lacks the columns ``source``, ``target`` or `more`, or if names are missing."""
    for column in ("source", "target", *more):
        if column not in edges or (column not in more and edges[column].isna().any()):
            raise DataError(
                f"{what} lack the column {column!r}, or names are missing in it (columns: {listing(edges)}); complete "
                "this column."
            )


def _places(names: pd.Series, index: pd.Index) -> np.ndarray:
    """Return the positions of names in an index, -1 for unknown names."""
    if not isinstance(names.dtype, pd.CategoricalDtype):
        names = names.astype("category")
    of_categories = index.get_indexer(pd.Index(names.cat.categories.astype(str)))
    return of_categories[names.cat.codes.to_numpy()]


def network_baselines(
    adata: AnnData,
    universe: Universe,
    names: Sequence[str] = NETWORK_BASELINES,
    *,
    layer: str | None = None,
    gene_key: str | None = None,
    max_cells: int = 10_000,
    seed: int = 0,
) -> dict[str, pd.DataFrame]:
    """Score all pairs of a universe of measured genes with simple baselines.

    ``"pearson"``, ``"spearman"``
        Absolute correlation of log1p CP10K over the cells, because transcription factors can also repress.
    ``"mean_expression"``
        Product of the mean log1p CP10K of both genes, because highly expressed genes are well studied.
    ``"degree"``
        Number of other true edges of both genes (cross-fitted). Unlike a model, it uses true edges, and it does not use
        the cells. It shows the score of popularity alone.
    ``"in_degree"``
        The same number for the target only. This is the fair baseline for rankings within a transcription factor.
    ``"random"``
        Random scores: chance level.

    Correlations use at most `max_cells` cells, sampled at random. Returns a mapping from baseline name to edges.
    """
    for name in names:
        check_known("baselines", name, NETWORK_BASELINES, "the network baselines", error=OptionError)
    genes = universe.tfs.union(universe.genes)
    rows, columns = genes.get_indexer(universe.tfs), genes.get_indexer(universe.genes)
    expression = _expression(adata, genes, layer, gene_key, max_cells, seed)
    weights: dict[str, np.ndarray] = {}
    for name in names:
        if name == "random":
            for number in range(_N_RANDOM):
                weights[f"random {number + 1}"] = np.random.default_rng(seed + number).random(universe.edges.shape)
        elif name == "mean_expression":
            mean = np.asarray(expression.mean(axis=0)).ravel()
            weights["mean expression"] = np.outer(mean[rows], mean[columns])
        elif name in ("degree", "in_degree"):
            weights[name.replace("_", "-")] = degree_weights(universe, out=name == "degree", seed=seed)
        else:
            values = _ranks(expression) if name == "spearman" else expression
            weights[f"co-expression ({name})"] = np.abs(_correlations(values, rows, columns))
    return {name: edges_of(matrix, universe.tfs, universe.genes) for name, matrix in weights.items()}


def _correlations(values: sparse.csc_matrix, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return correlations between columns of a sparse matrix over its rows; 0 for columns without variance."""
    mean = np.asarray(values.mean(axis=0)).ravel()
    square = np.asarray(values.multiply(values).mean(axis=0)).ravel()
    scale = np.sqrt(np.maximum(square - mean**2, 0.0))
    # A constant gene has a variance of rounding errors.
    scale[scale <= 1e-7 * np.sqrt(square)] = np.inf
    products = (values[:, rows].T @ values[:, columns]).toarray() / values.shape[0]
    return (products - np.outer(mean[rows], mean[columns])) / np.outer(scale[rows], scale[columns])


def degree_weights(universe: Universe, *, out: bool = True, seed: int = 0) -> np.ndarray:
    """Score each pair of genes by the degrees of its two genes, excluding the pair itself, shape (T, G).

    The score is the out-degree of the source (with `out`) times the in-degree of the target, both as fractions that are
    shrunk toward the overall fraction of true pairs, with a weight of one pseudo-observation. The degrees are
    cross-fitted: transcription factors and genes are split into folds. For a pair with the factor in fold a and the
    gene in fold b, the out-degree is counted over the genes outside b and the in-degree over the transcription factors
    outside a.

    Subtracting the scored edge from the degrees is not enough: true pairs would then have lower degrees than false
    pairs of the same gene, which would leak the answer. Folds reduce this effect but do not remove it. Within one
    transcription factor, the out-degree scores slightly below chance on random edges (AUROC 0.47 if 60 factors have 20
    of 200 genes each). Degrees also score below chance if most target genes have only one true edge, because degrees
    cannot be estimated from so few edges.
    """
    rng = np.random.default_rng(seed)
    edges, pairs = universe.edges, universe.pairs
    of_tf, of_gene = (rng.permutation(size) % _N_FOLDS for size in edges.shape)
    share = edges.sum() / pairs.sum()
    weights = np.empty(edges.shape)
    for fold in range(_N_FOLDS):
        rest = of_tf != fold
        weights[~rest] = (edges[rest].sum(axis=0) + share) / (pairs[rest].sum(axis=0) + 1.0)
    for fold in range(_N_FOLDS) if out else ():
        rest = of_gene != fold
        weights[:, ~rest] *= ((edges[:, rest].sum(axis=1) + share) / (pairs[:, rest].sum(axis=1) + 1.0))[:, None]
    return weights


def _expression(
    adata: AnnData, genes: pd.Index, layer: str | None, gene_key: str | None, max_cells: int, seed: int
) -> sparse.csc_matrix:
    """Return log1p CP10K of some cells over `genes`, shape (N, G), float64; genes with the same name are summed."""
    counts = counts_of(adata, layer).astype(np.float64)
    if counts.shape[0] > max_cells:
        rows = np.random.default_rng(seed).choice(counts.shape[0], max_cells, replace=False)
        counts = counts[np.sort(rows)]
    places = genes.get_indexer(gene_names(adata, gene_key))
    columns = np.flatnonzero(places >= 0)
    members = sparse.csr_matrix((np.ones(len(columns)), (columns, places[columns])), (counts.shape[1], len(genes)))
    totals = np.asarray(counts.sum(axis=1)).ravel()
    return sparse.csc_matrix(sparse.diags_array(TARGET_SUM / totals) @ (counts @ members)).log1p()


def _ranks(expression: sparse.csc_matrix) -> sparse.csc_matrix:
    """Return cell ranks for each gene, minus the rank of cells without the gene, so that the result is sparse."""
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
    max_cells: int = 10_000,
    seed: int = 0,
    intervals: bool = True,
    title: str = "Gene networks compared",
) -> Report:
    """Score gene networks against known edges, with baselines on the same pairs.

    Parameters
    ----------
    scores
        A mapping from method name to edges, with the columns ``source``, ``target`` and ``weight``, e.g. from
        :func:`scforge.eval.edges_from_embeddings`.
    truth
        True edges, with the columns ``source`` and ``target``, e.g. from :func:`scforge.eval.networks.read_network`.
    adata
        Annotated data with raw counts. It defines the measured genes and the baseline input.
    layer
        Key in ``adata.layers`` with raw counts. If None, reads ``adata.X``.
    gene_key
        Column of ``adata.var`` with names as in the truth. If None, uses ``adata.var_names``.
    genes
        Measured genes to restrict the pairs to, e.g. the genes of a model. If None, uses all measured genes; pairs
        with genes that a method does not score then rank last.
    tfs
        Transcription factors to restrict the pairs to. If None, uses all transcription factors in the truth that are
        among the genes.
    targets
        ``"truth"``: genes with an edge in the truth. ``"measured"``: all genes.
    kinds
        A mapping from method name to ``"model"``, ``"baseline"``, ``"untrained"`` or ``"ceiling"``. The default is
        ``"model"``.
    baselines
        ``"pearson"`` and ``"spearman"`` correlation over cells, ``"mean_expression"``, ``"degree"`` and ``"in_degree"``
        (number of other true edges of the genes), and ``"random"``. At least one is required unless `scores` contains a
        baseline.
    max_cells
        Maximum number of cells for correlations.
    seed
        Random seed for the baselines.
    intervals
        Whether to add 95% intervals from a bootstrap of transcription factors, and tests against the best baseline.
    title
        Heading of the report.

    Returns
    -------
    The report with the metrics of :class:`scforge.eval.GeneNetwork`. Its facts describe the pairs; its notes list the
    methods that leave pairs without a score.

    Raises
    ------
    OptionError
        If `kinds` names an unknown method, or there is no baseline.
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
    check_is_adata(adata)
    measured = set(gene_names(adata, gene_key))
    benchmark = GeneNetwork(sorted(measured if genes is None else measured & set(genes)), tfs, targets)
    universe = benchmark.universe(truth)
    simple = network_baselines(
        adata, universe, baselines, layer=layer, gene_key=gene_key, max_cells=max_cells, seed=seed
    )
    report = compare_beside(benchmark, "scores", scores, simple, truth, kinds=kinds, intervals=intervals, title=title)
    n_pairs, n_edges = int(universe.pairs.sum()), int(universe.edges.sum())
    report.facts |= {
        "transcription factors": len(universe.tfs),
        "genes": len(universe.genes),
        "pairs": n_pairs,
        "true edges": n_edges,
        "share of true edges": round(n_edges / n_pairs, 6),
        "true edges left out": universe.n_left_out,
    }
    for name, table in scores.items():
        n_scored = int((np.isfinite(universe.matrix(table)) & universe.pairs).sum())
        if n_scored < n_pairs:
            report.notes.append(
                f"{name} has a score for {n_scored:,} of {n_pairs:,} pairs; the other pairs are ranked last, tied."
            )
    if {"degree", "in-degree"} & set(simple):
        report.notes.append("Degree baselines use only the number of other true edges of a gene, not the cells.")
    report.notes.append("Edges outside the truth count as wrong, although they may only be unknown.")
    return report


def network_curves(scores: Mapping[str, pd.DataFrame], truth: pd.DataFrame, *, n_points: int = 500) -> pd.DataFrame:
    """Return precision-recall curves of networks, for a plot.

    Parameters
    ----------
    scores
        A mapping from method name to edges, as in :func:`evaluate_network`.
    truth
        True edges.
    n_points
        Maximum number of points per curve, evenly spaced along the ranks of true edges.

    Returns
    -------
    A table with the columns ``method``, ``recall``, ``precision`` and ``auprc``, by increasing recall. ``auprc`` is the
    average precision of the whole network, as in :class:`GeneNetwork`, repeated in all of its rows. Points are at
    changes of the weight, so tied pairs form one step. The last point, at recall 1, includes all pairs, so its
    precision is the same as for random scores.

    Examples
    --------
    >>> truth = pd.DataFrame({"source": ["A", "B"], "target": ["x", "y"]})
    >>> scores = pd.DataFrame({"source": ["A"], "target": ["x"], "weight": [1.0]})
    >>> network_curves({"mine": scores}, truth).values.tolist()
    [['mine', 0.5, 1.0, 0.75], ['mine', 1.0, 0.5, 0.75]]
    """
    from sklearn.metrics import average_precision_score, precision_recall_curve

    universe = GeneNetwork().universe(truth)
    true = universe.edges[universe.pairs]
    curves = []
    for method, table in scores.items():
        ranks = np.unique(universe.matrix(table)[universe.pairs], return_inverse=True)[1]
        precision, recall, _ = precision_recall_curve(true, ranks)
        # By rising recall, without the point of no pair; between true edges precision just falls.
        curve = pd.DataFrame({"recall": recall[-2::-1], "precision": precision[-2::-1]})
        rises = (curve["recall"].diff() != 0) | (curve.index == len(curve) - 1)
        rises[0] = rises[0] and curve["recall"][0] > 0
        points = np.flatnonzero(rises)
        if len(points) > n_points:
            points = points[np.unique(np.linspace(0, len(points) - 1, n_points).round().astype(np.int64))]
        curve = curve.iloc[points].assign(auprc=average_precision_score(true, ranks))
        curve.insert(0, "method", method)
        curves.append(curve)
    return pd.concat(curves, ignore_index=True)
