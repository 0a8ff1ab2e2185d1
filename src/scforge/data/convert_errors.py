"""A disk that is full, told in one sentence."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from scforge.errors import DataError, first_line

__all__ = ["check_space", "full_disk"]

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""No space, no quota left; a file larger than the file system or the limits of the process allow."""


def check_space(folder: Path, n_bytes: float) -> None:
    """Raise if there is not enough space for so many bytes of temporary files.

    Raises
    ------
    DataError
        If there is not.
    """
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        raise DataError(
            f"{str(folder.parent)!r} has {_size(free)} of free space, but the conversion needs about "
            f"{_size(n_bytes)}; make room, or choose a path on a larger disk."
        )


@contextlib.contextmanager
def full_disk(target: Path) -> Iterator[None]:
    """Turn the error of a full disk into one sentence.

    Raises
    ------
    DataError
        If the disk of `target` is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise _told(target, error) from error


def _told(target: Path, error: Exception) -> DataError:
    free = shutil.disk_usage(target.parent).free
    return DataError(
        f"the disk of {str(target)!r} is full ({first_line(error)}; {_size(free)} free): make room, and run the same "
        "conversion again to continue."
    )


def _size(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:,.2f} GB"
