"""Conversion of sources of any size into a store, in two passes with bounded memory.

The first pass reads every source once and scatters its cells to one temporary file for each dataset-to-be; the place
of each cell in the store is drawn before. The second pass brings the cells of one temporary file after the other into
order and writes them as a dataset. So the order is a uniformly random one of all cells, whatever `memory` is.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scforge._checks import check_bool, check_seed, check_share
from scforge._io import check_folder, put_back
from scforge.data.convert_errors import full_disk
from scforge.data.convert_plan import parse_bytes
from scforge.data.convert_steps import Conversion
from scforge.data.journal import Staging, locked
from scforge.data.mapping import MIN_OVERLAP
from scforge.data.remote import is_url
from scforge.data.store_files import StoreInfo, is_store, may_be_replaced, partial_path
from scforge.data.stream_adata import AdataStream
from scforge.data.streams import CellStream, open_streams
from scforge.data.vocab import GeneVocab
from scforge.errors import OptionError, ScforgeError

__all__ = ["convert"]


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
    progress: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> StoreInfo:
    """Convert cells into a store, from which models train however many cells there are.

    The cells of all sources come into one random order, over the genes of one vocabulary. A conversion that was
    interrupted goes on where it was when it is called again with the same arguments. Nothing stands under `path`
    before all of it is written.

    Parameters
    ----------
    sources
        What :func:`scforge.data.open_streams` opens: an AnnData, a path, pattern or URL of h5ad or zarr, or a list.
    path
        Folder of the store, e.g. ``"store.zarr"``, on a local disk.
    vocab
        A vocabulary, the file of one, or the name of a shipped one (see :func:`scforge.data.list_vocabs`). None takes
        all genes of all sources, in order of their first appearance.
    obs
        Columns of ``obs`` to keep; None keeps all that every source has. Columns of text become categories.
    shuffle
        Whether to bring the cells into random order. Without it they stay in the order of the sources.
    seed
        Seed of that order.
    memory
        Most memory that the process may take, e.g. ``"4GB"``, or a number of bytes. More makes larger datasets.
    layer
        Layer with raw counts; None reads X.
    gene_key
        Column of ``var`` with the gene names; None reads ``var_names``.
    modality
        Modality of a MuData.
    min_overlap
        Smallest share of genes of `vocab` that a source must have, see :func:`scforge.data.map_genes`.
    overwrite
        Whether to replace a store that is there, and to drop an unfinished conversion that does not fit this one.
    progress
        Whether to show a bar, where standard error is a terminal.
    storage_options
        Options of a remote file system for the sources, see fsspec.

    Returns
    -------
    The description of the store.

    Raises
    ------
    OptionError
        If `path` exists (with `overwrite`: and is no store), or is, contains or lies in a source or lies in a zarr
        folder; if another conversion is writing to it, an unfinished one was begun with other options, or `memory` is
        too little.
    MissingFileError
        If a source does not exist.
    DataError
        If a source cannot be used, or has changed since the conversion began, or if the disk is full.
    GeneMismatchError
        If a source has too few genes of the vocabulary.

    Warns
    -----
    ScforgeWarning
        As :func:`scforge.data.open_cells` does, with the name of the source.

    Examples
    --------
    >>> import scforge
    >>> info = convert(scforge.datasets.pbmc3k(), "store.zarr", obs=["cell_type"])
    >>> info.n_cells, info.counts_dtype, info.obs_columns
    (2700, 'uint16', ['cell_type'])
    """
    target = _check_target(path)
    check_bool("shuffle", shuffle)
    check_bool("overwrite", overwrite)
    check_bool("progress", progress)
    check_share("min_overlap", min_overlap)
    options = {
        "layer": layer,
        "gene_key": gene_key,
        "modality": modality,
        "min_overlap": float(min_overlap),
        "obs": None if obs is None else _listed(obs),
        "shuffle": shuffle,
        "seed": check_seed(seed),
        "memory": parse_bytes("memory", memory),
    }
    staging = Staging(partial_path(target))
    _check_free(target, staging, overwrite)
    streams = open_streams(sources, layer=layer, modality=modality, storage_options=storage_options)
    _check_apart(target, streams)
    with locked(staging.folder):
        try:
            conversion = Conversion(streams, target, staging, options, vocab, overwrite=overwrite, progress=progress)
            with full_disk(target, conversion.n_bytes):
                return conversion.run()
        except ScforgeError:
            staging.remove_if_empty()  # a rejected conversion leaves nothing that seems to be one to continue
            raise


_FILES = {".h5ad", ".h5", ".h5mu", ".hdf5", ".loom", ".csv", ".tsv", ".txt", ".json", ".yaml", ".parquet", ".zip"}
"""Endings that no folder has."""


def _check_target(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise OptionError(f"path={path!r} is not the path of a folder; name one such as 'store.zarr'.")
    if is_url(path):
        raise OptionError(f"path={os.fspath(path)!r} is a URL; convert to a local disk, and copy the store there.")
    target = Path(path).resolve()
    if not target.name:
        raise OptionError(f"path={os.fspath(path)!r} is the root of the disk; name a folder such as 'store.zarr'.")
    check_folder("path", target)
    put_back(target)
    if target.suffix in _FILES and not target.is_dir():
        raise OptionError(
            f"path={os.fspath(path)!r} is named like a file, and a store is a folder; name one such as 'store.zarr'."
        )
    for folder in target.parents:
        if any((folder / name).exists() for name in ("zarr.json", ".zgroup")):
            raise OptionError(
                f"path={str(target)!r} lies in the zarr folder {str(folder)!r}; choose a path outside of it."
            )
    return target


def _check_apart(target: Path, streams: Sequence[CellStream]) -> None:
    """Raise if the store would stand in the place of a source, above or below it."""
    for stream in streams:
        name = stream.name.removeprefix("file://")
        # The name of cells in memory or of the Census is no path, even if there is a file of that name.
        if isinstance(stream, AdataStream) or is_url(name) or not Path(name).exists():
            continue
        source = Path(name).resolve()
        if target == source or target in source.parents or source in target.parents:
            raise OptionError(
                f"path={str(target)!r} is, contains or lies in the source {name!r}; choose a path apart from it."
            )


def _listed(obs: Sequence[str]) -> list[str]:
    if isinstance(obs, str) or not all(isinstance(name, str) for name in obs):
        raise OptionError(f"obs={obs!r} is no list of columns; give e.g. obs=['cell_type'].")
    return list(obs)


def _check_free(target: Path, staging: Staging, overwrite: bool) -> None:
    """Raise if a store must not be replaced, after removing what a conversion that was killed at its end has left."""
    if not target.exists():
        return
    if not may_be_replaced(target):
        raise OptionError(
            f"path={str(target)!r} exists and is no store, so it is not replaced; choose another name, or remove it."
        )
    if overwrite:
        return
    if is_store(target) and staging.folder.exists():
        with locked(staging.folder):
            journal = staging.load()
            if journal is not None and staging.is_over(journal):
                shutil.rmtree(staging.folder)
    raise OptionError(f"path={str(target)!r} exists; pass overwrite=True (--overwrite) or choose another name.")
