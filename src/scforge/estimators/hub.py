"""Push models to the Hugging Face Hub, and load what was found there."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from scforge._checks import check_bool
from scforge._io import atomic_write_text, read_settled
from scforge.errors import MissingFileError, ModelFileError, NotTrainedWarning, OptionError, warn
from scforge.estimators.card import CardFacts, Origin
from scforge.estimators.finetune import load_adapter, save_adapter
from scforge.estimators.serialize import ADAPTER, read_description
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
    import torch
    from anndata import AnnData

    from scforge.estimators.base import CellModel


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
    """Send a model to the hub; see :meth:`scforge.models.Encoder.push_to_hub`.

    Parameters
    ----------
    model, repo_id
        What to send where.
    told
        License, data, citation and metrics.
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
            text = model._card(name=repo_id, is_adapter=adapter_only) if card is None else card
            if check_bool("adapter_only", adapter_only):
                _check_base(model._card_facts().base)
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
            model._current_origin() or Origin(), name=repo_id, revision=sent.commit, n_epochs=model.n_epochs_
        )
    return sent.url


def load_found(
    cls: Any,
    found: FoundModel,
    said: str,
    adata: AnnData | Literal[False] | None = None,
    *,
    base: CellModel | str | os.PathLike[str] | None = None,
    device: str | torch.device = "cpu",
    access: dict[str, Any] | None = None,
) -> CellModel:
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
        As for :meth:`scforge.models.Encoder.load`.
    access
        Options of :func:`scforge.hub.resolve` for the model below adapters.
    """
    if is_whole_model(found.folder):
        if base is not None:
            raise OptionError(f"base has no use where {said} is a whole model; leave it out.")
        model = cls._load_folder(found.folder, adata, device)
        if found.repo_id is not None:
            model._origin = Origin(found.repo_id, found.commit, n_epochs=model.n_epochs_)
        elif found.name is not None:
            model._origin = Origin(found.name, folder=found.folder, n_epochs=model.n_epochs_)
        return model
    if base is None or isinstance(base, str | os.PathLike):
        base = _load_base(cls, found, said, base, device, access or {})
    below, cells = base, None if adata is False else adata
    return read_settled(found.folder, lambda: load_adapter(cls, below, found.folder, cells))


def is_whole_model(folder: Path) -> bool:
    """Return whether a folder is that of a model, and not of adapters alone."""
    names = {path.name for path in folder.iterdir()}
    return "config.json" in names or not names & {"adapter.json", "adapter.safetensors"}


def _load_base(
    cls: Any,
    found: FoundModel,
    said: str,
    base: str | os.PathLike[str] | None,
    device: str | torch.device,
    access: dict[str, Any],
) -> CellModel:
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
    known = None if model._base is None else model._base._current_origin()
    revision = known.revision if known is not None and known.name == base else None
    return Origin(base, revision, is_given=True)


def _check_base(base: Origin | None) -> None:
    if base is None or base.name is None:
        raise OptionError(
            "adapter_only=True, but it is not known where others find the model that the adapters sit on; send that "
            "with push_to_hub first, or name it with base='org/name'."
        )
