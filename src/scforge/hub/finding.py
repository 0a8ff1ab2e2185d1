"""Finding the folder of a model by what a user calls it."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scforge.errors import MissingFileError, ModelFileError, OptionError, ScforgeWarning, first_line, listing
from scforge.hub.client import hub_api, hub_endpoint, is_offline
from scforge.hub.hub_errors import connection_errors, hub_errors
from scforge.hub.registry_files import SCHEME, find_registered
from scforge.hub.shared_files import SHARED_FILES, described_kind, kind_of, kind_of_folder

__all__ = ["FoundModel", "find_model", "is_hub_name", "is_registry_name", "resolve"]

logger = logging.getLogger("scforge")

_HUB = "hf://"
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_EXECUTED = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".py", ".so")
"""Endings of files that can run code when they are read."""


@dataclass(frozen=True)
class FoundModel:
    """A folder, and how others can find it.

    Attributes
    ----------
    folder
        Where the files are.
    repo_id, commit
        Repository and commit on the hub; None for a folder that the user named.
    """

    folder: Path
    repo_id: str | None = None
    commit: str | None = None


def is_hub_name(name: object) -> bool:
    """Return whether a name is meant for the hub and not for a folder here.

    ``org/name`` can be either: it is a folder where there is one, or where there is a folder ``org``.

    Examples
    --------
    >>> is_hub_name("hf://org/light"), is_hub_name("./org/light"), is_hub_name("light")
    (True, False, False)
    """
    if not isinstance(name, str):
        return False
    if name.startswith(_HUB):
        return True
    if _REPO.fullmatch(name) is None or Path(name).exists():
        return False
    return not Path(name).parent.is_dir()


def is_registry_name(name: object) -> bool:
    """Return whether a name is one of the registry, ``scforge://name``."""
    return isinstance(name, str) and name.startswith(SCHEME)


def resolve(
    name_or_folder_or_repo_id: str | os.PathLike[str],
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
) -> Path:
    """Return the folder of a model or an adapter; fetch it first if it is on the hub.

    Parameters
    ----------
    name_or_folder_or_repo_id
        A folder; a repository of the Hugging Face Hub, ``"org/name"`` (or ``"hf://org/name@revision"``, where a folder
        has the same name); or a name of the registry, ``"scforge://name"`` or ``"scforge://name@version"`` (see
        :func:`known_models`).
    revision
        Branch, tag or commit of the repository; None for its main branch.
    cache_dir
        Cache of the hub; None for its usual one (``HF_HUB_CACHE``).
    token
        Token for private and gated repositories; None takes ``HF_TOKEN`` or that of ``hf auth login``.
    local_files_only
        Do not ask the hub; take what is in the cache. ``HF_HUB_OFFLINE=1`` does the same.

    Returns
    -------
    The folder. Of a repository it is in the cache and not to be changed, and holds the files of scforge only: pickles
    and code that lie beside them are never fetched.

    Raises
    ------
    MissingFileError
        If there is no such folder, repository or revision, or it is not in the cache and cannot be fetched.
    ModelFileError
        If the repository has no model of scforge.
    OptionError
        If a name is not known, or a token is refused.
    HubError
        If the hub cannot be reached, or fails.

    Examples
    --------
    >>> resolve("org/light", revision="v1")  # doctest: +SKIP
    """
    found = find_model(
        name_or_folder_or_repo_id,
        said=f"name={os.fspath(name_or_folder_or_repo_id)!r}",
        revision=revision,
        cache_dir=cache_dir,
        token=token,
        local_files_only=local_files_only,
    )
    return found.folder


def find_model(
    name: str | os.PathLike[str],
    *,
    said: str,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
) -> FoundModel:
    """Do what :func:`resolve` says; `said` begins its messages."""
    repo_id: str | None = os.fspath(name)
    if is_registry_name(name):
        entry = find_registered(str(name), said)
        if revision is not None:
            raise OptionError(f"{said} has versions, so revision={revision!r} has no use; write it behind an @.")
        if entry.folder is not None:
            return FoundModel(_checked(entry.folder, f"{said} (version {entry.version}, folder {str(entry.folder)!r})"))
        repo_id, revision = entry.repo_id, entry.revision
    elif is_hub_name(name):
        repo_id, at, written = str(name).removeprefix(_HUB).partition("@")
        if _REPO.fullmatch(repo_id) is None or (at and not written):
            raise OptionError(f"{said} is no name of a repository; give it as 'hf://organisation/name'.")
        if at and revision is not None:
            raise OptionError(f"{said} names a revision, and revision={revision!r} is another one; give one of them.")
        revision = written or revision
    else:
        if revision is not None and Path(name).exists():
            raise OptionError(f"revision={revision!r} has no use where {said} is a folder here; leave it out.")
        return FoundModel(_checked(Path(name), said))
    assert repo_id is not None
    options: dict[str, Any] = {"cache_dir": cache_dir, "token": token, "local_files_only": local_files_only}
    return _fetch(repo_id, said, revision=revision, **options)


def _checked(folder: Path, said: str) -> Path:
    if folder.is_dir():
        return folder
    what = "is a file" if folder.exists() else "does not exist"
    raise MissingFileError(
        f"{said} {what}; give the folder of a model, a repository of the hub (org/name, or hf://org/name where a "
        "folder is called org), or a name of the registry (scforge://name)."
    )


def _fetch(
    repo_id: str,
    said: str,
    *,
    revision: str | None,
    cache_dir: str | os.PathLike[str] | None,
    token: str | bool | None,
    local_files_only: bool,
) -> FoundModel:
    """Return the folder of a repository in the cache; fetch what is not there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    options: dict[str, Any] = {
        "revision": revision,
        "cache_dir": cache_dir,
        "token": token,
        "allow_patterns": list(SHARED_FILES),
        "endpoint": hub_endpoint(),
    }
    with hub_errors(said, repo_id, revision):
        there = None if local_files_only or is_offline() else _look(repo_id, said, revision, token)
        folder = None
        if there is not None:
            with contextlib.suppress(LocalEntryNotFoundError):
                folder = Path(snapshot_download(repo_id, local_files_only=True, **options))
            if folder is not None and not there.is_whole(folder):
                folder = None
        if folder is None:
            folder = Path(snapshot_download(repo_id, local_files_only=there is None, **options))
    if kind_of_folder(folder) is None:
        raise MissingFileError(
            f"{said}: the cache has only a part of {repo_id!r}; fetch it once with a connection, or give cache_dir."
        )
    return FoundModel(folder, repo_id, folder.name)


@dataclass(frozen=True)
class _OnHub:
    """What a revision is on the hub: its commit, and its files of ours."""

    commit: str | None
    names: frozenset[str]

    def is_whole(self, folder: Path) -> bool:
        """Return whether a folder of the cache has this commit, and all of it."""
        return folder.name == self.commit and all((folder / name).is_file() for name in self.names)


def _look(repo_id: str, said: str, revision: str | None, token: str | bool | None) -> _OnHub | None:
    """Look what a repository holds, before anything is fetched; return None if the hub does not answer.

    The client by itself falls back to the cache without a word, also where a token is refused.
    """
    from huggingface_hub.errors import HfHubHTTPError

    try:
        info = hub_api(token).model_info(repo_id, revision=revision)
    except HfHubHTTPError:
        raise
    except connection_errors() as error:
        warnings.warn(
            f"{hub_endpoint()} does not answer ({first_line(error)}); {repo_id!r} is taken from the cache, which may "
            "be older.",
            ScforgeWarning,
            stacklevel=5,
        )
        return None
    names = [file.rfilename for file in info.siblings or ()]
    if kind_of(names) is None:
        raise ModelFileError(
            f"{said}: {repo_id!r} holds neither a {described_kind().replace(' or ', ' nor an ')}; convert a "
            "checkpoint of another package with scforge convert-checkpoint."
        )
    if unsafe := [name for name in names if name.endswith(_EXECUTED)]:
        logger.info("%s also has %s, which can run code and is not fetched.", repo_id, listing(unsafe, most=3))
    return _OnHub(info.sha, frozenset(names) & frozenset(SHARED_FILES))
