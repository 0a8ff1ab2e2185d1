"""Read counts, obs and var of local and remote h5ad and zarr files in blocks of rows."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import h5py
import numpy as np
from scipy import sparse

from scforge._checks import check_known
from scforge._io import new_h5
from scforge._opening import check_h5
from scforge.data.checks import check_adata, check_is_adata, counts_of
from scforge.data.matrix import ENTRIES, Matrix, check_chunk, is_array, rows_within
from scforge.data.memory import available_memory, parse_bytes
from scforge.data.paths import STORE_KEY, check_file, is_url
from scforge.data.remote import ZARR_METADATA, file_system, is_zarr, open_group, persistent, reading, without_query
from scforge.errors import DataError, MissingFileError, OptionError, listing, redacted, suggest

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData


_ENTRY = 12
"""Bytes per count in memory: the count and its gene, twice while pieces are concatenated."""

_CELL = 200
"""Bytes per cell in memory: name, library size, and some obs columns."""

_AGAIN = "write the file again"

_BLOCK = 2**22
"""Number of bytes of a remote h5ad file fetched at a time; 32 such blocks are cached."""

_MARKS = ("ETag", "etag", "md5Hash", "LastModified", "mtime", "created")
"""File attributes that change with the content of a file, most reliable first."""

_READERS = {
    ".csv": "scanpy.read_csv",
    ".tsv": "scanpy.read_text",
    ".txt": "scanpy.read_text",
    ".mtx": "scanpy.read_10x_mtx",
    ".loom": "anndata.io.read_loom",
    ".h5": "scanpy.read_10x_h5",
}
"""A mapping from the extension of another file format to the function that reads it."""


def lack_of_memory(streams: Sequence[ChunkReader], memory: int | str | None = None) -> str | None:
    """Return a message if cells exceed `memory`, e.g. ``"16GB"`` (if None, half of the free memory), else None."""
    available = available_memory() if memory is None else parse_bytes("memory", memory)
    if available is None:
        return None
    most = available // 2 if memory is None else available
    n_cells, n_entries = sum(stream.n_cells for stream in streams), sum(stream.n_entries for stream in streams)
    needed = n_entries * _ENTRY + n_cells * _CELL
    if needed <= most:
        return None
    limit = "at most half of the available {} may be used" if memory is None else "the limit set by memory is {}"
    return (
        f"{n_cells:,} cells with {n_entries:,} counts need about {_size(needed)} of memory, but "
        f"{limit.format(_size(available))}"
    )


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 10**8 else f"{n_bytes / 1e6:.1f} MB"


def write_h5ad(path: str | os.PathLike[str], adata: AnnData) -> None:
    """Write cells as ``adata.write_h5ad`` does; a full disk raises an OSError, see :func:`scforge._io.new_h5`."""
    from anndata.io import write_elem

    adata.strings_to_categoricals()
    if adata.raw is not None:
        adata.strings_to_categoricals(adata.raw.var)
    with new_h5(path) as file:
        write_elem(file, "/", adata)


@dataclass(frozen=True)
class StoredAdata:
    """An open AnnData on disk.

    Attributes
    ----------
    path
        Path or URL, for messages.
    file
        The open file, or a group in it (h5py or zarr).
    whole, modality
        For a modality of a MuData, the open file, whose obs contains additional columns, and the modality name.
    """

    path: str
    file: Any
    whole: Any = None
    modality: str = ""

    @classmethod
    def of(cls, path: str, file: Any, modality: str | None = None) -> StoredAdata:
        """Create from an open file after checking that it contains an AnnData, or a MuData with the modality."""
        if "mod" in file and not is_array(file["mod"]):
            check_modality(modality, list(file["mod"]), path)
            opened = cls(path, file[f"mod/{modality}"], file, str(modality))
        elif modality is not None:
            raise OptionError(f"has no effect, because {path!r} has no modalities; omit it.", modality=modality)
        else:
            opened = cls(path, file)
        tables = [opened.file.get(name) for name in ("obs", "var")]
        if STORE_KEY in opened.file.attrs:
            raise DataError(
                f"{path!r} is a store already; open it with open_cells, or convert the files it was made of."
            )
        if not all(table is not None and not is_array(table) and "_index" in table.attrs for table in tables):
            raise DataError(
                f"{path!r} has no obs and var tables in the current anndata format; write the file again with anndata."
            )
        return opened

    @cached_property
    def var(self) -> pd.DataFrame:
        """The gene table."""
        return self._table("var", "table of genes")

    @cached_property
    def obs(self) -> pd.DataFrame:
        """The cell table. For a modality, columns of the whole MuData are appended."""
        own = self._table("obs", "table of cells")
        if self.whole is None:
            return own
        whole = StoredAdata(self.path, self.whole).obs
        return own.join(shared_columns(whole, self.modality, own.index, list(own.columns)))

    def _table(self, name: str, what: str) -> pd.DataFrame:
        import pandas as pd
        from anndata.io import read_elem

        with reading(f"the {what} ({name}) of {self.path!r}", fix=_AGAIN):
            table = read_elem(self.file[name])
        if not isinstance(table, pd.DataFrame):
            raise DataError(f"{name} of {self.path!r} is not a {what}; write the file again with anndata.")
        return table

    @property
    def layers(self) -> list[str]:
        """Names of the layers."""
        group = self.file.get("layers")
        return [] if group is None or is_array(group) else list(group)

    def has(self, name: str) -> bool:
        """Return whether the file contains an element of this name, e.g. ``"X"`` or ``"raw/X"``."""
        # A matrix that is missing may be stored as an empty one.
        return name in self.file and not (is_array(self.file[name]) and self.file[name].shape in (None, ()))

    def matrix(self, layer: str | None = None) -> Matrix:
        """Return a layer, or X if `layer` is None."""
        if layer is not None:
            check_known("layer", layer, self.layers, f"the layers of {self.path!r}", fix="use layer=None to read X")
        name = "X" if layer is None else f"layers/{layer}"
        if not self.has(name):
            raw = ", or the result of adata.raw.to_adata()" if self.has("raw/X") else ""
            raise DataError(f"{self.path!r} has no {name}; pass a layer (available: {listing(self.layers)}){raw}.")
        with reading(f"{name!r} of {self.path!r}"):
            matrix = Matrix.of(self.file[name], self.path)
        n_cells, n_genes = matrix.shape
        if n_genes != len(self.var) or not n_cells or not n_genes:
            shape = f"{n_cells} cells x {n_genes} genes, but var has {len(self.var)} rows"
            raise DataError(f"{name} of {self.path!r} has {shape}; it needs cells, and one column for each row of var.")
        return matrix


def check_modality(modality: str | None, modalities: Sequence[str], source: str) -> None:
    """Raise an OptionError if `modality` is not a modality of the MuData."""
    if modality is None:
        raise OptionError(f"{source!r} is a MuData; set modality to one of its modalities ({listing(modalities)}).")
    check_known("modality", modality, modalities, repr(source), error=OptionError)


def shared_columns(obs: pd.DataFrame, modality: str, names: pd.Index, own: Sequence[str]) -> pd.DataFrame:
    """Return the columns of a MuData's obs for the cells `names` of a modality.

    A column that MuData has copied from a modality is named ``"modality:column"``. Columns copied from other modalities
    are left out, as are columns that the modality itself contains (`own`).
    """
    prefix = f"{modality}:"
    taken = {column: str(column).removeprefix(prefix) for column in obs.columns}
    keep = {column: name for column, name in taken.items() if ":" not in name and name not in own}
    return obs.loc[~obs.index.duplicated(), list(keep)].rename(columns=keep).reindex(names)


def missing_column(column: str, source: str, columns: Sequence[str]) -> DataError:
    """Return the error for a missing obs column."""
    shown = [name for name in columns if not str(name).startswith("_scvi_")]
    return DataError(f"of {source!r} has no column {column!r}{suggest(column, shown, 'available')}", argument="obs")


def check_columns(obs: pd.DataFrame, source: str) -> None:
    """Raise a DataError if the columns of a cell table do not have unique names."""
    if not obs.columns.is_unique:
        twice = obs.columns[obs.columns.duplicated()][0]
        raise DataError(
            f"of {source!r} contains the column {twice!r} more than once; rename the duplicates.", argument="obs"
        )


def chosen_columns(obs: pd.DataFrame, columns: Sequence[str] | None, source: str) -> pd.DataFrame:
    """Return `columns` of a cell table, or all columns if None."""
    if columns is None:
        return obs
    if missing := [column for column in columns if column not in obs]:
        raise missing_column(missing[0], source, list(obs.columns))
    return obs[list(columns)]


class AdataStream:
    """An AnnData in memory as a source of cells; `shared` contains additional obs columns of a MuData."""

    name = "adata"

    def __init__(self, adata: AnnData, layer: str | None = None, *, shared: pd.DataFrame | None = None) -> None:
        check_adata(adata)
        self.adata, self.var, self._layer, self._shared = adata, adata.var, layer, shared
        self.n_cells: int = adata.n_obs

    @cached_property
    def counts(self) -> sparse.csr_matrix:
        """Counts of all cells and genes, after checks."""
        return counts_of(self.adata, self._layer)

    @property
    def n_entries(self) -> int:
        """Approximate number of nonzero counts."""
        return self.counts.nnz

    @cached_property
    def _obs(self) -> pd.DataFrame:
        obs = self.adata.obs if self._shared is None else self.adata.obs.join(self._shared)
        # Pandas cannot take rows of columns with the byte order of another machine.
        foreign = [key for key, kind in obs.dtypes.items() if isinstance(kind, np.dtype) and not kind.isnative]
        return obs.astype({key: obs[key].dtype.newbyteorder("=") for key in foreign}) if foreign else obs

    def obs(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Return the cell table, or some of its columns."""
        return chosen_columns(self._obs, columns, self.name)

    def chunks(self) -> Iterator[tuple[int, sparse.csr_matrix]]:
        """Yield pieces of ``(first row, CSR matrix of all genes)``."""
        counts, start = self.counts, 0
        while start < self.n_cells:
            stop = rows_within(counts.indptr, start, ENTRIES)
            yield start, counts[start:stop]
            start = stop

    def fingerprint(self) -> dict[str, int | float | str]:
        """Return a fingerprint of these cells: digests of counts, names and obs."""
        digest = hashlib.blake2b(digest_size=16)
        for part in (self.counts.indptr.astype(np.int64), self.counts.indices, self.counts.data):
            digest.update(str(part.dtype).encode())
            digest.update(np.ascontiguousarray(part))
        return {
            "counts": digest.hexdigest(),
            "obs": table_digest(self._obs),
            "var": table_digest(self.var),
            "n_cells": self.n_cells,
            "n_genes": self.adata.n_vars,
        }


def table_digest(table: pd.DataFrame) -> str:
    """Return a digest of a table and its index, without the columns that scvi-tools adds."""
    import pandas as pd

    kept = table[[column for column in table.columns if not str(column).startswith("_scvi_")]]
    digest = hashlib.blake2b("\0".join(map(str, kept.columns)).encode(), digest_size=16)
    digest.update(pd.util.hash_pandas_object(kept.astype(str), index=True).to_numpy().tobytes())
    return digest.hexdigest()


class Location:
    """An AnnData in a local or remote h5ad file or zarr folder, or one modality of a MuData."""

    def __init__(self, address: str, modality: str | None = None, options: Mapping[str, Any] | None = None) -> None:
        self.name = redacted(address) if is_url(address) else address
        self.address, self._modality, self._options = address, modality, dict(options or {})
        self._is_zarr = is_zarr(address, options)
        self._is_checked = False

    @contextlib.contextmanager
    def open(self) -> Iterator[StoredAdata]:
        """Open the file for reading. A remote file is read through a cache of recently used blocks."""
        with contextlib.ExitStack() as opened:
            if self._is_zarr:
                stored: Any = open_group(self.address, self._options)
            else:
                file: Any = self.address
                with reading(repr(self.name), how="as an h5ad file"):
                    if is_url(file):
                        system, path = file_system(file, self._options)
                        blocks = system.open(path, "rb", block_size=_BLOCK, cache_type="blockcache")
                        file = persistent(opened.enter_context(blocks), repr(self.name))
                    else:
                        check_file(file)
                    stored = opened.enter_context(h5py.File(file, "r"))
                    if not self._is_checked:  # once, as it fetches all parts of a remote file
                        check_h5(stored, self.name)
                        self._is_checked = True
            yield StoredAdata.of(self.name, stored, self._modality)

    def identity(self) -> dict[str, int | float | str]:
        """Return a version fingerprint of a file: size and modification time, or e.g. the ETag of a remote file."""
        if not self._is_zarr and not is_url(self.address):
            status = Path(self.address).stat()
            return {"size": status.st_size, "mtime_ns": status.st_mtime_ns}
        system, path = file_system(self.address, self._options)
        with reading(repr(self.name)):
            if not self._is_zarr:
                facts = system.info(path)
                return {"size": int(facts["size"]), "mark": _mark(facts)}
            digest, size = hashlib.blake2b(digest_size=16), 0
            for name, facts in sorted(system.find(path, detail=True).items()):
                size += int(facts["size"])
                digest.update(f"{name.removeprefix(path)}\0{facts['size']}\0{_mark(facts)}\n".encode())
        return {"size": size, "files": digest.hexdigest()}


class FileStream:
    """A ``scforge.data.readers.ChunkReader`` for an AnnData on disk or at a URL.

    The file is opened anew for each access, so that the stream can be passed to another process.
    """

    def __init__(self, place: Location, layer: str | None = None) -> None:
        self._place, self._layer, self.name, self.address = place, layer, place.name, place.address
        with reading(repr(place.name), fix="write the file again"), place.open() as opened:
            matrix = opened.matrix(layer)
            self.n_cells, self._n_genes = matrix.shape
            self.var = opened.var

    @cached_property
    def n_entries(self) -> int:
        """Approximate number of nonzero counts."""
        with self._place.open() as opened:
            matrix = opened.matrix(self._layer)
            if matrix.kind != "dense":
                return matrix.n_stored
            _, first = next(matrix.row_chunks())  # what the first rows let expect
            return int(np.ceil(first.nnz / first.shape[0] * self.n_cells))

    def obs(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Return the cell table, or some of its columns."""
        with self._place.open() as opened:
            table = opened.obs
        if len(table) != self.n_cells:
            raise DataError(
                f"{self.name!r} has {self.n_cells} cells, but obs has {len(table)} rows; write the file again."
            )
        return chosen_columns(table, columns, self.name)

    def chunks(self) -> Iterator[tuple[int, sparse.csr_matrix]]:
        """Yield pieces of ``(first row, CSR matrix of all genes)``."""
        with self._place.open() as opened:
            matrix = opened.matrix(self._layer)
            for first, chunk in matrix.row_chunks():
                check_chunk(chunk, matrix.place, first)
                yield first, chunk

    def fingerprint(self) -> dict[str, int | float | str]:
        """Return a fingerprint of this file and its version."""
        return {**self._place.identity(), "n_cells": self.n_cells, "n_genes": self._n_genes}


class BackedStream(FileStream):
    """A backed AnnData: counts come from its file, and tables from memory, where they may have changed."""

    def __init__(self, adata: AnnData, layer: str | None = None) -> None:
        super().__init__(Location(str(adata.filename)), layer)
        self._adata, self.var = adata, adata.var

    def obs(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Return the cell table, or some of its columns."""
        return chosen_columns(self._adata.obs, columns, self.name)

    def fingerprint(self) -> dict[str, int | float | str]:
        """Return a fingerprint of these cells."""
        return {**super().fingerprint(), "obs": table_digest(self._adata.obs), "var": table_digest(self._adata.var)}


def _mark(facts: Mapping[str, Any]) -> str:
    return next((str(facts[name]) for name in _MARKS if facts.get(name) is not None), "")


class ChunkReader(Protocol):
    """Interface for cells that are read piece by piece, with all genes of their source.

    Attributes
    ----------
    name
        Path or URL as given, or ``"adata"``. It is used in messages and as the source of a cell.
    n_cells
        Number of cells.
    var
        The gene table, whose index contains the ``var_names``.

    Examples
    --------
    >>> import scforge
    >>> (stream,) = scforge.data.readers.open_streams(scforge.datasets.pbmc3k())
    >>> [(start, counts.shape) for start, counts in stream.chunks()]
    [(0, (2700, 16634))]
    >>> stream.obs(["cell_type"]).shape
    (2700, 1)
    """

    name: str
    n_cells: int
    var: pd.DataFrame

    @property
    def n_entries(self) -> int:
        """Approximate number of nonzero counts."""

    def obs(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Return the cell table, indexed by cell name, or some of its columns."""

    def chunks(self) -> Iterator[tuple[int, sparse.csr_matrix]]:
        """Yield pieces of ``(first row, CSR matrix over all genes)``, in which every cell has counts.

        A piece contains at most 4,194,304 entries (unless a single cell contains more) and 65,536 cells.
        """

    def fingerprint(self) -> dict[str, int | float | str]:
        """Return a JSON-safe fingerprint of this source and its version."""


def open_streams(
    source: Any,
    *,
    layer: str | None = None,
    modality: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> list[ChunkReader]:
    """Open sources of cells for reading in pieces, with one stream per source, or per file of a pattern.

    A source is an AnnData in memory or backed by its file; a MuData, or an h5mu file, with `modality`; the path of an
    h5ad file or of an AnnData-zarr folder; a pattern of paths, whose files are sorted by name; a URL that fsspec
    supports; a :class:`scforge.data.CensusQuery`; or a list of these.
    """
    from mudata import MuData

    entries = list(source) if isinstance(source, list | tuple) else [source]
    if not entries:
        raise OptionError("is empty; pass at least one file.", source=[])
    opened: list[ChunkReader] = []
    for entry in entries:
        if is_query(entry):
            opened += entry.streams()
        elif isinstance(entry, str | os.PathLike):
            opened += [
                FileStream(_place(path, modality, storage_options), layer)
                for path in _expanded(os.fspath(entry), storage_options)
            ]
        elif isinstance(entry, MuData):
            check_modality(modality, list(entry.mod), "mdata")
            adata = entry.mod[modality]
            shared = shared_columns(entry.obs, str(modality), adata.obs_names, list(adata.obs.columns))
            opened.append(AdataStream(adata, layer, shared=shared))
        else:
            check_is_adata(entry, argument="source")
            if modality is not None:
                raise OptionError("has no effect for an AnnData, which has no modalities; omit it.", modality=modality)
            if entry.isbacked and entry.is_view:
                raise DataError(
                    f"is a view of an AnnData backed by {str(entry.filename)!r}; load the AnnData with "
                    "adata.to_memory() before selecting cells or genes.",
                    argument="adata",
                )
            opened.append(BackedStream(entry, layer) if entry.isbacked else AdataStream(entry, layer))
    names = [identity_of(stream) for stream in opened]
    if len(set(names)) < len(names):
        twice = next(stream.name for i, stream in enumerate(opened) if names[i] in names[:i])
        raise OptionError(f"contains {twice!r} twice; pass each file once.", argument="source")
    return opened


def is_query(source: Any) -> bool:
    """Return whether `source` opens its cells itself, as a :class:`scforge.data.CensusQuery` does."""
    return callable(getattr(type(source), "streams", None))


def identity_of(stream: ChunkReader) -> object:
    """Return an identifier that is equal for streams of the same cells: absolute path, URL, or object id."""
    if isinstance(stream, AdataStream):
        return id(stream.adata)
    return resolved(getattr(stream, "address", stream.name))


def resolved(name: str) -> str:
    """Return a path as an absolute path, and a URL unchanged."""
    return name if "://" in name else str(Path(name).resolve())


def _expanded(pattern: str, options: Mapping[str, Any] | None) -> list[str]:
    """Return the files that match a pattern, sorted by name; a path is returned unchanged."""
    if pattern.lower().startswith("file://"):
        pattern = pattern[len("file://") :]
    if is_url(pattern):
        if not glob.has_magic(without_query(pattern)):
            return [pattern]
        system, path = file_system(pattern, options)
        with reading(repr(pattern)):
            paths = sorted(system.unstrip_protocol(match) for match in system.glob(path))
    elif not glob.has_magic(pattern) or Path(pattern).exists():
        return [pattern]
    else:
        paths = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 -- names stay relative
    if not paths:
        raise MissingFileError(f"no file matches the pattern {pattern!r}; check the folder and the file extension.")
    return paths


def _place(place: str, modality: str | None, options: Mapping[str, Any] | None) -> Location:
    """Return the location of a path or URL after checking that it can be opened."""
    path = Path(place)
    if not is_url(place):
        if not path.is_dir():
            check_file(path)
        elif not any((path / name).exists() for name in ZARR_METADATA):
            raise DataError(f"{place!r} is a folder without zarr metadata; pass an h5ad file or a zarr folder.")
    check_format(path)
    return Location(place, modality, options)


def check_format(path: Path) -> None:
    """Raise a DataError with advice if the file has the extension of another format."""
    if path.suffix in _READERS and not path.is_dir():
        reader = _READERS[path.suffix]
        raise DataError(f"{str(path)!r} is not an h5ad or zarr file; read it with {reader} and write h5ad.")
