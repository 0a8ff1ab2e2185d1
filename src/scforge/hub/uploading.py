"""Sending the folder of a model to the hub: one commit, of our files only."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scforge._checks import check_bool
from scforge._io import parse_json
from scforge.errors import HubError, MissingFileError, ModelFileError, OptionError, listing, redacted
from scforge.hub.client import (
    answered,
    checked_token,
    hub_api,
    hub_errors,
    info_of,
    is_offline,
    read_remote,
    shown_endpoint,
)
from scforge.hub.finding import ORIGIN_FILE, SHARED_FILES, check_shared, described_kind, kind_of_folder

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo, HfApi, ModelInfo


logger = logging.getLogger("scforge")

_MESSAGE = "Upload with scforge"
_MAIN = "main"
_CARD = "README.md"
_MARK = re.compile(rb" Written by scforge \(([0-9a-f]{16,})\)\. -->\s*")


@dataclass(frozen=True)
class SentModel:
    """What an upload has come to.

    Attributes
    ----------
    url
        Page of the repository, or of the pull request.
    commit
        The new commit.
    """

    url: str
    commit: str


def upload(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
    create_pr: bool = False,
) -> str:
    """Send the folder of a model or an adapter to the hub, as one commit.

    Parameters
    ----------
    folder
        The folder. Files that are not of scforge, such as ``adata.h5ad``, stay here.
    repo_id
        Repository, ``"org/name"``; it is made if there is none. Files of scforge that it has and `folder` lacks are
        removed from it; others stay, and so does a ``README.md`` that somebody has written or edited there, unless
        that of `folder` is, too.
    private
        Whether only you and your organization see it; None leaves it to the hub's settings. It cannot change a
        repository that exists.
    token
        A token that may write; None takes ``HF_TOKEN`` or that of ``hf auth login``.
    revision
        Branch to write to, which is made if there is none; None for the main branch.
    commit_message
        First line of the commit.
    create_pr
        Propose the files in a pull request in place of writing them; the repository must be there.

    Returns
    -------
    URL of the repository, or of the pull request.

    Raises
    ------
    MissingFileError, ModelFileError
        If `folder` is not there, or holds no model.
    OptionError
        If an argument cannot be used, the token may not write, or the repository has a model of another package.
    HubError
        If the hub cannot be reached, or fails, or somebody else writes to the repository at the same time.

    Examples
    --------
    >>> upload("my_model", "org/light", private=True)  # doctest: +SKIP
    """
    if not isinstance(folder, str | os.PathLike):
        raise OptionError(f"folder={folder!r} is no path; give the folder that model.save() wrote.")
    return send_model(
        Path(folder),
        repo_id,
        private=private,
        token=token,
        revision=revision,
        commit_message=commit_message,
        create_pr=create_pr,
    ).url


def send_model(
    folder: Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
    create_pr: bool = False,
) -> SentModel:
    """Do what :func:`upload` says."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    names = _names_to_send(folder)
    said = f"repo_id={repo_id!r}"
    if not isinstance(repo_id, str) or repo_id.count("/") != 1 or "://" in repo_id:
        raise OptionError(f"{said} is no name of a repository; give it as 'organization/name'.")
    for argument, text in {"revision": revision, "commit_message": commit_message}.items():
        if text is not None and (not isinstance(text, str) or not text.strip()):
            raise OptionError(f"{argument}={text!r} is no text; give some, or leave it out.")
    if private is not None:
        check_bool("private", private)
    check_bool("create_pr", create_pr)
    if create_pr and revision not in (None, _MAIN):
        raise OptionError(
            f"revision={revision!r} and create_pr=True: pull requests go to the main branch; leave one of them out."
        )
    if is_offline():
        raise HubError(f"{said}: nothing can be sent, because HF_HUB_OFFLINE says so; unset it.")
    with hub_errors(said, repo_id, revision, writing=True):
        api = hub_api(checked_token(token))
        if not create_pr:
            answered(said, lambda: api.create_repo(repo_id, private=private, exist_ok=True))
        info = info_of(api, said, repo_id)
        _check_visibility(said, private, bool(info.private))
        if revision not in (None, _MAIN):
            info = _branch(api, said, repo_id, str(revision), info)
        else:
            _check_ours(api, said, repo_id, info)
        there = _names_in(info)
        stale = sorted((there & set(SHARED_FILES)) - {*names, _CARD})
        is_ours = _CARD in names and _is_our_card((folder / _CARD).read_bytes())
        if is_ours and _CARD in there and not _is_our_card(read_remote(api, repo_id, _CARD, info.sha)):
            names.remove(_CARD)
            logger.warning("The %s of %s was written or edited by somebody, and stays as it is.", _CARD, repo_id)
        added = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=folder / name) for name in names]
        removed = [CommitOperationDelete(path_in_repo=name) for name in stale]

        def commit() -> CommitInfo:
            try:
                return api.create_commit(
                    repo_id,
                    operations=[*added, *removed],
                    commit_message=commit_message or _MESSAGE,
                    revision=revision,
                    create_pr=create_pr,
                    parent_commit=info.sha,  # what was looked at; another push in between is refused
                )
            except ValueError as error:  # what the hub says of the front matter of a card
                if type(error) is not ValueError:
                    raise
                text = " ".join(str(error).split()).rstrip(".")
                raise OptionError(
                    f"{said}: the hub does not take what was sent ({text}); correct the model card."
                ) from error

        done = answered(said, commit)
    if stale:
        logger.info("Removed %s of an earlier model from %s.", listing(stale), repo_id)
    page = f"{shown_endpoint()}/{repo_id}"
    if create_pr and done.pr_url is not None:
        page = redacted(str(done.pr_url))
    elif revision not in (None, _MAIN):
        page = f"{page}/tree/{revision}"
    return SentModel(page, done.oid)


def _names_in(info: ModelInfo) -> set[str]:
    return {file.rfilename for file in info.siblings or ()}


def _branch(api: HfApi, said: str, repo_id: str, branch: str, main: ModelInfo) -> ModelInfo:
    """Return what a branch holds; make it from the main one if there is none."""
    from huggingface_hub.errors import RevisionNotFoundError

    try:
        info = info_of(api, said, repo_id, branch)
    except RevisionNotFoundError:
        _check_ours(api, said, repo_id, main)
        api.create_branch(repo_id, branch=branch, exist_ok=True)
        return info_of(api, said, repo_id, branch)
    _check_ours(api, said, repo_id, info)
    return info


def _check_ours(api: HfApi, said: str, repo_id: str, info: ModelInfo) -> None:
    """Raise if there is a model of another package, whose description would be written over."""
    name = "config.json"
    if name not in _names_in(info):
        return
    data = read_remote(api, repo_id, name, info.sha)
    try:
        content = parse_json(data, finite=False)
    except ValueError:
        content = None
    if not isinstance(content, dict) or "scforge_version" not in content:
        raise OptionError(
            f"{said} has a model of another package, whose {name} would be lost; push to another repository, or remove "
            "that file from it first."
        )


def _is_our_card(content: bytes) -> bool:
    """Return whether a card is one of scforge that nobody has edited: the checksum in its last line says so."""
    text, _, last = content.rpartition(b"\n<!--")
    mark = _MARK.fullmatch(last)
    return mark is not None and hashlib.sha256(text + b"\n").hexdigest().startswith(mark[1].decode())


def _check_visibility(said: str, private: bool | None, is_private: bool) -> None:
    if private is not None and private != is_private:
        there = "private" if is_private else "public"
        raise OptionError(
            f"{said} exists and is {there}, so private={private} cannot be kept; change it in the settings of the "
            "repository, or leave private out."
        )


def _names_to_send(folder: Path) -> list[str]:
    """Return the files of ours in a folder; say which others stay."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise MissingFileError(f"folder={str(folder)!r} {what}; give the folder that model.save() wrote.")
    if kind_of_folder(folder) is None:
        raise ModelFileError(f"folder={str(folder)!r} holds no {described_kind()}; give the folder of one.")
    check_shared(folder)
    tell_left_behind(folder)
    return sorted(path.name for path in folder.iterdir() if path.name in SHARED_FILES)


def tell_left_behind(folder: Path) -> None:
    """Say what of a folder is not sent, save for what only tells where the folder comes from."""
    if kept := sorted(path.name for path in folder.iterdir() if path.name not in {*SHARED_FILES, ORIGIN_FILE}):
        logger.info("Not sent, because it is no part of a shared model: %s.", listing(kept))
