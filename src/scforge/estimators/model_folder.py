"""The folder of a model, as a user names it."""

from __future__ import annotations

import os
from pathlib import Path

from scforge.data.remote import is_url
from scforge.errors import MissingFileError
from scforge.training.run_folder import RunFolder

__all__ = ["check_model_folder"]

_EXAMPLE = "e.g. ckpt/final"


def check_model_folder(path: str | os.PathLike[str], said: str) -> Path:
    """Return the folder of a model, or raise unless there is one; cheap, as nothing is read.

    Parameters
    ----------
    path
        What the user gave.
    said
        How the user gave it, the beginning of a message: ``"model='ckpt' (--model)"``.

    Raises
    ------
    MissingFileError
        Saying what could have been meant.
    """
    folder = Path(path)
    if not folder.is_dir():
        if is_url(path) or "://" in os.fspath(path):
            raise MissingFileError(
                f"{said} is the name of a model elsewhere, and none are fetched yet; give the folder of a model, "
                f"{_EXAMPLE}."
            )
        what = "is a file" if folder.exists() else "does not exist"
        raise MissingFileError(f"{said} {what}; give the folder of a model, {_EXAMPLE}.")
    if not (folder / "config.json").exists():
        if models := RunFolder(folder).models():
            raise MissingFileError(f"{said} is the folder of a training; did you mean {str(models[-1])!r}?")
        raise MissingFileError(f"{said} holds no model; give the folder of one, {_EXAMPLE}.")
    return folder
