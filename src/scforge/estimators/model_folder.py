"""The model that a user names: a folder, a repository of the hub, or a name of the registry. All go through here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from scforge.data.readers import is_url
from scforge.errors import MissingFileError
from scforge.hub.finding import FoundModel, find_model, is_hub_name, is_registry_name, kind_of_folder
from scforge.training.checkpoint import RunFolder

if TYPE_CHECKING:
    from anndata import AnnData

    from scforge.estimators.encoder import Encoder


_EXAMPLE = "e.g. ckpt/final"


def is_shared_name(path: str | os.PathLike[str]) -> bool:
    """Return whether a name is of the hub or the registry, and not of a folder here."""
    return is_registry_name(path) or is_hub_name(path)


def check_model_folder(path: str | os.PathLike[str], said: str) -> Path:
    """Return the folder of a model; fetch it first if it is on the hub.

    Parameters
    ----------
    path
        What the user gave: a folder, ``"org/name"``, ``"hf://org/name@revision"`` or ``"scforge://name@version"``.
    said
        How the user gave it, the beginning of a message: ``"model='ckpt' (--model)"``.

    Raises
    ------
    MissingFileError
        If there is none, saying what could have been meant.
    ModelFileError, OptionError, HubError
        If it cannot be fetched.
    """
    return _found(path, said).folder


def load_named(path: str | os.PathLike[str], said: str, adata: AnnData | None = None) -> Encoder:
    """Load the model, or the adapters with their model, that a user names; arguments as for `check_model_folder`."""
    from scforge.estimators.encoder import Encoder
    from scforge.estimators.sharing import load_found

    return load_found(Encoder, _found(path, said, adapters=True), said, False if adata is None else adata)


def _found(path: str | os.PathLike[str], said: str, *, adapters: bool = False) -> FoundModel:
    if is_shared_name(path):
        found = find_model(path, said=said)
        if not adapters and kind_of_folder(found.folder) == "adapter":
            raise MissingFileError(f"{said} has adapters only; name the model that they sit on.")
        return found
    folder = Path(path)
    if not folder.is_dir():
        if is_url(path):
            raise MissingFileError(
                f"{said} is a URL; give the folder of a model, {_EXAMPLE}, a repository of the hub (org/name), or a "
                "name of the registry (scforge://name)."
            )
        what = "is a file" if folder.exists() else "does not exist"
        raise MissingFileError(f"{said} {what}; give the folder of a model, {_EXAMPLE}, or hf://org/name of the hub.")
    if adapters and kind_of_folder(folder) == "adapter":
        return FoundModel(folder)
    check_holds_model(folder, said)
    return FoundModel(folder)


def check_holds_model(folder: Path, said: str) -> None:
    """Raise :class:`~scforge.errors.MissingFileError` if a folder has no model, saying which could have been meant."""
    if not (folder / "config.json").exists():
        if models := RunFolder(folder).models():
            raise MissingFileError(f"{said} is the folder of a training; did you mean {str(models[-1])!r}?")
        raise MissingFileError(f"{said} holds no model; give the folder of one, {_EXAMPLE}.")
