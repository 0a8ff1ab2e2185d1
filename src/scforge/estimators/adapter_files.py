"""Adapters and heads without the model that they sit on."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import nn

from scforge._io import atomic_folder, check_inside, sha256_of
from scforge.errors import MissingFileError, ModelFileError, OptionError, listing
from scforge.estimators.card_facts import CardFacts
from scforge.estimators.finetuning_run import set_up
from scforge.estimators.folder_formats import ADAPTER, lacking, read_description, sealed
from scforge.estimators.registries import bare_registry
from scforge.estimators.shape_check import check_adapter
from scforge.finetuning.adapters import digest_of, is_adapter, merged
from scforge.finetuning.held_out import SeenCells
from scforge.models._weights import read_shapes, read_weights, refuse_not_finite, refuse_pickle

if TYPE_CHECKING:
    from anndata import AnnData

    from scforge.estimators.base import CellModel


_CONFIG, _WEIGHTS, _SPLIT = "adapter.json", "adapter.safetensors", "split.safetensors"
_CONTENT = {"tuning": dict, "vocab": str, "seed": int, "n_epochs": int, "history": dict, "sha256": str}
"""What loading reads of the description, and its type."""


def save_adapter(model: CellModel, dir_path: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Do what :meth:`scforge.models.Encoder.save_adapter` says."""
    tuning = model.spec.tuning
    if tuning is None or tuning.lora is None:
        raise OptionError("the model has no adapters to save; fine-tune with lora=True, or save all of it with save().")
    state = {
        name: value.detach().cpu().contiguous()
        for name, value in model.module.state_dict().items()
        if name.startswith("head.") or is_adapter(name)
    }
    with atomic_folder(dir_path, overwrite=overwrite) as folder:
        if model._seen is not None:
            model._seen.save(folder)
        save_file(state, folder / _WEIGHTS, metadata={"format": "pt"})
        content = {
            "architecture": model.spec.architecture,
            "vocab": model.vocab.hash,
            "tuning": tuning.to_json(),
            "seed": model.seed,
            "n_epochs": model.n_epochs_,
            "history": {name: frame[name].tolist() for name, frame in model.history_.items()},
            "sha256": sha256_of(folder / _WEIGHTS),
            "base": model._base_origin(Path(dir_path)),
            "card": replace(model._card_facts(), base=None).to_json(),
        }
        (folder / _CONFIG).write_text(sealed(ADAPTER, content), encoding="utf-8")


def load_adapter(
    cls: Any, base: CellModel, dir_path: str | os.PathLike[str], adata: AnnData | None, *, share: bool
) -> CellModel:
    """Do what :meth:`scforge.models.Encoder.load_adapter` says."""
    cls = type(base) if issubclass(type(base), cls) else cls
    folder = Path(dir_path)
    if not (folder / _CONFIG).is_file() or not (folder / _WEIGHTS).is_file():
        raise MissingFileError(
            f"dir_path={str(dir_path)!r} holds no adapter; give the folder that save_adapter() wrote."
        )
    for name in (_CONFIG, _WEIGHTS, _SPLIT):
        check_inside(folder, name)
    refuse_pickle(folder / _WEIGHTS)
    content = read_description(ADAPTER, folder / _CONFIG)
    if wrong := lacking(content, _CONTENT):
        raise ModelFileError(f"{str(folder / _CONFIG)!r} lacks {listing(wrong)}; copy the adapter again.")
    n_epochs, history, vocab, seed = (content[key] for key in ("n_epochs", "history", "vocab", "seed"))
    shapes = read_shapes(folder / _WEIGHTS)
    if (folder / _SPLIT).is_file():
        read_shapes(folder / _SPLIT)
    if sha256_of(folder / _WEIGHTS) != content["sha256"]:
        raise ModelFileError(f"{str(folder / _WEIGHTS)!r} is corrupted: its checksum is another one; copy it again.")
    encoder = merged(base.backbone)
    said = content["tuning"].get("base")
    of_base = said.get("sha256") if isinstance(said, dict) else None
    if vocab != base.vocab.hash or digest_of(encoder) != of_base:
        raise ModelFileError(
            f"the adapter {str(dir_path)!r} was trained on another base model (other weights or genes); load that one."
        )
    tuning = check_adapter(base.spec, content["tuning"], shapes, n_base=len(encoder.state_dict()), source=str(dir_path))
    weights = read_weights(folder / _WEIGHTS)
    adata = base.adata if adata is None else cls._set_up_as(adata, base._setup)
    if adata is not None and cls._setup_of(adata) is None:
        adata = set_up(
            base, adata, base._setup, tuning.task_options.get("labels_key"), tuning.task_options.get("batch_key")
        )
    registry = bare_registry(cls.__name__, dict(base._setup)) if adata is None else None
    parts = replace(base.spec, tuning=None).to_json()
    # The same memory, but parameters of their own, which can be frozen, or put on another device.
    shared = {id(p): nn.Parameter(p.data, requires_grad=False) for p in encoder.parameters()} if share else {}
    on_base = replace(tuning, backbone=copy.deepcopy(encoder, shared))
    model: CellModel = cls._of_parts(parts, base.vocab, adata=adata, registry=registry, seed=seed, tuning=on_base)
    model._spec = replace(model._spec, tuning=tuning)  # another module of this description is a new one
    refuse_not_finite(weights, model.module, source=str(dir_path))
    model.module.load_state_dict(weights, strict=False)
    model.module.to(torch.device(base.device)).eval()
    model.is_trained_, model.n_epochs_, model._base = True, n_epochs, base
    model._seen = SeenCells.load(folder, tuning.split.get("cells"))
    model._extend_history(history)
    model._facts = CardFacts.from_json(content.get("card"), source=str(dir_path))
    return model
