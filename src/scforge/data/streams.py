"""Sources of cells, read piece by piece: AnnData, MuData, h5ad and zarr, here or behind a URL."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from scforge._io import put_back
from scforge.data.h5ad import similar_file
from scforge.data.remote import is_url, without_query
from scforge.data.stream_adata import AdataStream
from scforge.data.stream_files import BackedStream, FileStream, H5adPlace, Place
from scforge.data.stream_remote import UrlPlace, ZarrPlace, expand_url, is_zarr
from scforge.errors import DataError, MissingFileError, OptionError

if TYPE_CHECKING:
    import pandas as pd
    from scipy import sparse

__all__ = ["CellStream", "identity_of", "is_query", "open_streams"]

_OTHER_FORMATS = {
    ".csv": "a table of text",
    ".tsv": "a table of text",
    ".txt": "a table of text",
    ".mtx": "a folder of 10x Genomics",
    ".loom": "a loom file",
    ".h5": "an HDF5 file, perhaps of 10x Genomics",
    ".rds": "an R object",
    ".zip": "an archive",
    ".tar": "an archive",
    ".gz": "a compressed file",
}
_READERS = {
    ".csv": "scanpy.read_csv",
    ".tsv": "scanpy.read_text",
    ".txt": "scanpy.read_text",
    ".mtx": "scanpy.read_10x_mtx",
    ".loom": "anndata.io.read_loom",
    ".h5": "scanpy.read_10x_h5",
}


class CellStream(Protocol):
    """Cells that are read piece by piece, with all genes of their source.

    Attributes
    ----------
    name
        Path or URL as given, or ``"adata"``; for messages and to say where a cell comes from.
    n_cells
        Number of cells.

    Examples
    --------
    >>> import scforge
    >>> (stream,) = scforge.data.open_streams(scforge.datasets.pbmc3k())
    >>> [(start, counts.shape) for start, counts in stream.chunks(start=2000)]
    [(2000, (700, 16634))]
    >>> stream.obs(["cell_type"]).shape
    (2700, 1)
    """

    name: str
    n_cells: int

    @property
    def var(self) -> pd.DataFrame:
        """The table of genes; its index holds the ``var_names``."""

    @property
    def n_entries(self) -> int:
        """Number of counts above zero, about."""

    def obs(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Return the table of cells (index: their names), or some columns of it.

        Parameters
        ----------
        columns
            Names of columns; None takes all.

        Returns
        -------
        One row a cell.

        Raises
        ------
        DataError
            If there is no such column.
        """

    def chunks(self, start: int = 0) -> Iterator[tuple[int, sparse.csr_matrix]]:
        """Yield ``(first row, CSR matrix over all genes)`` from row `start` on.

        A piece has at most 4,194,304 entries (unless one cell has more) and 65,536 cells, all of which have counts.

        Parameters
        ----------
        start
            Row to begin with.

        Yields
        ------
        The number of the first row of a piece, and its counts.

        Raises
        ------
        DataError
            If the values are no counts, or the file is damaged.
        """

    def fingerprint(self) -> dict[str, int | float | str]:
        """Return what tells this source from others, and from itself after a change; JSON can hold it."""


def open_streams(
    source: Any,
    *,
    layer: str | None = None,
    modality: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> list[CellStream]:
    """Open sources of cells for reading piece by piece.

    Parameters
    ----------
    source
        An AnnData in memory or backed by its file; a MuData, or an h5mu file, with `modality`; the path of an h5ad
        file or of an AnnData-zarr folder; a pattern of paths such as ``"data/*.h5ad"``, whose files are taken in
        order of their names; a URL that fsspec knows (``s3://``, ``gs://``, ``file://``, ``memory://``); a
        :class:`scforge.data.CensusQuery`; or a list of those.
    layer
        Layer with raw counts; None reads X.
    modality
        Modality of a MuData.
    storage_options
        Options of the remote file system, e.g. credentials, see :mod:`fsspec`.

    Returns
    -------
    One stream a source; of a pattern one a file.

    Raises
    ------
    MissingFileError
        If a file does not exist, or no file fits a pattern.
    OptionError
        If a file is named twice, a modality is missing, or `source` is nothing of these.
    DataError
        If a file cannot be read.

    Examples
    --------
    >>> import scforge
    >>> (stream,) = open_streams(scforge.datasets.pbmc3k())
    >>> stream.name, stream.n_cells, len(stream.var)
    ('adata', 2700, 16634)
    """
    places = list(source) if isinstance(source, list | tuple) else [source]
    if not places:
        raise OptionError("source=[] names no file; name at least one.")
    opened: list[CellStream] = []
    for place in places:
        if is_query(place):
            opened += place.streams()
        elif isinstance(place, str | os.PathLike):
            opened += [
                FileStream(_place(path, modality, storage_options), layer)
                for path in _expanded(os.fspath(place), storage_options)
            ]
        else:
            opened.append(_open_object(place, layer, modality))
    names = [identity_of(stream) for stream in opened]
    if len(set(names)) < len(names):
        twice = next(stream.name for i, stream in enumerate(opened) if names[i] in names[:i])
        raise OptionError(f"source names {twice!r} twice; name each file once.")
    return opened


def is_query(source: Any) -> bool:
    """Whether `source` opens its cells itself, as a :class:`scforge.data.CensusQuery` does."""
    return all(callable(getattr(type(source), name, None)) for name in ("open", "streams"))


def identity_of(stream: CellStream) -> object:
    """Return what two streams of the same cells have in common: the whole path, the URL, or the object."""
    if isinstance(stream, AdataStream):
        return id(stream.adata)
    name = stream.address if isinstance(stream, FileStream) else stream.name
    return name if "://" in name else str(Path(name).resolve())


def _open_object(source: Any, layer: str | None, modality: str | None) -> CellStream:
    from anndata import AnnData
    from mudata import MuData

    if isinstance(source, MuData):
        return AdataStream.of_mudata(source, modality, layer)
    if not isinstance(source, AnnData):
        raise OptionError(
            f"source is of type {type(source).__name__!r}; "
            "pass an AnnData, a MuData, the path or URL of h5ad or zarr, or a list of those."
        )
    if modality is not None:
        raise OptionError(f"modality={modality!r} was given for an AnnData, which has no modalities; leave it out.")
    if not source.isbacked:
        return AdataStream(source, layer)
    if source.is_view:
        raise DataError(
            f"adata is a part of an AnnData backed by {str(source.filename)!r}; read it with adata = adata.to_memory()."
        )
    return BackedStream(source, layer)


def _expanded(place: str, options: Mapping[str, Any] | None) -> list[str]:
    """Return the files that a pattern stands for, in order of their names; a path as it is."""
    if place.startswith("file://"):
        place = place.removeprefix("file://")
    if is_url(place):
        return expand_url(place, options) if glob.has_magic(without_query(place)) else [place]
    if not glob.has_magic(place) or Path(place).exists():
        return [place]
    root = Path(Path(place).anchor)
    found = sorted(str(path) for path in root.glob(str(Path(place).relative_to(root))))
    if not found:
        raise MissingFileError(f"no file fits the pattern {place!r}; check the folder and the ending.")
    return found


def _place(place: str, modality: str | None, options: Mapping[str, Any] | None) -> Place:
    """Return how a path or URL is opened."""
    path = Path(place)
    if not is_url(place):
        put_back(path)
        if not path.exists():
            raise MissingFileError(f"the file {place!r} does not exist{similar_file(path)}")
    if is_zarr(place, options):
        return ZarrPlace(place, modality, options)
    if path.suffix in _OTHER_FORMATS:
        reader = _READERS.get(path.suffix, "what made it")
        raise DataError(
            f"{place!r} is {_OTHER_FORMATS[path.suffix]}, not h5ad or zarr; "
            f"read it with {reader} and write it with adata.write_h5ad."
        )
    return UrlPlace(place, modality, options) if is_url(place) else H5adPlace(path, modality)
