"""Find models by name: folders, repositories of the hub, and the registry."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Literal

from scforge._checks import check_bool
from scforge._io import atomic_folder, check_folder, check_inside, read_json, read_settled, sha256_of
from scforge.errors import (
    MissingFileError,
    ModelFileError,
    OptionError,
    ScforgeError,
    did_you_mean,
    first_line,
    listing,
    warn,
)
from scforge.hub.client import (
    answered,
    checked_token,
    hub_api,
    hub_endpoint,
    hub_errors,
    info_of,
    is_offline,
    no_answer,
    shown_endpoint,
    silence_errors,
)

logger = logging.getLogger("scforge")

Kind = Literal["model", "adapter"]

_NEEDED: dict[Kind, tuple[str, ...]] = {
    "model": ("config.json", "vocab.json", "model.safetensors"),
    "adapter": ("adapter.json", "adapter.safetensors"),
}
_BESIDE = ("README.md", "split.safetensors")
SHARED_FILES = (*_NEEDED["model"], *_NEEDED["adapter"], *_BESIDE)
"""All files that are ever sent or fetched; ``split.safetensors`` says which cells a fine-tuned model has seen."""
ORIGIN_FILE = "origin.json"
"""What a folder on this machine was copied from; never sent."""


def kind_of(names: Iterable[str]) -> Kind | None:
    """Return what files of these names are together, or None if a file is missing.

    Examples
    --------
    >>> kind_of(["adapter.json", "adapter.safetensors", "notes.txt"])
    'adapter'
    >>> kind_of(["config.json", "pytorch_model.bin"]) is None
    True
    """
    there = set(names)
    return next((kind for kind, needed in _NEEDED.items() if there.issuperset(needed)), None)


def kind_of_folder(folder: Path) -> Kind | None:
    """Return what a folder holds, or None."""
    return kind_of(path.name for path in folder.iterdir() if path.is_file())


def check_shared(folder: Path) -> None:
    """Raise :class:`~scforge.errors.ModelFileError` if a file to share is a link out of its folder, or a pipe."""
    for name in SHARED_FILES:
        check_inside(folder, name)


def description_of(folder: Path) -> Path | None:
    """Return the file that describes the model or the adapter in a folder, with checksums of the others, or None."""
    kind = kind_of_folder(folder)
    return None if kind is None else folder / _NEEDED[kind][0]


def described_kind() -> str:
    """Return which files make a model or an adapter, for a message."""
    return " or ".join(f"{kind} ({listing(needed)})" for kind, needed in _NEEDED.items())


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
            raise OptionError(f"{said} is no name of a repository; give it as 'hf://organization/name'.")
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
