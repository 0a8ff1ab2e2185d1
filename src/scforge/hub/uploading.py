"""Upload a model folder to the hub in one commit that contains only scforge files."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from scforge._io import is_own_card
from scforge.errors import MissingFileError, ModelFileError, OptionError, listing
from scforge.hub.client import hub_api, hub_errors
from scforge.hub.finding import (
    CARD,
    ORIGIN_FILE,
    REFERENCE,
    SHARED_FILES,
    described_kind,
    kind_of,
    kind_of_folder,
    shared_files,
)

logger = logging.getLogger("scforge")


def upload(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
    create_pr: bool = False,
    reference: bool = False,
) -> str:
    """Upload the folder of a model or an adapter to the hub in one commit.

    Parameters
    ----------
    folder
        The folder. Other files in it, such as ``adata.h5ad``, are not uploaded.
    repo_id
        Repository, ``"org/name"``. It is created if necessary. scforge files that are not in `folder` are removed from
        the repository. Other files are kept. A ``README.md`` that a user wrote or edited in the repository is also
        kept, unless the ``README.md`` in `folder` was edited, too.
    private
        Whether only you and your organization can see the repository. If None, uses the hub settings. This option does
        not change an existing repository.
    token
        A token with write access. If None, uses ``HF_TOKEN`` or the token of ``hf auth login``.
    revision
        Branch to write to, which is created if necessary. If None, uses the main branch.
    commit_message
        First line of the commit.
    create_pr
        Whether to propose the files in a pull request instead of writing them. The repository must exist.
    reference
        Whether to also upload the counts of labeled cells that were saved with the model, see
        :meth:`scforge.models.Encoder.save`.

    Returns
    -------
    URL of the repository, or of the pull request.

    Raises
    ------
    MissingFileError, ModelFileError
        If `folder` is missing, or contains no model.
    OptionError
        If an argument is invalid, or the repository contains a model from another package.
    HubError
        If the hub cannot be reached, refuses the request or returns an error, or the repository is changed meanwhile.

    Examples
    --------
    >>> upload("my_model", "org/light", private=True)  # doctest: +SKIP
    """
    return send_model(
        Path(folder),
        repo_id,
        private=private,
        token=token,
        revision=revision,
        commit_message=commit_message,
        create_pr=create_pr,
        reference=reference,
    )[0]


def send_model(
    folder: Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
    create_pr: bool = False,
    reference: bool = False,
) -> tuple[str, str]:
    """Upload a folder as in :func:`upload`, and return the URL and the commit."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    if not folder.is_dir():
        raise MissingFileError("is not a folder; pass a folder written by model.save().", folder=str(folder))
    if kind_of_folder(folder) is None:
        raise ModelFileError(f"contains no {described_kind()}; pass a model folder.", folder=str(folder))
    if create_pr and revision is not None:
        raise OptionError(
            "does not work with create_pr=True, which targets the main branch; omit revision.", revision=revision
        )
    tell_left_behind(folder, reference=reference)
    names = [name for name in shared_files(folder) if reference or name != REFERENCE]
    prefix = f"repo_id={repo_id!r}"
    with hub_errors(prefix, repo_id, revision):
        api = hub_api(token)
        if not create_pr:
            api.create_repo(repo_id, private=private, exist_ok=True)
            if revision is not None:
                api.create_branch(repo_id, branch=revision, exist_ok=True)
        info = api.model_info(repo_id, revision=revision)
        if private and not info.private:
            raise OptionError(
                f"{prefix} already exists and is public; make the repository private in its settings, or omit "
                "private=True."
            )
        there = {file.rfilename for file in info.siblings or ()}
        if "config.json" in there and kind_of(there) is None:
            raise OptionError(
                f"{prefix} contains a model of another package that would be overwritten; push to another repository."
            )
        if {CARD} <= there & set(names) and is_own_card(_text(folder / CARD)):
            theirs = Path(api.hf_hub_download(repo_id, CARD, revision=info.sha))
            if not is_own_card(_text(theirs)):
                names.remove(CARD)
                logger.warning("The %s of %s was written or edited by a user, so it is not changed.", CARD, repo_id)
        stale = sorted((there & set(SHARED_FILES)) - {*names, CARD})
        done = api.create_commit(
            repo_id,
            operations=[
                *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=folder / name) for name in names),
                *(CommitOperationDelete(path_in_repo=name) for name in stale),
            ],
            commit_message=commit_message or "Upload with scforge",
            revision=revision,
            create_pr=create_pr,
            parent_commit=info.sha,  # what was looked at; another push in between is refused
        )
    if stale:
        logger.info("Removed %s of an earlier model from %s.", listing(stale), repo_id)
    page = f"{api.endpoint}/{repo_id}"
    if create_pr:
        page = str(done.pr_url)
    elif revision is not None:
        page = f"{page}/tree/{revision}"
    return page, done.oid


def _text(card: Path) -> str:
    return card.read_text(encoding="utf-8", errors="replace")


def tell_left_behind(folder: Path, *, reference: bool = False) -> None:
    """Log the files in a folder that are not uploaded."""
    sent = {*SHARED_FILES, ORIGIN_FILE} - (set() if reference else {REFERENCE})
    if kept := sorted(path.name for path in folder.iterdir() if path.name not in sent):
        logger.info("These files are not part of a shared model and were not uploaded: %s.", listing(kept))
