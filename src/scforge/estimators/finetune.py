"""Create fine-tuned models and query models, save and load adapters, and transfer labels."""

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
from scipy import sparse
from torch import nn

from scforge._checks import check_key, check_seed
from scforge._columns import texts_of
from scforge._io import atomic_folder, sha256_of
from scforge._registry import check_options
from scforge.data.cells import Cells, named_column
from scforge.data.checks import inherited_batch_key
from scforge.errors import DataError, ModelFileError, OptionError, ScforgeWarning, listing, warn
from scforge.estimators.base import CellModel
from scforge.estimators.serialize import (
    ADAPTER,
    CORRECTION,
    LABELED,
    check_sum,
    load_weights,
    read_description,
    sealed,
)
from scforge.estimators.setup import bare_registry
from scforge.estimators.spec import FineTuneSpec, check_freeze, named_options
from scforge.finetuning.adapters import base_state, digest_of, is_adapter, load_base, lora_options, merged
from scforge.finetuning.base import TASKS, Task, get_task
from scforge.finetuning.held_out import CellFingerprints, HeldOutRegistry
from scforge.finetuning.splits import Split, check_shares, split_for, split_from
from scforge.finetuning.supervised import SupervisedTask
from scforge.models._weights import read_weights
from scforge.models.components.gene_vectors import check_filled
from scforge.models.components.latent import batch_vectors
from scforge.training.datamodule import CellDataModule
from scforge.training.options import TrainOptions
from scforge.training.predict import embed

logger = logging.getLogger("scforge")

_LEFT_OUT = ("self", "predictor", "adata", "key_added", "context")

_OF_DATA = ("batch_size", "max_tokens_per_batch", "num_threads")

_QUERY, _REFERENCE, _SIDE = "query", "reference", "scforge_side"

_MOST = 20_000
"""Maximum number of query cells, and of reference cells, for joint training in memory."""

_CONFIG, _WEIGHTS = "adapter.json", "adapter.safetensors"


def warn_of_undecided(unclear: np.ndarray) -> None:
    """Warn about cells that may have been used as training cells in fine-tuning."""
    if unclear.any():
        n_unclear = f"{int(unclear.sum())} of the {len(unclear)} cells"
        warn(
            f"{n_unclear} may have been used for fine-tuning; this cannot be checked, because they have other genes "
            "and no cell names to compare."
        )


def options_of(method: Any) -> list[str]:
    """Return the option names of a task method."""
    return [name for name in inspect.signature(method).parameters if name not in _LEFT_OUT]


def finetune(
    model: CellModel,
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
) -> CellModel:
    """Create the model of :meth:`scforge.models.Encoder.finetune`, ready to train with the remaining `options`."""
    check_shares(validation_size, test_size)
    check_freeze(freeze, lora, options.get("gradual_unfreezing"))
    freeze = freeze if isinstance(freeze, bool) else int(freeze)  # numbers of NumPy cannot be saved
    check_filled(model.module)
    seed = model.seed if seed is None else check_seed(seed)
    source = model._source(source)
    registered = model._setup_of(source)
    setup = registered or model._setup
    common = {"labels_key": labels_key, "batch_key": batch_key, "head": head}
    name, task_options = _task_options(task, options, common, setup)
    if issubclass(TASKS.get(name), SupervisedTask):  # predictions are written under these names
        for argument in ("labels_key", "labels_keys"):
            keys = task_options.get(argument)
            for key in [keys] if isinstance(keys, str) else keys or ():
                check_key(argument, key)
    cells = model._open(source)
    how: dict[str, Any] = {
        "validation_size": float(validation_size),
        "test_size": float(test_size),
        "split_by": split_by,
        "split_key": split_key,
        "seed": seed,
    }
    made = get_task(name, **task_options)
    split = make_split(made, cells, **how)
    seen = HeldOutRegistry(split, CellFingerprints.of(cells), model._learned or CellFingerprints.none())
    found = made.options_from(lambda key: cells.column(key).iloc[split.train])
    made = get_task(name, **{**task_options, **found})
    made.check_split(cells.column, split)
    encoder = merged(model._backbone)
    n_latent = embed(model.module, cells, model.tokenizer, objective=model.objective, rows=split.train[:1]).shape[1]
    tuning = FineTuneSpec(
        task=name,
        task_options=made.config(),
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScforgeWarning)  # about genes, as issued when the cells were opened above
        tuned = type(model)._of_spec(replace(model.spec, tuning=tuning), seed=seed, **data)
    if registered is not None and all(registered[key] in (None, *source.obs) for key in ("batch_key", "labels_key")):
        # The next fine-tuning uses the columns of setup_anndata, not those of this one.
        register(type(model), source, registered)
    load_base(tuned._backbone, base_state(encoder))
    tuned.module.to(model.device)
    tuned._seen, tuned._base = seen, model
    tuned.train_indices_, tuned.validation_indices_, tuned.test_indices_ = split.train, split.validation, split.test
    tuned._opened = model._opened
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
    model: CellModel, adata: AnnData, setup: Mapping[str, Any], labels_key: str | None, batch_key: str | None
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
    register(type(model), adata, wanted)
    return adata


def register(cls: type[CellModel], adata: AnnData, setup: Mapping[str, Any]) -> None:
    """Set up an AnnData with these columns unless it already is, and keep its modality."""
    there = cls._setup_of(adata) or {}
    wanted = {key: value for key, value in setup.items() if key != "modality"}
    if not there or any(there.get(key) != value for key, value in wanted.items()):
        cls.setup_anndata(adata, **wanted)
        if "modality" in there:
            cls._get_most_recent_anndata_manager(adata).update_setup_method_args({"modality": there["modality"]})


def with_batches_of(cells: Cells, key: str, known: list[str]) -> dict[str, Any]:
    """Return the options of a decoder that also contains the query batches."""
    batches = texts_of(cells.column(key), key=key, argument="batch_key").categories
    if shared := [str(name) for name in batches if name in known]:
        logger.info(
            "Query batches in obs[%r] that have the name of a reference batch are treated as the same batch (%s); "
            "rename them if they are different batches.",
            key,
            listing(shared),
        )
    return {"batch_key": key, "batches": [*known, *(str(name) for name in batches if name not in known)]}


def with_room(reference: CellModel, found: dict[str, Any]) -> CellModel:
    """Return a copy of a model with decoder vectors for new batches, initialized to the mean of its batch vectors."""
    spec, own = reference.spec, merged(reference._backbone)
    sizes = {**spec.model_options, "n_batches": len(found["batches"])}
    objective = {**spec.objective_options, **found}
    roomy = replace(spec, tuning=None, model_options=sizes, objective_options=objective)
    model = type(reference)._of_spec(roomy, seed=reference.seed, registry=reference.registry_)
    vectors = batch_vectors(own)
    if vectors is None:
        nn.init.zeros_(batch_vectors(model.module))  # as if there were none
    state = {**model.module.state_dict(), **own.state_dict()}
    if vectors is not None:
        name = next(name for name, parameter in own.named_parameters() if parameter is vectors)
        new = vectors.detach().mean(dim=0).expand(len(found["batches"]) - len(vectors), -1)
        state[name] = torch.cat([vectors.detach(), new])
    model.module.load_state_dict(state)
    model.module.to(reference.device)
    model.is_trained_, model.n_epochs_, model._seen = True, reference.n_epochs_, reference._seen
    model._opened = reference._opened  # so that warnings about genes are issued once
    return model


def of_both(query: Cells, reference: Cells, pretraining: Any, key: str | None, seed: int) -> tuple[Any, Any]:
    """Return the concatenated query and reference cells, and the options of a decoder with all batches.

    Cells without a batch, or a query or reference without the column, form a separate batch. `key` is the query column.
    The concatenated column has the name of the reference column, so the model can serve as the reference in another
    joint training.
    """
    known = list(pretraining.batches or [])
    query, reference = (cells.sample(_MOST, seed=seed) for cells in (query, reference))
    parts = []
    for cells, column, name in ((query, key, _QUERY), (reference, pretraining.batch_key, _REFERENCE)):
        found = [name] * len(cells)
        if column is not None and cells.obs is not None and column in cells.obs:
            labels = texts_of(cells.column(column), key=column, argument="batch_key")
            found = [str(labels.categories[code]) if code >= 0 else name for code in labels.codes]
        parts.append(found)
    if shared := sorted(set(parts[0]) & {*known, *parts[1]}):
        warn(
            f"Some batches of the query and the reference have the same name ({listing(shared)}); rename them if they "
            "are different batches."
        )
    counts = sum(cells.totals.sum() for cells in (query, reference))
    kept = sum(cells.totals.sum() * cells.counts_kept for cells in (query, reference))
    batch_key = pretraining.batch_key or key or _SIDE
    both = replace(
        query,
        counts=sparse.vstack([query.counts, reference.counts], format="csr"),
        totals=np.concatenate([query.totals, reference.totals]),
        counts_kept=float(kept / max(counts, 1.0)),
        measured=None if query.measured is None or reference.measured is None else query.measured | reference.measured,
        obs=pd.DataFrame({batch_key: np.array([*parts[0], *parts[1]], dtype=object)}),
    )
    return both, {"batch_key": batch_key, "batches": [*known, *sorted({*parts[0], *parts[1]} - {*known})]}


def save_adapter(model: CellModel, dir_path: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Save the adapters and the head of a model fine-tuned with ``lora``."""
    tuning = model.spec.tuning
    if tuning is None or tuning.lora is None:
        raise OptionError("the model has no adapters to save; fine-tune with lora=True, or save the model with save().")
    state = {
        name: value.detach().cpu().contiguous()
        for name, value in model.module.state_dict().items()
        if name.startswith("head.") or is_adapter(name)
    }
    if model._labeled is not None:
        state |= {f"{LABELED}{name}": value for name, value in model._labeled.tensors().items()}
    correction = model._correction
    if correction is not None:
        state |= {f"{CORRECTION}{name}": value for name, value in correction.tensors().items()}
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
            "history": model._history_lists(),
            **({} if correction is None else {"corrected_batches": correction.batches}),
            "sha256": sha256_of(folder / _WEIGHTS),
            "base": model._base_origin(Path(dir_path)),
            "card": replace(model._card_facts(), base=None).to_json(),
        }
        (folder / _CONFIG).write_text(sealed(content), encoding="utf-8")


def load_adapter(cls: Any, base: CellModel, folder: Path, adata: AnnData | None) -> CellModel:
    """Load adapters and a head, and add them to their base model with shared weights."""
    cls = type(base) if issubclass(type(base), cls) else cls
    content = read_description(ADAPTER, folder / _CONFIG)
    weights = read_weights(folder / _WEIGHTS)
    check_sum(folder / _WEIGHTS, content["sha256"])
    encoder = merged(base._backbone)
    if content["vocab"] != base.vocab.hash or digest_of(encoder) != content["tuning"]["base"].get("sha256"):
        raise ModelFileError(
            f"the adapters in {str(folder)!r} were trained on a base model with other weights or genes; load them with "
            "that base model."
        )
    tuning = FineTuneSpec.from_json(content["tuning"])
    adata = base.adata if adata is None else cls._set_up_as(adata, base._setup)
    if adata is not None and cls._setup_of(adata) is None:
        keys = (tuning.task_options.get(key) for key in ("labels_key", "batch_key"))
        adata = set_up(base, adata, base._setup, *keys)
    # The same memory, but separate parameters, which can be frozen or moved to another device.
    shared = {id(p): nn.Parameter(p.data, requires_grad=False) for p in encoder.parameters()}
    model: CellModel = cls._of_spec(
        replace(base.spec, tuning=replace(tuning, backbone=copy.deepcopy(encoder, shared))),
        adata=adata,
        registry=bare_registry(cls.__name__, dict(base._setup)) if adata is None else None,
        seed=content["seed"],
    )
    model._spec = replace(model._spec, tuning=tuning)  # another module of this description is a new one
    load_weights(model.module, weights, source=str(folder), adapters=True)
    model.module.to(torch.device(base.device)).eval()
    model.is_trained_, model._base = True, base
    model._restore(content, folder, weights)
    return model
