"""What the client of the hub is told: where the hub is, and whether to ask it at all."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from huggingface_hub import HfApi

__all__ = ["hub_api", "hub_endpoint", "is_offline"]

_TRUE = {"1", "ON", "YES", "TRUE"}


def hub_endpoint() -> str:
    """Return the address of the hub: ``HF_ENDPOINT`` as it is now, which huggingface_hub reads once, when imported."""
    from huggingface_hub import constants

    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or constants.ENDPOINT


def is_offline() -> bool:
    """Return whether ``HF_HUB_OFFLINE`` says not to ask the hub, now or when huggingface_hub was imported."""
    from huggingface_hub import constants

    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return constants.HF_HUB_OFFLINE or any(os.environ.get(name, "").upper() in _TRUE for name in names)


def hub_api(token: str | bool | None) -> HfApi:
    """Return a client for this token; None takes ``HF_TOKEN`` or that of ``hf auth login``, False takes none."""
    from huggingface_hub import HfApi

    from scforge._version import __version__

    return HfApi(endpoint=hub_endpoint(), token=token, library_name="scforge", library_version=__version__)
