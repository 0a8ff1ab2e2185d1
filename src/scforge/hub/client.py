"""The client of the Hugging Face Hub, and what its errors mean."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from scforge._version import __version__
from scforge.errors import HubError, MissingFileError, OptionError, ScforgeError, safe_cause

if TYPE_CHECKING:
    from huggingface_hub import HfApi


def hub_api(token: str | bool | None) -> HfApi:
    """Return a client for a token; None takes ``HF_TOKEN`` or that of ``hf auth login``, False takes none."""
    from huggingface_hub import HfApi

    return HfApi(token=token, library_name="scforge", library_version=__version__)


@contextmanager
def hub_errors(said: str, repo_id: str, revision: str | None = None) -> Iterator[None]:
    """Turn an error of huggingface_hub into one sentence that begins with `said`, e.g. ``"name='org/model'"``.

    Raises
    ------
    MissingFileError
        If there is no such repository or revision, or nothing in the cache.
    OptionError
        If a name is malformed, access is not granted, or there is no token.
    HubError
        If the hub cannot be reached, refuses, or fails.
    """
    from huggingface_hub import constants, errors

    at = "" if revision is None else f" at revision {revision!r}"
    known: list[tuple[type[Exception], type[ScforgeError], str]] = [
        (
            errors.GatedRepoError,
            OptionError,
            f"access to {repo_id!r} is granted on request only; ask for it at {constants.ENDPOINT}/{repo_id}, and pass "
            "a token of that account (HF_TOKEN, or hf auth login)",
        ),
        (
            errors.RevisionNotFoundError,
            MissingFileError,
            f"{repo_id!r} has no revision {revision!r}; give a branch, a tag or a commit of it",
        ),
        (
            errors.RepositoryNotFoundError,
            MissingFileError,
            f"there is no repository {repo_id!r} at {constants.ENDPOINT}, or it is private and the token does not open "
            "it; check the name, or pass a token (HF_TOKEN, or hf auth login)",
        ),
        (
            errors.LocalEntryNotFoundError,
            MissingFileError,
            f"{repo_id!r}{at} is not in the cache, or not all of it, and the hub was not asked or did not answer; "
            "fetch it once with a connection, or give cache_dir",
        ),
        (errors.OfflineModeIsEnabled, HubError, "HF_HUB_OFFLINE says not to ask the hub; unset it"),
        (errors.HFValidationError, OptionError, "this is no name of a repository; give it as 'organization/name'"),
        (errors.LocalTokenNotFoundError, OptionError, "there is no token here; log in with hf auth login"),
    ]
    try:
        yield
    except ScforgeError:
        raise
    except (errors.HTTPError, OSError, ValueError, RuntimeError) as error:
        text = " ".join((getattr(error, "server_message", None) or str(error)).split())[:300].rstrip(".")
        status = f"{error.response.status_code}, " if isinstance(error, errors.HfHubHTTPError) else ""
        failed = (
            f"{constants.ENDPOINT} fails ({status}{text}); check the connection, HF_ENDPOINT and the token (HF_TOKEN, "
            "or hf auth login)"
        )
        kind, why = next(((kind, why) for cls, kind, why in known if isinstance(error, cls)), (HubError, failed))
        raise kind(f"{said}: {why}.") from safe_cause(error)
