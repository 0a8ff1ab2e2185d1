"""Find models by name in folders, hub repositories and the registry."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from scforge._io import atomic_folder, parsed, read_json, read_settled, sha256_of
from scforge.errors import MissingFileError, ModelFileError, OptionError, did_you_mean, listing
from scforge.hub.client import hub_api, hub_errors

Kind = Literal["model", "adapter"]

_NEEDED: dict[Kind, tuple[str, ...]] = {
    "model": ("config.json", "vocab.json", "model.safetensors"),
    "adapter": ("adapter.json", "adapter.safetensors"),
}
CARD = "README.md"
REFERENCE = "reference.safetensors"
"""File with counts of labeled cells, which is uploaded on request only."""
SHARED_FILES = (*_NEEDED["model"], *_NEEDED["adapter"], CARD, "split.safetensors", REFERENCE)
"""All files that are uploaded or downloaded; ``split.safetensors`` identifies the cells used for fine-tuning."""
ORIGIN_FILE = "origin.json"
"""File with the source of a folder copied to this machine; it is never uploaded."""

SCHEME = "scforge://"

_SCHEMES = (SCHEME, "scmodelforge://")
"""Schemes of registry names in lower case; the second is that of scModelForge's configurations."""

_VARIABLE = "SCFORGE_MODELS"

HUB = "hf://"

_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def kind_of(names: Iterable[str]) -> Kind | None:
    """Return the kind of folder that contains files with these names, or None if a file is missing.

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
    """Return the kind of a folder, or None if it is neither a model nor an adapter."""
    return kind_of(path.name for path in folder.iterdir() if path.is_file())


def shared_files(folder: Path) -> list[str]:
    """Return the names of the files in a folder that are uploaded or copied.

    Raises
    ------
    ModelFileError
        If one of them is a link that leads out of the folder, as a link to a private file of the user would.
    """
    names = [name for name in SHARED_FILES if (folder / name).is_file()]
    resolved = folder.resolve()
    # In the hub's cache, each file is a link to a blob.
    roots = (resolved, resolved.parent.parent / "blobs" if resolved.parent.name == "snapshots" else resolved)
    for name in names:
        if not any((resolved / name).resolve().is_relative_to(root) for root in roots):
            raise ModelFileError(f"{str(folder / name)!r} is a link out of its folder; replace it with a file.")
    return names


def described_kind() -> str:
    """Return text for a message on the files that a model or an adapter requires."""
    return " or ".join(f"{kind} ({listing(needed)})" for kind, needed in _NEEDED.items())


type Origin = tuple[str | None, str | None]
"""Repository and commit, or None if the model is not from a hub."""


def copy_model(
    folder: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    origin: Origin = (None, None),
) -> Path:
    """Copy the shared files of a model or an adapter to `output`; links into the cache become files.

    `origin` is the source of the model for :func:`origin_of`.
    """
    source = Path(folder)
    with atomic_folder(output, overwrite=overwrite, argument="output") as target:

        def copy(complete: Path) -> None:
            for name in shared_files(complete):
                shutil.copyfile(complete / name, target / name)

        read_settled(source, copy)
        kind = kind_of_folder(target)
        if kind is None:
            raise MissingFileError(f"contains no {described_kind()}; pass a model folder.", folder=str(folder))
        if None not in origin:
            content = {"repo_id": origin[0], "commit": origin[1], "sha256": sha256_of(target / _NEEDED[kind][0])}
            (target / ORIGIN_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return Path(output)


def origin_of(folder: Path) -> Origin:
    """Return the source of a copied folder, or None values if it is unknown or now contains another model."""
    kind = kind_of_folder(folder)
    if kind is None or not (folder / ORIGIN_FILE).is_file():
        return None, None
    content = read_json(folder / ORIGIN_FILE)
    if not isinstance(content, dict) or content.get("sha256") != sha256_of(folder / _NEEDED[kind][0]):
        return None, None
    return content.get("repo_id"), content.get("commit")


class _Version(BaseModel):
    """A repository commit (because branches and tags can move), or a folder next to the registry file."""

    model_config = ConfigDict(extra="forbid")
    repo_id: str | None = None
    revision: Annotated[str, Field(pattern="^[0-9a-f]{40}$")] | None = None
    folder: str | None = None

    @model_validator(mode="after")
    def _has_location(self) -> Self:
        if (self.repo_id is None) == (self.folder is None):
            raise ValueError("needs either repo_id or folder")
        return self


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid")
    description: str
    latest: str
    versions: dict[str, _Version]


class _RegistryFile(BaseModel):
    format: Literal[1]
    models: dict[str, _Entry]


def known_models() -> dict[str, str]:
    """Return the names of models for ``scforge://``, each with its description.

    Models are listed in scforge's registry file, and in files of the same format in the environment variable
    ``SCFORGE_MODELS`` (separated as in ``PATH``). If several files list a name, the first file is used. Files in
    ``SCFORGE_MODELS`` precede the shipped file.

    Returns
    -------
    A mapping from name, e.g. for ``resolve("scforge://name")``, to description.

    Raises
    ------
    MissingFileError, ModelFileError
        If a file is missing, or is not a registry.

    Examples
    --------
    >>> known_models()["pbmc3k-light"]
    'Light encoder trained on PBMC 3k, for tests and tutorials'
    """
    return {name: entry.description for name, (entry, _) in _entries().items()}


def find_registered(text: str, prefix: str) -> tuple[FoundModel | None, str | None, str | None]:
    """Return the folder of ``scforge://name[@version]``, or its repository and commit."""
    name, _, version = text.partition("://")[2].partition("@")
    entries = _entries()
    if name not in entries:
        advice = did_you_mean(name, entries)
        advice = advice or "; read a checkpoint of another package with Encoder.from_checkpoint(folder)"
        raise OptionError(f"{prefix} is not in the registry (known: {listing(entries)}){advice}.")
    entry, file = entries[name]
    version = version or entry.latest
    if version not in entry.versions:
        raise OptionError(f"{prefix} has no version {version!r} (known: {listing(entry.versions)})")
    location = entry.versions[version]
    if location.folder is None:
        return None, location.repo_id, location.revision
    folder = _checked(file.parent / location.folder, f"{prefix} (folder {str(file.parent / location.folder)!r})")
    is_shipped = file.parent == Path(str(files("scforge.hub")))
    return FoundModel(folder, *origin_of(folder), name=f"{SCHEME}{name}@{version}" if is_shipped else None), None, None


def _entries() -> dict[str, tuple[_Entry, Path]]:
    """Return a mapping from name to entry and file for all registry files."""
    entries: dict[str, tuple[_Entry, Path]] = {}
    own = [Path(name) for name in os.environ.get(_VARIABLE, "").split(os.pathsep) if name]
    with as_file(files("scforge.hub").joinpath("registry.json")) as shipped:
        for path in (*own, shipped):
            registry = parsed(
                _RegistryFile, read_json(path), f"{str(path)!r} is not a valid model registry ({_VARIABLE})"
            )
            for name, entry in registry.models.items():
                entries.setdefault(name, (entry, path))
    return entries


@dataclass(frozen=True)
class FoundModel:
    """A model folder and its source.

    Attributes
    ----------
    folder
        Folder of the files.
    repo_id, commit
        Repository and commit on the hub; None for a local folder that is not a copy of a repository.
    name
        Name in the registry that ships with the package, with its version; None for other sources.
    """

    folder: Path
    repo_id: str | None = None
    commit: str | None = None
    name: str | None = None


def is_hub_name(name: object) -> bool:
    """Return whether a name refers to the hub, i.e. begins with ``hf://``; any other path is local.

    A folder ``checkpoints/light`` that does not exist here could be a repository of anybody on the hub.

    Examples
    --------
    >>> is_hub_name("hf://org/light"), is_hub_name("org/light")
    (True, False)
    """
    return isinstance(name, str) and name.startswith(HUB)


def repository(name: str) -> str:
    """Return the name of a repository, ``hf://org/name``, for ``org/name``; other names are returned unchanged."""
    return f"{HUB}{name}" if _REPO.fullmatch(name) else name


def is_registry_name(name: object) -> bool:
    """Return whether a name refers to the registry, i.e. ``scforge://name``, or ``scModelForge://name`` in any case."""
    return isinstance(name, str) and name.lower().startswith(_SCHEMES)


def resolve(
    name_or_folder_or_repo_id: str | os.PathLike[str],
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
) -> Path:
    """Return the folder of a model or an adapter, fetching it first if it is on the hub.

    Parameters
    ----------
    name_or_folder_or_repo_id
        A folder; a Hugging Face Hub repository, ``"hf://org/name"`` or ``"hf://org/name@revision"``; or a registry
        name, ``"scforge://name"`` or ``"scforge://name@version"`` (see :func:`known_models`). ``scModelForge://`` is
        read as ``scforge://``.
    revision
        Branch, tag or commit of the repository. If None, uses the main branch.
    cache_dir
        Cache folder for the hub. If None, uses the default of the hub (``HF_HUB_CACHE``).
    token
        Token for private and gated repositories. If None, uses ``HF_TOKEN`` or the token of ``hf auth login``.
    local_files_only
        Whether to use only the cache, without querying the hub. ``HF_HUB_OFFLINE=1`` has the same effect.

    Returns
    -------
    The folder. For a repository, it is in the cache and must not be modified. It contains only scforge files; pickles
    and code in the repository are never downloaded.

    Raises
    ------
    MissingFileError
        If the folder, repository or revision does not exist, or is not in the cache and cannot be fetched.
    ModelFileError
        If the repository contains no scforge model.
    OptionError
        If a name is unknown, or access is not granted.
    HubError
        If the hub cannot be reached, or refuses the request or returns an error.

    Examples
    --------
    >>> resolve("hf://org/light", revision="v1")  # doctest: +SKIP
    """
    name = os.fspath(name_or_folder_or_repo_id)
    options = {"cache_dir": cache_dir, "local_files_only": local_files_only}
    return find_model(name, prefix=f"name={name!r}", revision=revision, token=token, **options).folder


def find_model(
    name: str | os.PathLike[str],
    *,
    prefix: str,
    revision: str | None = None,
    token: str | bool | None = None,
    **access: Any,
) -> FoundModel:
    """Find a model as in :func:`resolve`, with the same options; `prefix` is the prefix of messages."""
    repo_id: str | None
    if is_registry_name(name):
        registered, repo_id, revision = find_registered(str(name), prefix)
        if registered is not None:
            return registered
    elif is_hub_name(name):
        repo_id, _, written = str(name).removeprefix(HUB).rstrip("/").partition("@")
        if written and revision is not None:
            raise OptionError(f"{prefix} contains a revision, but revision={revision!r} is given too; pass only one.")
        revision = written or revision
    else:
        folder = _checked(Path(name), prefix)
        if revision is not None:
            raise OptionError(f"has no effect: {prefix} is a local folder; omit revision.", revision=revision)
        return FoundModel(folder, *origin_of(folder))
    assert repo_id is not None
    with hub_errors(prefix, repo_id, revision):
        api = hub_api(token)
        folder = Path(api.snapshot_download(repo_id, revision=revision, allow_patterns=list(SHARED_FILES), **access))
    if kind_of_folder(folder) is None:
        raise ModelFileError(
            f"{prefix}: {repo_id!r} contains no {described_kind()}; convert it with scforge convert-checkpoint."
        )
    return FoundModel(folder, repo_id, folder.name)


def _checked(folder: Path, prefix: str) -> Path:
    """Return a folder. Raises a MissingFileError if it does not exist."""
    if folder.is_dir():
        return folder
    what = "is a file" if folder.exists() else "does not exist"
    raise MissingFileError(f"{prefix} {what}; pass a folder, {hub_hint(folder)} or scforge://name.")


def hub_hint(folder: Path) -> str:
    """Return text for a message on how to name a repository of the hub, which a path may be meant as."""
    name = repository(folder.as_posix())
    return f"{name} if it is a repository of the hub," if is_hub_name(name) else "a hub repository (hf://org/name)"
