"""Finding the folder of a model by what a user calls it."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scforge._checks import check_bool
from scforge._io import check_folder
from scforge.errors import (
    MissingFileError,
    ModelFileError,
    OptionError,
    ScforgeError,
    first_line,
    listing,
    warn,
)
from scforge.hub.client import checked_token, hub_api, hub_endpoint, is_offline, shown_endpoint
from scforge.hub.copying import origin_of
from scforge.hub.hub_errors import answered, hub_errors, info_of, no_answer, silence_errors
from scforge.hub.registry_files import SCHEME, find_registered
from scforge.hub.shared_files import SHARED_FILES, described_kind, kind_of, kind_of_folder

__all__ = ["FoundModel", "find_model", "is_hub_name", "is_registry_name", "resolve"]

logger = logging.getLogger("scforge")

_HUB = "hf://"
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_OF_TRAINING = re.compile(r".*/(final|last|best|(step|epoch)[=_-]?\d+)", re.IGNORECASE)
"""Folders that a training writes; a name of such a form that is not here is mistyped, and not a stranger's model."""

_PAGE = re.compile(r"https?://[^/]+/([\w.-]+/[\w.-]+)(?:/tree/([^/?#]+))?(?:[/?#].*)?")
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
        Repository and commit on the hub; None for a folder of this machine that is no copy of one.
    name
        Name in the registry that ships with the package, with its version; None for anything else.
    """

    folder: Path
    repo_id: str | None = None
    commit: str | None = None
    name: str | None = None


def is_hub_name(name: object) -> bool:
    """Return whether a name is meant for the hub and not for a folder here.

    ``org/name`` can be either: it is a folder where there is one, or where there is a folder ``org``, and where it is
    called as a training calls its folders.

    Examples
    --------
    >>> is_hub_name("hf://org/light"), is_hub_name("./org/light"), is_hub_name("light"), is_hub_name("run/final")
    (True, False, False, False)
    """
    if not isinstance(name, str):
        return False
    if name.startswith(_HUB):
        return True
    plain = name.rstrip("/")
    if _REPO.fullmatch(plain) is None or _OF_TRAINING.fullmatch(plain) or Path(name).exists():
        return False
    return not Path(plain).parent.is_dir()


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
    name = name_or_folder_or_repo_id
    found = find_model(
        name,
        said=f"name={os.fspath(name) if isinstance(name, os.PathLike) else name!r}",
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
    if not isinstance(name, str | os.PathLike) or not os.fspath(name):
        raise OptionError(f"{said} names no model; give a folder, org/name of the hub, or scforge://name.")
    if revision is not None and (not isinstance(revision, str) or not revision):
        raise OptionError(f"revision={revision!r} is no text; give the name of a branch, a tag or a commit.")
    if cache_dir is not None:
        if not isinstance(cache_dir, str | os.PathLike):
            raise OptionError(f"cache_dir={cache_dir!r} is no folder; give the path of one.")
        check_folder("cache_dir", cache_dir)
    check_bool("local_files_only", local_files_only)
    repo_id: str | None
    is_bare = False
    if is_registry_name(name):
        entry = find_registered(str(name), said)
        if revision is not None:
            raise OptionError(f"{said} has versions, so revision={revision!r} has no use; write it behind an @.")
        if entry.folder is not None:
            folder = _checked(entry.folder, f"{said} (version {entry.version}, folder {str(entry.folder)!r})")
            return FoundModel(
                folder, *origin_of(folder), name=f"{SCHEME}{entry.name}@{entry.version}" if entry.is_shipped else None
            )
        repo_id, revision = entry.repo_id, entry.revision
    elif is_hub_name(name):
        is_bare = not str(name).startswith(_HUB)
        repo_id, at, written = str(name).removeprefix(_HUB).rstrip("/").partition("@")
        if _REPO.fullmatch(repo_id) is None or (at and not written):
            raise OptionError(f"{said} is no name of a repository; give it as 'hf://organisation/name'.")
        if at and revision is not None:
            raise OptionError(f"{said} names a revision, and revision={revision!r} is another one; give one of them.")
        revision = written or revision
    else:
        if revision is not None and Path(name).exists():
            raise OptionError(f"revision={revision!r} has no use where {said} is a folder here; leave it out.")
        folder = _checked(Path(name), said, os.fspath(name))
        return FoundModel(folder, *origin_of(folder))
    assert repo_id is not None
    options: dict[str, Any] = {"cache_dir": cache_dir, "token": token, "local_files_only": local_files_only}
    if not is_bare:
        return _fetch(repo_id, said, revision=revision, **options)
    try:
        found = _fetch(repo_id, said, revision=revision, **options)
    except ScforgeError as error:
        raise type(error)(f"{str(error).rstrip('.')} (and there is no folder {repo_id!r} here).") from error
    logger.info("%s is no folder here; it is the repository %s of the hub, at %s.", said, repo_id, found.commit)
    return found


def _checked(folder: Path, said: str, name: str | None = None) -> Path:
    """Return a folder, or raise unless it is one; `name` is what the user wrote."""
    if folder.is_dir():
        return folder
    if name is not None and (page := _PAGE.fullmatch(name)):
        repo_id, revision = page.groups()
        raise MissingFileError(
            f"{said} is a URL; write {repo_id if revision is None else f'hf://{repo_id}@{revision}'}."
        )
    what = "is a file" if folder.exists() else "does not exist"
    if name is not None and _REPO.fullmatch(plain := name.rstrip("/")) and not folder.exists():
        raise MissingFileError(
            f"{said} {what}: there is no folder {plain!r} here; give the folder of a model, or hf://{plain} for a "
            "repository of the hub."
        )
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

    there = silence = folder = None
    with hub_errors(said, repo_id, revision):
        if not local_files_only and not is_offline():
            token = checked_token(token)
            try:
                there = _look(repo_id, said, revision, token)
            except silence_errors() as error:
                silence = error
        options: dict[str, Any] = {
            "revision": revision,
            "cache_dir": cache_dir,
            "token": False if there is None else token,
            "allow_patterns": list(SHARED_FILES),
            "endpoint": hub_endpoint(),
        }
        try:
            folder = Path(snapshot_download(repo_id, local_files_only=True, **options))
        except LocalEntryNotFoundError:
            if silence is not None:
                raise no_answer(said, silence, f", and {repo_id!r} is not in the cache") from silence
            if there is None:
                raise
        if there is not None and (folder is None or not there.is_whole(folder)):
            folder = Path(answered(said, lambda: snapshot_download(repo_id, **options)))
    if folder is None or kind_of_folder(folder) is None:
        raise MissingFileError(
            f"{said}: the cache has only a part of {repo_id!r}; fetch it once with a connection, or give cache_dir."
        )
    if silence is not None:
        warn(
            f"{shown_endpoint()} does not answer ({first_line(silence)}); {repo_id!r} is taken from the cache, "
            "which may be older."
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


def _look(repo_id: str, said: str, revision: str | None, token: str | bool | None) -> _OnHub:
    """Look what a repository holds, before anything is fetched.

    The client by itself falls back to the cache without a word, also where a token is refused.
    """
    info = info_of(hub_api(token), said, repo_id, revision)
    names = [file.rfilename for file in info.siblings or ()]
    if kind_of(names) is None:
        raise ModelFileError(
            f"{said}: {repo_id!r} holds neither a {described_kind().replace(' or ', ' nor an ')}; convert a "
            "checkpoint of another package with scforge convert-checkpoint."
        )
    if unsafe := [name for name in names if name.endswith(_EXECUTED)]:
        logger.info("%s also has %s, which can run code and is not fetched.", repo_id, listing(unsafe, most=3))
    return _OnHub(info.sha, frozenset(names) & frozenset(SHARED_FILES))
