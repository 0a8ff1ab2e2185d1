"""What reading raises: damage, a file that is gone, a connection that broke; each becomes one sentence."""

from __future__ import annotations

import contextlib
import lzma
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from http import HTTPStatus

from scforge.errors import DataError, MissingFileError, ScforgeError, first_line, safe_cause

__all__ = ["LATER", "reading", "reading_errors", "refusal"]

_LOCAL = (
    *(OSError, EOFError, LookupError, ValueError, TypeError, AttributeError, RuntimeError, ArithmeticError),
    *(AssertionError, ImportError, MemoryError, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile, zlib.error),
)
"""What h5py, zarr, its codecs, anndata and fsspec raise for missing, odd, damaged or huge parts."""

LATER = {408, 425, 429, *range(500, 600)}
"""Answers of a web server that may be others a little later."""

_CLIENTS = {
    "aiohttp": ("ClientError",),
    "anndata._io.specs.registry": ("IORegistryError",),  # a way of storing that this anndata does not know
    "botocore.exceptions": ("BotoCoreError", "ClientError"),
    "gcsfs.retry": ("HttpError",),
    "google.auth.exceptions": ("GoogleAuthError",),
    "httpx": ("HTTPError",),
    "httpx2": ("HTTPError",),
    "requests": ("RequestException",),
}
"""Modules of remote stores, and their errors, which are of no common family."""


def reading_errors() -> tuple[type[Exception], ...]:
    """Return the errors of reading, those of the clients that are loaded among them."""
    return (*_LOCAL, *_clients(*_CLIENTS))


def _clients(*modules: str) -> list[type[Exception]]:
    """Return the errors of those of the modules that are loaded."""
    return [
        getattr(sys.modules[module], name)
        for module in modules
        if module in sys.modules
        for name in _CLIENTS[module]
        if hasattr(sys.modules[module], name)
    ]


def refusal(error: BaseException) -> tuple[int, str] | None:
    """Return the status with which a web server refused something, and what that means; None for another error.

    fsspec says of most of them that there is no such file, with the true one behind it.
    """
    found: BaseException | None = error
    while found is not None and not isinstance(getattr(found, "status", None), int):
        found = found.__cause__
    status = getattr(found, "status", 404)
    if status in (404, 410):
        return None
    if status < 400:
        return status, "the server redirects without end; check the URL"
    phrase = HTTPStatus(status).phrase if status in HTTPStatus else "unknown"
    fix = "check the URL"
    if status in (401, 403):
        fix = "check the credentials in the URL or in storage_options"
    elif status in LATER:
        fix = "try again later"
    return status, f"the server answers {status} ({phrase}); {fix}"


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
        if told := refusal(error):
            raise DataError(f"{what} cannot be read: {told[1]}.") from safe_cause(error)
        behind = error.__cause__
        lost = isinstance(behind, (TimeoutError, *_clients("aiohttp"))) and not hasattr(behind, "status")
        if lost and isinstance(behind, Exception):
            raise DataError(
                f"{what} cannot be reached ({first_line(behind)}); check the URL and the connection."
            ) from safe_cause(error)
        raise MissingFileError(f"{what} does not exist; check the name.") from safe_cause(error)
    except PermissionError as error:
        raise DataError(
            f"{what} may not be read ({first_line(error)}); "
            "check the permissions, or the credentials in storage_options."
        ) from safe_cause(error)
    except TimeoutError as error:
        raise DataError(f"{what} cannot be reached in time; check the connection and try again.") from safe_cause(error)
    except reading_errors() as error:
        if told := refusal(error):
            raise DataError(f"{what} cannot be read: {told[1]}.") from safe_cause(error)
        read, tail = (f"read {how}" if how else "read"), (f"; {fix}" if fix else "")
        raise DataError(f"{what} cannot be {read}: {first_line(error)}{tail}.") from safe_cause(error)
