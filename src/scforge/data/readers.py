"""Read counts, obs and var of local and remote h5ad and zarr files in blocks of rows."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import glob
import hashlib
import json
import logging
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import h5py
import numpy as np
import zarr
from fsspec.asyn import get_loop, sync
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.local import LocalFileSystem
from scipy import sparse
from zarr import storage

from scforge._checks import check_known
from scforge._io import new_h5
from scforge._opening import check_folder_files, check_h5, check_regular
from scforge.data.checks import (
    REPAIR,
    boundary_problem,
    check_adata,
    check_is_adata,
    counts_of,
    index_problem,
    row_sums,
    value_problem,
)
from scforge.data.paths import STORE_KEY, check_file, check_url, is_url
from scforge.errors import (
    SECRET,
    DataError,
    MissingFileError,
    OptionError,
    ScforgeError,
    first_line,
    listing,
    redacted,
    safe_cause,
    suggest,
)

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData
    from fsspec import AbstractFileSystem


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(argument: str, value: Any) -> int:
    """Return a size in bytes, given as a number or as e.g. ``"4GB"`` (powers of ten) or ``"4GiB"`` (powers of two).

    Examples
    --------
    >>> parse_bytes("memory", "1.5GB"), parse_bytes("memory", "512 MiB")
    (1500000000, 536870912)
    """
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", value, flags=re.IGNORECASE)
        if match and match[2].lower() in _UNITS and float(match[1]) > 0:
            return int(float(match[1]) * _UNITS[match[2].lower()])
    elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise OptionError(f"{argument}={value!r} is not a valid size; pass e.g. '4GB', or a number of bytes.")


logger = logging.getLogger("scforge")

LATER = {408, 425, 429, *range(500, 600)}
"""HTTP status codes for which a later request may succeed."""


def refusal(error: BaseException) -> tuple[int, str] | None:
    """Return the HTTP status with which a server refused a request, and its meaning; None for other errors.

    For most of these errors, fsspec raises a FileNotFoundError, whose cause is the original error.
    """
    found: BaseException | None = error
    while found is not None and _status(found) is None:
        found = found.__cause__
    status = 404 if found is None else found.status  # type: ignore[attr-defined]
    if status in (404, 410):
        return None
    if status < 400:
        return status, "the server redirects in a loop; check the URL"
    phrase = HTTPStatus(status).phrase if status in HTTPStatus else "unknown"
    fix = "check the URL"
    if status in (401, 403):
        fix = "check the credentials in the URL or in storage_options"
    elif status in LATER:
        fix = "try again later"
    return status, f"the server returned status {status} ({phrase}); {fix}"


@contextlib.contextmanager
def reading(what: str, *, how: str = "", fix: str = "") -> Iterator[None]:
    """Turn errors from reading `what` as `how` into one-sentence messages; `fix` is the advice for corrupted files."""
    try:
        yield
    except ScforgeError:
        raise
    except Exception as error:  # noqa: BLE001 -- h5py, zarr, its codecs, anndata, fsspec: of no common family
        raise _reading_error(error, what, how, fix) from safe_cause(error)


def _reading_error(error: Exception, what: str, how: str, fix: str) -> DataError | MissingFileError:
    """Return an error that describes a reading error in one sentence."""
    refused, behind = refusal(error), error.__cause__
    if isinstance(error, PermissionError):
        problem = f"is not readable ({first_line(error)}); check the permissions, or the credentials in storage_options"
    elif refused is not None:
        problem = f"cannot be read: {refused[1]}"
    elif isinstance(error, TimeoutError) or isinstance(behind, TimeoutError):
        problem = "cannot be reached in time; check the URL and the connection, and try again"
    elif isinstance(behind, Exception) and type(behind).__module__.startswith("aiohttp.") and _status(behind) is None:
        problem = f"cannot be reached ({first_line(behind)}); check the URL and the connection"
    elif isinstance(error, FileNotFoundError):
        return MissingFileError(f"{what} does not exist; check the name.")
    else:
        problem = f"cannot be read{how and f' {how}'}: {first_line(error)}{fix and f'; {fix}'}"
    return DataError(f"{what} {problem}.")


def _status(error: BaseException) -> int | None:
    status = getattr(error, "status", None)
    return status if isinstance(status, int) else None


TRIES = 5
"""Maximum number of attempts to read one piece."""

FIRST_WAIT_S = 0.2
"""Seconds before the second attempt; each further wait is twice as long."""

TRY_S = 60.0
"""Timeout of one attempt in seconds."""

_CONNECT_S, _READ_S = 10, 30
_FINAL = (
    *(FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError),
    *(KeyError, ValueError, TypeError, IndexError, AttributeError),
)
"""Errors that a retry does not fix."""


def without_query(url: str) -> str:
    """Return a URL without its query. Only HTTP URLs have a query; in other URLs, ``?`` is part of a pattern."""
    return url.partition("?")[0] if url.lower().startswith(("http://", "https://")) else url


def remote_file_system(
    url: str, storage_options: Mapping[str, Any] | None = None, *, asynchronous: bool = False
) -> tuple[AbstractFileSystem, str]:
    """Return the fsspec file system of a URL with its options, and the path on it, without connecting."""
    from fsspec.core import url_to_fs

    if f"://{SECRET}@" in url or f"?{SECRET}" in url or f"'{SECRET}'" in repr(storage_options):
        raise OptionError(f"{url!r} requires a credential, which scforge does not save to files; enter it again.")
    scheme = check_url(url, storage_options)
    url = scheme + url[len(scheme) :]  # fsspec knows protocols in lower case
    with reading(repr(url)):
        try:
            options = _with_limits(scheme, dict(storage_options or {}))
            found = url_to_fs(url, **options, asynchronous=asynchronous)
        except ImportError as error:
            raise OptionError(
                f"{url!r} needs a package that is not installed ({first_line(error)}); "
                'install the S3 and Google Cloud clients with pip install "scforge[cloud]".'
            ) from safe_cause(error)
        except (ValueError, TypeError) as error:
            what = "used with these storage_options" if storage_options else "opened"
            problem = f"{url!r} cannot be {what}: {first_line(error)}."
            raise OptionError(problem) from safe_cause(error)
    return found


def _with_limits(scheme: str, options: dict[str, Any]) -> dict[str, Any]:
    """Add timeouts and a limit on the client's own retries to `options`, unless the user has set them."""
    if scheme == "s3":
        limits = {"connect_timeout": _CONNECT_S, "read_timeout": _READ_S, "retries": {"total_max_attempts": 1}}
        options["config_kwargs"] = {**limits, **options.get("config_kwargs", {})}
    elif scheme in ("http", "https"):
        from aiohttp import ClientTimeout

        limits = {"timeout": ClientTimeout(total=TRY_S, sock_connect=_CONNECT_S, sock_read=_READ_S)}
        options["client_kwargs"] = {**limits, **options.get("client_kwargs", {})}
    return options


async def ask_again[Result](ask: Callable[[], Awaitable[Result]], what: str) -> Result:
    """Retry after connection errors; the last error is raised as a :class:`~scforge.errors.DataError`."""
    wait = FIRST_WAIT_S
    for number in range(1, TRIES + 1):
        try:
            return await asyncio.wait_for(ask(), TRY_S)
        except _FINAL:
            raise
        except Exception as error:
            refused = refusal(error)
            if refused and (number == TRIES or refused[0] not in LATER):
                raise
            if number == TRIES:
                raise DataError(
                    f"{what} could not be reached in {number} attempts ({first_line(error)}); "
                    "check the connection and storage_options, then try again."
                ) from safe_cause(error)
            logger.debug("Reading again in %g s: %s", wait, redacted(f"{what}: {error}"))
        await asyncio.sleep(wait)
        wait *= 2
    raise AssertionError("the last try returns or raises")


def persistent(file: Any, what: str) -> Any:
    """Return an fsspec file that retries the request of a missing block several times and rejects incomplete blocks."""
    if (blocks := getattr(file, "cache", None)) is None or getattr(blocks, "fetcher", None) is None:
        return file  # of a disk, or of memory
    fetch = blocks.fetcher

    def whole(start: int, stop: int) -> bytes:
        found = fetch(start, stop)
        if len(found) < (wanted := min(stop, blocks.size) - start):
            raise OSError(f"{wanted:,} bytes were requested, but only {len(found):,} were received")
        return found

    def again(start: int, stop: int) -> bytes:
        # h5py holds its lock meanwhile: a thread that collects garbage of h5py would wait for it, and be waited for.
        collects = gc.isenabled()
        gc.disable()
        try:
            return sync(get_loop(), ask_again, lambda: asyncio.to_thread(whole, start, stop), what)
        finally:
            if collects:
                gc.enable()

    blocks.fetcher = again
    return file


_CODECS = {
    *("adler32", "bitround", "blosc", "bytes", "bz2", "crc32", "crc32c", "delta", "endian", "fletcher32", "gzip"),
    *("jenkins_lookup3", "lz4", "lzma", "packbits", "pcodec", "sharding_indexed", "shuffle", "transpose"),
    *("vlen-bytes", "vlen-utf8", "zlib", "zstd"),
}
"""Zarr v2 and v3 codecs needed for numbers and text. Other codecs, e.g. pickle, can run code during decoding."""

_MAY_NAME_CODECS = ("zarr.json", ".zarray", ".zmetadata")

_NEEDED = re.compile(
    r"(?:^|/)(?:(?:X|layers/[^/]+)/(?:data|indices|indptr)|(?:obs|var)/_?index(?:/values)?)/(?:c/)?\d+$"
)
"""Pattern of the chunks of sparse counts and of names. None consists of zeros or empty names, so that none is left out
when an array is written."""

_CHUNK = re.compile(r"(?:^|/)c(?:/\d+)*$")
"""Pattern of the chunks of a zarr v3 array."""

CHECKSUM = "scforge_sha256"
"""Root attribute with the checksum of all metadata in the ``zarr.json`` of a store."""


def metadata_checksum(document: Mapping[str, Any]) -> str:
    """Return the SHA-256 hash of the content of a ``zarr.json``, without the attribute that holds it."""
    kept = {name: value for name, value in document["attributes"].items() if name != CHECKSUM}
    return hashlib.sha256(json.dumps({**document, "attributes": kept}, sort_keys=True).encode()).hexdigest()


def check_metadata(document: Any, place: str) -> None:
    """Raise a DataError if the content of a ``zarr.json`` does not match the checksum in it, if there is one."""
    attributes = document.get("attributes") if isinstance(document, dict) else None
    if isinstance(attributes, dict) and CHECKSUM in attributes and attributes[CHECKSUM] != metadata_checksum(document):
        raise DataError(
            f"{place} is corrupted: its zarr.json does not match its checksum; copy the store again, or convert the "
            "data again."
        )


def open_group(
    place: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None, *, mode: Any = "r"
) -> zarr.Group:
    """Open a zarr group; data at a URL are read in pieces, with several attempts for each piece."""
    name = os.fspath(place)
    store: storage.LocalStore | storage.FsspecStore
    if is_url(name):
        fs, path = remote_file_system(name, storage_options, asynchronous=True)
        local = path if isinstance(fs, LocalFileSystem) else None
        if not fs.async_impl:
            fs = AsyncFileSystemWrapper(fs, asynchronous=True)
        elif hasattr(fs, "retries"):
            # s3fs retries three deep; a server that is down would take it minutes to believe.
            fs.retries = 1
        store = RemoteStore(fs, read_only=mode == "r", path=path.rstrip("/"))
    else:
        store, local = LocalStore(name, read_only=mode == "r"), name
    with reading(repr(name), how="as a zarr folder"):
        if mode == "r" and local is not None:
            check_folder_files(local)  # what decodes chunks opens them itself
        return zarr.open_group(store, mode=mode)


# zarrs reads from a store of this name itself, which is much faster.
class LocalStore(storage.LocalStore):
    """A zarr folder that accepts only safe codecs, and in which no chunk of counts or names may be missing.

    Attributes
    ----------
    is_complete
        Whether no chunk of any other array may be missing either.
    """

    is_complete = False

    def place(self, key: str) -> str:
        """Return the path of `key` for messages."""
        return repr(str(self.root / key))

    async def get(self, key: str, prototype: Any = None, byte_range: Any = None) -> Any:
        """Return the bytes of `key`."""
        return _checked(self, key, await super().get(key, prototype, byte_range))

    def get_sync(self, key: str, *, prototype: Any = None, byte_range: Any = None) -> Any:
        """Return the bytes of `key`."""
        return _checked(self, key, super().get_sync(key, prototype=prototype, byte_range=byte_range))


class RemoteStore(storage.FsspecStore):
    """A remote zarr store with retries that accepts only safe codecs; for missing chunks, see :class:`LocalStore`."""

    is_complete = False

    def place(self, key: str = "") -> str:
        """Return the URL of `key` for messages."""
        return repr(self.fs.unstrip_protocol(f"{self.path}/{key}".rstrip("/")))

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        """Return the bytes of `key`."""
        get = super().get
        return _checked(self, key, await ask_again(lambda: get(key, prototype, byte_range), self.place(key)))

    async def get_partial_values(self, prototype: Any, key_ranges: Iterable[Any]) -> Any:
        """Return the bytes of several keys."""
        ranges, get = list(key_ranges), super().get_partial_values
        contents = await ask_again(lambda: get(prototype, ranges), self.place())
        return [_checked(self, key, content) for (key, _), content in zip(ranges, contents, strict=True)]

    async def exists(self, key: str) -> bool:
        """Return whether `key` exists."""
        exists = super().exists
        return await ask_again(lambda: exists(key), self.place(key))

    async def set(self, key: str, value: Any, byte_range: Any = None) -> None:
        """Write `key` as a whole, so that an interrupted attempt leaves nothing behind."""
        write = super().set
        await ask_again(lambda: write(key, value, byte_range), self.place(key))


def _checked(store: Any, key: str, content: Any) -> Any:
    """Return the content of `key`. Raises a DataError if a chunk is missing, or metadata are corrupted or unsafe."""
    if content is None:
        # For zarr, a missing chunk is one of zeros.
        if store.read_only and (_NEEDED.search(key) or (store.is_complete and _CHUNK.search(key))):
            raise missing_chunk(store, key)
        return None
    if key.rpartition("/")[2] not in _MAY_NAME_CODECS:
        return content
    try:
        described = json.loads(content.to_bytes())
    except (ValueError, RecursionError):
        return content  # zarr cannot read it either, and raises
    if key == "zarr.json":
        check_metadata(described, store.place(""))
    for codec in _codecs(described):
        if codec.removeprefix("numcodecs.") not in _CODECS:
            raise DataError(
                f"{key!r} of {str(store)!r} uses the codec {codec[:100]!r}, which may run code; write the file again "
                "with anndata."
            )
    return content


def missing_chunk(store: LocalStore | RemoteStore, key: str) -> DataError:
    """Return the error for a chunk that does not exist."""
    return DataError(f"{store.place(key)} is missing; copy the data again, or write them again.")


def _codecs(node: Any) -> Iterator[str]:
    """Yield the names of all codecs in the metadata of a node, including consolidated metadata of its descendants."""
    if not isinstance(node, dict):
        return
    for key in ("codecs", "index_codecs", "filters", "compressor"):
        found = node.get(key) or []
        for codec in found if isinstance(found, list) else [found]:
            named = codec if isinstance(codec, dict) else {"id": codec}
            yield from (str(named[name]) for name in ("id", "name") if name in named)
            yield from _codecs(named.get("configuration"))
    consolidated = node.get("consolidated_metadata") or {}
    for below in (node.get("metadata"), consolidated.get("metadata")):
        for one in below.values() if isinstance(below, dict) else ():
            yield from _codecs(one)


_ENTRY = 12
"""Bytes per count in memory: the count and its gene, twice while pieces are concatenated."""

_CELL = 200
"""Bytes per cell in memory: name, library size, and some obs columns."""

_UNLIMITED = 2**60
"""Reported limit above which a version 1 control group is unlimited."""


def lack_of_memory(streams: Sequence[ChunkReader], memory: int | str | None = None) -> str | None:
    """Return a message if cells exceed `memory`, e.g. ``"16GB"`` (if None, half of the free memory), else None."""
    there = available_memory() if memory is None else parse_bytes("memory", memory)
    if there is None:
        return None
    most = there // 2 if memory is None else there
    n_cells, n_entries = sum(stream.n_cells for stream in streams), sum(stream.n_entries for stream in streams)
    needed = n_entries * _ENTRY + n_cells * _CELL
    if needed <= most:
        return None
    limit = "at most half of the available {} may be used" if memory is None else "the limit set by memory is {}"
    return (
        f"{n_cells:,} cells with {n_entries:,} counts need about {_size(needed)} of memory, but "
        f"{limit.format(_size(there))}"
    )


def available_memory() -> int | None:
    """Return the memory in bytes that is still available to this process, or None if it is unknown."""
    return min(_limits(), default=None)


def _limits() -> Iterator[int]:
    """Yield the memory available on the machine, and within the control groups of a container or a job."""
    meminfo = _numbers(Path("/proc/meminfo"))
    if "MemAvailable:" in meminfo:
        yield meminfo["MemAvailable:"] * 1024
    elif hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for folder in _control_groups(Path("/sys/fs/cgroup"), _text(Path("/proc/self/cgroup"))):
        for most, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            limit, taken = _text(folder / most).strip(), _text(folder / used).strip()
            if limit.isdigit() and taken.isdigit() and int(limit) < _UNLIMITED:
                # What the page cache holds of files is given back when it is needed.
                stat = _numbers(folder / "memory.stat")
                files = stat.get("inactive_file", 0) + stat.get("active_file", 0)
                yield max(0, int(limit) - int(taken) + files)


def _control_groups(root: Path, described: str) -> Iterator[Path]:
    """Yield the control group folders of this process, innermost first; inside a container, `root` is one of them."""
    for line in described.splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "memory" if controllers else root
        place = base / group.strip("/")
        yield place
        yield from (parent for parent in place.parents if parent.is_relative_to(base))


def _numbers(path: Path) -> dict[str, int]:
    """Return a mapping from name to number for the lines of a system file."""
    words = [line.split() for line in _text(path).splitlines()]
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # no such file on this system
        return ""


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 10**8 else f"{n_bytes / 1e6:.1f} MB"


ENTRIES = 2**22
"""Maximum number of entries held at a time; about 100 MB including derived arrays."""

ROWS = 2**16
"""Maximum number of rows per piece, because even empty rows have boundaries."""

_CSC_WINDOW = 8
"""Number of pieces gathered in one pass over a CSC matrix; at most about 800 MB."""


_PARTS = ("data", "indices", "indptr")
"""Names of the arrays of a compressed matrix."""


def is_array(stored: Any) -> bool:
    """Return whether an object in an h5ad file or a zarr folder is an array, not a group."""
    return hasattr(stored, "dtype")


@dataclass(frozen=True)
class Matrix:
    """A matrix in an h5ad file or a zarr folder.

    Attributes
    ----------
    stored
        The h5py or zarr group or array.
    kind
        ``"csr"``, ``"csc"`` or ``"dense"``.
    shape
        Number of cells and of genes.
    place
        Description of the matrix for messages, e.g. ``"'X' of 'cells.h5ad'"``.
    """

    stored: Any
    kind: str
    shape: tuple[int, int]
    place: str

    @classmethod
    def of(cls, stored: Any, source: str) -> Matrix:
        """Detect how a matrix is stored; `source` is the file name for messages."""
        place = f"{stored.name.removeprefix('/')!r} of {source!r}"
        if is_array(stored):
            if stored.shape is None or len(stored.shape) != 2 or stored.dtype.kind not in "biuf":
                raise DataError(f"{place} is not a 2D matrix of numbers (shape {stored.shape}, dtype {stored.dtype}).")
            return cls(stored, "dense", tuple(stored.shape), place)
        encoding = str(stored.attrs.get("encoding-type", stored.attrs.get("h5sparse_format", "")))
        kind = encoding.removesuffix("_matrix")
        if kind not in ("csr", "csc") or not {"data", "indices", "indptr"} <= set(stored):
            raise DataError(f"{place} is stored as {encoding!r}; a CSR, CSC or dense matrix is needed.")
        with reading(f"the shape of {place}", fix=REPAIR):
            n_cells, n_genes = map(int, stored.attrs.get("shape", stored.attrs.get("h5sparse_shape")))
        matrix = cls(stored, kind, (n_cells, n_genes), place)
        matrix._check_parts()
        return matrix

    def _check_parts(self) -> None:
        """Raise a DataError if data, indices and indptr are not 1D numeric arrays of matching lengths."""
        for name, kinds in {"data": "biuf", "indices": "iu", "indptr": "iu"}.items():
            part = self.stored[name]
            if not is_array(part) or part.shape is None or len(part.shape) != 1 or part.dtype.kind not in kinds:
                self._damaged(f"{name} is not a one-dimensional array of numbers")
        for name, needed in {"indices": self.n_stored, "indptr": self._major_minor[0] + 1}.items():
            if (found := self._parts[name].shape[0]) != needed:
                self._damaged(f"{name} has {found} values, expected {needed}")

    @cached_property
    def _parts(self) -> dict[str, Any]:
        """A mapping from name to data, indices and indptr, or from ``""`` to a dense matrix."""
        parts = {"": self.stored} if self.kind == "dense" else {name: self.stored[name] for name in _PARTS}
        if isinstance(self.stored, zarr.Group | zarr.Array):
            # A chunk that is gone is not a chunk of zeros.
            parts = {name: part.with_config({"read_missing_chunks": False}) for name, part in parts.items()}
        return parts

    @property
    def n_stored(self) -> int:
        """Number of stored entries; for a dense matrix, the number of all entries."""
        return self.shape[0] * self.shape[1] if self.kind == "dense" else int(self._parts["data"].shape[0])

    @property
    def _major_minor(self) -> tuple[int, int]:
        """Size of the compressed axis (CSR rows or CSC columns), and size of the indexed axis."""
        return self.shape if self.kind == "csr" else self.shape[::-1]

    def _damaged(self, problem: str | None) -> None:
        if problem is not None:
            raise DataError(f"{self.place} is corrupted: {problem}; {REPAIR}.")

    def _read(self, part: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return a slice of data, indices or indptr, or rows of a dense matrix if `part` is empty."""
        with reading(f"{part} in {self.place}" if part else self.place):
            return np.asarray(self._parts[part][start:stop])

    @cached_property
    def _boundaries(self) -> np.ndarray:
        """Start of each compressed row (or column), and end of the last one, int64."""
        boundaries = self._read("indptr").astype(np.int64)
        self._damaged(boundary_problem(boundaries, self.n_stored))
        return boundaries

    def _indices(self, start: int, stop: int) -> np.ndarray:
        indices = self._read("indices", start, stop)
        self._damaged(index_problem(indices, self._major_minor[1]))
        return indices

    def row_chunks(self, size: int = ENTRIES) -> Iterator[tuple[int, sparse.csr_matrix]]:
        """Yield the cells in order, in pieces of ``(first row, CSR matrix of all columns)``.

        `size` is the maximum number of entries per piece, unless a single row contains more. A CSC matrix is read
        completely for every eight times `size` of its entries, because its cells are scattered over the file.
        """
        if self.kind == "dense":
            step = min(max(1, size // self.shape[1]), ROWS)
            for row in range(0, self.shape[0], step):
                yield row, sparse.csr_matrix(_sparse_type(self._read("", row, row + step)))
        elif self.kind == "csr":
            yield from self._csr_chunks(size)
        else:
            yield from self._csc_chunks(size)

    def _csr_chunks(self, size: int) -> Iterator[tuple[int, sparse.csr_matrix]]:
        boundaries, start = self._boundaries, 0
        while start < self.shape[0]:
            stop = rows_within(boundaries, start, size)
            first, last = int(boundaries[start]), int(boundaries[stop])
            values = _sparse_type(self._read("data", first, last))
            parts = (values, self._indices(first, last), boundaries[start : stop + 1] - first)
            yield start, sparse.csr_matrix(parts, shape=(stop - start, self.shape[1]))
            start = stop

    def _csc_chunks(self, size: int) -> Iterator[tuple[int, sparse.csr_matrix]]:
        n_cells, n_genes = self.shape
        filled = np.zeros(n_cells, dtype=np.int64)
        for start in range(0, int(self._boundaries[-1]), size):
            filled += np.bincount(self._indices(start, start + size), minlength=n_cells)
        before = np.concatenate([[0], np.cumsum(filled)])
        start = 0
        while start < n_cells:
            stop = rows_within(before, start, _CSC_WINDOW * size, most=n_cells)
            window = self._csc_rows(size, start, stop, int(before[stop] - before[start]))
            row = start
            while row < stop:
                after = min(rows_within(before, row, size), stop)
                yield row, sparse.csr_matrix(window[row - start : after - start], shape=(after - row, n_genes))
                row = after
            start = stop

    def _csc_rows(self, size: int, start: int, stop: int, n_entries: int) -> sparse.csr_matrix:
        """Return the rows from `start` to `stop`, which contain `n_entries` entries, as a CSR matrix."""
        rows, columns = (np.empty(n_entries, dtype=np.int32) for _ in range(2))
        values = _sparse_type(np.empty(n_entries, dtype=self._parts["data"].dtype))
        filled = 0
        for first in range(0, int(self._boundaries[-1]), size):
            all_rows = self._indices(first, first + size)
            here = np.flatnonzero((all_rows >= start) & (all_rows < stop))
            place = slice(filled, filled + len(here))
            inside = np.clip(self._boundaries, first, first + len(all_rows))
            all_columns = np.repeat(np.arange(self.shape[1]), np.diff(inside))
            all_values = self._read("data", first, first + size)
            rows[place], columns[place], values[place] = all_rows[here] - start, all_columns[here], all_values[here]
            filled += len(here)
        return sparse.csr_matrix((values, (rows, columns)), shape=(stop - start, self.shape[1]))


def rows_within(before: np.ndarray, start: int, size: int, *, most: int = ROWS) -> int:
    """Return the end of a piece from `start`: at least one row, and at most `size` entries and `most` rows."""
    end = int(np.searchsorted(before, before[start] + size, side="right")) - 1
    return min(max(start + 1, end), start + most)


def _sparse_type(values: np.ndarray) -> np.ndarray:
    """Convert half precision and foreign byte orders, which SciPy's sparse matrices do not support."""
    if values.dtype == np.float16:
        return values.astype(np.float32)
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def write_h5ad(path: str | os.PathLike[str], adata: AnnData) -> None:
    """Write cells as ``adata.write_h5ad`` does; a full disk raises an OSError, see :func:`scforge._io.new_h5`."""
    from anndata.io import write_elem

    adata.strings_to_categoricals()
    if adata.raw is not None:
        adata.strings_to_categoricals(adata.raw.var)
    with new_h5(path) as file:
        write_elem(file, "/", adata)


def check_chunk(
    chunk: sparse.csr_matrix,
    place: str,
    first: int,
    *,
    no_counts: str = "pass the layer that contains the raw counts",
    empty: str = "remove them with sc.pp.filter_cells(adata, min_counts=1)",
) -> None:
    """Raise a DataError if values are not counts or a row is empty; `no_counts` and `empty` are the advice."""
    if problem := value_problem(chunk.data):
        raise DataError(f"{place} {problem} from row {first} onward, but raw counts are needed; {no_counts}.")
    totals = row_sums(chunk)
    if not totals.all():
        row = first + int((totals == 0).argmax())
        raise DataError(f"{place} has cells without counts (first: row {row}); {empty}.")


_AGAIN = "write the file again"


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
            raise OptionError(f"modality={modality!r} has no effect, because {path!r} has no modalities; omit it.")
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
    return DataError(f"obs of {source!r} has no column {column!r}{suggest(column, shown, 'available')}")


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
                found = system.info(path)
                return {"size": int(found["size"]), "mark": _mark(found)}
            digest, size = hashlib.blake2b(digest_size=16), 0
            for name, found in sorted(system.find(path, detail=True).items()):
                size += int(found["size"])
                digest.update(f"{name.removeprefix(path)}\0{found['size']}\0{_mark(found)}\n".encode())
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


_BLOCK = 2**22
"""Number of bytes of a remote h5ad file fetched at a time; 32 such blocks are cached."""

_MARKS = ("ETag", "etag", "md5Hash", "LastModified", "mtime", "created")
"""File attributes that change with the content of a file, most reliable first."""

_FILES = (".h5ad", ".h5mu")
_COLLECTION = "annbatch-preshuffled"

_ZARR_METADATA = ("zarr.json", ".zgroup", ".zattrs")
"""Metadata files, at least one of which a zarr folder contains."""


def file_system(place: str, options: Mapping[str, Any] | None = None) -> tuple[Any, str]:
    """Return the file system of a path or URL, with its directory cache cleared, and the path on it."""
    if not is_url(place):
        return LocalFileSystem(), str(Path(place).absolute())
    system, path = remote_file_system(place, options)
    system.invalidate_cache()
    return system, path.rstrip("/")


def is_zarr(place: str, options: Mapping[str, Any] | None = None) -> bool:
    """Return whether a path or URL is a zarr folder, not a file."""
    if not is_url(place):
        return Path(place).is_dir()
    if Path(without_query(place)).suffix in (*_FILES, ".zarr"):
        return place.endswith(".zarr")
    system, path = file_system(place, options)
    with reading(repr(place)):
        return any(system.exists(f"{path}/{name}") for name in _ZARR_METADATA)


def root_attributes(place: str, options: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """Return the root attributes of a zarr v3 folder, or None if it is not one."""
    if is_url(place) and Path(without_query(place)).suffix in _FILES:
        return None
    system, path = file_system(place, options)
    with reading(repr(place), how="as a zarr folder"):
        name = f"{path}/zarr.json"
        if not is_url(place):
            check_regular(name)
        if not system.exists(name):
            return None
        document = json.loads(system.cat_file(name))
        check_metadata(document, repr(place))
        return dict(document.get("attributes", {}))


def is_collection(place: str, options: Mapping[str, Any] | None = None) -> bool:
    """Return whether a path or URL is an scforge store or another annbatch collection."""
    return (root_attributes(place, options) or {}).get("encoding-type") == _COLLECTION


def _mark(found: Mapping[str, Any]) -> str:
    return next((str(found[name]) for name in _MARKS if found.get(name) is not None), "")


_READERS = {
    ".csv": "scanpy.read_csv",
    ".tsv": "scanpy.read_text",
    ".txt": "scanpy.read_text",
    ".mtx": "scanpy.read_10x_mtx",
    ".loom": "anndata.io.read_loom",
    ".h5": "scanpy.read_10x_h5",
}
"""A mapping from the extension of another file format to the function that reads it."""


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
    places = list(source) if isinstance(source, list | tuple) else [source]
    if not places:
        raise OptionError("source=[] is empty; pass at least one file.")
    opened: list[ChunkReader] = []
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
        raise OptionError(f"source contains {twice!r} twice; pass each file once.")
    return opened


def is_query(source: Any) -> bool:
    """Return whether `source` opens its cells itself, as a :class:`scforge.data.CensusQuery` does."""
    return callable(getattr(type(source), "streams", None))


def identity_of(stream: ChunkReader) -> object:
    """Return an identifier that is equal for streams of the same cells: absolute path, URL, or object id."""
    if isinstance(stream, AdataStream):
        return id(stream.adata)
    name = getattr(stream, "address", stream.name)
    return name if "://" in name else str(Path(name).resolve())


def _open_object(source: Any, layer: str | None, modality: str | None) -> ChunkReader:
    from mudata import MuData

    if isinstance(source, MuData):
        check_modality(modality, list(source.mod), "mdata")
        adata = source.mod[modality]
        shared = shared_columns(source.obs, str(modality), adata.obs_names, list(adata.obs.columns))
        return AdataStream(adata, layer, shared=shared)
    check_is_adata(source, argument="source")
    if modality is not None:
        raise OptionError(f"modality={modality!r} has no effect for an AnnData, which has no modalities; omit it.")
    if not source.isbacked:
        return AdataStream(source, layer)
    if source.is_view:
        raise DataError(
            f"adata is a view of an AnnData backed by {str(source.filename)!r}; load the AnnData with "
            "adata.to_memory() before selecting cells or genes."
        )
    return BackedStream(source, layer)


def _expanded(place: str, options: Mapping[str, Any] | None) -> list[str]:
    """Return the files that match a pattern, sorted by name; a path is returned unchanged."""
    if place.lower().startswith("file://"):
        place = place[len("file://") :]
    if is_url(place):
        if not glob.has_magic(without_query(place)):
            return [place]
        system, path = file_system(place, options)
        with reading(repr(place)):
            found = sorted(system.unstrip_protocol(one) for one in system.glob(path))
    elif not glob.has_magic(place) or Path(place).exists():
        return [place]
    else:
        found = sorted(glob.glob(place, recursive=True))  # noqa: PTH207 -- names stay relative
    if not found:
        raise MissingFileError(f"no file matches the pattern {place!r}; check the folder and the file extension.")
    return found


def _place(place: str, modality: str | None, options: Mapping[str, Any] | None) -> Location:
    """Return the location of a path or URL after checking that it can be opened."""
    path = Path(place)
    if not is_url(place):
        if not path.is_dir():
            check_file(path)
        elif not any((path / name).exists() for name in _ZARR_METADATA):
            raise DataError(f"{place!r} is a folder without zarr metadata; pass an h5ad file or a zarr folder.")
    check_format(path)
    return Location(place, modality, options)


def check_format(path: Path) -> None:
    """Raise a DataError with advice if the file has the extension of another format."""
    if path.suffix in _READERS and not path.is_dir():
        reader = _READERS[path.suffix]
        raise DataError(f"{str(path)!r} is not an h5ad or zarr file; read it with {reader} and write h5ad.")
