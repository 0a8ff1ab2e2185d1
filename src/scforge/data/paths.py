"""Paths and URLs of cells, checked without reading them and without slow imports."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from scforge._io import check_folder, left_by_swap, others_in_store, read_json, working_folders
from scforge._opening import check_regular
from scforge.errors import SECRET, DataError, MissingFileError, ModelFileError, OptionError, listing, redacted, spelled

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+::)*[A-Za-z][A-Za-z0-9+.-]+://")

PROTOCOLS = ("file", "memory", "http", "https", "s3", "gs", "gcs", "az", "abfs", "abfss", "hf")
"""Protocols of URLs that scforge opens. Others of fsspec read further files that the data name, or run expressions."""

_OTHER_PLACES = {
    *("cache_storage", "fo", "fs", "protocol", "ref_storage_args", "remote_options", "remote_protocol"),
    *("simple_templates", "target_options", "target_protocol", "templates"),
}
"""Options that make fsspec read from another place than the URL names."""

_ENDPOINTS = {
    "hf": ("endpoint", "HF_ENDPOINT"),
    "gs": ("endpoint_url", "STORAGE_EMULATOR_HOST"),
    "gcs": ("endpoint_url", "STORAGE_EMULATOR_HOST"),
}
"""Options that name a server to which the client sends the user's token, and the variables that do so instead."""

STORE_KEY = "scforge"
"""Root attribute and group of a store with its description."""

_FILES = {".h5ad", ".h5", ".h5mu", ".hdf5", ".loom", ".csv", ".tsv", ".txt", ".json", ".yaml", ".parquet", ".zip"}
"""File extensions that a folder should not have."""


def is_url(place: Any) -> bool:
    r"""Return whether `place` is text that begins with one or several URL schemes, e.g. ``"s3://bucket/cells.h5ad"``.

    Examples
    --------
    >>> is_url("s3://bucket/store.zarr"), is_url("cells.h5ad"), is_url(r"C:\cells.h5ad")
    (True, False, False)
    """
    return isinstance(place, str) and _SCHEME.match(place) is not None


def check_url(url: str, storage_options: Mapping[str, Any] | None = None) -> str:
    """Return the protocol of a URL. Raises an OptionError if it, or an option, may open more than the URL names."""
    scheme = url.partition("://")[0].lower()
    if "::" in url:
        raise OptionError(f"{url!r} chains URLs with '::', which scforge does not open; pass the URL of the data.")
    if scheme not in PROTOCOLS:
        raise OptionError(f"{url!r} has the protocol {scheme!r}; use one of {listing(PROTOCOLS)}, or a local copy.")
    own = (storage_options or {}).get(scheme)  # fsspec adds the options under the name of the protocol to the others
    given = {*(storage_options or ()), *(own if isinstance(own, Mapping) else ())}
    option, variable = _ENDPOINTS.get(scheme, ("", ""))
    if option in given:
        raise OptionError(
            f"contains {option!r}, a server that would get your credentials for {url!r}; remove it, or "
            f"set the environment variable {variable}.",
            argument="storage_options",
        )
    if others := sorted(_OTHER_PLACES & given):
        raise OptionError(
            f"contains {listing(others)}, which names another place than {url!r}; pass only options of "
            f"the protocol {scheme!r}.",
            argument="storage_options",
        )
    return scheme


def stem_of(place: str) -> str:
    """Return the name of a file or URL without its extension, and without what may be a credential.

    Examples
    --------
    >>> stem_of("folder/cells.h5ad"), stem_of("https://me:secret@host/cells.h5ad?signature=a.b/c")
    ('cells', 'cells')
    """
    if is_url(place):
        place = re.split("[?#]", redacted(repr(place))[1:-1])[0].rpartition(f"{SECRET}@")[2]
    return PurePath(place).stem


def check_file(path: str | os.PathLike[str]) -> None:
    """Raise an error if the file does not exist; the message suggests the most similar name in the same folder."""
    if Path(path).is_dir():
        raise DataError(f"{str(path)!r} is a folder; pass the path of an h5ad file.")
    if not Path(path).exists():
        raise MissingFileError(f"the file {str(path)!r} does not exist{similar_file(Path(path))}")
    check_regular(path)


def similar_file(path: Path) -> str:
    """Return the end of a sentence on a missing file: how to restore it, the most similar file name, or a period."""
    if left := left_by_swap(path):
        return f", because a process was killed while replacing it; rename {str(left[0])!r} to restore the earlier one."
    # The common ending makes all names alike, so it does not count.
    others = {other.stem: other.name for other in path.parent.glob(f"*{path.suffix}")}
    near = difflib.get_close_matches(path.stem, others, n=1, cutoff=0.7)
    return f"; did you mean {others[near[0]]!r}?" if near else "."


def is_unfinished(path: str | os.PathLike[str]) -> bool:
    """Return whether a store does not exist, but is being written, or was when a process was killed."""
    path = Path(path)
    return not path.exists() and bool(working_folders(path.parent, f".{path.name}"))


def check_exists(place: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> None:
    """Raise an error if a local file or folder does not exist, nor a store that is still being written.

    Patterns and URLs pass, except a URL that scforge does not open with these options.
    """
    name = os.fspath(place)
    if is_url(name):
        check_url(name, storage_options)
        return
    if any(mark in name for mark in "*?["):
        return
    if not Path(name).exists() and not is_unfinished(name):
        raise MissingFileError(f"the file {name!r} does not exist{similar_file(Path(name))}")
    check_regular(name)


def holds_store(folder: Path) -> bool:
    """Return whether a local folder is a complete scforge store."""
    try:
        return isinstance(read_json(folder / "zarr.json").get("attributes", {}).get(STORE_KEY), dict)
    except (OSError, MissingFileError, ModelFileError, AttributeError):
        return False


def check_target(path: str | os.PathLike[str], overwrite: bool, append: bool = False) -> Path:
    """Return the absolute path of a store that does not exist yet, may be replaced, or to which cells are appended."""
    name = os.fspath(path)
    if is_url(name):
        problem = "append to a local copy" if append else "convert to a local folder"
        raise OptionError(f"is a URL; {problem}, and then upload the store.", path=name)
    target = Path(name).resolve()
    if append and overwrite:
        raise OptionError("cannot replace a store and add to it; omit append or overwrite.", append=True)
    if append:
        return _check_grows(target)
    check_folder("path", target)
    if target.suffix in _FILES and not target.is_dir():
        raise OptionError("has a file extension, but a store is a folder; choose e.g. 'store.zarr'.", path=name)
    if target.exists():
        if not holds_store(target) and any(target.iterdir()):
            raise OptionError("exists and is not a store; choose another name, or remove it.", path=str(target))
        if not overwrite:
            how = spelled("overwrite=True", "--overwrite")
            raise OptionError(f"exists; pass {how} or choose another name.", path=str(target))
        if others := others_in_store(target):
            raise OptionError(
                f"contains {listing(others)}, which scforge did not write; move it, or choose another name.",
                path=str(target),
            )
    return target


def _check_grows(target: Path) -> Path:
    """Return the absolute path of a store to which cells can be appended."""
    how = spelled("append=True", "--append")
    if is_unfinished(target):
        raise DataError(f"{str(target)!r} is incomplete; run the command that creates it again, without {how}.")
    if not target.exists():
        raise MissingFileError(f"the store {str(target)!r} does not exist; omit {how} to create it.")
    if not holds_store(target):
        raise DataError(
            f"{str(target)!r} is not a store; pass a folder that was written by scforge convert, or omit {how}."
        )
    return target
