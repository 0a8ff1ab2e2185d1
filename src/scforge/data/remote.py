"""Files and stores behind a URL, read with fsspec: bounded retries, bounded waiting, errors of one sentence."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from scforge.data.stream_errors import reading_errors
from scforge.errors import DataError, OptionError, did_you_mean, first_line

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

__all__ = ["ask_again", "is_url", "remote_file_system"]

logger = logging.getLogger("scforge")

TRIES = 5
"""How often one piece is asked for before reading gives up."""

FIRST_WAIT_S = 0.2
"""Seconds before the second try; each further wait is twice as long."""

TRY_S = 60.0
"""Seconds that one try may take."""

_CONNECT_S, _READ_S = 10, 30
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_FINAL = (
    *(FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError),
    *(KeyError, ValueError, TypeError, IndexError, AttributeError),
)
"""Errors that another try does not mend."""


def is_url(place: Any) -> bool:
    r"""Return whether `place` is text that names a scheme, as ``"s3://bucket/cells.h5ad"`` does.

    Examples
    --------
    >>> is_url("s3://bucket/store.zarr"), is_url("cells.h5ad"), is_url(r"C:\cells.h5ad")
    (True, False, False)
    """
    return isinstance(place, str) and _SCHEME.match(place) is not None


def remote_file_system(
    url: str, storage_options: Mapping[str, Any] | None = None, *, asynchronous: bool = False
) -> tuple[AbstractFileSystem, str]:
    """Return the file system of a URL and the path on it; no connection is made yet.

    Parameters
    ----------
    url
        Any URL that fsspec knows.
    storage_options
        Options of its file system, e.g. ``{"key": ..., "secret": ..., "endpoint_url": ...}`` for S3.
    asynchronous
        For use inside an event loop, as zarr does.

    Raises
    ------
    OptionError
        If nothing installed reads such URLs, or an option is unknown.
    """
    from fsspec.core import url_to_fs
    from fsspec.registry import available_protocols

    options = _with_limits(url.partition("://")[0], dict(storage_options or {}))
    try:
        return url_to_fs(url, **options, asynchronous=asynchronous)
    except ImportError as error:
        raise OptionError(
            f"{url!r} needs a package that is not installed ({first_line(error)}); "
            'install the clients of S3 and Google Cloud with: pip install "scforge[cloud]".'
        ) from error
    except ValueError as error:
        known = available_protocols()
        if (scheme := url.partition("://")[0]) not in known:
            raise OptionError(
                f"{url!r} starts with the unknown scheme {scheme!r}{did_you_mean(scheme, known) or ';'} "
                "(fsspec knows s3, gs, https and others)"
            ) from error
        raise OptionError(f"storage_options cannot be used for {url!r}: {first_line(error)}.") from error
    except TypeError as error:
        raise OptionError(f"storage_options cannot be used for {url!r}: {first_line(error)}.") from error


def _with_limits(scheme: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return `options` with limits on waiting and on the client's own retries, where the user set none."""
    if scheme in ("s3", "s3a"):
        limits = {"connect_timeout": _CONNECT_S, "read_timeout": _READ_S, "retries": {"total_max_attempts": 1}}
        options["config_kwargs"] = {**limits, **options.get("config_kwargs", {})}
    elif scheme in ("http", "https"):
        from aiohttp import ClientTimeout

        limits = {"timeout": ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_READ_S)}
        options["client_kwargs"] = {**limits, **options.get("client_kwargs", {})}
    return options


async def ask_again[Result](ask: Callable[[], Awaitable[Result]], what: str) -> Result:
    """Ask again after errors of the connection.

    Raises
    ------
    DataError
        If the last try fails, too, or access is refused.
    """
    wait = FIRST_WAIT_S
    for left in reversed(range(TRIES)):
        try:
            return await asyncio.wait_for(ask(), TRY_S)
        except PermissionError as error:
            raise DataError(
                f"{what} may not be read ({first_line(error)}); check the credentials in storage_options."
            ) from error
        except _FINAL:
            raise
        except reading_errors() as error:
            if not left:
                raise DataError(
                    f"{what} cannot be reached, tried {TRIES} times ({first_line(error)}); "
                    "check the connection and storage_options, and run this again."
                ) from error
            logger.debug("Reading %s again in %g s: %s", what, wait, error)
        await asyncio.sleep(wait)
        wait *= 2
    raise AssertionError("the last try returns or raises")
