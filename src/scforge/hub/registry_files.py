"""Short names for models, ``scforge://name`` or ``scforge://name@version``: a file says what they stand for."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from scforge._io import read_json
from scforge.errors import MissingFileError, ModelFileError, OptionError, did_you_mean, first_line, listing

__all__ = ["SCHEME", "RegisteredModel", "find_registered", "known_models"]

SCHEME = "scforge://"
_FORMAT = 1
_VARIABLE = "SCFORGE_MODELS"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True)
class RegisteredModel:
    """What a name stands for: a revision of a repository, or a folder.

    Attributes
    ----------
    name, version
        The name, and its version.
    repo_id, revision
        Repository on the hub, and the commit; None for a folder.
    folder
        Folder of the model; None for a repository.
    is_shipped
        Whether the name is of the registry in the package, and so the same everywhere.
    """

    name: str
    version: str
    repo_id: str | None = None
    revision: str | None = None
    folder: Path | None = None
    is_shipped: bool = False


def known_models() -> dict[str, str]:
    """Return the names that ``scforge://`` knows, each with its description.

    They stand in the registry file that ships with scforge, and in files of the same format that the environment
    variable ``SCFORGE_MODELS`` names (several with the separator of ``PATH``). Of a name in several files the first
    counts, those of ``SCFORGE_MODELS`` before the shipped one.

    Returns
    -------
    Name to description, e.g. for ``resolve("scforge://name")``.

    Raises
    ------
    MissingFileError, ModelFileError
        If a file is not there, or is no registry.

    Examples
    --------
    >>> known_models()
    {'pbmc3k-light': 'Light encoder trained on PBMC 3k, for tests and tutorials'}
    """
    return {name: entry["description"] for name, (entry, _) in _entries().items()}


def find_registered(text: str, said: str) -> RegisteredModel:
    """Return what ``scforge://name[@version]`` stands for; without a version, the newest.

    Parameters
    ----------
    text
        The name with its scheme.
    said
        Beginning of a message.

    Raises
    ------
    OptionError
        If the name or the version is not known.
    MissingFileError, ModelFileError
        If a registry file cannot be used.
    """
    name, at, version = text.removeprefix(SCHEME).partition("@")
    entries = _entries()
    if not _NAME.fullmatch(name) or (at and not version):
        raise OptionError(f"{said} is no name of a model; write it as scforge://name or scforge://name@version.")
    if name not in entries:
        advice = did_you_mean(name, entries) or (
            "; convert a downloaded checkpoint of another package, e.g. Geneformer's, with "
            "Encoder.from_checkpoint(folder) or scforge convert-checkpoint"
        )
        raise OptionError(
            f"{said} is not in the registry (known: {listing(entries)}; more come from the file that {_VARIABLE} "
            f"names){advice}."
        )
    entry, file = entries[name]
    versions: dict[str, Any] = entry["versions"]
    version = version or entry["latest"]
    if version not in versions:
        raise OptionError(
            f"{said} has no version {version!r}{did_you_mean(version, versions)} (known: {listing(versions)})"
        )
    place = versions[version]
    if "folder" in place:
        is_shipped = file.parent == Path(str(files("scforge.hub")))
        return RegisteredModel(name, version, folder=file.parent / place["folder"], is_shipped=is_shipped)
    return RegisteredModel(name, version, repo_id=place["repo_id"], revision=place["revision"])


def _entries() -> dict[str, tuple[dict[str, Any], Path]]:
    """Return the entries of all registry files, each with its file."""
    entries: dict[str, tuple[dict[str, Any], Path]] = {}
    own = [Path(name) for name in os.environ.get(_VARIABLE, "").split(os.pathsep) if name]
    for path in own:
        if not path.is_file():
            raise MissingFileError(f"{_VARIABLE}={str(path)!r} is no file; name a registry file, or unset it.")
    with as_file(files("scforge.hub").joinpath("registry.json")) as shipped:
        for path in (*own, shipped):
            for name, entry in _read(path, f"{_VARIABLE}={str(path)!r}").items():
                entries.setdefault(name, (entry, path))
    return entries


def _read(path: Path, said: str) -> dict[str, dict[str, Any]]:
    try:
        found = read_json(path)
        version, models = found["format"], found["models"]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelFileError(
            f"{said} is no registry of models: {first_line(error)}; it is JSON with 'format' and 'models'."
        ) from error
    if type(version) is not int or version < 1:
        raise ModelFileError(f"{said} has format={version!r}, which is no number of one; write 'format': {_FORMAT}.")
    if version > _FORMAT:
        raise ModelFileError(f"{said} has format {version}, and this scforge reads up to {_FORMAT}; update scforge.")
    if not isinstance(models, dict):
        raise ModelFileError(f"{said} has models that are no mapping of names; write 'models': {{name: ...}}.")
    for name, entry in models.items():
        if not _NAME.fullmatch(name) or not _is_entry(entry):
            raise ModelFileError(
                f"{said} has an entry {name!r} that cannot be used; it needs description, latest (one of versions) and "
                "versions, each with repo_id and revision (a commit, 40 digits), or with folder."
            )
    return models


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or set(entry) != {"description", "latest", "versions"}:
        return False
    versions = entry["versions"]
    if not isinstance(entry["description"], str) or not isinstance(versions, dict) or not versions:
        return False
    wanted = ({"repo_id", "revision"}, {"folder"})
    fits = all(
        isinstance(place, dict)
        and set(place) in wanted
        and all(isinstance(one, str) and one for one in place.values())
        # A branch or a tag can move, and then a version would stand for something else.
        and ("folder" in place or _COMMIT.fullmatch(place["revision"]) is not None)
        for place in versions.values()
    )
    return fits and isinstance(entry["latest"], str) and entry["latest"] in versions
