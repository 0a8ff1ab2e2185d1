"""AnnData in zarr folders and behind URLs: where they are, and how they are opened."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scforge.data.stream_errors import reading
from scforge.data.stream_stored import StoredAdata
from scforge.errors import DataError, MissingFileError, OptionError, did_you_mean, listing

__all__ = ["UrlPlace", "ZarrPlace", "expand_url", "file_system", "is_url", "is_zarr"]

_BLOCK = 2**22
"""Bytes that are fetched of an h5ad file at a time; 32 such blocks are kept."""

_MARKS = ("ETag", "etag", "md5Hash", "LastModified", "mtime", "created")
"""What file systems say of a file that changes with it, the surest first."""

_METADATA = ("zarr.json", ".zgroup", ".zattrs")
"""Files of which a zarr folder has one."""


def is_url(path: str) -> bool:
    """Whether `path` is a URL of a file system that fsspec knows, e.g. ``"s3://bucket/cells.h5ad"``."""
    return "://" in path


def file_system(url: str, options: Mapping[str, Any] | None = None) -> tuple[Any, str]:
    """Return the file system of a URL, and the path on it.

    Raises
    ------
    OptionError
        If its kind is not known, its client is not installed, or it does not take the options.
    """
    import fsspec

    protocol = url.split("://", 1)[0].split("::")[-1]
    try:
        system, path = fsspec.core.url_to_fs(url, **(options or {}))
    except ImportError as error:
        clients = 'pip install "scforge[cloud]"'
        raise OptionError(f"{url!r} needs a client that is not installed ({error}); run: {clients}") from error
    except ValueError as error:
        if protocol in fsspec.available_protocols():
            raise OptionError(f"{url!r} cannot be opened with these storage_options: {error}.") from error
        known = ("file", "gs", "http", "https", "memory", "s3")
        raise OptionError(
            f"{url!r} is of no file system that fsspec knows{did_you_mean(protocol, known) or ';'} "
            f"(known, among others: {listing(known)})"
        ) from error
    except TypeError as error:
        raise OptionError(f"storage_options={listing(options or {})} do not suit {url!r}: {error}.") from error
    return system, path


def expand_url(url: str, options: Mapping[str, Any] | None = None) -> list[str]:
    """Return the URLs that a pattern stands for, in order of their names.

    Raises
    ------
    MissingFileError
        If there are none.
    """
    system, path = file_system(url, options)
    with reading(repr(url)):
        found = sorted(system.unstrip_protocol(one) for one in system.glob(path))
    if not found:
        raise MissingFileError(f"no file fits the pattern {url!r}; check the folder and the ending.")
    return found


def is_zarr(place: str, options: Mapping[str, Any] | None = None) -> bool:
    """Whether a path or URL is a zarr folder, and no file."""
    if not is_url(place):
        return Path(place).is_dir()
    if Path(place).suffix in (".h5ad", ".h5mu", ".zarr"):
        return place.endswith(".zarr")
    system, path = file_system(place, options)
    with reading(repr(place)):
        return any(system.exists(f"{path.rstrip('/')}/{name}") for name in _METADATA)


class ZarrPlace:
    """An AnnData in a zarr folder, here or behind a URL, or one modality of a MuData in it."""

    def __init__(self, path: str, modality: str | None = None, options: Mapping[str, Any] | None = None) -> None:
        self.name, self._modality, self._options = path, modality, dict(options or {})

    @contextlib.contextmanager
    def open(self) -> Iterator[StoredAdata]:
        """Open it for reading."""
        import zarr

        if is_url(self.name):
            file_system(self.name, self._options)  # tells what is missing
            with reading(repr(self.name), how="as a zarr folder"):
                store: Any = zarr.storage.FsspecStore.from_url(
                    self.name, storage_options=self._options or None, read_only=True
                )
                group = zarr.open_group(store, mode="r")
        else:
            if not any((Path(self.name) / name).exists() for name in _METADATA):
                raise DataError(f"{self.name!r} is a folder without zarr metadata; name an h5ad file or a zarr folder.")
            with reading(repr(self.name), how="as a zarr folder"):
                group = zarr.open_group(self.name, mode="r")
        yield StoredAdata.of(self.name, group, self._modality)

    def identity(self) -> dict[str, int | float | str]:
        """Return the size of all files, and a digest of their names, sizes and times of change (or ETags)."""
        system, path = file_system(self.name if is_url(self.name) else os.fspath(Path(self.name).resolve()))
        if is_url(self.name):
            system, path = file_system(self.name, self._options)
        digest, size = hashlib.blake2b(digest_size=16), 0
        with reading(repr(self.name)):
            for name, found in sorted(system.find(path, detail=True).items()):
                size += int(found["size"])
                digest.update(f"{name.removeprefix(path)}\0{found['size']}\0{_mark(found)}\n".encode())
        return {"size": size, "files": digest.hexdigest()}


class UrlPlace:
    """An h5ad file behind a URL, or one modality of an h5mu file."""

    def __init__(self, url: str, modality: str | None = None, options: Mapping[str, Any] | None = None) -> None:
        self.name, self._modality, self._options = url, modality, dict(options or {})

    @contextlib.contextmanager
    def open(self) -> Iterator[StoredAdata]:
        """Open it for reading, through a cache of the blocks used last."""
        import h5py

        system, path = file_system(self.name, self._options)
        with contextlib.ExitStack() as opened:
            with reading(repr(self.name), how="as an h5ad file"):
                file = opened.enter_context(system.open(path, "rb", block_size=_BLOCK, cache_type="blockcache"))
                stored = opened.enter_context(h5py.File(file, "r"))
            yield StoredAdata.of(self.name, stored, self._modality)

    def identity(self) -> dict[str, int | float | str]:
        """Return size and ETag, or what else the file system tells of a file."""
        system, path = file_system(self.name, self._options)
        with reading(repr(self.name)):
            found = system.info(path)
        return {"size": int(found["size"]), "mark": _mark(found)}


def _mark(found: Mapping[str, Any]) -> str:
    return next((str(found[name]) for name in _MARKS if found.get(name) is not None), "")
