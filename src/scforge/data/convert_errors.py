"""A disk that is full, told in one sentence."""

from __future__ import annotations

import contextlib
import errno
import re
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
def full_disk(target: Path, n_bytes: float) -> Iterator[None]:
    """Turn the error of a full disk into one sentence.

    Parameters
    ----------
    target
        Path of the store.
    n_bytes
        What the conversion needs, about.

    Raises
    ------
    DataError
        If the disk of `target` is full.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        # zarrs tells what the system says in a text.
        told = re.search(r"\(os error (\d+)\)", str(error))
        number = int(told[1]) if told else getattr(error, "errno", None)
        if number not in _FULL:
            raise
        free = shutil.disk_usage(target.parent).free
        raise DataError(
            f"the disk of {str(target)!r} is full ({first_line(error)}): {_size(free)} are free, and the conversion "
            f"needs about {_size(n_bytes)} in all; make room, and run the same conversion again to continue."
        ) from error


def _size(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:,.2f} GB" if n_bytes >= 1e8 else f"{n_bytes / 1e6:,.2f} MB"
