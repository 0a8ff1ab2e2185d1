"""Atomic writes: a reader sees the old file or the whole new one, never a part."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from scforge.errors import OptionError

__all__ = [
    "atomic_folder",
    "atomic_path",
    "atomic_write_bytes",
    "atomic_write_text",
    "check_folder",
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
def atomic_folder(path: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty temporary folder beside `path`; on success it becomes `path`, on an error it is removed.

    What was written is on the disk before it gets its name, so that a machine that loses power leaves it whole, too.

    Raises
    ------
    OptionError
        If `path` exists and `overwrite` is false, or is a file.
    """
    path = Path(path)
    check_folder("dir_path", path)
    if path.exists() and any(path.iterdir()) and not overwrite:
        raise OptionError(
            f"dir_path={str(path)!r} exists and is not empty; pass overwrite=True or choose another name."
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
