"""Opening cells of any source: in memory, on disk or behind a URL."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scforge._checks import check_share
from scforge.data.cells import Cells, CellSource
from scforge.data.checks import check_adata
from scforge.data.compressed import REPAIR, compressed_problem, row_sums
from scforge.data.duplicates import join_columns
from scforge.data.h5ad import open_hdf5, similar_file
from scforge.data.harmonise import check_shared, map_streams
from scforge.data.mapping import MIN_OVERLAP, GeneMap, warn_counts_outside
from scforge.data.named import open_vocab
from scforge.data.stream_adata import AdataStream
from scforge.data.stream_cache import AUTO, convert_once, store_of_large
from scforge.data.stream_errors import reading
from scforge.data.stream_gather import gather, joined_obs
from scforge.data.stream_memory import check_memory, check_stored
from scforge.data.stream_remote import is_collection
from scforge.data.streams import is_query, open_streams
from scforge.data.vocab import GeneVocab
from scforge.errors import DataError, MissingFileError, OptionError, listing, redacted, warn

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = ["open_cells", "read_h5ad"]

logger = logging.getLogger("scforge")


def open_cells(
    source: Any,
    vocab: str | os.PathLike[str] | GeneVocab | None = None,
    *,
    layer: str | None = None,
    gene_key: str | None = None,
    modality: str | None = None,
    whole_annotation: bool | None = None,
    min_overlap: float = MIN_OVERLAP,
    obs: Sequence[str] | None = None,
    memory: int | str | None = None,
    cache: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Cells:
    """Open cells over the genes of a vocabulary, wherever they are.

    A store that :func:`scforge.data.convert` wrote stays on disk, however large. Any other source is read into
    memory, piece by piece and already mapped; or, with `cache`, converted into a store once.

    Parameters
    ----------
    source
        An AnnData, in memory or backed; a MuData, or an h5mu file; the path of an h5ad file, of an AnnData-zarr folder
        or of a store; a pattern such as ``"data/*.h5ad"``; a URL of one of these (``s3://``, ``gs://``, ``https://``,
        ...); a query of the CELLxGENE Census; or a list, whose cells come one after the other. Counts have to be raw.
    vocab
        Vocabulary to map the genes to, by name: itself, its file, or the name of a shipped one. Genes outside of it
        are left out, but their counts stay in the library size of each cell. None takes the vocabulary of a store,
        and all genes of any other source.
    layer
        Key in ``adata.layers`` with raw counts; None reads ``adata.X``.
    gene_key
        Column of ``adata.var`` with the gene names; None reads ``adata.var_names``.
    modality
        Modality of a MuData.
    whole_annotation
        `vocab` is a whole annotation, of which no data set measures every gene. None: what its release says.
    min_overlap
        Smallest share of genes to accept in each source, see :func:`scforge.data.map_genes`.
    obs
        Columns of obs to keep. None keeps all that every source has. Of several sources ``"scforge_source"`` says
        where a cell comes from.
    memory
        Most memory that cells read from files may take, e.g. ``"16GB"`` or a number of bytes. None: half of what is
        available.
    cache
        Folder for a store; of no use for what is a store or a query already. It is written when it is not there yet,
        or the sources have changed, and opened from then on. It holds all genes and columns, so it serves every
        vocabulary. ``"auto"`` converts files that do not fit into memory, into ``~/.cache/scforge/stores`` (or
        ``$XDG_CACHE_HOME``), as training from files does.
    storage_options
        Options of the remote file system, e.g. credentials, as of :mod:`fsspec`.

    Returns
    -------
    The cells in the order of the source (of a store, in its own), e.g. a :class:`scforge.data.CellSource`.

    Raises
    ------
    MissingFileError
        If a file does not exist.
    DataError
        If counts, gene names or columns cannot be used, a file is damaged, or the cells do not fit into memory.
    GeneMismatchError
        If too few genes of `vocab` are in a source, or sources share hardly any gene.
    OptionError
        If an argument does not suit the source.

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
    >>> adata.write_h5ad("cells.h5ad")
    >>> cells = open_cells("cells.h5ad", obs=["cell_type"])
    >>> len(cells), cells.vocab.n_genes, cells.obs.columns.tolist()
    (2700, 16634, ['cell_type'])
    """
    check_share("min_overlap", min_overlap)
    columns = _listed(obs)
    wanted = None if vocab is None else open_vocab(vocab)
    on_disk: dict[str, Any] = {"obs": columns, "min_overlap": min_overlap}
    if is_query(source):
        _check_unused("the query", obs=obs, layer=layer, gene_key=gene_key, modality=modality)
        return source.open(wanted, min_overlap=min_overlap)
    if place := _store(source, storage_options):
        _check_unused(f"the store {place!r}", layer=layer, gene_key=gene_key, modality=modality)
        return _open_store(place, wanted, storage_options, on_disk)
    streams = open_streams(source, layer=layer, modality=modality, storage_options=storage_options)
    options: dict[str, Any] = {"layer": layer, "gene_key": gene_key, "modality": modality}
    if cache is not None and os.fspath(cache) == AUTO:
        cache = store_of_large(streams, memory, **options)
    if cache is not None:
        store = convert_once(source, streams, cache, wanted, obs=columns, storage_options=storage_options, **options)
        return _open_store(store, wanted, None, on_disk)
    found, maps = map_streams(streams, wanted, gene_key=gene_key, min_overlap=min_overlap, whole=whole_annotation)
    if len(streams) == 1 and isinstance(streams[0], AdataStream):
        cells = _in_memory(streams[0], maps[0], found, columns)
    else:
        check_memory(streams, memory)
        cells = gather(streams, maps, found, obs=columns)
        logger.info("Read into memory: %s cells of %s.", f"{len(cells):,}", listing(one.name for one in streams))
    _warn(cells, found)
    return cells


def _listed(obs: Sequence[str] | None) -> list[str] | None:
    if isinstance(obs, str):
        raise OptionError(f"obs={obs!r} is text; give a list of columns, [{obs!r}].")
    return None if obs is None else list(obs)


def _store(source: Any, options: Mapping[str, Any] | None) -> str | None:
    """Return the path or URL of a store, one that is not finished among them; None for another source."""
    if isinstance(source, list | tuple) and len(source) == 1:
        (source,) = source
    if not isinstance(source, str | os.PathLike):
        return None
    from scforge.data.remote import is_url
    from scforge.data.store_files import partial_path

    place = os.fspath(source)
    unfinished = not is_url(place) and not Path(place).exists() and partial_path(place).exists()
    return place if unfinished or is_collection(place, options) else None


def _open_store(
    place: str | os.PathLike[str], vocab: GeneVocab | None, options: Mapping[str, Any] | None, on_disk: dict[str, Any]
) -> Cells:
    from scforge.data.store import StoreCells

    cells = StoreCells.open(place, vocab, storage_options=options, **on_disk)
    logger.info("Opened %s: %s cells.", redacted(os.fspath(place)), f"{len(cells):,}")
    return cells


def _check_unused(place: str, **options: Any) -> None:
    for name, value in options.items():
        if value is not None:
            raise OptionError(f"{name}={value!r} was chosen when {place} was made; leave it out here.")


def _in_memory(stream: AdataStream, gene_map: GeneMap, vocab: GeneVocab, obs: Sequence[str] | None) -> CellSource:
    """Map an AnnData as a whole, which is faster than in pieces."""
    table = joined_obs([stream], obs)
    mapped, totals = gene_map.apply(stream.counts), row_sums(stream.counts)
    return CellSource(
        counts=mapped,
        totals=totals,
        overlap=gene_map.overlap,
        counts_kept=float(mapped.data.sum(dtype=np.float64) / totals.sum()),
        measured=gene_map.measured,
        vocab=vocab,
        obs=table,
    )


def _warn(cells: CellSource, vocab: GeneVocab) -> None:
    empty = int((cells.n_expressed == 0).sum())
    if empty:
        warn(f"{empty} of {len(cells)} cells express no gene of the vocabulary; their embedding tells nothing.")
    warn_counts_outside(cells.counts_kept, vocab)


def read_h5ad(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> AnnData:
    """Read one or several h5ad files into one AnnData in memory.

    Several files are concatenated over the union of their genes (by ``var_names``); a gene that a file lacks counts
    as not expressed there, and columns of one name in a file are summed first. ``obs["source_file"]`` says where a
    cell comes from (``obs["scforge_source"]`` if a file has a column ``"source_file"`` of its own), and cell names are
    made unique.

    Parameters
    ----------
    paths
        One file or several.

    Returns
    -------
    Annotated data in memory.

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

    Examples
    --------
    >>> import tempfile, scforge
    >>> adata = scforge.datasets.pbmc3k()[:100, :50]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     adata[:60].write_h5ad(f"{folder}/a.h5ad")
    ...     adata[60:, :40].write_h5ad(f"{folder}/b.h5ad")
    ...     both = read_h5ad([f"{folder}/a.h5ad", f"{folder}/b.h5ad"])
    >>> both.shape, both.obs["source_file"].nunique()
    ((100, 50), 2)
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
    check_shared([(path, part.var_names.to_numpy()) for path, part in parts.items()], what="var_names")
    taken = any("source_file" in part.obs for part in parts.values())
    label = "scforge_source" if taken else "source_file"
    joined = anndata.concat(parts, join="outer", label=label, index_unique="-", fill_value=0)
    # One annotation of each gene is enough: that of the first file that has the gene.
    var = pd.concat([part.var for part in parts.values()])
    joined.var = var[~var.index.duplicated()].reindex(joined.var_names)
    return joined


def _read_one(path: Path) -> AnnData:
    import anndata

    if not path.exists():
        raise MissingFileError(f"the file {str(path)!r} does not exist{similar_file(path)}")
    if not path.is_file():
        raise DataError(f"{str(path)!r} is not a file; data.paths takes h5ad files.")
    with open_hdf5(path, str(path)) as file, reading(repr(str(path)), how="as an h5ad file"):
        check_stored(file, repr(str(path)))
    with reading(repr(str(path)), how="as an h5ad file"), warnings.catch_warnings():
        # What it advises, to number them, would hide which columns mean one gene; scforge sums those.
        warnings.filterwarnings("ignore", message="Variable names are not unique")
        adata = anndata.read_h5ad(path)
    check_adata(adata, argument=repr(str(path)))
    matrices = {"X": adata.X, **{f"layers[{key!r}]": layer for key, layer in adata.layers.items() if key is not None}}
    if adata.raw is not None:
        matrices["raw.X"] = adata.raw.X
    for name, matrix in matrices.items():
        if problem := compressed_problem(matrix):
            raise DataError(f"{name} of {str(path)!r} is damaged: {problem}; {REPAIR}.")
    return adata
