"""The client of the Hugging Face Hub, with explanations of its errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from scforge._version import __version__
from scforge.errors import HubError, MissingFileError, OptionError, ScforgeError, safe_cause

if TYPE_CHECKING:
    from huggingface_hub import HfApi


def hub_api(token: str | bool | None) -> HfApi:
    """Return a hub client. If None, uses ``HF_TOKEN`` or the token of ``hf auth login``; if False, uses no token."""
    from huggingface_hub import HfApi

    return HfApi(token=token, library_name="scforge", library_version=__version__)


@contextmanager
def hub_errors(prefix: str, repo_id: str, revision: str | None = None) -> Iterator[None]:
    """Convert huggingface_hub errors into one sentence that begins with `prefix`, e.g. ``"name='org/model'"``.

    Raises
    ------
    MissingFileError
        If the repository or revision does not exist, or is not in the cache.
    OptionError
        If a name is malformed, access is not granted, or the token is missing.
    HubError
        If the hub cannot be reached, or refuses the request or returns an error.
    """
    from huggingface_hub import constants, errors

    endpoint, token = constants.ENDPOINT, "a token (HF_TOKEN, or hf auth login)"
    causes: list[tuple[type[Exception], type[ScforgeError], str]] = [
        (
            errors.GatedRepoError,
            OptionError,
            f"access is restricted; request access at {endpoint}/{repo_id}, and pass {token}",
        ),
        (
            errors.RevisionNotFoundError,
            MissingFileError,
            f"there is no revision {revision!r} of {repo_id!r}; check the revision",
        ),
        (
            errors.RepositoryNotFoundError,
            MissingFileError,
            f"there is no repository {repo_id!r} at {endpoint}, or it is private; check the name, or pass {token}",
        ),
        (
            errors.LocalEntryNotFoundError,
            MissingFileError,
            f"{repo_id!r} is not in the cache, and the hub was not queried or did not answer; connect to the "
            "internet to download it",
        ),
        (errors.OfflineModeIsEnabled, HubError, "the hub is disabled by HF_HUB_OFFLINE; unset HF_HUB_OFFLINE"),
        (errors.HFValidationError, OptionError, "this is not a valid repository name; pass 'organization/name'"),
        (errors.LocalTokenNotFoundError, OptionError, "no token was found; log in with hf auth login"),
    ]
    try:
        yield
    except ScforgeError:
        raise
    except (errors.HTTPError, OSError, ValueError, RuntimeError) as error:
        for cls, kind, why in causes:
            if isinstance(error, cls):
                raise kind(f"{prefix}: {why}.") from safe_cause(error)
        text = " ".join((getattr(error, "server_message", None) or str(error)).split())[:300].rstrip(".")
        status = f"{error.response.status_code}, " if isinstance(error, errors.HfHubHTTPError) else ""
        raise HubError(
            f"{prefix}: the request to {endpoint} failed ({status}{text}); check the connection and HF_ENDPOINT, or "
            f"pass {token}."
        ) from safe_cause(error)
