"""A model out of the cache, as a folder of one's own."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from scforge._io import atomic_folder, read_json, read_settled, sha256_of
from scforge.errors import MissingFileError, ModelFileError
from scforge.hub.shared_files import ORIGIN_FILE, SHARED_FILES, check_shared, description_of

__all__ = ["copy_model", "origin_of"]

type Origin = tuple[str | None, str | None]
"""Repository and commit, None for what was on no hub."""


def copy_model(
    folder: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    origin: Origin = (None, None),
) -> Path:
    """Copy the shared files of a model or an adapter; links of the cache become files.

    Parameters
    ----------
    folder
        What :func:`scforge.hub.resolve` returned.
    output
        Folder to make. It appears whole or not at all.
    overwrite
        Replace the model in a folder that exists; files that are not of scforge stay.
    origin
        Where the model is from, for :func:`origin_of`.

    Raises
    ------
    OptionError
        If `output` exists.
    """
    source = Path(folder)
    with atomic_folder(output, overwrite=overwrite, argument="output") as place:

        def copy() -> None:
            check_shared(source)
            for name in SHARED_FILES:
                (place / name).unlink(missing_ok=True)
                if (source / name).exists():
                    shutil.copyfile(source / name, place / name)

        read_settled(source, copy)
        if not any(place.iterdir()):
            raise MissingFileError(f"folder={str(folder)!r} holds no file of a model; give the folder of one.")
        description = description_of(place)
        if None not in origin and description is not None:
            content = {"repo_id": origin[0], "commit": origin[1], "sha256": sha256_of(description)}
            (place / ORIGIN_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return Path(output)


def origin_of(folder: Path) -> Origin:
    """Return where a folder was copied from; of one that holds another model by now, nothing.

    Raises
    ------
    ModelFileError
        If the file that says so cannot be read.
    """
    path, description = folder / ORIGIN_FILE, description_of(folder)
    if description is None or not path.is_file():
        return None, None
    try:
        content = read_json(path)
        repo_id, commit, digest = (content[name] for name in ("repo_id", "commit", "sha256"))
        if not all(isinstance(value, str) for value in (repo_id, commit, digest)):
            raise TypeError("a repository, a commit and a checksum are texts")
    except (ValueError, LookupError, TypeError) as error:
        raise ModelFileError(
            f"{str(path)!r} does not say where the folder was fetched; pull it again, or remove that file."
        ) from error
    return (repo_id, commit) if digest == sha256_of(description) else (None, None)
