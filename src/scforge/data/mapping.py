"""Genes of a data set onto the genes of a vocabulary, with a report of what was lost."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from scipy import sparse

from scforge._checks import check_share
from scforge.data.arguments import listed_names
from scforge.data.duplicates import n_summed, sum_columns, warn_summed
from scforge.data.gene_ids import converted_genes
from scforge.data.gene_tables import ANNOTATION, SPECIES
from scforge.data.id_kinds import recognise_ids
from scforge.data.vocab import GeneVocab
from scforge.errors import DataError, GeneMismatchError, did_you_mean, listing, warn

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData

__all__ = ["MIN_OVERLAP", "GeneMap", "gene_names", "how_to_convert", "map_names", "names_of", "names_place"]

MIN_OVERLAP = 0.1
"""Smallest share of a model's genes that a data set must have."""

_R_REPLACES = re.compile(r"[^A-Za-z0-9_]")
"""Characters for which R writes a dot in names, and the dot itself."""

WARN_OVERLAP = 0.5
"""Share of a model's genes below which a warning is given."""

WARN_OUTSIDE = 0.2
"""Share of the counts outside of a vocabulary above which a warning is given."""


def names_place(gene_key: str | None) -> str:
    """Return what holds the gene names: ``adata.var_names`` or a column of ``adata.var``."""
    return "adata.var_names" if gene_key is None else f"adata.var[{gene_key!r}]"


def gene_names(adata: AnnData, gene_key: str | None = None) -> np.ndarray:
    """Return the gene names of `adata` as an array of str, shape (n_vars,).

    Raises
    ------
    DataError
        If ``adata.var`` has no column `gene_key`, or names are missing. Repeated names are no mistake: the counts of
        their columns are summed when they are mapped.
    """
    return names_of(adata.var, gene_key)


def names_of(var: pd.DataFrame, gene_key: str | None = None) -> np.ndarray:
    """Return the gene names in a table of genes, as :func:`gene_names` does."""
    where = names_place(gene_key)
    if gene_key is None:
        names = var.index
    elif gene_key in var:
        names = var[gene_key]
    else:
        columns = list(var.columns)
        raise DataError(
            f"gene_key={gene_key!r} is not a column of adata.var{did_you_mean(gene_key, columns)} "
            f"(adata.var has: {listing(columns)})"
        )
    missing = np.asarray(names.isna())
    if missing.any():
        raise DataError(f"{where} has {int(missing.sum())} missing gene names; fill them or drop those genes.")
    return np.asarray(names, dtype=object).astype(str)


@dataclass(frozen=True)
class GeneMap:
    """Which column of a data set is which gene of a vocabulary.

    Attributes
    ----------
    columns
        For each column of the data its index among the genes of the vocabulary, -1 where it has none. Int32, shape
        (n_vars,).
    n_genes
        Number of genes of the vocabulary.
    notes
        What was done to find genes by other names than those that the vocabulary knows.

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

        Where hardly any name is known, because one side has Ensembl ids and the other symbols of the same species, ids
        and symbols are matched by the annotation that ships. Names that differ from a gene of the vocabulary only in
        characters that R replaces by a dot (``HLA.A``, ``NKX6.1``) are taken for it.

        Parameters
        ----------
        names
            Name of each column, shape (n_vars,).
        vocab
            The vocabulary.

        Returns
        -------
        The map.
        """
        names = [str(name) for name in listed_names("names", names)]
        columns = vocab.gene_indices(names)
        notes = []
        if (columns >= 0).sum() < MIN_OVERLAP * min(vocab.n_genes, len(names)):
            columns, said = _by_annotation(names, columns, vocab)
            notes += said
        columns, said = _by_dots(names, columns, vocab)
        return cls(columns, vocab.n_genes, (*notes, *said))

    @property
    def n_matched(self) -> int:
        """Number of vocabulary genes that the data have."""
        return len(np.unique(self.columns[self.columns >= 0]))

    @property
    def n_summed(self) -> int:
        """Number of columns whose counts are summed with those of an earlier column, because they mean one gene."""
        return n_summed(self.columns)

    @property
    def measured(self) -> np.ndarray:
        """True for the vocabulary genes that the data have, bool, shape (n_genes,)."""
        return self.measured_of(slice(None))

    def measured_of(self, columns: np.ndarray | slice) -> np.ndarray:
        """Return True for the vocabulary genes that some columns (a mask or a slice) have, bool, shape (n_genes,)."""
        return np.isin(np.arange(self.n_genes), self.columns[columns])

    @cached_property
    def ascends(self) -> bool:
        """Whether columns that have a gene are in the order of the vocabulary, each gene once."""
        used = self.columns[self.columns >= 0]
        return bool((used[1:] > used[:-1]).all())

    @property
    def overlap(self) -> float:
        """Share of the vocabulary's genes that the data have."""
        return self.n_matched / self.n_genes

    def apply(self, counts: sparse.csr_matrix) -> sparse.csr_matrix:
        """Return `counts` with vocabulary columns: sorted, duplicates summed, genes outside left out.

        Parameters
        ----------
        counts
            Shape (n_cells, n_vars).

        Returns
        -------
        Matrix of shape (n_cells, n_genes) and the dtype of `counts`; small integers that are summed become int64.
        """
        return sum_columns(counts, self.columns, self.n_genes)


def map_names(
    names: np.ndarray,
    vocab: GeneVocab,
    *,
    min_overlap: float = MIN_OVERLAP,
    whole: bool = False,
    var: pd.DataFrame | None = None,
    gene_key: str | None = None,
) -> GeneMap:
    """Map gene names onto a vocabulary.

    Parameters
    ----------
    names
        Gene names of the data, shape (n_vars,).
    vocab
        The vocabulary.
    min_overlap
        Smallest share of the vocabulary's genes (or, with `whole`, of the smaller of the two sets) to accept.
    whole
        The vocabulary is a whole annotation, e.g. all protein-coding genes, of which no data set measures all.
    var, gene_key
        ``adata.var`` and the column in use: when the overlap is too small, the message names a column that fits.

    Raises
    ------
    GeneMismatchError
        If too few genes of the vocabulary are among `names`.
    OptionError
        If `min_overlap` is no share.

    Warns
    -----
    ScforgeWarning
        If less than half of the genes are there, if columns are summed because they mean one gene, or if names were
        matched by the annotation that ships or in spite of R's dots.
    """
    check_share("min_overlap", min_overlap)
    gene_map = GeneMap.of(names, vocab)
    possible = min(vocab.n_genes, len(names)) if whole else vocab.n_genes
    share = gene_map.n_matched / possible
    where = names_place(gene_key)
    if share < min_overlap or gene_map.n_matched == 0:
        kind, expected = recognise_ids(names), recognise_ids(vocab.genes)
        needed = max(gene_map.n_matched + 1, min_overlap * possible)
        hint = _better_column(var, vocab, gene_key, needed) or _way_out(kind, expected)
        raise GeneMismatchError(
            f"{where} has only {gene_map.n_matched} of the {vocab.n_genes} genes of the vocabulary: it holds "
            f"{kind} such as {listing(names[:2])}, the vocabulary {expected} such as "
            f"{listing(vocab.genes[:2])}; {hint}."
        )
    for said in gene_map.notes:
        better = _better_column(var, vocab, gene_key, gene_map.n_matched + 1)
        warn(f"{where}: {said}{f'; {better}' if better else ''}.")
    if share < WARN_OVERLAP:
        warn(
            f"{where} has {gene_map.n_matched} of the {vocab.n_genes} genes of the vocabulary ({share:.0%}); "
            "the others count as not expressed."
        )
    warn_summed(names, gene_map.columns, where)
    return gene_map


def _by_annotation(names: list[str], columns: np.ndarray, vocab: GeneVocab) -> tuple[np.ndarray, list[str]]:
    """Match Ensembl ids with symbols, or symbols with Ensembl ids, where a table knows both."""
    kind, expected = recognise_ids(names), recognise_ids(vocab.genes)
    if how_to_convert(kind, expected) is None:
        return columns, []
    species, target = kind.split(" ")[0], "ensembl" if expected.endswith("Ensembl ids") else "symbol"
    found = converted_genes(names, target, species, keep_unknown=True)
    converted = vocab.gene_indices(str(name) for name in found)
    n_found = int((converted >= 0).sum())
    if n_found <= (columns >= 0).sum():
        return columns, []
    genes = set(vocab.genes)
    lost = [name for name, ids in found.ambiguous.items() if genes.intersection(ids)]
    unclear = f"; {listing(lost, most=3)} mean several genes and were left out" if lost else ""
    return converted, [f"{n_found:,} {kind} were matched with {expected} by the genes of {ANNOTATION}{unclear}"]


def _by_dots(names: list[str], columns: np.ndarray, vocab: GeneVocab) -> tuple[np.ndarray, list[str]]:
    """Match names in which R has replaced characters by dots, on either side, where that leaves no doubt."""
    lost = [row for row, name in enumerate(names) if columns[row] < 0 and _R_REPLACES.search(name)]
    if not lost:
        return columns, []
    taken = set(columns.tolist())
    known: dict[str, dict[int, str]] = {}
    for genes in (vocab.genes, vocab.symbols or ()):
        for index, gene in enumerate(genes):
            if index not in taken and _R_REPLACES.search(gene):
                known.setdefault(_R_REPLACES.sub(".", gene), {})[index] = gene
    dotted = Counter(_R_REPLACES.sub(".", names[row]) for row in lost)
    columns, matched = columns.copy(), []
    for row in lost:
        name, spelled = names[row], _R_REPLACES.sub(".", names[row])
        if len(known.get(spelled, {})) == dotted[spelled] == 1:
            ((index, gene),) = known[spelled].items()
            if spelled in (name, gene):  # one of them was written by R
                columns[row] = index
                matched.append(f"{name!r} is {gene!r}")
    if not matched:
        return columns, []
    return columns, [f"{len(matched):,} names were matched that R wrote with dots ({', '.join(matched[:2])})"]


def warn_counts_outside(kept: float, vocab: GeneVocab) -> None:
    """Warn if many counts lie outside of an annotation; of chosen genes that is expected."""
    if kept < 1 - WARN_OUTSIDE and not vocab.chosen_from_data:
        warn(
            f"{1 - kept:.0%} of the counts lie in genes outside of the vocabulary ({vocab.release}); "
            "scforge.data.map_genes(adata, vocab) shows which."
        )


def _better_column(var: pd.DataFrame | None, vocab: GeneVocab, gene_key: str | None, needed: float) -> str | None:
    """Name the column of ``adata.var`` that fits the vocabulary best, or None if none has the genes needed."""
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
        f"{name} has {matches[best]} of them: pass gene_key={best!r} to setup_anndata, "
        f"or for a trained model set {names_place(gene_key)} = {name}"
    )


def text_columns(var: pd.DataFrame) -> dict[str | None, np.ndarray]:
    """Return what may be gene names in a table of genes: its index (None) and its columns of text."""
    text = [column for column in var.columns if var[column].dtype.kind not in "biufcmM"]
    columns: dict[str | None, np.ndarray] = {None: np.asarray(var.index.astype(str))}
    return columns | {column: np.asarray(var[column], dtype=object).astype(str) for column in text}


def _way_out(kind: str, expected: str) -> str:
    """Say what to do about names of one kind where the vocabulary has those of another."""
    species, wanted = kind.split(" ")[0], expected.split(" ")[0]
    if {species, wanted} == set(SPECIES):
        return (
            f"genes of {species} need a vocabulary of their species, vocab='{species}_protein_coding' (in a YAML file "
            "data.gene_vocab), or 'human_mouse', which takes both"
        )
    if conversion := how_to_convert(kind, expected):
        return f"{conversion} and name the new column with gene_key"
    if kind == expected and species in SPECIES:
        return "the names are of one kind, so the genes differ: take data that measure these, or a model of other genes"
    return "map the gene ids of the data to those of the vocabulary first"


def how_to_convert(kind: str, expected: str) -> str | None:
    """Say how names of one kind become the other names of the same genes; None where no table knows."""
    species, wanted = kind.split(" ")[0], expected.split(" ")[0]
    if species != wanted or species not in SPECIES or kind == expected:
        return None
    target = "ensembl" if expected.endswith("Ensembl ids") else "symbol"
    return f"convert them with scforge.data.convert_gene_ids(names, to={target!r}, species={species!r})"
