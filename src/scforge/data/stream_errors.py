"""What reading raises: damage, a file that is gone, a connection that broke; each becomes one sentence."""

from __future__ import annotations

import contextlib
import lzma
import sys
import zipfile
import zlib
from collections.abc import Iterator

from scforge.errors import DataError, MissingFileError, ScforgeError, first_line

__all__ = ["reading", "reading_errors"]

_LOCAL = (
    *(OSError, EOFError, LookupError, ValueError, TypeError, AttributeError, RuntimeError, ArithmeticError),
    *(AssertionError, ImportError, MemoryError, lzma.LZMAError, zipfile.BadZipFile, zlib.error),
)
"""What h5py, zarr, its codecs, anndata and fsspec raise for missing, odd, damaged or huge parts."""

_CLIENTS = {
    "aiohttp": ("ClientError",),
    "anndata._io.specs.registry": ("IORegistryError",),  # a way of storing that this anndata does not know
    "botocore.exceptions": ("BotoCoreError", "ClientError"),
    "gcsfs.retry": ("HttpError",),
    "google.auth.exceptions": ("GoogleAuthError",),
    "requests": ("RequestException",),
}
"""Modules of remote stores, and their errors, which are of no common family."""


def reading_errors() -> tuple[type[Exception], ...]:
    """Return the errors of reading, those of the clients that are loaded among them."""
    loaded = [
        getattr(sys.modules[module], name)
        for module, names in _CLIENTS.items()
        if module in sys.modules
        for name in names
        if hasattr(sys.modules[module], name)
    ]
    return (*_LOCAL, *loaded)


@contextlib.contextmanager
def reading(what: str, *, how: str = "", fix: str = "") -> Iterator[None]:
    """Turn an error of reading into one sentence.

    Parameters
    ----------
    what
        What is read, e.g. ``"'X' of 'cells.h5ad'"``.
    how
        As what it is read, e.g. ``"as an h5ad file"``.
    fix
        What to do about damage.

    Raises
    ------
    MissingFileError
        If the file is not there.
    DataError
        For any other error of reading.
    """
    try:
        yield
    except ScforgeError:
        raise
    except FileNotFoundError as error:
        raise MissingFileError(f"{what} does not exist; check the name.") from error
    except PermissionError as error:
        raise DataError(
            f"{what} may not be read ({first_line(error)}); "
            "check the permissions, or the credentials in storage_options."
        ) from error
    except reading_errors() as error:
        read, tail = (f"read {how}" if how else "read"), (f"; {fix}" if fix else "")
        raise DataError(f"{what} cannot be {read}: {first_line(error)}{tail}.") from error
