"""Files and stores behind a URL, read with fsspec: bounded retries, bounded waiting, errors of one sentence."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from fsspec.asyn import get_loop, sync

from scforge.data.stream_errors import LATER, reading, reading_errors, refusal
from scforge.errors import SECRET, DataError, OptionError, did_you_mean, first_line, redacted, safe_cause

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

__all__ = ["ask_again", "is_url", "persistent", "remote_file_system", "without_query"]

logger = logging.getLogger("scforge")

TRIES = 5
"""How often one piece is asked for before reading gives up."""

FIRST_WAIT_S = 0.2
"""Seconds before the second try; each further wait is twice as long."""

TRY_S = 60.0
"""Seconds that one try may take."""

PIECE_S = 120.0
"""Seconds after which one piece is not asked for again: a server that sends a byte now and then never ends."""

_CONNECT_S, _READ_S = 10, 30
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+::)*[A-Za-z][A-Za-z0-9+.-]+://")
_FINAL = (
    *(FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError),
    *(KeyError, ValueError, TypeError, IndexError, AttributeError),
)
"""Errors that another try does not mend."""


def is_url(place: Any) -> bool:
    r"""Return whether `place` is text that names a scheme, as ``"s3://bucket/cells.h5ad"`` does, or several.

    Examples
    --------
    >>> is_url("s3://bucket/store.zarr"), is_url("cells.h5ad"), is_url(r"C:\cells.h5ad")
    (True, False, False)
    """
    return isinstance(place, str) and _SCHEME.match(place) is not None


def without_query(url: str) -> str:
    """Return a URL up to its query, which only web servers have: elsewhere ``?`` is part of a pattern."""
    return url.partition("?")[0] if url.startswith(("http://", "https://")) else url


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
        If nothing installed reads such URLs, an option is unknown, or a credential was left out, see
        :func:`scforge.errors.redacted`.
    """
    from fsspec.core import url_to_fs
    from fsspec.registry import available_protocols

    if f"://{SECRET}@" in url or f"?{SECRET}" in url or f"'{SECRET}'" in repr(storage_options):
        raise OptionError(f"{url!r} needs a credential, which scforge does not write into files; give all of it again.")
    scheme, known = url.partition("://")[0], available_protocols()
    with reading(repr(url)):
        try:
            options = _with_limits(scheme, dict(storage_options or {}))
            found = url_to_fs(url, **options, asynchronous=asynchronous)
        except ImportError as error:
            raise OptionError(
                f"{url!r} needs a package that is not installed ({first_line(error)}); "
                'install the clients of S3 and Google Cloud with: pip install "scforge[cloud]".'
            ) from safe_cause(error)
        except (ValueError, TypeError) as error:
            if "::" not in scheme and scheme not in known:
                raise OptionError(
                    f"{url!r} starts with the unknown scheme {scheme!r}{did_you_mean(scheme, known)} "
                    "(fsspec knows s3, gs, https and others)"
                ) from safe_cause(error)
            problem = f"storage_options cannot be used for {url!r}: {first_line(error)}."
            raise OptionError(problem) from safe_cause(error)
    return found


def _with_limits(scheme: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return `options` with limits on waiting and on the client's own retries, where the user set none."""
    if scheme in ("s3", "s3a"):
        limits = {"connect_timeout": _CONNECT_S, "read_timeout": _READ_S, "retries": {"total_max_attempts": 1}}
        options["config_kwargs"] = {**limits, **options.get("config_kwargs", {})}
    elif scheme in ("http", "https"):
        from aiohttp import ClientTimeout

        limits = {"timeout": ClientTimeout(total=TRY_S, sock_connect=_CONNECT_S, sock_read=_READ_S)}
        options["client_kwargs"] = {**limits, **options.get("client_kwargs", {})}
    return options


async def ask_again[Result](ask: Callable[[], Awaitable[Result]], what: str) -> Result:
    """Ask again after errors of the connection.

    Raises
    ------
    DataError
        If the last try fails, too, or access is refused.
    """
    wait, until = FIRST_WAIT_S, time.monotonic() + PIECE_S
    for number in range(1, TRIES + 1):
        try:
            return await asyncio.wait_for(ask(), TRY_S)
        except PermissionError as error:
            raise DataError(
                f"{what} may not be read ({first_line(error)}); check the credentials in storage_options."
            ) from safe_cause(error)
        except _FINAL:
            raise
        except reading_errors() as error:
            told = refusal(error)
            last = number == TRIES or time.monotonic() > until
            if told and (last or told[0] not in LATER):
                raise DataError(f"{what} cannot be read: {told[1]}.") from safe_cause(error)
            if last:
                raise DataError(
                    f"{what} cannot be reached, tried {number} times ({first_line(error)}); "
                    "check the connection and storage_options, and run this again."
                ) from safe_cause(error)
            logger.debug("Reading again in %g s: %s", wait, redacted(f"{what}: {error}"))
        await asyncio.sleep(wait)
        wait *= 2
    raise AssertionError("the last try returns or raises")


def persistent(file: Any, what: str) -> Any:
    """Return a file of fsspec that asks several times for each block that it lacks, and takes no part of one for it."""
    if (blocks := getattr(file, "cache", None)) is None or getattr(blocks, "fetcher", None) is None:
        return file  # of a disk, or of memory
    fetch = blocks.fetcher

    def whole(start: int, stop: int) -> bytes:
        found = fetch(start, stop)
        if len(found) < (wanted := min(stop, blocks.size) - start):
            raise OSError(f"{wanted:,} bytes were asked for, and {len(found):,} came")
        return found

    def again(start: int, stop: int) -> bytes:
        # h5py holds its lock meanwhile: a thread that collects garbage of h5py would wait for it, and be waited for.
        collects = gc.isenabled()
        gc.disable()
        try:
            return sync(get_loop(), ask_again, lambda: asyncio.to_thread(whole, start, stop), what)
        finally:
            if collects:
                gc.enable()

    blocks.fetcher = again
    return file
