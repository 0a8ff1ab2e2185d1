"""Convert cells into a store: one pass scatters them over temporary files, each of which becomes a dataset."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from filelock import Timeout

from scforge._checks import check_seed
from scforge._io import add_to_store, locked, new_folder, remove_working, swap_in
from scforge._version import __version__
from scforge.data.appending import StoreEnd
from scforge.data.checks import listed_columns
from scforge.data.gene_sets import share_of_partial, warn_of_partial
from scforge.data.genes import MIN_OVERLAP, map_streams, warn_counts_outside, warn_empty
from scforge.data.joining import join_obs
from scforge.data.memory import parse_bytes
from scforge.data.paths import check_target, is_url
from scforge.data.readers import ChunkReader, open_streams
from scforge.data.scattering import COUNT_BYTES, Scattered, gene_dtype
from scforge.data.store import (
    CHUNK_SIZE,
    SOURCE,
    StoreInfo,
    content_hash,
    write_added,
    write_root,
)
from scforge.data.vocab import GeneVocab, open_vocab
from scforge.errors import DataError, OptionError, first_line

logger = logging.getLogger("scforge")

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Error codes for a full disk, an exceeded quota, and a file larger than the system or the process allows."""

_LIBRARIES = 900_000_000
"""Memory in bytes for Python and the libraries, including torch, which annbatch imports."""

_BUFFERS = 300_000_000
"""Memory in bytes for a piece of a source and its derived arrays, or for a dataset file during compression."""

_MIN = 150_000_000
"""Minimum memory for counts, in bytes."""


def convert(
    sources: Any,
    path: str | os.PathLike[str],
    *,
    vocab: str | os.PathLike[str] | GeneVocab | None = None,
    obs: Sequence[str] | None = None,
    shuffle: bool = True,
    seed: int = 0,
    memory: int | str = "4GB",
    layer: str | None = None,
    gene_key: str | None = None,
    modality: str | None = None,
    min_overlap: float = MIN_OVERLAP,
    overwrite: bool = False,
    append: bool = False,
    progress: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> StoreInfo:
    """Convert cells into a store, from which models can train on any number of cells.

    The cells of all sources are put into one random order, with their counts aligned to the genes of one vocabulary.
    `path` does not exist until the store is complete. An interrupted conversion starts again from the beginning.

    With `append`, the cells become new datasets at the end of an existing store, shuffled among themselves. The store
    keeps its vocabulary with its medians, and its columns of ``obs``. Until the last step, the store is what it
    was: other processes can read it meanwhile, and an append that is interrupted changes nothing.

    Parameters
    ----------
    sources
        An AnnData in memory or backed by its file; a MuData with `modality`; the path, pattern or URL of h5ad files or
        AnnData-zarr folders; a :class:`scforge.data.CensusQuery`; or a list of these sources.
    path
        Folder of the store, e.g. ``"store.zarr"``, on a local disk.
    vocab
        A vocabulary, its file, or the name of a shipped vocabulary (see :func:`scforge.data.list_vocabs`). If None,
        uses all genes of all sources, in order of their first appearance; with `append`, the vocabulary of the store.
    obs
        Columns of ``obs`` to keep. If None, keeps all columns that every source has; with `append`, the columns of the
        store, which every source must have. Text columns become categories.
    shuffle
        Whether to put the cells into random order. If false, they stay in the order of the sources.
    seed
        Random seed for the order; with `append`, for the order of the new cells.
    memory
        Maximum memory of the process, e.g. ``"4GB"``, or a number of bytes. Python and the libraries use about 0.9 GB
        of this. With more memory, the store is split into fewer, larger datasets.
    layer
        Layer with raw counts. If None, reads X.
    gene_key
        Column of ``var`` with the gene names. If None, reads ``var_names``.
    modality
        Modality of a MuData.
    min_overlap
        Minimum fraction of the genes of `vocab` in each source, see :func:`scforge.data.map_genes`.
    overwrite
        Whether to replace an existing store.
    append
        Whether to append the cells to an existing store.
    progress
        Whether to show a progress bar, if standard error is a terminal.
    storage_options
        Options of a remote file system for the sources, see fsspec.

    Returns
    -------
    The description of the store, with ``n_cells``, ``n_genes``, ``content_hash`` and more; ``print`` shows it.

    Raises
    ------
    OptionError
        If `path` exists (with `overwrite`: exists and is not a store) or overlaps with a source, if another conversion
        is writing to it, if `memory` is too small, or, with `append`, if the store already contains a source, or has
        other genes, columns or another order than the options say.
    MissingFileError
        If a source does not exist, or the store to which `append` refers.
    DataError
        If a source cannot be used, or the disk is full.
    GeneMismatchError
        If a source contains too few vocabulary genes.

    Warns
    -----
    ScforgeWarning
        The same warnings as :func:`scforge.data.open_cells`, with the name of the source. With `append`, also if genes
        of a source are not in the vocabulary of the store.

    Examples
    --------
    >>> import scforge
    >>> info = convert(scforge.datasets.pbmc3k(), "store.zarr", obs=["cell_type"])
    >>> info.n_cells, info.counts_dtype, info.obs_columns
    (2700, 'uint16', ['cell_type'])
    """
    target = check_target(path, overwrite, append)
    columns = listed_columns(obs)
    seed, n_bytes = check_seed(seed), parse_bytes("memory", memory)
    end = StoreEnd.read(target) if append else None
    if end is not None:
        end.check_options(vocab, columns, shuffle=shuffle)
        columns, vocab = end.info.obs_columns, end.vocab
    streams = open_streams(sources, layer=layer, modality=modality, storage_options=storage_options)
    _check_apart(target, streams)
    described = [{"name": stream.name, **stream.fingerprint()} for stream in streams]
    if end is not None:
        end.check_new(streams, described)
    genes = None if vocab is None else open_vocab(vocab)
    genes, maps = map_streams(streams, genes, gene_key=gene_key, min_overlap=min_overlap)
    for stream, gene_map in zip(streams, maps, strict=True):
        logger.info(
            "%r: %d cells and %d genes, including %d of the %d vocabulary genes.",
            stream.name,
            stream.n_cells,
            len(gene_map.columns),
            gene_map.n_matched,
            genes.n_genes,
        )
    table = join_obs(streams, columns, None if end is None else end.obs)
    size = dataset_size(n_bytes, streams, genes, table)
    with _working_folder(target) as folder, _full_disk(target):
        if end is not None and StoreInfo.read(target) != end.info:  # by another append, before this one had the lock
            raise OptionError("has changed since the append began; run it again.", path=str(target))
        _check_space(folder, streams, genes.n_genes)
        order = np.arange(len(table), dtype=np.uint32 if len(table) < 2**32 else np.uint64)
        if shuffle:
            positions = order.copy()
            # Not the seed alone: permuting the cells of the store with the same seed would restore the old order.
            np.random.default_rng([seed, *b"store"]).shuffle(positions)
            order[positions] = np.arange(len(table))
        scattered = Scattered(folder, order, size, genes, None if end is None else end.info.counts_dtype)
        measured = np.stack([gene_map.measured for gene_map in maps])
        of_all = measured if end is None else np.concatenate([end.measured, measured])
        scattered.read(streams, maps, table, partial=of_all.any(axis=0) & ~of_all.all(axis=0), progress=progress)
        warn_empty(scattered.lengths)
        shares = [kept / total for kept, total in zip(scattered.kept, scattered.sums, strict=True)]
        if end is not None:
            end.warn_outside(streams, maps, shares)
        else:
            for stream, share in zip(streams, shares, strict=True):
                warn_counts_outside(share, genes, source=f"{stream.name!r}: ")
        kept, of_partial = sum(scattered.kept), scattered.sum_of_partial
        if end is not None:
            kept, of_partial = kept + end.kept, of_partial + end.kept * share_of_partial(end.of_genes, of_all)
        warn_of_partial(of_partial / kept, of_all)
        first = 0 if end is None else len(end.info.datasets)
        datasets, genes = scattered.write(folder / "store", table, first=first, progress=progress)
        info = StoreInfo(
            n_cells=len(table),
            n_nonzeros=sum(dataset["n_nonzeros"] for dataset in datasets),
            n_genes=genes.n_genes,
            vocab_hash=genes.hash,
            counts_dtype=scattered.counts_dtype.name,
            shuffled=shuffle,
            seed=seed if shuffle else None,
            chunk_size=CHUNK_SIZE,
            obs_columns=[name for name in table if name != SOURCE],
            content_hash=content_hash(genes.hash, [dataset["hash"] for dataset in datasets]),
            datasets=datasets,
            sources=[
                {**source, "overlap": gene_map.overlap, "counts_kept": share}
                for source, gene_map, share in zip(described, maps, shares, strict=True)
            ],
            counts_kept=sum(scattered.kept) / sum(scattered.sums),
            options={
                "layer": layer,
                "gene_key": gene_key,
                "modality": modality,
                "min_overlap": float(min_overlap),
                "obs": columns,
                "memory": n_bytes,
            },
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            scforge_version=__version__,
        )
        check_target(path, overwrite, append)  # something may have been written there meanwhile
        if end is None:
            write_root(folder / "store", info, genes, measured, scattered.checksums)
            swap_in(folder / "store", target, overwrite=overwrite)
            return info
        info = end.grown(info, sum(scattered.sums))
        names = write_added(folder / "store", target, info, measured, scattered.checksums, first)
        add_to_store(folder / "store", target, names)
    return info


def _check_apart(target: Path, streams: Sequence[ChunkReader]) -> None:
    """Raise an OptionError if the store is, contains or is inside a source."""
    for stream in streams:
        address = getattr(stream, "address", "").removeprefix("file://")  # cells in memory have none
        source = Path(address).resolve()
        overlaps = target == source or target in source.parents or source in target.parents
        if overlaps and address and not is_url(address):
            raise OptionError(f"overlaps with the source {address!r}; choose another path.", path=str(target))


@contextlib.contextmanager
def _working_folder(target: Path) -> Iterator[Path]:
    """Create the folder in which a store is written, and lock its target; it is always removed at the end."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(target.with_name(f".{target.name}.saving.lock"), blocking=False))
        except Timeout as error:
            raise OptionError(
                f"another conversion is writing to {str(target)!r}; wait until it has finished."
            ) from error
        remove_working(target.parent, f".{target.name}")  # of a conversion that was killed
        folder = new_folder(target.parent, f".{target.name}")
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _full_disk(target: Path) -> Iterator[None]:
    """Convert the error of a full disk into a one-sentence DataError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # zarrs tells what the system says in a text.
        code = re.search(r"\(os error (\d+)\)", str(error))
        if (int(code[1]) if code else getattr(error, "errno", None)) not in _FULL:
            raise
        raise DataError(
            f"no space left on the disk of {str(target)!r} ({first_line(error)}); free some space and start again."
        ) from error


def _check_space(folder: Path, streams: Sequence[ChunkReader], n_genes: int) -> None:
    free = shutil.disk_usage(folder).free
    needed = sum(stream.n_entries for stream in streams) * (gene_dtype(n_genes).itemsize + COUNT_BYTES)
    if free < needed:
        raise DataError(
            f"{str(folder.parent)!r} has {free / 1e9:,.2f} GB free, but up to {needed / 1e9:,.2f} GB are needed; "
            "free some space, or choose a larger disk."
        )


def dataset_size(memory: int, streams: Sequence[ChunkReader], vocab: GeneVocab, table: pd.DataFrame) -> int:
    """Return the number of cells per dataset (the last may have fewer) for which about `memory` bytes suffice."""
    medians = 4_400 * vocab.n_genes if vocab.medians is None else 0
    # Of each cell: its place, length, total and type, and its row in the table, with what a dataset copies of it.
    tables = 25 * len(table) + 2 * int(table.memory_usage(deep=True).sum())
    fixed = _LIBRARIES + _BUFFERS + medians + tables
    if memory - fixed < _MIN:
        least = (fixed + _MIN) / 1e9 + 0.05
        raise OptionError(f"of {memory / 1e9:.2f}GB is not enough; pass at least {least:.1f}GB.", argument="memory")
    n_entries = sum(stream.n_entries for stream in streams)
    # In the temporary files, while gathered, and twice while compressed.
    n_bytes = 5 * (gene_dtype(vocab.n_genes).itemsize + COUNT_BYTES) * n_entries
    n_datasets = max(1, -(-n_bytes // (memory - fixed)))
    return -(-len(table) // (n_datasets * CHUNK_SIZE)) * CHUNK_SIZE  # whole chunks
