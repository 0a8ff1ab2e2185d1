"""Making a fine-tuned model of a model: what ``Encoder.finetune`` does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import lightning
import numpy as np
import pandas as pd
from anndata import AnnData

from scforge._checks import check_seed
from scforge._registry import check_options
from scforge.data.cells import Cells
from scforge.data.checks import inherited_batch_key
from scforge.data.vocab import named_column
from scforge.errors import DataError, OptionError
from scforge.estimators.spec import named_options
from scforge.estimators.tuning import Tuning, check_freeze
from scforge.finetuning.adapters import base_state, digest_of, load_base, lora_options, merged
from scforge.finetuning.base import TASKS, Task, get_task
from scforge.finetuning.held_out import CellMarks, SeenCells
from scforge.finetuning.splits import Split, check_shares, split_for, split_from
from scforge.models.components.gene_vectors import check_filled
from scforge.training.datamodule import CellDataModule
from scforge.training.predict import embed

if TYPE_CHECKING:
    from scforge.estimators.base import CellModel


_OF_DATA = ("batch_size", "max_tokens_per_batch", "num_threads")


def finetune(
    model: CellModel,
    task: str | Mapping[str, Any],
    source: Any,
    *,
    labels_key: str | None,
    batch_key: str | None,
    validation_size: float,
    test_size: float,
    split_by: str | None,
    split_key: str | None,
    freeze: bool | int,
    lora: bool | Mapping[str, Any],
    head: Mapping[str, Any] | None,
    seed: int | None,
    options: dict[str, Any],
) -> CellModel:
    """Do what :meth:`scforge.models.Encoder.finetune` says, up to a model that is ready to train with ``options``."""
    check_shares(validation_size, test_size)
    validation_size, test_size = float(validation_size), float(test_size)
    check_freeze(freeze, lora, options.get("gradual_unfreezing"))
    freeze = freeze if isinstance(freeze, bool) else int(freeze)  # numbers of NumPy cannot be saved
    check_filled(model.module)
    seed = model.seed if seed is None else check_seed(seed)
    source = model._source(source)
    setup = (model._setup_of(source) if isinstance(source, AnnData) else None) or model._setup
    name, task_options = _task_options(
        model, task, options, {"labels_key": labels_key, "batch_key": batch_key, "head": head}, setup
    )
    cells = model._open(source)
    how: dict[str, Any] = {
        "validation_size": validation_size,
        "test_size": test_size,
        "split_by": split_by,
        "split_key": split_key,
        "seed": seed,
    }
    split = make_split(get_task(name, **task_options), cells, **how)
    seen = SeenCells(split, CellMarks.of(cells), model._learned or CellMarks.none())
    column = _of_rows(cells, split.train)
    task_options |= get_task(name, **task_options).options_from(column)
    get_task(name, **task_options).check_split(cells.column, split)
    encoder = merged(model.backbone)
    n_latent = embed(
        model.module, cells, model.tokenizer, objective=model.spec.build_objective(), rows=split.train[:1]
    ).shape[1]
    tuning = Tuning(
        task=name,
        task_options=get_task(name, **task_options).config(),
        n_latent=n_latent,
        lora=lora_options(encoder, lora),
        freeze=freeze,
        split={**how, "cells": seen.digest},
        base={"sha256": digest_of(encoder), "n_epochs": model.n_epochs_},
    )
    data: dict[str, Any] = {}
    if isinstance(source, AnnData):
        data["adata"] = set_up(model, source, setup, labels_key, batch_key)
    else:
        given = {key: options.pop(key) for key in _OF_DATA if options.get(key) not in (None, "auto")}
        data["datamodule"] = CellDataModule(
            cells, train_rows=split.train, validation_rows=split.validation, seed=seed, **given
        )
    parts = replace(model.spec, tuning=None).to_json()
    tuned = type(model)._of_parts(parts, model.vocab, seed=seed, tuning=tuning, **data)
    load_base(tuned.backbone, base_state(encoder))
    tuned.module.to(model.device)
    tuned._seen, tuned._base = seen, model
    return tuned


def _task_options(
    model: CellModel, task: str | Mapping[str, Any], options: dict[str, Any], common: dict[str, Any], setup: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Return name and options of the task; take its options out of `options`, which train gets."""
    if not isinstance(task, str | Mapping) or (not isinstance(task, str) and "name" not in task):
        raise OptionError(f"task={task!r} is neither a name nor a dict with 'name' and options; see list_tasks().")
    name, found = named_options("task", dict(task) if isinstance(task, Mapping) else task, "")
    cls = TASKS.get(name)
    known = cls.option_names()
    check_options("task option", name, found, known)
    of_train = [key for key in inspect.signature(type(model).train).parameters if key not in ("self", "trainer_options")]
    of_trainer = set(inspect.signature(lightning.Trainer).parameters)
    check_options(
        "option of finetune", name, [key for key in options if key not in of_trainer], sorted({*known, *of_train})
    )
    for key in list(options):
        if key in known:
            if key in found:
                raise OptionError(f"{key} is given in task and beside it; give it once.")
            found[key] = options.pop(key)
    if "validation_size" in options or "datamodule" in options:
        raise OptionError("datamodule is of no use to finetune; pass the cells, or the path of a store, as adata.")
    for key, value in common.items():
        if value is None:
            continue
        if key not in known:
            raise OptionError(f"{key}={value!r} is of no use to the task {name!r}; leave it out.")
        if key in found:
            raise OptionError(f"{key} is given in task and beside it; give it once.")
        found[key] = value
    for key in cls.keys:
        if found.get(key) is None and setup.get(key) is not None:
            found[key] = setup[key]
    return name, found


def make_split(
    task: Task,
    cells: Cells,
    *,
    validation_size: float,
    test_size: float,
    split_by: str | None,
    split_key: str | None,
    seed: int,
) -> Split:
    """Split cells, over the genes of the model, as the task wants it."""
    task.vocab = cells.vocab
    names = {value: name for name in task.keys if isinstance(value := getattr(task, name, None), str)}

    def column(key: str) -> pd.Series:
        return named_column(cells, key, argument=names.get(key))

    usable = task.usable(column)
    if usable is not None and not np.any(usable):
        said = " and ".join(f"{name}={value!r}" for value, name in names.items())
        raise DataError(f"{said or 'the task'} leaves no cell to train on; choose another column or other cells.")
    if split_key is not None:
        if split_by is not None:
            raise OptionError(f"split_by={split_by!r} has no use beside split_key={split_key!r}; give one of them.")
        return split_from(named_column(cells, split_key, argument="split_key"), usable, key=split_key)
    own = task.split(column, validation_size=validation_size, test_size=test_size, split_by=split_by, seed=seed)
    if own is not None:
        return own
    return split_for(
        len(cells),
        validation_size=validation_size,
        test_size=test_size,
        seed=seed,
        usable=usable,
        strata=task.strata(column),
        groups=None if split_by is None else named_column(cells, split_by, argument="split_by"),
    )


def _of_rows(cells: Cells, rows: np.ndarray) -> Callable[[str], pd.Series]:
    def column(key: str) -> pd.Series:
        return cells.column(key).iloc[rows]

    return column


def set_up(
    model: CellModel, adata: AnnData, setup: Mapping[str, Any], labels_key: str | None, batch_key: str | None
) -> AnnData:
    """Set an AnnData up for the fine-tuned model, with the columns it is about."""
    there = model._setup_of(adata)
    wanted = {
        "layer": setup.get("layer"),
        "gene_key": setup.get("gene_key"),
        "labels_key": labels_key or setup.get("labels_key"),
        "batch_key": batch_key or inherited_batch_key(adata.obs, setup.get("batch_key")),
    }
    for key in ("labels_key", "batch_key"):
        if wanted[key] is not None and wanted[key] not in adata.obs:
            wanted[key] = None  # of the data that the base model was trained on
    batch = wanted["batch_key"]
    if batch is not None and adata.obs[batch].isna().any():
        wanted["batch_key"] = None  # cells without batch may take no part in a task, but cannot be registered
    if there is None or any(there.get(key) != value for key, value in wanted.items()):
        type(model).setup_anndata(adata, **wanted)
    return adata
