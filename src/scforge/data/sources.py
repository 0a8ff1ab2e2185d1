"""Opening cells: an AnnData, or h5ad files that are read into one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from scforge.data.cells import CellSource
from scforge.data.checks import check_adata, counts_of
from scforge.data.compressed import REPAIR, compressed_problem, row_sums
from scforge.data.duplicates import join_columns
from scforge.data.id_kinds import recognise_ids
from scforge.data.mapping import MIN_OVERLAP, gene_names, map_names, warn_counts_outside
from scforge.data.vocab import GeneVocab
from scforge.errors import (
    DataError,
    GeneMismatchError,
    MissingFileError,
    OptionError,
    ScforgeWarning,
    first_line,
    listing,
)

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = ["open_cells", "read_h5ad"]


def open_cells(
    adata: AnnData,
    vocab: GeneVocab,
    *,
    layer: str | None = None,
    gene_key: str | None = None,
    whole_annotation: bool = False,
    min_overlap: float = MIN_OVERLAP,
) -> CellSource:
    """Map the counts of `adata` onto the genes of `vocab`.

    Parameters
    ----------
    adata
        Annotated data with raw counts.
    vocab
        Vocabulary to map the genes to. Genes of `adata` outside of it are left out, but their counts stay in the
        library size of each cell.
    layer
        Key in ``adata.layers`` with raw counts; None reads ``adata.X``.
    gene_key
        Column of ``adata.var`` with the gene names; None reads ``adata.var_names``.
    whole_annotation
        `vocab` is a whole annotation, of which no data set measures every gene.
    min_overlap
        Smallest share of genes to accept, see :func:`scforge.data.map_genes`.

    Returns
    -------
    The cells in the order of ``adata.obs_names``.

    Raises
    ------
    DataError
        If the counts or the gene names cannot be used.
    GeneMismatchError
        If too few genes of `vocab` are in `adata`.

    Warns
    -----
    ScforgeWarning
        If genes of `vocab` are missing by the half, if columns mean one gene and are summed, if cells express no gene
        of `vocab`, or if more than a fifth of the counts lie outside of it although it is a whole annotation.

    Examples
    --------
    >>> import scforge
    >>> adata = scforge.datasets.pbmc3k()
    >>> cells = open_cells(adata, GeneVocab.from_genes(["B2M", "MALAT1", "TMSB4X"]))
    >>> cells.counts.shape
    (2700, 3)
    """
    check_adata(adata)
    counts = counts_of(adata, layer)
    names = gene_names(adata, gene_key)
    gene_map = map_names(
        names, vocab, min_overlap=min_overlap, whole=whole_annotation, var=adata.var, gene_key=gene_key
    )
    totals = row_sums(counts)
    mapped = gene_map.apply(counts)
    empty = int((np.diff(mapped.indptr) == 0).sum())
    if empty:
        warnings.warn(
            f"{empty} of {adata.n_obs} cells express no gene of the vocabulary; their embedding tells nothing.",
            ScforgeWarning,
            stacklevel=2,
        )
    kept = float(mapped.sum(dtype=np.float64) / totals.sum())
    warn_counts_outside(kept, vocab)
    return CellSource(
        counts=mapped, totals=totals, overlap=gene_map.overlap, counts_kept=kept, measured=gene_map.measured
    )


def read_h5ad(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> AnnData:
    """Read one or several h5ad files into one AnnData in memory.

    Several files are concatenated over the union of their genes (by ``var_names``); a gene that a file lacks counts
    as not expressed there, and columns of one name in a file are summed first. ``obs["source_file"]`` says where a
    cell comes from, and cell names are made unique.

    Parameters
    ----------
    paths
        One file or several.

    Raises
    ------
    MissingFileError
        If a file does not exist.
    DataError
        If a file is not an h5ad, is empty, or has a damaged matrix.
    GeneMismatchError
        If files share hardly any gene, e.g. because one has symbols and the other Ensembl ids.

    Warns
    -----
    ScforgeWarning
        If columns of one of several files are summed.
    """
    import anndata
    import pandas as pd

    files = [Path(paths)] if isinstance(paths, str | os.PathLike) else [Path(path) for path in paths]
    if not files:
        raise OptionError("paths=[] names no file; name at least one h5ad file.")
    parts = {str(path): _read_one(path) for path in files}
    if len(files) == 1:
        return parts[str(files[0])]
    if len(parts) < len(files):
        raise OptionError("paths names the same file twice; name each file once.")
    parts = {
        path: part if part.var_names.is_unique else join_columns(part, f"var_names of {path!r}")
        for path, part in parts.items()
    }
    first, *others = parts.items()
    for path, part in others:
        shared = len(first[1].var_names.intersection(part.var_names))
        if shared < MIN_OVERLAP * min(first[1].n_vars, part.n_vars):
            kinds = recognise_ids(part.var_names), recognise_ids(first[1].var_names)
            raise GeneMismatchError(
                f"{path!r} shares {shared} var_names with {first[0]!r}: they hold {kinds[0]} such as "
                f"{listing(part.var_names[:2])} and {kinds[1]} such as {listing(first[1].var_names[:2])}; "
                "name the genes alike before joining files."
            )
    joined = anndata.concat(parts, join="outer", label="source_file", index_unique="-", fill_value=0)
    # One annotation of each gene is enough: that of the first file that has the gene.
    var = pd.concat([part.var for part in parts.values()])
    joined.var = var[~var.index.duplicated()].reindex(joined.var_names)
    return joined


def _read_one(path: Path) -> AnnData:
    import anndata
    from anndata._io.specs.registry import IORegistryError  # a way of storing that this anndata does not know

    if not path.exists():
        raise MissingFileError(f"the file {str(path)!r} does not exist; check data.paths.")
    if not path.is_file():
        raise DataError(f"{str(path)!r} is not a file; data.paths takes h5ad files.")
    try:
        with warnings.catch_warnings():
            # What it advises, to number them, would hide which columns mean one gene; scforge sums those.
            warnings.filterwarnings("ignore", message="Variable names are not unique")
            adata = anndata.read_h5ad(path)
    except (OSError, KeyError, ValueError, TypeError, AttributeError, IndexError, IORegistryError) as error:
        raise DataError(f"{str(path)!r} cannot be read as an h5ad file: {first_line(error)}.") from error
    check_adata(adata, argument=repr(str(path)))
    matrices = {"X": adata.X, **{f"layers[{key!r}]": layer for key, layer in adata.layers.items() if key is not None}}
    if adata.raw is not None:
        matrices["raw.X"] = adata.raw.X
    for name, matrix in matrices.items():
        if problem := compressed_problem(matrix):
            raise DataError(f"{name} of {str(path)!r} is damaged: {problem}; {REPAIR}.")
    return adata
