"""Files and stores behind a URL, read with fsspec: bounded retries, bounded waiting, errors of one sentence."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from scforge.data.stream_errors import reading, reading_errors
from scforge.errors import DataError, MissingFileError, OptionError, did_you_mean, first_line

if TYPE_CHECKING:
    import zarr
    from fsspec import AbstractFileSystem
    from zarr.storage import FsspecStore

__all__ = ["is_url", "open_group", "remote_file_system"]

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


def open_group(url: str, storage_options: Mapping[str, Any] | None = None, *, mode: str = "r") -> zarr.Group:
    """Open a zarr group behind a URL; what is read of it later is read in pieces, each tried several times.

    Parameters
    ----------
    url, storage_options
        See :func:`remote_file_system`.
    mode
        As for :func:`zarr.open_group`.

    Raises
    ------
    MissingFileError
        If there is no group.
    DataError
        If the server cannot be reached, or access is refused. Reads that fail later raise the same.
    OptionError
        If nothing installed reads such URLs.
    """
    import zarr
    from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

    fs, path = remote_file_system(url, storage_options, asynchronous=True)
    if not fs.async_impl:
        fs = AsyncFileSystemWrapper(fs, asynchronous=True)
    elif hasattr(fs, "retries"):
        # s3fs retries three deep; a server that is down would take it minutes to believe.
        fs.retries = 1
    store = _remote_store()(fs, read_only=mode == "r", path=path.rstrip("/"))
    with reading(repr(url)):
        try:
            return zarr.open_group(store, mode=mode)  # type: ignore[arg-type]
        except FileNotFoundError as error:
            raise MissingFileError(f"{url!r} is not there, or is no zarr group; check the URL.") from error


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


async def _persistent[Result](ask: Callable[[], Awaitable[Result]], what: str) -> Result:
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


@cache
def _remote_store() -> type[FsspecStore]:
    """Return the class of stores; zarr is imported when the first one is opened."""
    from zarr.storage import FsspecStore

    class RemoteStore(FsspecStore):
        """A zarr store that asks again for what a broken connection did not bring."""

        def _name(self, key: str = "") -> str:
            return repr(self.fs.unstrip_protocol(f"{self.path}/{key}".rstrip("/")))

        async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
            """Return bytes of `key`."""
            get = super().get
            return await _persistent(lambda: get(key, prototype, byte_range), self._name(key))

        async def get_partial_values(self, prototype: Any, key_ranges: Iterable[Any]) -> Any:
            """Return bytes of several keys."""
            ranges, get = list(key_ranges), super().get_partial_values
            return await _persistent(lambda: get(prototype, ranges), self._name())

        async def exists(self, key: str) -> bool:
            """Return whether there is a `key`."""
            exists = super().exists
            return await _persistent(lambda: exists(key), self._name(key))

        async def set(self, key: str, value: Any, byte_range: Any = None) -> None:
            """Write `key`, whole: a try that broke off leaves nothing behind."""
            write = super().set
            await _persistent(lambda: write(key, value, byte_range), self._name(key))

    return RemoteStore
