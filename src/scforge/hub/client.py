"""What the client of the hub is told: where the hub is, whether to ask it at all, and with which token."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from scforge.errors import OptionError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

__all__ = ["checked_token", "hub_api", "hub_endpoint", "is_offline", "read_remote", "shown_endpoint"]

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
