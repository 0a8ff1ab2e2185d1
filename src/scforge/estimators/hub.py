"""Load models from folders, published checkpoints and the Hugging Face Hub, and push them to it."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from scforge._io import read_settled
from scforge.data.checks import check_adata, inherited_batch_key
from scforge.data.sources import read_h5ad
from scforge.errors import MissingFileError, ModelFileError, NotTrainedWarning, OptionError, warn
from scforge.estimators.card import CardFacts, Origin
from scforge.estimators.finetune import load_adapter, save_adapter
from scforge.estimators.fitted import FittedModel
from scforge.estimators.serialize import (
    ADAPTER,
    ADATA,
    check_sum,
    load_weights,
    read_description,
    read_folder,
    read_spec,
    shapes_of,
)
from scforge.estimators.setup import Model, class_named, class_of_architecture, set_up_like, setup_of
from scforge.estimators.transfer import reference_to_save
from scforge.finetuning.reference import read_reference
from scforge.hub.finding import REFERENCE, FoundModel, find_model, is_registry_name, kind_of_folder
from scforge.hub.uploading import send_model

if TYPE_CHECKING:
    import torch
    from anndata import AnnData

    from scforge.foreign.base import Foreign


def push_model(
    model: Model,
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
    fitted = model.fitted
    if not fitted.is_trained:
        warn("The model is not trained; its random weights will be pushed.", NotTrainedWarning)
    before = fitted.facts
    told_facts = before.with_given(**told, n_epochs=fitted.n_epochs)
    facts = told_facts
    if base is not None:
        if place_of(base) is None:
            raise OptionError("is not the name of a public model; pass 'org/name' or 'scforge://name'.", base=base)
        if fitted.spec.tuning is None:
            raise OptionError("has no effect if the model was not fine-tuned; omit base.", base=base)
        known = None if fitted.base is None else fitted.base.current_origin
        revision = known.revision if known is not None and known.name == base else None
        facts = replace(told_facts, base=Origin(base, revision, is_given=True))
    fitted.facts = facts
    try:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "model"
            cells = reference_to_save(model) if reference and not adapter_only else None
            if reference and cells is None:
                warn("reference=True has no effect, because the model has no labeled training cells to push.")
            text = fitted.card(name=repo_id, is_adapter=adapter_only, reference=cells) if card is None else card
            if adapter_only:
                below = fitted.card_facts.base
                if below is None or below.name is None:
                    raise OptionError(
                        ", but the base model has no public location; push the base model, or pass its name as base.",
                        adapter_only=True,
                    )
                save_adapter(fitted, folder, overwrite=False)
                (folder / "README.md").write_text(text, encoding="utf-8")
            else:
                fitted.write(folder, card=text, reference=cells)
            url, commit = send_model(folder, repo_id, reference=reference, **options)
        # A name that nobody has checked is for this push.
        before = told_facts
    finally:
        fitted.facts = before
    if not adapter_only and not options.get("create_pr"):
        origin = fitted.current_origin or Origin()
        fitted.origin = replace(origin, name=repo_id, revision=commit, n_epochs=fitted.n_epochs)
    return url


def load_found(
    cls: Any,
    found: FoundModel,
    prefix: str,
    adata: AnnData | Literal[False] | None = None,
    *,
    base: Any = None,
    device: str | torch.device = "cpu",
    access: dict[str, Any] | None = None,
) -> Any:
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
        model = read_settled(found.folder, lambda place: load_folder(cls, place, adata, device))
        fitted = model.fitted
        if found.repo_id is not None:
            fitted.origin = Origin(found.repo_id, found.commit, n_epochs=fitted.n_epochs)
        elif found.name is not None:
            fitted.origin = Origin(found.name, folder=found.folder, n_epochs=fitted.n_epochs)
        return model
    revision, where = None, f"base={base!r}"
    if base is None:
        stored = Origin.from_json(read_description(ADAPTER, found.folder / "adapter.json").get("base"))
        if stored is None or stored.name is None:
            raise OptionError(f"{prefix} does not contain the name of the base model; pass the base model as base.")
        where = f"the base model {stored.name!r} of {prefix}"
        base, revision = place_of(stored.name) or found.folder / stored.name, stored.revision
        if isinstance(base, Path) and not base.is_dir():
            raise MissingFileError(f"{where} is a folder that does not exist; pass the base model as base.")
    if isinstance(base, str | os.PathLike):
        found_base = find_model(base, prefix=where, revision=revision, **(access or {}))
        if kind_of_folder(found_base.folder) != "model":
            raise ModelFileError(f"{where} contains no model; pass another base model as base.")
        base = load_found(cls, found_base, where, False, device=device)
    cells = None if adata is False else adata
    return read_settled(found.folder, lambda place: load_adapter(cls, base, place, cells))


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


def load_folder(cls: Any, folder: Path, adata: AnnData | Literal[False] | None, device: str | torch.device) -> Any:
    """Load the model in a folder, with the cells that were saved with it if `adata` is None."""
    stored = read_folder(folder)
    setup, made_by, sums = (stored.content[name] for name in ("setup", "class", "sha256"))
    cells: Any = None if adata is False else adata
    if adata is None and ADATA in sums:
        file = folder / ADATA
        if file.exists():
            check_sum(file, sums[ADATA])
            cells = read_h5ad([str(file)])
        else:
            warn(
                f"The cells saved with the model are missing: {str(file)!r} does not exist (push and pull do not copy "
                "cells)."
            )
    if made_by != cls.__name__:
        saved_class = class_named(made_by)
        special = class_of_architecture(stored.spec.architecture)
        if saved_class is not None and issubclass(saved_class, cls):
            cls = saved_class
        elif saved_class is None or not (issubclass(special, cls) and issubclass(cls, saved_class)):
            what = f"dir_path={str(folder)!r} contains a model of the class {made_by!r}"
            raise ModelFileError(f"{what}; load it with scforge.models.{made_by}.load.")
    if cells is not None:
        cells = set_up_like(cls, cells, setup)
        check_adata(cells)
        if not setup_of(cls, cells):
            own = {key: value for key, value in setup.items() if key != "modality"}
            own["batch_key"] = inherited_batch_key(cells.obs, setup["batch_key"])
            own["labels_key"] = setup["labels_key"] if setup["labels_key"] in cells.obs else None
            cls.setup_anndata(cells, **own)
    model = cls.of_fitted(FittedModel.of_folder(folder, stored), cells)
    model.to_device(device)
    if REFERENCE in sums and (folder / REFERENCE).exists():  # pushes leave it out
        check_sum(folder / REFERENCE, sums[REFERENCE])
        model.reference_cells = read_reference(folder / REFERENCE, stored.spec.vocab)
    return model


def load_foreign(cls: Any, checkpoint: Foreign, adata: AnnData | None, device: str | torch.device) -> Any:
    """Create a model from a published checkpoint, using the model class of its architecture."""
    special = class_of_architecture(checkpoint.architecture["name"])
    cls = special if issubclass(special, cls) else cls
    if adata is not None and not setup_of(cls, adata):
        cls.setup_anndata(adata)
    # Before memory is taken for a module of the size that a config claims.
    parts = {name: getattr(checkpoint, name) for name in ("architecture", "tokenizer", "objective")}
    spec, module = read_spec(parts, checkpoint.vocab, f"the config of {checkpoint.source!r}")
    weights = None if module is None else checkpoint.weights(shapes_of(module))
    setup = dict.fromkeys(("layer", "gene_key", "batch_key", "labels_key"))
    fitted = FittedModel(spec, 0, setup=setup, draws=module is None)
    if weights is None:
        weights = checkpoint.weights(shapes_of(fitted.module))
    load_weights(fitted.module, weights, source=checkpoint.source)
    fitted.is_trained = True  # elsewhere
    fitted.facts = CardFacts.of_checkpoint(checkpoint)
    model = cls.of_fitted(fitted, adata)
    model.to_device(device)
    return model
