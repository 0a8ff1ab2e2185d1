"""AnnData in zarr folders and behind URLs: where they are, and how they are opened."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scforge._io import put_back
from scforge.data.h5ad import open_hdf5
from scforge.data.remote import is_url, persistent, remote_file_system, without_query
from scforge.data.stream_errors import reading
from scforge.data.stream_stored import StoredAdata
from scforge.errors import DataError, MissingFileError, redacted

__all__ = ["UrlPlace", "ZarrPlace", "expand_url", "is_collection", "is_zarr"]

_BLOCK = 2**22
"""Bytes that are fetched of an h5ad file at a time; 32 such blocks are kept."""

_MARKS = ("ETag", "etag", "md5Hash", "LastModified", "mtime", "created")
"""What file systems say of a file that changes with it, the surest first."""

_FILES = (".h5ad", ".h5mu")
_COLLECTION = "annbatch-preshuffled"

_METADATA = ("zarr.json", ".zgroup", ".zattrs")
"""Files of which a zarr folder has one."""


def _file_system(url: str, options: Mapping[str, Any] | None = None) -> tuple[Any, str]:
    """Return the file system of a URL, and the path on it, without what it remembers of folders: they may change."""
    system, path = remote_file_system(url, options)
    system.invalidate_cache()
    return system, path


def expand_url(url: str, options: Mapping[str, Any] | None = None) -> list[str]:
    """Return the URLs that a pattern stands for, in order of their names.

    Raises
    ------
    MissingFileError
        If there are none.
    """
    system, path = _file_system(url, options)
    with reading(repr(url)):
        found = sorted(system.unstrip_protocol(one) for one in system.glob(path))
    if not found:
        raise MissingFileError(f"no file fits the pattern {url!r}; check the folder and the ending.")
    return found


def is_zarr(place: str, options: Mapping[str, Any] | None = None) -> bool:
    """Whether a path or URL is a zarr folder, and no file."""
    if not is_url(place):
        return Path(place).is_dir()
    if Path(without_query(place)).suffix in (*_FILES, ".zarr"):
        return place.endswith(".zarr")
    system, path = _file_system(place, options)
    with reading(repr(place)):
        return any(system.exists(f"{path.rstrip('/')}/{name}") for name in _METADATA)


def is_collection(place: str, options: Mapping[str, Any] | None = None) -> bool:
    """Whether a path or URL is a store of scforge, or another collection of annbatch."""
    if is_url(place):
        if Path(without_query(place)).suffix in _FILES:
            return False
        system, path = _file_system(place, options)
        with reading(repr(place)):
            name = f"{path.rstrip('/')}/zarr.json"
            content = system.cat_file(name) if system.exists(name) else b"{}"
    else:
        put_back(place)
        metadata = Path(place, "zarr.json")
        content = metadata.read_bytes() if metadata.is_file() else b"{}"
    with reading(repr(place), how="as a zarr folder"):
        return json.loads(content).get("attributes", {}).get("encoding-type") == _COLLECTION


class ZarrPlace:
    """An AnnData in a zarr folder, here or behind a URL, or one modality of a MuData in it."""

    def __init__(self, path: str, modality: str | None = None, options: Mapping[str, Any] | None = None) -> None:
        self.name = redacted(path) if is_url(path) else path
        self.address, self._modality, self._options = path, modality, dict(options or {})

    @contextlib.contextmanager
    def open(self) -> Iterator[StoredAdata]:
        """Open it for reading."""
        from scforge.data.zarr_groups import open_group

        if not is_url(self.address) and not any((Path(self.address) / name).exists() for name in _METADATA):
            raise DataError(f"{self.name!r} is a folder without zarr metadata; name an h5ad file or a zarr folder.")
        yield StoredAdata.of(self.name, open_group(self.address, self._options), self._modality)

    def identity(self) -> dict[str, int | float | str]:
        """Return the size of all files, and a digest of their names, sizes and times of change (or ETags)."""
        url = self.address if is_url(self.address) else f"file://{Path(self.address).resolve()}"
        system, path = _file_system(url, self._options if is_url(self.address) else None)
        digest, size = hashlib.blake2b(digest_size=16), 0
        with reading(repr(self.name)):
            for name, found in sorted(system.find(path, detail=True).items()):
                size += int(found["size"])
                digest.update(f"{name.removeprefix(path)}\0{found['size']}\0{_mark(found)}\n".encode())
        return {"size": size, "files": digest.hexdigest()}


class UrlPlace:
    """An h5ad file behind a URL, or one modality of an h5mu file."""

    def __init__(self, url: str, modality: str | None = None, options: Mapping[str, Any] | None = None) -> None:
        self.name, self.address, self._modality, self._options = redacted(url), url, modality, dict(options or {})

    @contextlib.contextmanager
    def open(self) -> Iterator[StoredAdata]:
        """Open it for reading, through a cache of the blocks used last."""
        system, path = _file_system(self.address, self._options)
        with contextlib.ExitStack() as opened:
            with reading(repr(self.name), how="as an h5ad file"):
                file = opened.enter_context(system.open(path, "rb", block_size=_BLOCK, cache_type="blockcache"))
                file = persistent(file, repr(self.name))
            stored = opened.enter_context(open_hdf5(file, self.name))
            yield StoredAdata.of(self.name, stored, self._modality)

    def identity(self) -> dict[str, int | float | str]:
        """Return size and ETag, or what else the file system tells of a file."""
        system, path = _file_system(self.address, self._options)
        with reading(repr(self.name)):
            found = system.info(path)
        return {"size": int(found["size"]), "mark": _mark(found)}


def _mark(found: Mapping[str, Any]) -> str:
    return next((str(found[name]) for name in _MARKS if found.get(name) is not None), "")
