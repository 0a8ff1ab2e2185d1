"""Files: atomic writes (a reader sees the old file or the whole new one), and JSON that anybody may have written."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scforge.errors import OptionError

__all__ = [
    "atomic_folder",
    "atomic_path",
    "atomic_write_bytes",
    "atomic_write_text",
    "check_folder",
    "parse_json",
    "read_json",
    "remove_folder",
    "sha256_of",
]


def check_folder(argument: str, path: str | os.PathLike[str]) -> None:
    """Raise if `path`, where a folder is to be, or one above it is a file."""
    for place in (Path(path), *Path(path).parents):
        if place.is_file():
            raise OptionError(f"{argument}={str(path)!r}: {str(place)!r} is a file; give the name of a folder.")


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it takes the place of `path`, on an error it is removed.

    The temporary name keeps the suffix of `path`, because several writers choose their format by it.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        # mkstemp files are private (0600); a result has the permissions of any other new file.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def atomic_write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` to `path` atomically."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def atomic_write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to `path` atomically, as UTF-8."""
    atomic_write_bytes(path, text.encode())


@contextlib.contextmanager
def atomic_folder(
    path: str | os.PathLike[str], *, overwrite: bool = False, argument: str = "dir_path"
) -> Iterator[Path]:
    """Yield an empty temporary folder beside `path`; on success it becomes `path`, on an error it is removed.

    What was written is on the disk before it gets its name, so that a machine that loses power leaves it whole, too.
    `argument` is what the caller calls `path`.

    Raises
    ------
    OptionError
        If `path` exists and `overwrite` is false, or is a file.
    """
    path = Path(path)
    check_folder(argument, path)
    if path.exists() and any(path.iterdir()) and not overwrite:
        raise OptionError(
            f"{argument}={str(path)!r} exists and is not empty; pass overwrite=True or choose another name."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    old = temporary.with_name(temporary.name + ".old")
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o777 & ~umask)
        for part in [*temporary.rglob("*"), temporary]:
            _to_disk(part)
        if path.exists():
            path.rename(old)
        try:
            temporary.rename(path)
        except OSError:
            if old.exists():
                old.rename(path)
            raise
        _to_disk(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)


def _to_disk(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_folder(path: str | os.PathLike[str]) -> None:
    """Remove a folder with all that is in it; first out of sight, so that nobody finds half of it."""
    path = Path(path)
    hidden = path.with_name(f".{path.name}.removed")
    path.rename(hidden)
    shutil.rmtree(hidden)


def sha256_of(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file as hexadecimal text."""
    with Path(path).open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def parse_json(data: bytes, *, most_items: int = 1_000_000, finite: bool = True) -> Any:
    """Read JSON from a file that anybody may have written.

    Stricter than :func:`json.loads`: a key twice in an object, numbers that are none or are not finite, and whole
    numbers of more than 20 digits are refused. What it takes in memory is bounded by `most_items`.

    Parameters
    ----------
    data
        The text, UTF-8.
    most_items
        Most keys and values, counted before anything is read.
    finite
        Whether ``NaN``, ``Infinity`` and numbers beyond the largest are refused.

    Raises
    ------
    ValueError
        Saying in a few words what is wrong.
    """
    text = data.decode("utf-8")
    n_items = text.count(",") + text.count("[") + text.count("{")
    if n_items > most_items:
        raise ValueError(f"it holds about {n_items:,} values, where {most_items:,} are the most that is read")
    number = _finite if finite else float
    try:
        return json.loads(
            text, object_pairs_hook=_once, parse_constant=number, parse_float=number, parse_int=_whole_number
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(
    path: str | os.PathLike[str], *, most_bytes: int = 2**25, most_items: int = 1_000_000, finite: bool = True
) -> Any:
    """Read a JSON file of at most `most_bytes` as :func:`parse_json` does, which names the other parameters and errors.

    Raises
    ------
    OSError
        If the file cannot be read.
    """
    with Path(path).open("rb") as handle:
        size = os.fstat(handle.fileno()).st_size
        if size > most_bytes:
            raise ValueError(f"it has {size:,} bytes, where {most_bytes:,} are the most that is read")
        data = handle.read(size)
    return parse_json(data, most_items=most_items, finite=finite)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"it holds the key {twice[:50]!r} twice")
    return content


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"it holds {text[:20]}, which is no finite number")
    return number


def _whole_number(text: str) -> int:
    if len(text) > 20:
        raise ValueError(f"it holds a whole number of {len(text)} digits")
    return int(text)
