"""Open cells from AnnData, files, stores and Census queries, in memory or on disk."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
from scipy import sparse

from scforge._checks import check_count
from scforge._io import locked
from scforge._opening import check_h5
from scforge.data.cells import Cells, CellSource
from scforge.data.checks import (
    REPAIR,
    check_adata,
    compressed_problem,
    gene_names,
    listed_columns,
    names_place,
    row_sums,
    value_problem,
)
from scforge.data.gene_sets import share_of_partial, warn_of_partial
from scforge.data.genes import (
    MIN_OVERLAP,
    GeneMap,
    OverlapReport,
    check_shared,
    join_columns,
    map_names,
    map_streams,
    overlap_report,
    text_columns,
    text_keys,
    union_vocab,
    warn_counts_outside,
    warn_empty,
)
from scforge.data.joining import SOURCE, join_obs
from scforge.data.matrix import Matrix
from scforge.data.paths import check_file, is_unfinished, is_url
from scforge.data.readers import (
    AdataStream,
    Location,
    StoredAdata,
    check_columns,
    check_format,
    identity_of,
    is_query,
    lack_of_memory,
    open_streams,
)
from scforge.data.remote import is_collection, open_group, reading
from scforge.data.vocab import OTHER_NAMES, GeneVocab, list_vocabs, open_vocab, recognize_ids
from scforge.errors import DataError, GeneMismatchError, OptionError, ScforgeWarning, listing, redacted

if TYPE_CHECKING:
    from anndata import AnnData

    from scforge.data.readers import ChunkReader

logger = logging.getLogger("scforge")

AUTO = "auto"
"""Value of `cache` to convert only data that do not fit into memory, into the user's cache."""

_OF_STORE = {"name", "overlap", "counts_kept"}
"""Keys that describe a source in a store, in addition to its fingerprint."""


def _in_memory(
    streams: Sequence[ChunkReader], maps: Sequence[GeneMap], vocab: GeneVocab, columns: Sequence[str] | None
) -> CellSource:
    """Read sources into memory one after another; only pieces of files are held with all genes."""
    if len(streams) == 1:
        table = streams[0].obs(columns).copy(deep=False)
        check_columns(table, streams[0].name)
    else:
        table = join_obs(streams, None if columns is None else [column for column in columns if column != SOURCE])
        table = table if columns is None else table[list(columns)]
    if len(streams) == 1 and isinstance(streams[0], AdataStream):  # as a whole, which is faster
        counts, totals = maps[0].apply(streams[0].counts), row_sums(streams[0].counts)
    else:
        pieces, sums = [], []
        for stream, gene_map in zip(streams, maps, strict=True):
            for _, chunk in stream.chunks():
                sums.append(row_sums(chunk))
                mapped = gene_map.apply(chunk)
                largest = mapped.data.max(initial=0)
                fits = largest <= np.iinfo(np.uint64).max
                pieces.append(mapped.astype(np.min_scalar_type(int(largest))) if fits else mapped)
        counts, totals = sparse.vstack(pieces, format="csr"), np.concatenate(sums)
    # A gene counts as measured if any source has it.
    of_sources = np.stack([gene_map.measured for gene_map in maps])
    measured = of_sources.any(axis=0)
    if not (of_sources == measured).all():
        of_genes = np.bincount(counts.indices, counts.data, minlength=vocab.n_genes)
        warn_of_partial(share_of_partial(of_genes, of_sources), of_sources)
    return CellSource(
        counts=counts,
        totals=totals,
        overlap=float(measured.mean()),
        counts_kept=float(counts.data.sum(dtype=np.float64) / totals.sum()),
        measured=measured,
        vocab=vocab,
        obs=table,
    )


def store_of_large(
    streams: Sequence[ChunkReader], memory: int | str | None = None, **options: str | None
) -> Path | None:
    """Return the path of the cached store for files that do not fit into memory, or None if they fit.

    Files that were converted before are always read from the store, so that the cell order does not depend on memory.
    """
    places = [identity_of(stream) for stream in streams]
    if not all(isinstance(identity, str) for identity in places):  # what is in memory already
        return None
    digest = hashlib.sha256(repr((places, sorted(options.items()))).encode()).hexdigest()[:16]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    store = root / "scforge" / "stores" / f"{digest}.zarr"
    if store.exists():
        return store
    lack = lack_of_memory(streams, memory)
    if lack is not None:
        logger.warning("%s, so they are converted once into %s; set cache to use another folder.", lack, store)
    return None if lack is None else store


def convert_once(
    source: Any,
    streams: Sequence[ChunkReader],
    cache: str | os.PathLike[str],
    *,
    obs: Sequence[str] | None,
    storage_options: Mapping[str, Any] | None,
    **options: str | None,
) -> Path:
    """Return the path of a store of the sources; write it if it is missing or the sources have changed."""
    from scforge.data.conversion import convert

    if is_url(os.fspath(cache)):
        raise OptionError("is a URL; pass a folder on a local disk.", cache=os.fspath(cache))
    path = Path(cache)
    for stream in streams if obs else ():
        stream.obs(obs)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Of several processes the first converts, and the others wait for it. Nobody converts into a read-only folder.
    may_write = os.access(path.parent, os.W_OK)
    with locked(path.with_name(f".{path.name}.lock")) if may_write else contextlib.nullcontext():
        if path.exists():
            if _is_fresh(path, streams, options):
                return path
            logger.info("The sources of %s have changed; converting them again.", path)
        convert(source, path, overwrite=True, storage_options=storage_options, **options)  # type: ignore[arg-type]
    logger.info("Converted %s to %s.", listing(stream.name for stream in streams), path)
    return path


def _is_fresh(path: Path, streams: Sequence[ChunkReader], options: Mapping[str, str | None]) -> bool:
    """Return whether a store is up to date. Raises an OptionError if it contains other data or genes."""
    from scforge.data.store import StoreInfo, read_vocab

    info = StoreInfo.read(path)  # or raise, as it is not a store
    # The same folder may be named from elsewhere; what is in a file is compared by its fingerprint.
    stored = [source["name"].rstrip("/").rpartition("/")[2] for source in info.sources]
    given = [stream.name.rstrip("/").rpartition("/")[2] for stream in streams]
    stored_options = {name: info.options.get(name) for name in options}
    if stored != given:
        problem = f"is a store of {listing(stored)}, not of {listing(given)}"
    elif different := [name for name in options if stored_options[name] != options[name]]:
        name = different[0]
        problem = f"was converted with {name}={stored_options[name]!r}, not {options[name]!r}"
    else:
        fingerprints = [
            {key: value for key, value in source.items() if key not in _OF_STORE} for source in info.sources
        ]
        if fingerprints != [stream.fingerprint() for stream in streams]:
            return False
        if read_vocab(open_group(path)).genes == union_vocab(streams, options["gene_key"]).genes:
            return True
        problem = "was converted with different genes"
    raise OptionError(f"{problem}; pass another folder.", cache=str(path))


def open_cells(
    source: Any,
    vocab: str | os.PathLike[str] | GeneVocab | None = None,
    *,
    layer: str | None = None,
    gene_key: str | None = None,
    modality: str | None = None,
    min_overlap: float = MIN_OVERLAP,
    obs: Sequence[str] | None = None,
    memory: int | str | None = None,
    cache: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Cells:
    """Open cells over the genes of a vocabulary, from memory, files, stores or URLs.

    A store written by :func:`scforge.data.convert` stays on disk. Any other source is read into memory piece by piece,
    and its genes are mapped while reading. With `cache`, the source is instead converted into a store once.

    Parameters
    ----------
    source
        An AnnData, in memory or backed; a MuData, or an h5mu file; the path of an h5ad file, of an AnnData-zarr folder
        or of a store; a pattern such as ``"data/*.h5ad"``; a URL of one of these (``s3://``, ``gs://``, ``https://``,
        ...); a CELLxGENE Census query; or a list of sources, which are concatenated. Counts must be raw.
    vocab
        Vocabulary to map the genes to by name: a vocabulary, its file, or the name of a shipped vocabulary. Genes
        outside the vocabulary are left out, but their counts stay in the library size of each cell. If None, uses the
        vocabulary of a store, or all genes of any other source.
    layer
        Key in ``adata.layers`` with raw counts. If None, reads ``adata.X``.
    gene_key
        Column of ``adata.var`` with the gene names. If None, reads ``adata.var_names``.
    modality
        Modality of a MuData.
    min_overlap
        Minimum fraction of the vocabulary genes in each source, see :func:`scforge.data.map_genes`.
    obs
        Columns of ``obs`` to keep. If None, keeps all columns that every source has. With several sources,
        ``"scforge_source"`` names the source of each cell.
    memory
        Maximum memory for cells that are read from files, e.g. ``"16GB"`` or a number of bytes. If None, uses half of
        the available memory.
    cache
        Folder for a store; it has no effect if the source is a store. The store is written if it is missing or the
        sources have changed, and is reused afterwards. It contains all genes and columns, so it works for every
        vocabulary. With ``"auto"``, only files that do not fit into memory are converted, into
        ``~/.cache/scforge/stores`` (or ``$XDG_CACHE_HOME``), as in training from files.
    storage_options
        Options for the remote file system, e.g. credentials, see :mod:`fsspec`.

    Returns
    -------
    The cells in the order of the source (or of the store), e.g. a ``scforge.data.cells.CellSource``.

    Raises
    ------
    MissingFileError
        If a file does not exist.
    DataError
        If counts, gene names or columns are invalid, a file is corrupted, or the cells do not fit into memory.
    GeneMismatchError
        If too few genes of `vocab` are in a source, or the sources share hardly any genes.
    OptionError
        If an argument is not valid for the source.

    Warns
    -----
    ScforgeWarning
        If fewer than half of the genes of `vocab` are in the data, columns of the same gene are summed, several sources
        measure different genes, cells express no gene of `vocab`, or `vocab` is an entire annotation and more than a
        fifth of the counts are outside it.

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
    columns = listed_columns(obs)
    wanted = None if vocab is None else open_vocab(vocab)
    on_disk: dict[str, Any] = {"obs": columns, "min_overlap": min_overlap}
    location = source[0] if isinstance(source, list | tuple) and len(source) == 1 else source
    if isinstance(location, str | os.PathLike):
        location = os.fspath(location)
        unfinished = not is_url(location) and is_unfinished(location)
        if unfinished or is_collection(location, storage_options):
            _check_unused(f"the store {location!r}", layer=layer, gene_key=gene_key, modality=modality)
            return _open_store(location, wanted, storage_options, on_disk)
    if is_query(source):
        _check_unused("the query", obs=obs, layer=layer, gene_key=gene_key, modality=modality)
        streams = source.streams(wanted)
    else:
        streams = open_streams(source, layer=layer, modality=modality, storage_options=storage_options)
    options: dict[str, Any] = {"layer": layer, "gene_key": gene_key, "modality": modality}
    if cache is not None and os.fspath(cache) == AUTO:
        cache = store_of_large(streams, memory, **options)
    if cache is not None:
        store = convert_once(source, streams, cache, obs=columns, storage_options=storage_options, **options)
        return _open_store(store, wanted, None, on_disk)
    genes, maps = map_streams(streams, wanted, gene_key=gene_key, min_overlap=min_overlap)
    in_memory = len(streams) == 1 and isinstance(streams[0], AdataStream)
    if not in_memory and (lack := lack_of_memory(streams, memory)):
        raise DataError(
            f"{lack}; read the cells from disk: run scforge convert SOURCE -o store.zarr once and open store.zarr, or "
            'pass cache="store.zarr", which does both.'
        )
    cells = _in_memory(streams, maps, genes, columns)
    if not in_memory:
        logger.info("Read into memory: %s cells of %s.", f"{len(cells):,}", listing(stream.name for stream in streams))
    warn_empty(cells.n_expressed)
    warn_counts_outside(cells.counts_kept, genes)
    return cells


def _open_store(
    store: str | os.PathLike[str], vocab: GeneVocab | None, options: Mapping[str, Any] | None, on_disk: dict[str, Any]
) -> Cells:
    from scforge.data.store import StoreCells

    cells = StoreCells.open(store, vocab, storage_options=options, **on_disk)
    logger.info("Opened %s: %s cells.", redacted(os.fspath(store)), f"{len(cells):,}")
    return cells


def _check_unused(store: str, **options: Any) -> None:
    for name, value in options.items():
        if value is not None:
            raise OptionError(
                f"has no effect, because {name} is set when {store} is created; omit {name}.",
                argument=name,
                value=value,
            )


def read_h5ad(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> AnnData:
    """Read one or several h5ad files into one AnnData in memory.

    Several files are concatenated over the union of their genes (by ``var_names``). If a gene is not in a file, it is
    treated as not expressed in the cells of this file. Columns with the same name in a file are summed first. The
    source of each cell is in ``obs["source_file"]``, or in ``obs["scforge_source"]`` if a file already contains a
    column ``"source_file"``. Cell names are made unique.

    Parameters
    ----------
    paths
        One or several files.

    Returns
    -------
    Annotated data in memory.

    Raises
    ------
    MissingFileError
        If a file does not exist.
    DataError
        If a file is not an h5ad file, is empty, or has a corrupted matrix.
    GeneMismatchError
        If files share hardly any genes, e.g. because one contains symbols and the other Ensembl ids.

    Warns
    -----
    ScforgeWarning
        If several files are given, and columns of one of them are summed, or the files measure different genes.

    Examples
    --------
    >>> import tempfile, scforge
    >>> adata = scforge.datasets.pbmc3k()[:100, :50]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     adata[:60].write_h5ad(f"{folder}/a.h5ad")
    ...     adata[60:].write_h5ad(f"{folder}/b.h5ad")
    ...     both = read_h5ad([f"{folder}/a.h5ad", f"{folder}/b.h5ad"])
    >>> both.shape, both.obs["source_file"].nunique()
    ((100, 50), 2)
    """
    import anndata
    import pandas as pd

    files = [Path(paths)] if isinstance(paths, str | os.PathLike) else [Path(path) for path in paths]
    if not files:
        raise OptionError("is empty; pass at least one h5ad file.", paths=[])
    parts = {str(path): _read_one(path) for path in files}
    if len(files) == 1:
        return parts[str(files[0])]
    if len(parts) < len(files):
        raise OptionError("contains the same file twice; pass each file once.", argument="paths")
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
    if joined.X is not None:
        measured = np.stack([joined.var_names.isin(part.var_names) for part in parts.values()])
        sums = np.asarray(joined.X.sum(axis=0), dtype=np.float64).ravel()
        warn_of_partial(share_of_partial(sums, measured), measured)
    return joined


def _read_one(path: Path) -> AnnData:
    import anndata

    check_file(path)
    check_format(path)
    with reading(repr(str(path)), how="as an h5ad file"), warnings.catch_warnings():
        # What it advises, to number them, would hide which columns mean one gene; scforge sums those.
        warnings.filterwarnings("ignore", message="Variable names are not unique")
        with h5py.File(path, "r") as file:
            check_h5(file, str(path))
        adata = anndata.read_h5ad(path)
    check_adata(adata, argument=repr(str(path)))
    matrices = {"X": adata.X, **{f"layers[{key!r}]": layer for key, layer in adata.layers.items() if key is not None}}
    if adata.raw is not None:
        matrices["raw.X"] = adata.raw.X
    for name, matrix in matrices.items():
        if problem := compressed_problem(matrix):
            raise DataError(f"{name} of {str(path)!r} is corrupted: {problem}; {REPAIR}.")
    return adata


@dataclass(frozen=True)
class Inspection:
    """Content of an h5ad file; ``print(inspection)`` shows it.

    Attributes
    ----------
    path
        The file.
    n_cells, n_genes
        Number of cells, and number of columns of the matrix.
    stored
        Storage format of the matrix: ``"csr"``, ``"csc"`` or ``"dense"``.
    counts
        Sentence that states whether the matrix contains raw counts, or which other matrix does.
    n_empty
        Number of cells without counts; None if there are no counts.
    obs_columns
        Text columns of ``obs``, which can be labels, batches or groups, each with its numbers of values and of cells
        without a value.
    other_names
        Other columns of ``var`` that contain gene names, each with the kind of its names and how many of them are in
        the vocabulary.
    overlap
        Report on the overlap of the genes with the vocabulary.
    chosen
        Whether the vocabulary was chosen from the shipped vocabularies.
    mismatch
        Sentence that explains why the data cannot be used with the given vocabulary; None if they can be used.

    Examples
    --------
    >>> import tempfile, scforge
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     scforge.datasets.pbmc3k()[:100].write_h5ad(f"{folder}/cells.h5ad")
    ...     found = inspect_h5ad(f"{folder}/cells.h5ad", "human_protein_coding")
    >>> found.stored, found.overlap.n_matched, found.n_empty, found.mismatch is None
    ('csr', 12380, 0, True)
    """

    path: str
    n_cells: int
    n_genes: int
    stored: str
    counts: str
    n_empty: int | None
    obs_columns: dict[str, str]
    other_names: dict[str, str]
    overlap: OverlapReport
    chosen: bool
    mismatch: str | None = None

    def check(self) -> None:
        """Raise a :class:`~scforge.errors.GeneMismatchError` if too few genes match the given vocabulary."""
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
        if self.obs_columns:
            rows["text columns of obs"] = "; ".join(f"{key!r}: {text}" for key, text in self.obs_columns.items())
        if self.other_names:
            rows["other gene names"] = "; ".join(f"{where}: {kind}" for where, kind in self.other_names.items())
        if self.chosen:
            name = self.overlap.vocab.split(",")[0]
            fits = self.overlap.n_matched > 0
            rows["best vocabulary"] = f"{name} (shipped)" if fits else "no shipped vocabulary matches"
        return "\n".join([*(f"{name:<25}{value}" for name, value in rows.items()), str(self.overlap)])


def inspect_h5ad(
    path: str | os.PathLike[str],
    vocab: str | os.PathLike[str] | GeneVocab | None = None,
    *,
    layer: str | None = None,
    gene_key: str | None = None,
    n_top: int = 10,
) -> Inspection:
    """Inspect an h5ad file without reading it into memory.

    Parameters
    ----------
    path
        The file.
    vocab
        A vocabulary, its file, or the name of a shipped vocabulary. If None, uses the shipped vocabulary that fits
        best.
    layer
        Layer to inspect. If None, inspects X. If it does not contain counts, the result names another matrix that does.
        If the other matrix is a layer or X, fractions of counts are computed from it.
    gene_key
        Column of ``var`` with the gene names. If None, reads ``var_names``.
    n_top
        Number of missing genes to list.

    Returns
    -------
    The result of the inspection; ``print`` shows it.

    Raises
    ------
    MissingFileError
        If the file does not exist.
    DataError
        If the file is not an h5ad file, or does not contain the layer or column.
    OptionError
        If the vocabulary is unknown.

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
    check_format(Path(path))
    with reading(repr(os.fspath(path)), fix="write the file again"), Location(os.fspath(path)).open() as opened:
        obs, var, matrix = opened.obs, opened.var, opened.matrix(layer)
        names = gene_names(opened, gene_key)
        sums, empty, counts = _counts(opened, matrix, layer)
    candidates = [open_vocab(name) for name in list_vocabs()] if given is None else [given]
    maps = {candidate: GeneMap.of(names, candidate) for candidate in candidates}
    taken = max(candidates, key=lambda candidate: (np.count_nonzero(maps[candidate].columns >= 0), -candidate.n_genes))
    best = overlap_report(names, sums, taken, maps[taken], where=names_place(gene_key), n_top=n_top)
    others = {
        names_place(key): f"{kind} ({GeneMap.of(column, taken).n_matched:,} in the vocabulary)"
        for key, column in text_columns(var).items()
        if key != gene_key and (kind := recognize_ids(column)) != OTHER_NAMES
    }
    obs_columns = {}
    for key in text_keys(obs):
        n_missing = int(obs[key].isna().sum())
        missing = f", {n_missing:,} cells without a value" if n_missing else ""
        obs_columns[str(key)] = f"{obs[key].nunique():,} values{missing}"
    mismatch = None
    if given is not None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ScforgeWarning)  # the report says as much
                map_names(names, given, var=var, gene_key=gene_key)
        except GeneMismatchError as error:
            mismatch = str(error)
    return Inspection(
        os.fspath(path),
        *matrix.shape,
        matrix.kind,
        counts,
        empty,
        obs_columns,
        others,
        best,
        chosen=given is None,
        mismatch=mismatch,
    )


def _counts(opened: StoredAdata, matrix: Matrix, layer: str | None) -> tuple[np.ndarray | None, int | None, str]:
    """Return the column sums, the number of empty cells, and a sentence on which matrix contains counts."""
    places = {"X": "X", **{f"layers/{name}": f"layers[{name!r}]" for name in opened.layers}, "raw/X": "raw"}
    asked = "X" if layer is None else f"layers/{layer}"
    sums, empty, problem = _summary(matrix)
    if problem is None:
        return sums, empty, f"{places[asked]} contains raw counts"
    text = f"{places.pop(asked)} {problem}, so it does not contain raw counts"
    for key in filter(opened.has, places):
        # Whether a matrix that was not asked for can be read is of no matter.
        with contextlib.suppress(DataError):
            sums, empty, problem = _summary(Matrix.of(opened.file[key], opened.path))
            if problem is None and key == "raw/X":  # over other genes
                return None, None, f"{text}; raw contains them, see adata.raw.to_adata()"
            if problem is None:
                return sums, empty, f"{text}; {places[key]} contains them"
    return None, None, text


def _summary(matrix: Matrix) -> tuple[np.ndarray, int, str | None]:
    """Return the column sums, the number of empty rows, and the problem if values are not counts, or None."""
    sums, n_empty = np.zeros(matrix.shape[1]), 0
    for _, chunk in matrix.row_chunks():
        if problem := value_problem(chunk.data):
            return sums, 0, problem
        sums += np.asarray(chunk.sum(axis=0, dtype=np.float64)).ravel()
        n_empty += int((row_sums(chunk) == 0).sum())
    return sums, n_empty, None
