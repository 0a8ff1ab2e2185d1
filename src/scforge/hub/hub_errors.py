"""What the hub's client raises, said as scforge says it: one sentence with the fix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from scforge.errors import HubError, MissingFileError, OptionError, first_line
from scforge.hub.client import hub_endpoint

__all__ = ["connection_errors", "hub_errors"]

_TOKEN = "token= (HF_TOKEN in the environment, or hf auth login)"


def connection_errors() -> tuple[type[Exception], ...]:
    """Return the errors of the HTTP client where there is no answer at all.

    huggingface_hub went from httpx to httpx2; its own error is a subclass of what either raises, so look there.
    """
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    base = [cls for cls in HfHubHTTPError.__mro__ if cls.__name__ == "HTTPError"]
    return (*base, OfflineModeIsEnabled)


@contextmanager
def hub_errors(said: str, repo_id: str, revision: str | None = None, *, writing: bool = False) -> Iterator[None]:
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
        If a name is malformed, or a token is refused.
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
    try:
        yield
    except HFValidationError as error:
        raise OptionError(
            f"{said} is no name of a repository ({first_line(error)}); give it as 'organisation/name'."
        ) from error
    except GatedRepoError as error:
        raise OptionError(
            f"{said}: access to {repo_id!r} is granted on request only; ask for it at {hub_endpoint()}/{repo_id}, and "
            f"pass the token of that account as {_TOKEN}."
        ) from error
    except RevisionNotFoundError as error:
        raise MissingFileError(
            f"{said}: {repo_id!r} has no revision {revision!r}; give a branch, a tag or a commit of it as revision."
        ) from error
    except RepositoryNotFoundError as error:
        raise MissingFileError(
            f"{said}: there is no repository {repo_id!r} at {hub_endpoint()}, or it is private and the token does not "
            f"open it; check the name, or pass a token as {_TOKEN}."
        ) from error
    except LocalEntryNotFoundError as error:
        raise MissingFileError(
            f"{said}: {repo_id!r}{at} is not in the cache, or not all of it, and the hub was not asked or did not "
            "answer; fetch it once with a connection, or give cache_dir."
        ) from error
    except HfHubHTTPError as error:
        raise _of_status(said, repo_id, error, writing=writing) from error
    except connection_errors() as error:
        raise _no_answer(said, error) from error
    except RuntimeError as error:
        # Large files are sent by threads, whose errors come back inside another one.
        if isinstance(error.__cause__, HfHubHTTPError):
            raise _of_status(said, repo_id, error.__cause__, writing=writing) from error
        if isinstance(error.__cause__, connection_errors()):
            raise _no_answer(said, error.__cause__) from error
        raise


def _no_answer(said: str, error: BaseException) -> HubError:
    why = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
    return HubError(f"{said}: {hub_endpoint()} does not answer ({why}); check the connection and HF_ENDPOINT.")


def _of_status(said: str, repo_id: str, error: Exception, *, writing: bool) -> HubError | OptionError:
    response = getattr(error, "response", None)
    status = None if response is None else response.status_code
    message = getattr(error, "server_message", None)
    what = f"{status}" + (f", {message.splitlines()[0].rstrip('.')}" if message else "")
    if status == 401:
        return OptionError(f"{said}: {hub_endpoint()} does not know the token ({what}); pass a valid one as {_TOKEN}.")
    if status == 403:
        needed = "may write to" if writing else "may read"
        return OptionError(
            f"{said}: {hub_endpoint()} forbids it ({what}); pass a token that {needed} {repo_id!r} as {_TOKEN}."
        )
    return HubError(f"{said}: {hub_endpoint()} failed ({what}); try again later.")
