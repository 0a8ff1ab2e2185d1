"""Push models to the Hugging Face Hub, and load models from it."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from scforge._io import read_settled
from scforge.errors import MissingFileError, ModelFileError, NotTrainedWarning, OptionError, warn
from scforge.estimators.card import CardFacts, Origin
from scforge.estimators.finetune import load_adapter, save_adapter
from scforge.estimators.serialize import ADAPTER, read_description
from scforge.hub.finding import FoundModel, find_model, is_registry_name, kind_of_folder
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
    reference: bool = False,
    **options: Any,
) -> str:
    """Push a model to the hub, see :meth:`scforge.models.Encoder.push_to_hub`.

    `told` contains license, data, citation and metrics. `card` is the text of the card; if None, it is generated.
    `reference` tells whether to push labeled cells. `options` are the options of :func:`scforge.hub.upload`.
    """
    if not model.is_trained_:
        warn("The model is not trained; its random weights will be pushed.", NotTrainedWarning)
    before: CardFacts = model._facts
    told_facts = before.with_given(**told, n_epochs=model.n_epochs_)
    facts = told_facts if base is None else replace(told_facts, base=_named(base, model))
    model._facts = facts
    try:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "model"
            cells = model._reference_to_save() if reference and not adapter_only else None
            if reference and cells is None:
                warn("reference=True has no effect, because the model has no labeled training cells to push.")
            text = model._card(name=repo_id, is_adapter=adapter_only, reference=cells) if card is None else card
            if adapter_only:
                below = model._card_facts().base
                if below is None or below.name is None:
                    raise OptionError(
                        ", but the base model has no public location; push the base model, or pass its name as base.",
                        adapter_only=True,
                    )
                save_adapter(model, folder, overwrite=False)
                (folder / "README.md").write_text(text, encoding="utf-8")
            else:
                model._write(folder, card=text, reference=cells)
            url, commit = send_model(folder, repo_id, reference=reference, **options)
        # A name that nobody has checked is for this push.
        before = told_facts
    finally:
        model._facts = before
    if not adapter_only and not options.get("create_pr"):
        origin = model._current_origin() or Origin()
        model._origin = replace(origin, name=repo_id, revision=commit, n_epochs=model.n_epochs_)
    return url


def load_found(
    cls: Any,
    found: FoundModel,
    prefix: str,
    adata: AnnData | Literal[False] | None = None,
    *,
    base: CellModel | str | os.PathLike[str] | None = None,
    device: str | torch.device = "cpu",
    access: dict[str, Any] | None = None,
) -> CellModel:
    """Load a model, or adapters with their base model, from a folder.

    Parameters
    ----------
    cls
        The model class.
    found
        The folder and its source.
    prefix
        Prefix of error messages, which contains the name given by the user.
    adata, base, device
        See :meth:`scforge.models.Encoder.load`.
    access
        Options of :func:`scforge.hub.resolve` for the base model of adapters.
    """
    if kind_of_folder(found.folder) != "adapter":
        if base is not None:
            raise OptionError(f"has no effect if {prefix} is a complete model; omit base.", argument="base")
        model = cls._load_folder(found.folder, adata, device)
        if found.repo_id is not None:
            model._origin = Origin(found.repo_id, found.commit, n_epochs=model.n_epochs_)
        elif found.name is not None:
            model._origin = Origin(found.name, folder=found.folder, n_epochs=model.n_epochs_)
        return model
    if base is None or isinstance(base, str | os.PathLike):
        base = _load_base(cls, found, prefix, base, device, access or {})
    below, cells = base, None if adata is False else adata
    return read_settled(found.folder, lambda place: load_adapter(cls, below, place, cells))


def _load_base(
    cls: Any,
    found: FoundModel,
    prefix: str,
    base: str | os.PathLike[str] | None,
    device: str | torch.device,
    access: dict[str, Any],
) -> CellModel:
    """Load the base model of adapters, and verify its checksum."""
    revision = None
    where = f"base={base!r}"
    if base is None:
        stored = Origin.from_json(read_description(ADAPTER, found.folder / "adapter.json").get("base"))
        if stored is None or stored.name is None:
            raise OptionError(f"{prefix} does not contain the name of the base model; pass the base model as base.")
        where = f"the base model {stored.name!r} of {prefix}"
        base, revision = place_of(stored.name) or found.folder / stored.name, stored.revision
        if isinstance(base, Path) and not base.is_dir():
            raise MissingFileError(f"{where} is a folder that does not exist; pass the base model as base.")
    below = find_model(base, prefix=where, revision=revision, **access)
    if kind_of_folder(below.folder) != "model":
        raise ModelFileError(f"{where} contains no model; pass another base model as base.")
    return load_found(cls, below, where, False, device=device)


def place_of(name: str | os.PathLike[str]) -> str | None:
    """Return the public location that a name refers to, regardless of local folders, or None for other names.

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
    """Return the public location of the base model of a fine-tuned model."""
    if place_of(base) is None:
        raise OptionError("is not the name of a public model; pass 'org/name' or 'scforge://name'.", base=base)
    if model.spec.tuning is None:
        raise OptionError("has no effect if the model was not fine-tuned; omit base.", base=base)
    known = None if model._base is None else model._base._current_origin()
    revision = known.revision if known is not None and known.name == base else None
    return Origin(base, revision, is_given=True)
