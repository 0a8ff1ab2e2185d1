"""A look at an h5ad file of any size: which genes, which species, where the counts are, which vocabulary fits."""

from __future__ import annotations

import contextlib
import os
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from scforge._checks import check_count
from scforge.data.checks import value_problem
from scforge.data.h5ad import Matrix, StoredAdata, open_h5ad
from scforge.data.id_kinds import OTHER_NAMES, recognise_ids
from scforge.data.mapping import GeneMap, map_names, names_of, names_place, text_columns
from scforge.data.named import list_vocabs, open_vocab
from scforge.data.overlap import OverlapReport, overlap_report
from scforge.data.stream_errors import reading
from scforge.data.vocab import GeneVocab
from scforge.errors import DataError, GeneMismatchError, ScforgeWarning

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Inspection", "inspect_h5ad"]


@dataclass(frozen=True)
class Inspection:
    """What an h5ad file holds; ``print(inspection)`` shows it.

    Attributes
    ----------
    path
        The file.
    n_cells, n_genes
        Number of cells and of columns of the matrix.
    stored
        How the matrix that was asked for is stored: ``"csr"``, ``"csc"`` or ``"dense"``.
    counts
        One sentence: whether the matrix holds raw counts, and if not, what does.
    n_empty
        Number of cells without any count; None where there are no counts.
    other_names
        Other columns of ``var`` that hold gene names, each with what they are and how many the vocabulary has.
    overlap
        How well the genes fit the vocabulary.
    chosen
        Whether the vocabulary was looked for among the shipped ones.
    mismatch
        Why the data cannot be used with the vocabulary that was named, one sentence; None if they can.

    Examples
    --------
    >>> import tempfile, scforge
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     scforge.datasets.pbmc3k()[:100].write_h5ad(f"{folder}/cells.h5ad")
    ...     found = scforge.data.inspect_h5ad(f"{folder}/cells.h5ad", "human_protein_coding")
    >>> found.stored, found.overlap.n_matched, found.n_empty, found.mismatch is None
    ('csr', 12380, 0, True)
    """

    path: str
    n_cells: int
    n_genes: int
    stored: str
    counts: str
    n_empty: int | None
    other_names: dict[str, str]
    overlap: OverlapReport
    chosen: bool
    mismatch: str | None = None

    def check(self) -> None:
        """Raise :class:`~scforge.errors.GeneMismatchError` if too few genes fit the vocabulary that was named."""
        if self.mismatch is not None:
            raise GeneMismatchError(self.mismatch)

    def __str__(self) -> str:
        rows = {
            "file": self.path,
            "cells x genes": f"{self.n_cells:,} x {self.n_genes:,} ({self.stored})",
            "counts": self.counts,
        }
        if self.n_empty:
            rows["empty cells"] = f"{self.n_empty:,}; remove them with sc.pp.filter_cells(adata, min_counts=1)"
        if self.other_names:
            rows["other gene names"] = "; ".join(f"{where}: {kind}" for where, kind in self.other_names.items())
        if self.chosen:
            name = self.overlap.vocab.split(",")[0]
            fits = self.overlap.n_matched > 0
            rows["best vocabulary"] = f"{name} (of those that ship)" if fits else "none of those that ship fits"
        return "\n".join([*(f"{name:<25}{value}" for name, value in rows.items()), str(self.overlap)])


def inspect_h5ad(
    path: str | os.PathLike[str],
    vocab: str | os.PathLike[str] | GeneVocab | None = None,
    *,
    layer: str | None = None,
    gene_key: str | None = None,
    n_top: int = 10,
) -> Inspection:
    """Look at an h5ad file without reading it into memory.

    Parameters
    ----------
    path
        The file.
    vocab
        A vocabulary, the file of one, or the name of a shipped one. None takes the shipped one that fits best.
    layer
        Layer to look at; None looks at X. If it holds no counts, another matrix that does is named, and the shares of
        counts are those of that one if it is a layer or X.
    gene_key
        Column of ``var`` with the gene names; None reads ``var_names``.
    n_top
        Number of missing genes to name.

    Returns
    -------
    What was found; ``print`` shows it.

    Raises
    ------
    MissingFileError
        If there is no such file.
    DataError
        If it is no h5ad file, or has no such layer or column.
    OptionError
        If there is no such vocabulary.

    Examples
    --------
    >>> import scforge
    >>> scforge.datasets.pbmc3k().write_h5ad("cells.h5ad")
    >>> found = inspect_h5ad("cells.h5ad")
    >>> found.n_cells, found.overlap.id_kind, found.overlap.vocab
    (2700, 'human gene symbols', 'human_protein_coding, CELLxGENE schema 7.1.2')
    """
    check_count("n_top", n_top, "genes", least=0)
    given = None if vocab is None else open_vocab(vocab)
    with reading(repr(os.fspath(path)), fix="write the file again"), open_h5ad(os.fspath(path)) as opened:
        var, matrix = opened.var, opened.matrix(layer)
        names = names_of(var, gene_key)
        sums, empty, counts = _counts(opened, matrix, layer)
    candidates = [open_vocab(name) for name in list_vocabs()] if given is None else [given]
    maps = {one: GeneMap.of(names, one) for one in candidates}
    taken = max(candidates, key=lambda one: (np.count_nonzero(maps[one].columns >= 0), -one.n_genes))
    best = overlap_report(names, sums, taken, maps[taken], where=names_place(gene_key), n_top=n_top)
    others = {
        names_place(key): f"{kind} ({GeneMap.of(column, taken).n_matched:,} in the vocabulary)"
        for key, column in text_columns(var).items()
        if key != gene_key and (kind := recognise_ids(column)) != OTHER_NAMES
    }
    mismatch = None if given is None else _mismatch(names, given, var, gene_key)
    return Inspection(
        os.fspath(path),
        *matrix.shape,
        matrix.kind,
        counts,
        empty,
        others,
        best,
        chosen=given is None,
        mismatch=mismatch,
    )


def _mismatch(names: np.ndarray, vocab: GeneVocab, var: pd.DataFrame, gene_key: str | None) -> str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ScforgeWarning)  # the report says as much
            map_names(names, vocab, whole=not vocab.chosen_from_data, var=var, gene_key=gene_key)
    except GeneMismatchError as error:
        return str(error)
    return None


def _counts(opened: StoredAdata, matrix: Matrix, layer: str | None) -> tuple[np.ndarray | None, int | None, str]:
    """Return the sums of the columns, the number of empty cells, and a sentence on where the counts are."""
    where = _name(layer)
    sums, empty, problem = _summary(matrix)
    if problem is None:
        return sums, empty, f"{where} holds raw counts"
    text = f"{where} {problem}, so it is not raw counts"
    for other in [None, *opened.layers]:
        if other == layer or (other is None and not opened.has("X")):
            continue
        # Whether a layer that was not asked for can be read is of no matter.
        with contextlib.suppress(DataError):
            sums, empty, found = _summary(opened.matrix(other))
            if found is None:
                return sums, empty, f"{text}; {_name(other)} does hold them"
    if opened.has("raw/X") and _raw_holds_counts(opened):
        text += "; raw does hold them, which adata.raw.to_adata() makes an AnnData of"
    return None, None, text


def _raw_holds_counts(opened: StoredAdata) -> bool:
    try:
        return _summary(Matrix.of(opened.file["raw/X"], opened.path))[2] is None
    except DataError:
        return False


def _name(layer: str | None) -> str:
    return "X" if layer is None else f"layers[{layer!r}]"


def _summary(matrix: Matrix) -> tuple[np.ndarray, int, str | None]:
    """Return the sums of the columns and the number of empty rows, and what is not a count; stop where that is seen."""
    sums = np.zeros(matrix.shape[1])
    filled = np.zeros(matrix.shape[0], dtype=bool)
    for rows, columns, values in matrix.entries():
        if problem := value_problem(values):
            return sums, 0, problem
        sums += np.bincount(columns, weights=values, minlength=len(sums))
        filled[rows[values > 0]] = True
    return sums, int((~filled).sum()), None
