"""How well the genes of a data set fit a vocabulary, as a report to read or to compare."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from scforge._checks import check_count
from scforge.data.checks import check_adata, counts_of
from scforge.data.id_kinds import recognise_ids
from scforge.data.mapping import MIN_OVERLAP, GeneMap, gene_names, map_names, names_place, warn_counts_outside
from scforge.data.named import open_vocab
from scforge.data.vocab import GeneVocab

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData

__all__ = ["OverlapReport", "map_genes", "overlap_report"]


@dataclass(frozen=True)
class OverlapReport:
    """How well the genes of a data set fit a vocabulary; ``print(report)`` shows it as a table.

    Attributes
    ----------
    where
        What holds the gene names: ``"adata.var_names"`` or a column of ``adata.var``.
    id_kind
        What the names are, e.g. ``"human Ensembl ids"`` or ``"mouse gene symbols"``.
    vocab, vocab_hash, vocab_kind
        Release and hash of the vocabulary, and what its names are.
    n_genes_data, n_genes_vocab
        Number of columns of the data and of genes of the vocabulary.
    n_columns_matched
        Number of columns of the data that are genes of the vocabulary.
    n_matched
        Number of genes of the vocabulary that the data have.
    n_columns_summed
        Number of columns that mean a gene of an earlier column; their counts are summed.
    counts_kept
        Share of all counts that lie in genes of the vocabulary; NaN where the data hold no counts.
    top_missing
        Names outside of the vocabulary with the most counts, each with its share of all counts.
    gene_map
        Which column is which gene.

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
        """Share of the genes of the vocabulary that the data have."""
        return self.n_matched / self.n_genes_vocab

    def to_dict(self) -> dict[str, Any]:
        """Return the figures, one number or text each; a list of such dicts makes a data frame.

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
    """Report how well the genes of `adata` fit a vocabulary.

    Parameters
    ----------
    adata
        Annotated data with raw counts; not changed.
    vocab
        A vocabulary, the file of one, or the name of a shipped one (see :func:`scforge.data.list_vocabs`).
    layer
        Key in ``adata.layers`` with raw counts; None reads ``adata.X``.
    gene_key
        Column of ``adata.var`` with the gene names; None reads ``adata.var_names``. Ensembl ids that end in ``_PAR_Y``
        match nothing, see :class:`scforge.data.GeneVocab`.
    min_overlap
        Smallest share of the vocabulary's genes to accept; of an annotation, which no data set measures as a whole,
        smallest share of the smaller of the two sets.
    n_top
        Number of missing genes to name.

    Returns
    -------
    The report; ``report.gene_map.columns`` has the gene of each column.

    Raises
    ------
    DataError
        If the counts or the gene names cannot be used.
    GeneMismatchError
        If too few genes fit. The message says what the names look like, what was expected, and which column of
        ``adata.var`` or which vocabulary fits.
    OptionError
        If there is no such vocabulary, or `min_overlap` is no share.

    Warns
    -----
    ScforgeWarning
        If columns are summed because they mean one gene, if less than half of the genes are there, or if more than a
        fifth of the counts lie outside of a vocabulary that was not chosen from data.

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
    gene_map = map_names(
        names, vocab, min_overlap=min_overlap, whole=not vocab.chosen_from_data, var=adata.var, gene_key=gene_key
    )
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
    """Make the report from the names of the columns and their sums, shape (n_vars,); None where there are no counts."""
    inside = gene_map.columns >= 0
    kept, missing = float("nan"), []
    if sums is not None and (total := sums.sum()) > 0:
        kept = float(sums[inside].sum() / total)
        outside = np.flatnonzero(~inside & (sums > 0))
        most = outside[np.argsort(-sums[outside], kind="stable")[:n_top]]
        missing = [(str(names[column]), float(sums[column] / total)) for column in most]
    return OverlapReport(
        where=where,
        id_kind=recognise_ids(names),
        vocab=vocab.release,
        vocab_hash=vocab.hash,
        vocab_kind=recognise_ids(vocab.genes),
        n_genes_data=len(names),
        n_genes_vocab=vocab.n_genes,
        n_columns_matched=int(inside.sum()),
        n_matched=gene_map.n_matched,
        n_columns_summed=gene_map.n_summed,
        counts_kept=kept,
        top_missing=tuple(missing),
        gene_map=gene_map,
    )


def _part(some: int, whole: int, what: str) -> str:
    return f"{some:,} of {whole:,} ({some / whole:.1%}) {what}"
