"""The client of the Hugging Face Hub, and what its errors mean."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

from scforge.errors import HubError, MissingFileError, OptionError, ScforgeError, first_line, safe_cause

if TYPE_CHECKING:
    from huggingface_hub import HfApi, ModelInfo


_TOKEN = re.compile("[!-~]+")
_TRUE = {"1", "ON", "YES", "TRUE"}


def hub_endpoint() -> str:
    """Return the address of the hub: ``HF_ENDPOINT`` as it is now, which huggingface_hub reads once, when imported."""
    from huggingface_hub import constants

    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or constants.ENDPOINT


def shown_endpoint() -> str:
    """Return the address of the hub without user and password, for messages and links."""
    return re.sub(r"^(\w+://)?[^/]*@", r"\1", hub_endpoint())


def is_offline() -> bool:
    """Return whether ``HF_HUB_OFFLINE`` says not to ask the hub, now or when huggingface_hub was imported."""
    from huggingface_hub import constants

    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return constants.HF_HUB_OFFLINE or any(os.environ.get(name, "").upper() in _TRUE for name in names)


def checked_token(token: str | bool | None) -> str | bool | None:
    """Return a token without the space around it, or raise unless it can be sent.

    The message does not hold the token. What the HTTP client says of one that it cannot send would.
    """
    from huggingface_hub import constants, get_token

    if token is not None and not isinstance(token, str | bool):
        raise OptionError(
            f"token is {type(token).__name__}, not text; give the token, True for that of hf auth login, or False for "
            "none."
        )
    if token is False or (token is None and constants.HF_HUB_DISABLE_IMPLICIT_TOKEN):
        return token
    found = token.strip() if isinstance(token, str) else get_token()
    if found is None and token is True:
        raise OptionError("token=True, but there is none here; log in with hf auth login, or set HF_TOKEN.")
    if found is not None and not _TOKEN.fullmatch(found):
        place = "token" if isinstance(token, str) else "the token of HF_TOKEN or hf auth login"
        what = "has characters that no token has (space, or other than ASCII)" if found else "is empty"
        raise OptionError(f"{place} {what}; copy it again.")
    return found if isinstance(token, str) else token


def read_remote(api: HfApi, repo_id: str, name: str, commit: str | None) -> bytes:
    """Return a small file of a repository, past the cache."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    url = hf_hub_url(repo_id, name, revision=commit, endpoint=api.endpoint)
    response = get_session().get(url, headers=build_hf_headers(token=api.token))
    hf_raise_for_status(response)
    return response.content


def hub_api(token: str | bool | None) -> HfApi:
    """Return a client for this token; None takes ``HF_TOKEN`` or that of ``hf auth login``, False takes none."""
    from huggingface_hub import HfApi

    from scforge._version import __version__

    return HfApi(endpoint=hub_endpoint(), token=token, library_name="scforge", library_version=__version__)


_COMMIT = re.compile("[0-9a-f]{40}")
_TOKEN_HELP = "token= (HF_TOKEN in the environment, or hf auth login)"


def _http() -> ModuleType:
    """Return the HTTP client of huggingface_hub, which went from httpx to httpx2; its errors are subclasses of it."""
    from huggingface_hub.errors import HfHubHTTPError

    (base,) = (cls for cls in HfHubHTTPError.__mro__ if cls.__name__ == "HTTPError")
    return importlib.import_module(base.__module__.partition(".")[0])


def silence_errors() -> tuple[type[Exception], ...]:
    """Return the errors of a hub that is not reached, or does not answer in time."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    http = _http()
    return (http.TimeoutException, http.NetworkError, OfflineModeIsEnabled)


@contextmanager
def hub_errors(said: str, repo_id: str, revision: str | None = None, *, writing: bool = False) -> Iterator[None]:
    """Do what :func:`_said` says, without the errors of the client where those show a password."""
    try:
        with _said(said, repo_id, revision, writing=writing):
            yield
    except ScforgeError as error:
        raise error from safe_cause(error.__cause__)


def answered[T](said: str, ask: Callable[[], T]) -> T:
    """Return what the hub answers, or raise :class:`~scforge.errors.HubError` if it makes no sense to its client."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return ask()
    except (ScforgeError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError):
        raise
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise HubError(
            f"{said}: {shown_endpoint()} answers what no hub answers ({first_line(error)}); check HF_ENDPOINT."
        ) from error


def info_of(api: HfApi, said: str, repo_id: str, revision: str | None = None) -> ModelInfo:
    """Return what the hub says of a repository, which has a commit."""
    info = answered(said, lambda: api.model_info(repo_id, revision=revision))
    if not isinstance(info.sha, str) or not _COMMIT.fullmatch(info.sha):
        raise HubError(f"{said}: {shown_endpoint()} names no commit of {repo_id!r}; check HF_ENDPOINT.")
    return info


@contextmanager
def _said(said: str, repo_id: str, revision: str | None = None, *, writing: bool = False) -> Iterator[None]:
    """Turn errors of huggingface_hub into one sentence.

    Parameters
    ----------
    said
        How the user named the repository, the beginning of the sentence: ``"name='org/model'"``.
    repo_id, revision
        What was asked for.
    writing
        Whether something is sent.

    Raises
    ------
    MissingFileError
        If there is no such repository or revision, or nothing in the cache.
    OptionError
        If a name or the address of the hub is malformed, a token is refused, or the cache cannot be written.
    HubError
        If the hub cannot be reached, or fails.
    """
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = "" if revision is None else f" at revision {revision!r}"
    http = _http()
    unsent = (http.UnsupportedProtocol, http.LocalProtocolError, http.InvalidURL)
    try:
        yield
    except ScforgeError:
        raise
    except HFValidationError as error:
        raise OptionError(
            f"{said} is no name of a repository ({first_line(error)}); give it as 'organization/name'."
        ) from error
    except GatedRepoError as error:
        raise OptionError(
            f"{said}: access to {repo_id!r} is granted on request only; ask for it at {shown_endpoint()}/{repo_id}, "
            f"and pass the token of that account as {_TOKEN_HELP}."
        ) from error
    except RevisionNotFoundError as error:
        raise MissingFileError(
            f"{said}: {repo_id!r} has no revision {revision!r}; give a branch, a tag or a commit of it as revision."
        ) from error
    except RepositoryNotFoundError as error:
        raise MissingFileError(
            f"{said}: there is no repository {repo_id!r} at {shown_endpoint()}, or it is private and the token does "
            f"not open it; check the name, or pass a token as {_TOKEN_HELP}."
        ) from error
    except LocalEntryNotFoundError as error:
        raise MissingFileError(
            f"{said}: {repo_id!r}{at} is not in the cache, or not all of it, and the hub was not asked or did not "
            "answer; fetch it once with a connection, or give cache_dir."
        ) from error
    except HfHubHTTPError as error:
        raise _of_status(said, repo_id, error, writing=writing) from error
    except unsent:
        # Nothing of what the client says: it would show the headers, and with them the token.
        raise OptionError(
            f"{said}: {shown_endpoint()!r} is no address of a hub; set HF_ENDPOINT to one, e.g. "
            "https://huggingface.co, or unset it."
        ) from None
    except (http.HTTPError, *silence_errors()) as error:
        raise no_answer(said, error) from error
    except RuntimeError as error:
        # Large files are sent by threads, whose errors come back inside another one.
        cause = error.__cause__
        if isinstance(cause, HfHubHTTPError):
            raise _of_status(said, repo_id, cause, writing=writing) from error
        if isinstance(cause, Exception) and isinstance(cause, (http.HTTPError, *silence_errors())):
            raise no_answer(said, cause) from error
        raise
    except OSError as error:
        why = " ".join(str(part) for part in (error.strerror, error.filename and repr(error.filename)) if part)
        fix = "give a folder that can be read" if writing else "give cache_dir, or HF_HUB_CACHE, where you may write"
        raise OptionError(f"{said}: a file cannot be used ({why or type(error).__name__}); {fix}.") from error


def no_answer(said: str, error: Exception, besides: str = "") -> HubError:
    """Return the error of a hub that does not answer; `besides` goes on behind the reason."""
    return HubError(
        f"{said}: {shown_endpoint()} does not answer ({first_line(error)}){besides}; check the connection and "
        "HF_ENDPOINT."
    )


def _of_status(said: str, repo_id: str, error: Exception, *, writing: bool) -> HubError | OptionError:
    response = getattr(error, "response", None)
    status = None if response is None else response.status_code
    message = getattr(error, "server_message", None)
    what = f"{status}" + (f", {message.splitlines()[0].rstrip('.')}" if message else "")
    if status == 401:
        return OptionError(
            f"{said}: {shown_endpoint()} does not know the token ({what}), or asks for one; pass a valid one as "
            f"{_TOKEN_HELP}."
        )
    if status == 403:
        needed = "may write to" if writing else "may read"
        return OptionError(
            f"{said}: {shown_endpoint()} forbids it ({what}); pass a token that {needed} {repo_id!r} as {_TOKEN_HELP}."
        )
    if writing and status in (409, 412):
        return HubError(f"{said}: somebody else has written to it meanwhile ({what}); look what, and push again.")
    fix = "try again later" if status is None or status >= 500 or status in (408, 429) else "check HF_ENDPOINT"
    return HubError(f"{said}: {shown_endpoint()} failed ({what}); {fix}.")
