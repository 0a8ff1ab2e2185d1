"""Files, zarr folders and URLs: file systems with retries, checks before reading, and errors in one sentence."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import json
import logging
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zarr
from fsspec.asyn import get_loop, sync
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.local import LocalFileSystem
from zarr import storage

from scforge._opening import check_folder_files, check_regular
from scforge.data.paths import check_url, is_url
from scforge.errors import (
    SECRET,
    DataError,
    MissingFileError,
    OptionError,
    ScforgeError,
    first_line,
    redacted,
    safe_cause,
)

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


logger = logging.getLogger("scforge")

LATER = {408, 425, 429, *range(500, 600)}
"""HTTP status codes for which a later request may succeed."""

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

_FILES = (".h5ad", ".h5mu")

_COLLECTION = "annbatch-preshuffled"

ZARR_METADATA = ("zarr.json", ".zgroup", ".zattrs")
"""Metadata files, at least one of which a zarr folder contains."""


def refusal(error: BaseException) -> tuple[int, str] | None:
    """Return the HTTP status with which a server refused a request, and its meaning; None for other errors.

    For most of these errors, fsspec raises a FileNotFoundError, whose cause is the original error.
    """
    cause: BaseException | None = error
    while cause is not None and _status(cause) is None:
        cause = cause.__cause__
    status = 404 if cause is None else cause.status  # type: ignore[attr-defined]
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
            opened = url_to_fs(url, **options, asynchronous=asynchronous)
        except ImportError as error:
            raise OptionError(
                f"{url!r} needs a package that is not installed ({first_line(error)}); "
                'install the S3 and Google Cloud clients with pip install "scforge[cloud]".'
            ) from safe_cause(error)
        except (ValueError, TypeError) as error:
            what = "used with these storage_options" if storage_options else "opened"
            problem = f"{url!r} cannot be {what}: {first_line(error)}."
            raise OptionError(problem) from safe_cause(error)
    return opened


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
        content = fetch(start, stop)
        if len(content) < (wanted := min(stop, blocks.size) - start):
            raise OSError(f"{wanted:,} bytes were requested, but only {len(content):,} were received")
        return content

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
        listed = node.get(key) or []
        for codec in listed if isinstance(listed, list) else [listed]:
            named = codec if isinstance(codec, dict) else {"id": codec}
            yield from (str(named[name]) for name in ("id", "name") if name in named)
            yield from _codecs(named.get("configuration"))
    consolidated = node.get("consolidated_metadata") or {}
    for below in (node.get("metadata"), consolidated.get("metadata")):
        for descendant in below.values() if isinstance(below, dict) else ():
            yield from _codecs(descendant)


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
        return any(system.exists(f"{path}/{name}") for name in ZARR_METADATA)


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
