"""Create fine-tuned models, and save and load adapters."""

from __future__ import annotations

import copy
import inspect
import logging
import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pandas as pd
import torch
from anndata import AnnData
from safetensors.torch import save_file
from torch import nn

from scforge._checks import check_key, check_seed
from scforge._columns import texts_of
from scforge._io import atomic_folder, sha256_of
from scforge._registry import check_options
from scforge.data.cells import Cells, named_column
from scforge.data.checks import inherited_batch_key
from scforge.errors import DataError, ModelFileError, OptionError, ScforgeWarning
from scforge.estimators.fitted import FittedModel
from scforge.estimators.serialize import (
    ADAPTER,
    check_sum,
    load_weights,
    read_description,
    sealed,
)
from scforge.estimators.setup import register, set_up_like, setup_of
from scforge.estimators.sources import Model, source_of
from scforge.estimators.spec import FineTuneSpec, check_freeze, named_options
from scforge.finetuning.adapters import base_state, digest_of, is_adapter, load_base, lora_options, merged
from scforge.finetuning.base import TASKS, Task, get_task
from scforge.finetuning.held_out import CellFingerprints, HeldOutRegistry
from scforge.finetuning.splits import Split, check_shares, split_for, split_from
from scforge.finetuning.supervised import SupervisedTask
from scforge.models._weights import read_weights
from scforge.models.components.gene_vectors import check_filled
from scforge.training.datamodule import CellDataModule
from scforge.training.options import TrainOptions

logger = logging.getLogger("scforge")

_OF_DATA = ("batch_size", "max_tokens_per_batch", "num_threads")

_CONFIG, _WEIGHTS = "adapter.json", "adapter.safetensors"


def finetune(
    model: Model,
    task: str | Mapping[str, Any],
    source: Any,
    options: dict[str, Any],
    *,
    labels_key: str | None = None,
    batch_key: str | None = None,
    validation_size: float = 0.1,
    test_size: float = 0.1,
    freeze: bool | int = False,
    lora: bool | Mapping[str, Any] = False,
    head: Mapping[str, Any] | None = None,
    seed: int | None = None,
    split_by: str | None = None,
    split_key: str | None = None,
) -> Any:
    """Create the model of :meth:`scforge.models.Encoder.finetune`, ready to train with the remaining `options`."""
    check_shares(validation_size, test_size)
    check_freeze(freeze, lora, options.get("gradual_unfreezing"))
    freeze = freeze if isinstance(freeze, bool) else int(freeze)  # numbers of NumPy cannot be saved
    fitted = model.fitted
    check_filled(fitted.module)
    seed = fitted.seed if seed is None else check_seed(seed)
    source = source_of(model, source)
    registered = setup_of(type(model), source)
    setup = registered or fitted.setup
    common = {"labels_key": labels_key, "batch_key": batch_key, "head": head}
    name, task_options = _task_options(task, options, common, setup)
    if issubclass(TASKS.get(name), SupervisedTask):  # predictions are written under these names
        for argument in ("labels_key", "labels_keys"):
            keys = task_options.get(argument)
            for key in [keys] if isinstance(keys, str) else keys or ():
                check_key(argument, key)
    cells = model.open_cells(source)
    how: dict[str, Any] = {
        "validation_size": float(validation_size),
        "test_size": float(test_size),
        "split_by": split_by,
        "split_key": split_key,
        "seed": seed,
    }
    made = get_task(name, **task_options)
    split = make_split(made, cells, **how)
    seen = HeldOutRegistry(split, CellFingerprints.of(cells), fitted.learned or CellFingerprints.none())
    found = made.options_from(lambda key: cells.column(key).iloc[split.train])
    made = get_task(name, **{**task_options, **found})
    made.check_split(cells.column, split)
    encoder = merged(fitted.backbone)
    tuning = FineTuneSpec(
        task=name,
        task_options=made.config(),
        n_latent=fitted.embed(cells, rows=split.train[:1]).shape[1],
        lora=lora_options(encoder, lora),
        freeze=freeze,
        split={**how, "cells": seen.digest},
        base={"sha256": digest_of(encoder), "n_epochs": fitted.n_epochs},
    )
    data: dict[str, Any] = {}
    if isinstance(source, AnnData):
        data["adata"] = set_up(type(model), source, setup, labels_key, batch_key)
    else:
        given = {key: options.pop(key) for key in _OF_DATA if options.get(key) not in (None, "auto")}
        data["datamodule"] = CellDataModule(
            cells, train_rows=split.train, validation_rows=split.validation, seed=seed, **given
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScforgeWarning)  # about genes, as issued when the cells were opened above
        tuned = type(model).of_fitted(FittedModel(replace(fitted.spec, tuning=tuning), seed), **data)
    if registered and all(registered[key] in (None, *source.obs) for key in ("batch_key", "labels_key")):
        # The next fine-tuning uses the columns of setup_anndata, not those of this one.
        register(type(model), source, registered)
    load_base(tuned.fitted.backbone, base_state(encoder))
    tuned.fitted.module.to(fitted.device)
    tuned.fitted.seen, tuned.base_model = seen, model
    tuned.train_indices_, tuned.validation_indices_, tuned.test_indices_ = split.train, split.validation, split.test
    tuned.opened = model.opened
    return tuned


def _task_options(
    task: str | Mapping[str, Any], options: dict[str, Any], common: dict[str, Any], setup: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Return the task's name and options, and remove these from `options`; the remaining options are for training."""
    name, found = named_options("task", dict(task) if isinstance(task, Mapping) else task, "")
    cls = TASKS.get(name)
    known = cls.option_names()
    check_options("task option", name, found, known)
    of_trainer = inspect.signature(lightning.Trainer).parameters
    others = [key for key in options if key not in of_trainer]
    check_options("option of finetune", name, others, sorted({*known, *TrainOptions.names()}))
    if "datamodule" in options:
        raise OptionError(
            "has no effect in finetune; pass the cells, or the path of a store, as adata.",
            argument="datamodule",
        )
    beside = {key: value for key, value in common.items() if value is not None}
    beside |= {key: options.pop(key) for key in list(options) if key in known}
    if useless := sorted(beside.keys() - known):
        raise OptionError(
            f"has no effect for task {name!r}; omit {useless[0]}.", argument=useless[0], value=beside[useless[0]]
        )
    if twice := sorted(beside.keys() & found):
        raise OptionError(f"{twice[0]} is set both in task and as an argument; remove one of the two.")
    found |= beside
    return name, found | {key: setup[key] for key in cls.keys if found.get(key) is None and setup.get(key) is not None}


def make_split(task: Task, cells: Cells, *, split_by: str | None, split_key: str | None, **how: Any) -> Split:
    """Split cells (over the genes of the model) as the task requires."""
    task.vocab = cells.vocab
    names = {value: name for name in task.keys if isinstance(value := getattr(task, name, None), str)}

    def column(key: str) -> pd.Series:
        return named_column(cells, key, argument=names.get(key))

    usable = task.usable(column)
    if usable is not None and not np.any(usable):
        named = " and ".join(f"{name}={value!r}" for value, name in names.items())
        raise DataError(f"{named or 'the task'} leaves no training cells; choose another column or other cells.")
    if split_key is not None:
        if split_by is not None:
            raise OptionError(f"has no effect with split_key={split_key!r}; pass only one.", split_by=split_by)
        return split_from(named_column(cells, split_key, argument="split_key"), usable, key=split_key)
    own = task.split(column, split_by=split_by, **how)
    if own is not None:
        return own
    groups = None if split_by is None else named_column(cells, split_by, argument="split_by")
    return split_for(len(cells), usable=usable, strata=task.strata(column), groups=groups, **how)


def set_up(
    cls: Any, adata: AnnData, setup: Mapping[str, Any], labels_key: str | None, batch_key: str | None
) -> AnnData:
    """Set up an AnnData for the fine-tuned model, with the columns of the task."""
    labels = labels_key or setup.get("labels_key")
    batch = batch_key or inherited_batch_key(adata.obs, setup.get("batch_key"))
    batches = texts_of(adata.obs[batch], key=str(batch), argument="batch_key") if batch in adata.obs else None
    if batches is None or batches.isna().any():
        batch = None  # cells without a batch may be unused in a task, but cannot be registered
    wanted = {
        "layer": setup.get("layer"),
        "gene_key": setup.get("gene_key"),
        "labels_key": labels if labels in adata.obs else None,
        "batch_key": batch,
    }
    register(cls, adata, wanted)
    return adata


def save_adapter(model: FittedModel, dir_path: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Save the adapters and the head of a model fine-tuned with ``lora``."""
    tuning = model.spec.tuning
    if tuning is None or tuning.lora is None:
        raise OptionError("the model has no adapters to save; fine-tune with lora=True, or save the model with save().")
    state = {
        name: value.detach().cpu().contiguous()
        for name, value in model.module.state_dict().items()
        if name.startswith("head.") or is_adapter(name)
    }
    correction = model.correction
    with atomic_folder(dir_path, overwrite=overwrite) as folder:
        if model.seen is not None:
            model.seen.save(folder)
        save_file(state | model.own_tensors(), folder / _WEIGHTS, metadata={"format": "pt"})
        content = {
            "architecture": model.spec.architecture,
            "vocab": model.spec.vocab.hash,
            "tuning": tuning.to_json(),
            "seed": model.seed,
            "n_epochs": model.n_epochs,
            "history": model.history_lists(),
            **({} if correction is None else {"corrected_batches": correction.batches}),
            "sha256": sha256_of(folder / _WEIGHTS),
            "base": model.base_origin(Path(dir_path)),
            "card": replace(model.card_facts, base=None).to_json(),
        }
        (folder / _CONFIG).write_text(sealed(content), encoding="utf-8")


def load_adapter(cls: Any, base: Model, folder: Path, adata: AnnData | None) -> Any:
    """Load adapters and a head, and add them to their base model with shared weights."""
    cls = type(base) if issubclass(type(base), cls) else cls
    content = read_description(ADAPTER, folder / _CONFIG)
    weights = read_weights(folder / _WEIGHTS)
    check_sum(folder / _WEIGHTS, content["sha256"])
    spec, setup, encoder = base.fitted.spec, base.fitted.setup, merged(base.fitted.backbone)
    if content["vocab"] != spec.vocab.hash or digest_of(encoder) != content["tuning"]["base"].get("sha256"):
        raise ModelFileError(
            f"the adapters in {str(folder)!r} were trained on a base model with other weights or genes; load them with "
            "that base model."
        )
    tuning = FineTuneSpec.from_json(content["tuning"])
    adata = base.adata if adata is None else set_up_like(cls, adata, setup)
    if adata is not None and not setup_of(cls, adata):
        keys = (tuning.task_options.get(key) for key in ("labels_key", "batch_key"))
        adata = set_up(cls, adata, setup, *keys)
    # The same memory, but separate parameters, which can be frozen or moved to another device.
    shared = {id(p): nn.Parameter(p.data, requires_grad=False) for p in encoder.parameters()}
    described = replace(spec, tuning=replace(tuning, backbone=copy.deepcopy(encoder, shared)))
    fitted = FittedModel(described, content["seed"], setup=dict(setup))
    fitted.spec = replace(spec, tuning=tuning)  # another module of this description is a new one
    load_weights(fitted.module, weights, source=str(folder), adapters=True)
    fitted.module.to(torch.device(base.fitted.device)).eval()
    fitted.is_trained = True
    fitted.restore(content, folder, weights)
    model = cls.of_fitted(fitted, adata)
    model.base_model = base
    return model
