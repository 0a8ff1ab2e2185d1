"""Models on the Hugging Face Hub: what a front class has to do with :mod:`scforge.hub`.

``huggingface_hub.ModelHubMixin`` is not used. It keeps the arguments of a constructor as ``config.json`` and calls the
constructor with them again; here the description is a file with versions and checksums, the constructor needs the
vocabulary beside it, and an adapter needs another model. The mixin also downloads by file name without looking at what
else a repository is, and takes what is in the cache without a word where a token is refused.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from scforge._checks import check_bool
from scforge._io import atomic_write_text
from scforge.errors import MissingFileError, ModelFileError, NotTrainedWarning, OptionError, warn
from scforge.estimators.adapter_files import save_adapter
from scforge.estimators.card_facts import CardFacts, Origin, facts_of
from scforge.estimators.folder_formats import ADAPTER, read_description
from scforge.estimators.model_content import card_of
from scforge.hub.finding import (
    FoundModel,
    described_kind,
    find_model,
    find_registered,
    is_registry_name,
    kind_of_folder,
)
from scforge.hub.uploading import send_model

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from anndata import AnnData

    from scforge.estimators.encoder import Encoder
    from scforge.eval.report import Report

__all__ = ["SharingMethods", "load_found", "place_of", "push_model"]


class SharingMethods:
    """Methods around the hub."""

    _facts: CardFacts
    _origin: Origin | None

    def push_to_hub(
        self: Any,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        commit_message: str | None = None,
        create_pr: bool = False,
        licence: str | None = None,
        data: str | Sequence[str] | None = None,
        metrics: Report | pd.DataFrame | None = None,
        citation: str | None = None,
        adapter_only: bool = False,
        base: str | None = None,
    ) -> str:
        """Send the model to the Hugging Face Hub: weights, description, vocabulary and model card, in one commit.

        Parameters
        ----------
        repo_id
            Repository, ``"org/name"``; it is made if there is none.
        private
            Whether only you and your organisation see it; None leaves it to the hub's settings.
        token
            A token that may write; None takes ``HF_TOKEN`` or that of ``hf auth login``.
        revision
            Branch to write to, which is made if there is none; None for the main branch.
        commit_message
            First line of the commit.
        create_pr
            Propose the model in a pull request in place of writing it.
        licence
            Identifier of the licence, e.g. ``"apache-2.0"``, or its name. Without one the card says that none is
            stated.
        data
            What the model was trained on, or a list of it; names of data sets on the hub become links.
        metrics
            What :meth:`evaluate` returned: figures beside those of baselines.
        citation
            How to cite the model.
        adapter_only
            Send the adapters and the head of a model that was fine-tuned with ``lora`` alone, and the name of the model
            that they sit on.
        base
            That name, a repository or ``"scforge://name"``; it is not checked, and counts for this push. None takes
            where the model before fine-tuning came from, or was sent to.

        Returns
        -------
        URL of the repository, or of the pull request.

        Raises
        ------
        OptionError
            If an argument cannot be used, or the token may not write.
        HubError
            If the hub cannot be reached, or fails.
        NotTrainedWarning
            If the model is not trained.

        Notes
        -----
        Cells are never sent. Of a fine-tuned model ``split.safetensors`` is, which holds fingerprints (hashes of
        counts) of the cells that it has seen. Licence, data, figures and citation stay with the model: :meth:`save`
        writes them, too.

        Examples
        --------
        >>> model.push_to_hub("org/light", licence="apache-2.0", data="PBMC 3k")  # doctest: +SKIP
        >>> annotator.push_to_hub("org/blood", metrics=annotator.evaluate(), adapter_only=True)  # doctest: +SKIP
        """
        told = {"licence": licence, "data": data, "citation": citation, "metrics": metrics}
        return push_model(
            self,
            repo_id,
            told=told,
            adapter_only=adapter_only,
            base=base,
            private=private,
            token=token,
            revision=revision,
            commit_message=commit_message,
            create_pr=create_pr,
        )

    @classmethod
    def from_pretrained(
        cls,
        name_or_folder: str | os.PathLike[str],
        adata: AnnData | None = None,
        *,
        revision: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        base: Encoder | str | os.PathLike[str] | None = None,
        device: str | torch.device = "cpu",
    ) -> Encoder:
        """Load a model, or adapters with the model that they sit on, by name; fetch what is not here.

        Nothing that is fetched is run, and no pickle is opened or even fetched.

        Parameters
        ----------
        name_or_folder
            A folder, a repository of the hub, or a name of the registry, as for :func:`scforge.hub.resolve`.
        adata
            Data to go on with, as for :meth:`load`.
        revision, cache_dir, token, local_files_only
            As for :func:`scforge.hub.resolve`. Of adapters they count for the model below them, too, save `revision`.
        base
            The model that adapters sit on, or its name. None takes the name that is stored with them.
        device
            Where to put the module.

        Returns
        -------
        The model.

        Raises
        ------
        MissingFileError
            If there is no such folder, repository or revision, or it cannot be fetched.
        ModelFileError
            If what is there is not a model of scforge, is damaged, or adapters sit on another model.
        OptionError
            If a name is not known, a token is refused, or it is not known what adapters sit on.
        HubError
            If the hub fails.

        Examples
        --------
        >>> model = Encoder.from_pretrained("org/light", revision="v1")  # doctest: +SKIP
        >>> annotator = Encoder.from_pretrained("org/blood", adata)  # doctest: +SKIP
        """
        access: dict[str, Any] = {"cache_dir": cache_dir, "token": token, "local_files_only": local_files_only}
        said = f"name_or_folder={os.fspath(name_or_folder)!r}"
        found = find_model(name_or_folder, said=said, revision=revision, **access)
        return load_found(cls, found, said, adata, base=base, device=device, access=access)


def push_model(
    model: Any,
    repo_id: str,
    *,
    told: dict[str, Any],
    adapter_only: bool = False,
    base: str | None = None,
    card: str | None = None,
    **options: Any,
) -> str:
    """Do what :meth:`SharingMethods.push_to_hub` says.

    Parameters
    ----------
    model, repo_id
        What to send where.
    told
        Licence, data, citation and metrics.
    adapter_only, base
        As there.
    card
        The card; None writes one.
    **options
        Options of :func:`scforge.hub.upload`.
    """
    if not model.is_trained_:
        warn("The model is not trained; what is sent is random.", NotTrainedWarning)
    before: CardFacts = model._facts
    told_facts = before.with_given(**told, n_epochs=model.n_epochs_)
    facts = told_facts if base is None else replace(told_facts, base=_named(base, model))
    model._facts = facts
    try:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "model"
            text = card_of(model, name=repo_id, is_adapter=adapter_only) if card is None else card
            if check_bool("adapter_only", adapter_only):
                _check_base(facts_of(model).base)
                save_adapter(model, folder, overwrite=False)
                atomic_write_text(folder / "README.md", text)
            else:
                model._write(folder, card=text)
            sent = send_model(folder, repo_id, **options)
        # A name that nobody has checked is for this push.
        before = told_facts
    finally:
        model._facts = before
    if not adapter_only and not options.get("create_pr"):
        model._origin = replace(
            Origin.of(model) or Origin(), name=repo_id, revision=sent.commit, n_epochs=model.n_epochs_
        )
    return sent.url


def load_found(
    cls: Any,
    found: FoundModel,
    said: str,
    adata: AnnData | Literal[False] | None = None,
    *,
    base: Encoder | str | os.PathLike[str] | None = None,
    device: str | torch.device = "cpu",
    access: dict[str, Any] | None = None,
) -> Encoder:
    """Load what was found: a model, or adapters with their model.

    Parameters
    ----------
    cls
        The front class.
    found
        The folder, and where it comes from.
    said
        How the user named it, the beginning of a message.
    adata, base, device
        As for :meth:`SharingMethods.from_pretrained`.
    access
        Options of :func:`scforge.hub.resolve` for the model below adapters.
    """
    kind = kind_of_folder(found.folder)
    if kind != "adapter":
        if base is not None:
            raise OptionError(f"base has no use where {said} is a whole model; leave it out.")
        model = cls.load(found.folder, adata, device=device)
        if found.repo_id is not None:
            model._origin = Origin(found.repo_id, found.commit, n_epochs=model.n_epochs_)
        elif found.name is not None:
            model._origin = Origin(found.name, folder=found.folder, n_epochs=model.n_epochs_)
        return model
    if base is None or isinstance(base, str | os.PathLike):
        base = _load_base(cls, found, said, base, device, access or {})
    return cls.load_adapter(base, found.folder, None if adata is False else adata)


def _load_base(
    cls: Any,
    found: FoundModel,
    said: str,
    base: str | os.PathLike[str] | None,
    device: str | torch.device,
    access: dict[str, Any],
) -> Encoder:
    """Load the model that adapters sit on."""
    revision = None
    where = f"base={base!r}"
    if base is None:
        stored = Origin.from_json(
            read_description(ADAPTER, found.folder / "adapter.json").get("base"), source=str(found.folder)
        )
        if stored is None or stored.name is None:
            raise OptionError(f"{said} does not say which model its adapters sit on; name it with base=.")
        base, revision = stored.name, stored.revision
        where = f"{said} has adapters for {stored.name!r}, and this name of theirs"
        # What somebody else wrote does not choose files of this machine.
        is_foreign = found.repo_id is not None
        place = place_of(base)
        if place is None:
            if is_foreign:
                raise ModelFileError(f"{where} is a folder of another machine; name the model with base=.")
            base = found.folder / base
            if not base.is_dir():
                raise MissingFileError(f"{where} is a folder that is not here; name the model with base=.")
        elif is_foreign and is_registry_name(base) and _is_private(base, where):
            raise ModelFileError(f"{where} is a folder in the registry of this machine; name the model with base=.")
        else:
            base = place
    below = find_model(base, said=where, revision=revision, **access)
    if kind_of_folder(below.folder) != "model":
        raise ModelFileError(f"{where} is not a {described_kind().partition(' or ')[0]}; name another one.")
    return load_found(cls, below, where, False, device=device)


def _is_private(name: str, said: str) -> bool:
    """Return whether a name of the registry is a folder that this machine alone has."""
    registered = find_registered(name, said)
    return registered.folder is not None and not registered.is_shipped


def place_of(name: str | os.PathLike[str]) -> str | None:
    """Return where others find a model, whatever folders are here; None for a name that is none of theirs.

    Examples
    --------
    >>> place_of("org/light"), place_of("scforge://light"), place_of("./light")
    ('hf://org/light', 'scforge://light', None)
    """
    text = os.fspath(name)
    if is_registry_name(text):
        return text
    return f"hf://{text}" if text.count("/") == 1 and not text.startswith((".", "/")) else None


def _named(base: str, model: Any) -> Origin:
    if not isinstance(base, str) or place_of(base) is None:
        raise OptionError(f"base={base!r} is no name that others can use; give 'org/name' or 'scforge://name'.")
    if model.spec.tuning is None:
        raise OptionError(f"base={base!r} has no use where the model was not fine-tuned; leave it out.")
    known = Origin.of(model._base)
    revision = known.revision if known is not None and known.name == base else None
    return Origin(base, revision, is_given=True)


def _check_base(base: Origin | None) -> None:
    if base is None or base.name is None:
        raise OptionError(
            "adapter_only=True, but it is not known where others find the model that the adapters sit on; send that "
            "with push_to_hub first, or name it with base='org/name'."
        )
