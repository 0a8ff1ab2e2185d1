"""Zarr groups, on disk or behind a URL, of which no array is read through a codec that can run code."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import zarr
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from zarr import storage

from scforge.data.remote import ask_again, is_url, remote_file_system
from scforge.data.stream_errors import reading
from scforge.errors import DataError, MissingFileError, safe_cause

__all__ = ["open_group"]

_CODECS = {
    *("adler32", "bitround", "blosc", "bytes", "bz2", "crc32", "crc32c", "delta", "endian", "fletcher32", "gzip"),
    *("jenkins_lookup3", "lz4", "lzma", "packbits", "pcodec", "sharding_indexed", "shuffle", "transpose"),
    *("vlen-bytes", "vlen-utf8", "zlib", "zstd"),
}
"""Codecs of zarr v2 and v3 that numbers and text need. Others, pickle first of all, can run code when they decode."""

_METADATA = ("zarr.json", ".zarray", ".zmetadata")


def open_group(
    place: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None, *, mode: Any = "r"
) -> zarr.Group:
    """Open a zarr group; what is read behind a URL is read in pieces, each tried several times.

    Parameters
    ----------
    place
        Folder or URL.
    storage_options
        See :func:`scforge.data.remote.remote_file_system`.
    mode
        As for :func:`zarr.open_group`.

    Raises
    ------
    MissingFileError
        If there is no group.
    DataError
        If the server cannot be reached, access is refused, or the metadata cannot be used. Arrays that are opened
        later raise the same. If the folder holds a pipe or a device.
    OptionError
        If nothing installed reads such URLs.
    """
    name = os.fspath(place)
    store: storage.LocalStore | storage.FsspecStore
    if is_url(name):
        fs, path = remote_file_system(name, storage_options, asynchronous=True)
        if not fs.async_impl:
            fs = AsyncFileSystemWrapper(fs, asynchronous=True)
        elif hasattr(fs, "retries"):
            # s3fs retries three deep; a server that is down would take it minutes to believe.
            fs.retries = 1
        store = RemoteStore(fs, read_only=mode == "r", path=path.rstrip("/"))
    else:
        _refuse_odd_files(name)
        store = LocalStore(name, read_only=mode == "r")
    with reading(repr(name), how="as a zarr folder"):
        try:
            return zarr.open_group(store, mode=mode)
        except FileNotFoundError as error:
            problem = f"{name!r} is not there, or is no zarr group; check the name."
            raise MissingFileError(problem) from safe_cause(error)


def _refuse_odd_files(place: str) -> None:
    """Raise if a folder holds a pipe or a device: zarr, and zarrs besides, would wait for their end forever."""
    waiting = [place]
    while waiting:
        # What cannot be listed is reported when it is read.
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                elif not entry.is_file(follow_symlinks=False):
                    path = Path(entry.path)
                    if path.exists() and not path.is_file() and not path.is_dir():
                        raise DataError(f"{entry.path!r} is not a regular file; copy the data again.")


# zarrs reads from a store of this name itself, which is much faster.
class LocalStore(storage.LocalStore):
    """A folder whose metadata may name harmless codecs only."""

    async def get(self, key: str, prototype: Any = None, byte_range: Any = None) -> Any:
        """Return bytes of `key`."""
        return _checked(self, key, await super().get(key, prototype, byte_range))

    def get_sync(self, key: str, *, prototype: Any = None, byte_range: Any = None) -> Any:
        """Return bytes of `key`."""
        return _checked(self, key, super().get_sync(key, prototype=prototype, byte_range=byte_range))


class RemoteStore(storage.FsspecStore):
    """A store that asks again for what a broken connection did not bring, with harmless codecs only."""

    def _name(self, key: str = "") -> str:
        return repr(self.fs.unstrip_protocol(f"{self.path}/{key}".rstrip("/")))

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        """Return bytes of `key`."""
        get = super().get
        return _checked(self, key, await ask_again(lambda: get(key, prototype, byte_range), self._name(key)))

    async def get_partial_values(self, prototype: Any, key_ranges: Iterable[Any]) -> Any:
        """Return bytes of several keys."""
        ranges, get = list(key_ranges), super().get_partial_values
        return await ask_again(lambda: get(prototype, ranges), self._name())

    async def exists(self, key: str) -> bool:
        """Return whether there is a `key`."""
        exists = super().exists
        return await ask_again(lambda: exists(key), self._name(key))

    async def set(self, key: str, value: Any, byte_range: Any = None) -> None:
        """Write `key`, whole: a try that broke off leaves nothing behind."""
        write = super().set
        await ask_again(lambda: write(key, value, byte_range), self._name(key))


def _checked(store: Any, key: str, content: Any) -> Any:
    """Return what a store has under `key`, unless it is metadata that names another codec than the harmless ones."""
    if content is None or key.rpartition("/")[2] not in _METADATA:
        return content
    try:
        described = json.loads(content.to_bytes())
    except (ValueError, RecursionError):
        return content  # zarr cannot read it either, and says so
    for codec in _codecs(described):
        if str(codec).removeprefix("numcodecs.") not in _CODECS:
            raise DataError(
                f"{key!r} of {str(store)!r} names the codec {str(codec)[:100]!r}, which may run code and is not used; "
                "write the data again with a current anndata."
            )
    return content


def _codecs(described: Any) -> Iterator[Any]:
    """Yield the names of all codecs in the metadata of a node, and in what it has of the nodes below it."""
    waiting = [described]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, dict):
            continue
        for key in ("codecs", "index_codecs", "filters", "compressor"):
            found = node.get(key)
            for codec in found if isinstance(found, list) else [found] if found is not None else []:
                if isinstance(codec, dict):
                    yield codec.get("name", codec.get("id"))
                    yield codec.get("id", codec.get("name"))
                    waiting.append(codec.get("configuration"))
                else:
                    yield codec
        consolidated = node.get("consolidated_metadata")
        for below in (node.get("metadata"), consolidated.get("metadata") if isinstance(consolidated, dict) else None):
            waiting += below.values() if isinstance(below, dict) else []
