"""Match the genes in the data to a vocabulary, and report how many match."""

from __future__ import annotations

import contextlib
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import sparse

from scforge._checks import check_count, check_share
from scforge.data.checks import check_adata, counts_of, gene_names, names_place, sound_csr
from scforge.data.vocab import (
    ANNOTATION,
    SPECIES,
    GeneVocab,
    converted_genes,
    listed_names,
    open_vocab,
    recognize_ids,
    strip_version,
)
from scforge.errors import DataError, GeneMismatchError, ScforgeWarning, listing, warn

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData

    from scforge.data.readers import ChunkReader

MIN_OVERLAP = 0.1
"""Minimum fraction of a model's genes that a data set must contain."""

_R_REPLACES = re.compile(r"[^A-Za-z0-9_]")
"""Characters that R replaces by a dot in names, and the dot itself."""

WARN_OVERLAP = 0.5
"""Fraction of a model's genes below which a warning is issued."""

WARN_OUTSIDE = 0.2
"""Fraction of the counts outside a vocabulary above which a warning is issued."""


def sum_columns(matrix: sparse.csr_matrix, columns: np.ndarray, n_columns: int) -> sparse.csr_matrix:
    """Move the columns of `matrix` to new positions; columns with the same position are summed.

    `columns` contains the new position of each column, or -1 to drop it, shape (n_vars,). The result is sorted, without
    explicit zeros, and of shape (n_cells, n_columns). It has the dtype of `matrix`; integers become int64 if summed.
    """
    matrix = sound_csr(matrix, "matrix")
    if matrix.shape[1] != len(columns):
        raise DataError(
            f"has {matrix.shape[1]} columns, but columns has {len(columns)} entries; pass one per column.",
            argument="matrix",
        )
    places = columns[matrix.indices]
    keep = places >= 0
    kept_before = np.concatenate([[0], np.cumsum(keep)])
    mapped = sparse.csr_matrix(
        (matrix.data[keep], places[keep], kept_before[matrix.indptr]), shape=(matrix.shape[0], n_columns)
    )
    if mapped.dtype.kind in "iu" and not mapped.has_canonical_format:
        mapped = mapped.astype(np.int64)  # a sum may not fit into e.g. uint8
    mapped.sum_duplicates()
    mapped.eliminate_zeros()
    return mapped


def warn_summed(names: np.ndarray, columns: np.ndarray, where: str) -> None:
    """Warn if columns with these names and positions (-1 if dropped) are summed; the warning contains their number."""
    used = np.flatnonzero(columns >= 0)
    _, first = np.unique(columns[used], return_index=True)
    again = np.delete(used, first)
    if len(again):
        warn(
            f"{where}: several columns refer to the same gene; the counts of {len(again)} columns "
            f"(first: {str(names[again[0]])!r}) are summed."
        )


def join_columns(adata: AnnData, where: str) -> AnnData:
    """Return `adata` with unique ``var_names``; duplicate columns of X and layers are summed, with a warning.

    The first row of ``var`` is kept for each name. ``varm`` and ``varp``, which cannot be summed, are left out.
    """
    import anndata
    import pandas as pd

    columns, unique = pd.factorize(adata.var_names)
    warn_summed(np.asarray(adata.var_names), columns, where)

    def joined(matrix: object) -> sparse.csr_matrix:
        return sum_columns(matrix, columns, len(unique))

    result = anndata.AnnData(
        None if adata.X is None else joined(adata.X),
        obs=adata.obs,
        var=adata.var[~adata.var_names.duplicated()],
        uns=dict(adata.uns),
        obsm=dict(adata.obsm),
        # anndata lists X among the layers, as None.
        layers={key: joined(layer) for key, layer in adata.layers.items() if key is not None},
    )
    if adata.raw is not None:
        result.raw = adata.raw.to_adata()
    return result


@dataclass(frozen=True)
class GeneMap:
    """Map from the columns of a data set to the genes of a vocabulary.

    Attributes
    ----------
    columns
        Vocabulary gene index of each column of the data, or -1 for columns outside the vocabulary, int32, shape
        (n_vars,).
    n_genes
        Number of vocabulary genes.
    notes
        Notes on how genes were matched by names that are not in the vocabulary.

    Examples
    --------
    >>> from scipy.sparse import csr_matrix
    >>> from scforge.data import GeneVocab
    >>> gene_map = GeneMap.of(["LYZ", "no gene", "CD3D", "LYZ"], GeneVocab.from_genes(["CD3D", "LYZ", "MS4A1"]))
    >>> gene_map.columns.tolist(), gene_map.n_matched, gene_map.n_summed
    ([1, -1, 0, 1], 2, 1)
    >>> gene_map.apply(csr_matrix([[1, 7, 2, 3]])).toarray().tolist()
    [[2, 4, 0]]
    """

    columns: np.ndarray
    n_genes: int
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, names: Iterable[str], vocab: GeneVocab) -> GeneMap:
        """Look up the name of each column.

        If hardly any name is in the vocabulary, because one of them contains Ensembl ids and the other symbols of the
        same species, ids and symbols are matched with the shipped annotation. A name that differs from a vocabulary
        gene only in characters that R replaces by a dot (``HLA.A``, ``NKX6.1``) is matched with this gene.
        """
        names = [str(name) for name in listed_names("names", names)]
        columns = vocab.gene_indices(names)
        notes = []
        if (columns >= 0).sum() < MIN_OVERLAP * min(vocab.n_genes, len(names)):
            columns, further = _by_annotation(names, columns, vocab)
            notes += further
        # Names in which R has replaced characters by dots, in data or vocabulary, if the match is unambiguous.
        lost = [row for row, name in enumerate(names) if columns[row] < 0 and _R_REPLACES.search(name)]
        dotted = Counter(_R_REPLACES.sub(".", names[row]) for row in lost)
        taken, columns, matched = set(columns.tolist()), columns.copy(), []
        candidates: dict[str, dict[int, str]] = {}
        for genes in (vocab.genes, vocab.symbols or ()) if lost else ():
            for index, gene in enumerate(genes):
                if index not in taken and _R_REPLACES.search(gene):
                    candidates.setdefault(_R_REPLACES.sub(".", gene), {})[index] = gene
        for row in lost:
            name, spelled = names[row], _R_REPLACES.sub(".", names[row])
            if len(candidates.get(spelled, {})) == dotted[spelled] == 1:
                ((index, gene),) = candidates[spelled].items()
                if spelled in (name, gene):  # one of them was written by R
                    columns[row] = index
                    matched.append(f"{name!r} is {gene!r}")
        if matched:
            examples = ", ".join(matched[:2])
            notes.append(f"{len(matched):,} names in which R replaced characters with dots were matched ({examples})")
        return cls(columns, vocab.n_genes, tuple(notes))

    @property
    def n_matched(self) -> int:
        """Number of vocabulary genes that are in the data."""
        return len(np.unique(self.columns[self.columns >= 0]))

    @property
    def n_summed(self) -> int:
        """Number of columns whose counts are added to an earlier column of the same gene."""
        used = self.columns[self.columns >= 0]
        return len(used) - len(np.unique(used))

    @property
    def measured(self) -> np.ndarray:
        """True for the vocabulary genes that are in the data, bool, shape (n_genes,)."""
        return np.isin(np.arange(self.n_genes), self.columns)

    @cached_property
    def ascends(self) -> bool:
        """Whether the columns of vocabulary genes are unique and in vocabulary order."""
        used = self.columns[self.columns >= 0]
        return bool((used[1:] > used[:-1]).all())

    @property
    def overlap(self) -> float:
        """Fraction of the vocabulary genes that are in the data."""
        return self.n_matched / self.n_genes

    def apply(self, counts: sparse.csr_matrix) -> sparse.csr_matrix:
        """Return `counts` over vocabulary genes, see :func:`sum_columns`, shape (n_cells, n_genes)."""
        return sum_columns(counts, self.columns, self.n_genes)


def map_names(
    names: np.ndarray,
    vocab: GeneVocab,
    *,
    min_overlap: float = MIN_OVERLAP,
    var: pd.DataFrame | None = None,
    gene_key: str | None = None,
) -> GeneMap:
    """Map gene names to a vocabulary.

    Raises a GeneMismatchError if too few vocabulary genes are in the data, and warns if fewer than half are.
    `min_overlap` is the minimum fraction of the vocabulary genes. For an annotation, which no data set measures
    completely, it is the minimum fraction of the smaller of the two gene sets. The message suggests a column of `var`
    that matches better.
    """
    check_share("min_overlap", min_overlap)
    gene_map = GeneMap.of(names, vocab)
    possible = vocab.n_genes if vocab.chosen_from_data else min(vocab.n_genes, len(names))
    share = gene_map.n_matched / possible
    where = names_place(gene_key)
    if share < min_overlap or gene_map.n_matched == 0:
        kind, expected = recognize_ids(names), recognize_ids(vocab.genes)
        needed = max(gene_map.n_matched + 1, math.ceil(min_overlap * possible))
        converted = GeneMap(_by_annotation([*names], gene_map.columns, vocab)[0], vocab.n_genes).n_matched
        hint = _better_column(var, vocab, gene_key, needed) or _way_out(kind, expected, helps=converted >= needed)
        if hint is None:
            after = "" if kind == expected else f", even after conversion to {expected}"
            raise GeneMismatchError(
                f"has only {converted} of the {vocab.n_genes} genes of the vocabulary{after}, and at least "
                f"{needed} are needed. The cells measure {len(names)} genes, {kind} such as {listing(names[:2])}, and "
                f"the vocabulary contains {expected} such as {listing(vocab.genes[:2])}; use cells with more genes of "
                "the vocabulary, or another model.",
                argument=where,
            )
        raise GeneMismatchError(
            f"has only {gene_map.n_matched} of the {vocab.n_genes} genes of the vocabulary. It contains "
            f"{kind} such as {listing(names[:2])}, but the vocabulary contains {expected} such as "
            f"{listing(vocab.genes[:2])}; {hint}.",
            argument=where,
        )
    for note in gene_map.notes:
        better = _better_column(var, vocab, gene_key, gene_map.n_matched + 1)
        warn(f"{where}: {note}{f'; {better}' if better else ''}.")
    if share < WARN_OVERLAP:
        warn(
            f"{where} has {gene_map.n_matched} of the {vocab.n_genes} genes of the vocabulary ({share:.0%}); "
            "the others are treated as not expressed."
        )
    warn_summed(names, gene_map.columns, where)
    return gene_map


def _by_annotation(names: list[str], columns: np.ndarray, vocab: GeneVocab) -> tuple[np.ndarray, list[str]]:
    """Match Ensembl ids with symbols, or symbols with Ensembl ids, using the shipped annotation."""
    kind, expected = recognize_ids(names), recognize_ids(vocab.genes)
    if how_to_convert(kind, expected) is None:
        return columns, []
    species, target = kind.split(" ")[0], "ensembl" if expected.endswith("Ensembl ids") else "symbol"
    conversion = converted_genes(names, target, species, keep_unknown=True)
    converted = vocab.gene_indices(str(name) for name in conversion)
    n_found = int((converted >= 0).sum())
    if n_found <= (columns >= 0).sum():
        return columns, []
    genes = set(vocab.genes)
    lost = [name for name, ids in conversion.ambiguous.items() if genes.intersection(ids)]
    unclear = f"; names of several genes were left out: {listing(lost, most=3)}" if lost else ""
    return converted, [f"{n_found:,} {kind} were matched with {expected} using the genes of {ANNOTATION}{unclear}"]


def warn_empty(n_expressed: np.ndarray) -> None:
    """Warn if cells express no vocabulary gene, given the number of expressed genes per cell."""
    if n_empty := int((n_expressed == 0).sum()):
        total = len(n_expressed)
        warn(f"{n_empty} of {total} cells express no gene of the vocabulary; their embedding is not informative.")


def warn_counts_outside(kept: float, vocab: GeneVocab, *, source: str = "") -> None:
    """Warn if many counts are outside an annotation; this is expected for chosen genes."""
    if kept < 1 - WARN_OUTSIDE and not vocab.chosen_from_data:
        warn(
            f"{source}{1 - kept:.0%} of the counts are in genes outside the vocabulary ({vocab.release}); "
            "use scforge.data.map_genes(adata, vocab) to list these genes."
        )


def _better_column(var: pd.DataFrame | None, vocab: GeneVocab, gene_key: str | None, needed: float) -> str | None:
    """Return advice on a column of ``adata.var`` that matches more genes, or None if no column has enough."""
    if var is None:
        return None
    matches = {
        key: int((np.unique(vocab.gene_indices(names)) >= 0).sum())
        for key, names in text_columns(var).items()
        if key != gene_key
    }
    best = max(matches, key=lambda key: matches[key], default=None)
    if matches.get(best, 0) < needed:
        return None
    name = names_place(best)
    # A saved model keeps its gene_key, so the names of new data must come to where it looks for them.
    return (
        f"{name} contains {matches[best]} of the vocabulary genes: pass gene_key={best!r} to setup_anndata, "
        f"or for a trained model, set {names_place(gene_key)} = {name}"
    )


def text_columns(var: pd.DataFrame) -> dict[str | None, np.ndarray]:
    """Return possible gene names in a gene table: its index, with the key None, and its text columns."""
    columns: dict[str | None, np.ndarray] = {None: np.asarray(var.index.astype(str))}
    return columns | {key: np.asarray(var[key], dtype=object).astype(str) for key in text_keys(var)}


def text_keys(table: pd.DataFrame) -> list[str]:
    """Return the names of the columns that contain neither numbers, booleans nor dates."""
    return [key for key in table if table[key].dtype.kind not in "biufcmM"]


def _way_out(kind: str, expected: str, *, helps: bool) -> str | None:
    """Return advice for gene names that do not match the vocabulary, or None if the data measure too few genes.

    `helps` states whether conversion of the names matches enough genes.
    """
    species, wanted = kind.split(" ")[0], expected.split(" ")[0]
    if {species, wanted} == set(SPECIES):
        return (
            f"for {species} genes, use vocab='{species}_protein_coding' (data.gene_vocab in a YAML file), or "
            "vocab='human_mouse', which contains both species"
        )
    if helps:
        return f"{how_to_convert(kind, expected)} and pass the new column as gene_key"
    if species == wanted and species in SPECIES:
        return None
    return "convert the gene names of the data to vocabulary identifiers first"


def how_to_convert(kind: str, expected: str) -> str | None:
    """Return how to convert names of one kind to the other, or None if no annotation contains both."""
    species, wanted = kind.split(" ")[0], expected.split(" ")[0]
    if species != wanted or species not in SPECIES or kind == expected:
        return None
    target = "ensembl" if expected.endswith("Ensembl ids") else "symbol"
    return f"convert them with scforge.data.convert_gene_ids(names, to={target!r}, species={species!r})"


def check_shared(names: Sequence[tuple[str, np.ndarray]], *, what: str = "gene names") -> None:
    """Raise a GeneMismatchError if sources, given by their gene names, share too few genes with the first source.

    Each must share at least a tenth of its genes, or of the genes of the first source if those are fewer. `what`
    describes the gene names in messages.
    """
    (first, reference), *others = names
    for source, genes in others:
        shared = len(np.intersect1d(reference, genes))
        if shared < MIN_OVERLAP * min(len(reference), len(genes)):
            kinds = recognize_ids(genes), recognize_ids(reference)
            raise GeneMismatchError(
                f"{source!r} shares only {shared} {what} with {first!r}: the former contains {kinds[0]} such as "
                f"{listing(genes[:2])}, and the latter contains {kinds[1]} such as {listing(reference[:2])}; convert "
                "the genes to the same identifiers before joining files."
            )


def union_vocab(streams: Sequence[ChunkReader], gene_key: str | None = None) -> GeneVocab:
    """Return a vocabulary of all genes of all sources, in order of first appearance."""
    names = []
    for stream in streams:
        with _named(stream):
            names.append((stream.name, gene_names(stream, gene_key)))
    check_shared(names)
    return GeneVocab(tuple(dict.fromkeys(strip_version(name) for _, genes in names for name in genes)))


def map_streams(
    streams: Sequence[ChunkReader],
    vocab: GeneVocab | None,
    *,
    gene_key: str | None = None,
    min_overlap: float = MIN_OVERLAP,
) -> tuple[GeneVocab, list[GeneMap]]:
    """Map the genes of each source to one vocabulary, see :func:`map_names`. If None, uses all genes of the sources.

    Errors and warnings contain the name of the source.
    """
    check_share("min_overlap", min_overlap)
    genes = union_vocab(streams, gene_key) if vocab is None else vocab
    maps = []
    for stream in streams:
        with _named(stream):
            names = gene_names(stream, gene_key)
            if vocab is None:  # of several sources, one need not have most
                maps.append(GeneMap.of(names, genes))
                warn_summed(names, maps[-1].columns, names_place(gene_key))
            else:
                maps.append(map_names(names, genes, min_overlap=min_overlap, var=stream.var, gene_key=gene_key))
    return genes, maps


@contextlib.contextmanager
def _named(stream: ChunkReader) -> Iterator[None]:
    """Add the file name to messages about genes, which otherwise mention only ``adata``."""
    prefix = "" if stream.name == "adata" else f"{stream.name!r}: "
    warned: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", ScforgeWarning)
            yield
    except DataError as error:
        error.located(prefix)
        raise
    for warning in warned:
        warn(f"{prefix}{warning.message}", warning.category)


@dataclass(frozen=True)
class OverlapReport:
    """Overlap between the genes of a data set and a vocabulary; ``print(report)`` shows it as a table.

    Attributes
    ----------
    where
        Location of the gene names: ``"adata.var_names"`` or a column of ``adata.var``.
    id_kind
        Kind of the names, e.g. ``"human Ensembl ids"`` or ``"mouse gene symbols"``.
    vocab, vocab_hash, vocab_kind
        Release and hash of the vocabulary, and the kind of its names.
    n_genes_data, n_genes_vocab
        Number of columns in the data, and number of genes in the vocabulary.
    n_columns_matched
        Number of columns in the data that are vocabulary genes.
    n_matched
        Number of vocabulary genes that are in the data.
    n_columns_summed
        Number of columns that have the same gene as an earlier column; their counts are summed.
    counts_kept
        Fraction of all counts that are in vocabulary genes; NaN if the data contain no counts.
    top_missing
        Names outside the vocabulary with the most counts, each with its fraction of all counts.
    gene_map
        Mapping from columns to genes.

    Examples
    --------
    >>> import scforge
    >>> vocab = scforge.data.GeneVocab.from_genes(["CD3D", "LYZ", "NO_SUCH_GENE"])
    >>> report = scforge.data.map_genes(scforge.datasets.pbmc3k(), vocab)
    >>> report.n_matched, round(report.overlap, 2), report.id_kind
    (2, 0.67, 'human gene symbols')
    >>> report.to_frame()["gene"][:2].tolist()
    ['MALAT1', 'TMSB4X']
    """

    where: str
    id_kind: str
    vocab: str
    vocab_hash: str
    vocab_kind: str
    n_genes_data: int
    n_genes_vocab: int
    n_columns_matched: int
    n_matched: int
    n_columns_summed: int
    counts_kept: float
    top_missing: tuple[tuple[str, float], ...]
    gene_map: GeneMap = field(repr=False, compare=False)

    @property
    def overlap(self) -> float:
        """Fraction of the vocabulary genes that are in the data."""
        return self.n_matched / self.n_genes_vocab

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dict of numbers and text; a list of such dicts can be converted to a data frame.

        Examples
        --------
        >>> import pandas as pd, scforge
        >>> adata = scforge.datasets.pbmc3k()
        >>> reports = [map_genes(adata, "human_protein_coding", gene_key=key) for key in (None, "gene_ids")]
        >>> pd.DataFrame([report.to_dict() for report in reports])[["id_kind", "n_matched"]]
                      id_kind  n_matched
        0  human gene symbols      12380
        1   human Ensembl ids      13236
        """
        figures = asdict(self)
        del figures["gene_map"], figures["top_missing"]
        return {**figures, "overlap": self.overlap}

    def to_frame(self) -> pd.DataFrame:
        """Return ``top_missing`` as a data frame with the columns ``gene`` and ``share_of_counts``."""
        import pandas as pd

        return pd.DataFrame(list(self.top_missing), columns=["gene", "share_of_counts"])

    def __str__(self) -> str:
        missing = ", ".join(f"{name} ({share:.1%})" for name, share in self.top_missing)
        rows = {
            "gene names": f"{self.id_kind} in {self.where}",
            "vocabulary": f"{self.vocab} ({self.vocab_kind})",
            "genes of the data": _part(self.n_columns_matched, self.n_genes_data, "are in the vocabulary"),
            "genes of the vocabulary": _part(self.n_matched, self.n_genes_vocab, "are in the data"),
            "columns summed": f"{self.n_columns_summed:,}",
            "counts kept": "unknown, there are no counts" if np.isnan(self.counts_kept) else f"{self.counts_kept:.1%}",
            "most counts outside": missing or "none",
        }
        return "\n".join(f"{name:<25}{value}" for name, value in rows.items())


def map_genes(
    adata: AnnData,
    vocab: str | os.PathLike[str] | GeneVocab,
    *,
    layer: str | None = None,
    gene_key: str | None = None,
    min_overlap: float = MIN_OVERLAP,
    n_top: int = 10,
) -> OverlapReport:
    """Report the overlap between the genes of `adata` and a vocabulary.

    Parameters
    ----------
    adata
        Annotated data with raw counts. It is not modified.
    vocab
        A vocabulary, its file, or the name of a shipped vocabulary (see :func:`scforge.data.list_vocabs`).
    layer
        Key in ``adata.layers`` with raw counts. If None, reads ``adata.X``.
    gene_key
        Column of ``adata.var`` with the gene names. If None, reads ``adata.var_names``. Ensembl ids that end in
        ``_PAR_Y`` match no gene, see :class:`scforge.data.GeneVocab`.
    min_overlap
        Minimum fraction of the vocabulary genes in the data. For an annotation, which no data set measures completely,
        it is the minimum fraction of the smaller of the two gene sets.
    n_top
        Number of missing genes to list.

    Returns
    -------
    The report; ``report.gene_map.columns`` contains the gene of each column.

    Raises
    ------
    DataError
        If the counts or the gene names are invalid.
    GeneMismatchError
        If too few genes match. The message describes the names, the expected names, and which column of ``adata.var``
        or which vocabulary matches.
    OptionError
        If the vocabulary is unknown, or `min_overlap` is not a fraction.

    Warns
    -----
    ScforgeWarning
        If columns of the same gene are summed, fewer than half of the genes match, or more than a fifth of the counts
        are outside a vocabulary that was not chosen from data.

    Examples
    --------
    >>> import scforge
    >>> print(map_genes(scforge.datasets.pbmc3k(), "human_protein_coding", n_top=2))
    gene names               human gene symbols in adata.var_names
    vocabulary               human_protein_coding, CELLxGENE schema 7.1.2 (human Ensembl ids)
    genes of the data        12,380 of 16,634 (74.4%) are in the vocabulary
    genes of the vocabulary  12,380 of 20,120 (61.5%) are in the data
    columns summed           0
    counts kept              93.0%
    most counts outside      MALAT1 (2.5%), GNB2L1 (0.3%)
    """
    check_adata(adata)
    check_count("n_top", n_top, "genes", least=0)
    vocab = open_vocab(vocab)
    counts = counts_of(adata, layer)
    names = gene_names(adata, gene_key)
    gene_map = map_names(names, vocab, min_overlap=min_overlap, var=adata.var, gene_key=gene_key)
    sums = np.asarray(counts.sum(axis=0, dtype=np.float64)).ravel()
    report = overlap_report(names, sums, vocab, gene_map, where=names_place(gene_key), n_top=n_top)
    warn_counts_outside(report.counts_kept, vocab)
    return report


def overlap_report(
    names: np.ndarray,
    sums: np.ndarray | None,
    vocab: GeneVocab,
    gene_map: GeneMap,
    *,
    where: str,
    n_top: int,
) -> OverlapReport:
    """Create the report from column names and column sums (None without counts), shape (n_vars,)."""
    inside = gene_map.columns >= 0
    kept, missing = float("nan"), []
    if sums is not None and (total := sums.sum()) > 0:
        kept = float(sums[inside].sum() / total)
        outside = np.flatnonzero(~inside & (sums > 0))
        most = outside[np.argsort(-sums[outside], kind="stable")[:n_top]]
        missing = [(str(names[column]), float(sums[column] / total)) for column in most]
    return OverlapReport(
        where=where,
        id_kind=recognize_ids(names),
        vocab=vocab.release,
        vocab_hash=vocab.hash,
        vocab_kind=recognize_ids(vocab.genes),
        n_genes_data=len(names),
        n_genes_vocab=vocab.n_genes,
        n_columns_matched=int(inside.sum()),
        n_matched=gene_map.n_matched,
        n_columns_summed=gene_map.n_summed,
        counts_kept=kept,
        top_missing=tuple(missing),
        gene_map=gene_map,
    )


def _part(number: int, whole: int, what: str) -> str:
    return f"{number:,} of {whole:,} ({number / whole:.1%}) {what}"
