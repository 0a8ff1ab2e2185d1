"""A model out of the cache, as a folder of one's own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from scforge._io import atomic_folder
from scforge.errors import MissingFileError
from scforge.hub.shared_files import SHARED_FILES

__all__ = ["copy_model"]


def copy_model(folder: str | os.PathLike[str], output: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Copy the shared files of a model or an adapter; links of the cache become files.

    Parameters
    ----------
    folder
        What :func:`scforge.hub.resolve` returned.
    output
        Folder to make. It appears whole or not at all.
    overwrite
        Replace a folder that exists.

    Raises
    ------
    OptionError
        If `output` exists.
    """
    names = [name for name in SHARED_FILES if (Path(folder) / name).is_file()]
    if not names:
        raise MissingFileError(f"folder={str(folder)!r} holds no file of a model; give the folder of one.")
    with atomic_folder(output, overwrite=overwrite) as place:
        for name in names:
            shutil.copyfile(Path(folder) / name, place / name)
    return Path(output)
