"""Create fine-tuned models and models of query cells, and save and load adapters."""

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
from scforge.data.neighbors import n_query_clusters
from scforge.errors import DataError, ModelFileError, OptionError, ScforgeWarning, listing, warn
from scforge.estimators.card import Origin
from scforge.estimators.fitted import FittedModel
from scforge.estimators.serialize import ADAPTER, check_sum, load_weights, read_description, sealed
from scforge.estimators.setup import Model, Source, register, set_up_like, setup_of, source_of
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

logger = logging.getLogger("scforge")

_OF_DATA = ("batch_size", "max_tokens_per_batch", "num_threads")

_QUERY, _REFERENCE, _SIDE = "query", "reference", "scforge_side"

_MOST = 20_000
"""Maximum number of query cells, and of reference cells, for joint training in memory."""

_CONFIG, _WEIGHTS = "adapter.json", "adapter.safetensors"


def finetune(
    model: Model,
    task: str | Mapping[str, Any],
    adata: Any,
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
    source = source_of(model, adata)
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
        cls: Any = type(model)
        tuned = cls.of_fitted(FittedModel(replace(fitted.spec, tuning=tuning), seed), **data)
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
            "has no effect in finetune; pass the cells, or the path of a store, as adata.", argument="datamodule"
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


def query_model(
    reference: Model,
    query: Source,
    *,
    batch_key: str | None,
    reference_cells: Source | None,
    lora: bool | Mapping[str, Any],
    validation_size: float,
    seed: int | None,
) -> Any:
    """Return a model of query cells, see :meth:`scforge.models.Encoder.load_query_data`."""
    fitted = reference.fitted
    if fitted.labeled is not None and fitted.labeled.in_base and fitted.mapping_base is not None:
        reference = reference.base_model  # of an annotator
        fitted = reference.fitted
    given = {"batch_key": batch_key, "reference_cells": reference_cells, "lora": lora}
    known, integrated, stays = _checked(fitted, given)
    cls, source = type(reference), source_of(reference, query)
    cells: Any = reference.open_cells(source)
    key: Any = batch_key or setup_of(cls, source).get("batch_key") or known.get("batch_key")
    if batch_key is not None:
        cells.column(batch_key)  # raises if there is none
    # Cells can be mapped without a batch; they are decoded with the mean of all batch vectors.
    has_column = batch_key is not None or integrated or (cells.obs is not None and key in cells.obs)
    found: dict[str, Any] = {}
    if known.get("batches") and has_column and reference_cells is None:
        found = with_batches_of(cells, key, known["batches"])
    base, task = reference, dict[str, Any](name="adaptation")
    trained_on = source if isinstance(source, AnnData) else cells  # opened once
    if reference_cells is not None:
        learned = reference.open_cells(reference_cells)
        trained_on, found = of_both(cells, learned, fitted.pretraining, key, fitted.seed)
        base = with_room(reference, found)
    elif integrated:
        task = {"name": "integration", **known, **found, "n_reference": len(known["batches"])}
    elif stays:
        base = with_room(reference, found) if found else reference
        task["n_reference"] = len(known["batches"] or [])
        if fitted.landmarks is None:
            warn(
                "The reference model contains no embeddings of its training cells, so the query is not mapped onto "
                "the reference; complete the training of the reference model."
            )
        else:
            task |= {"n_clusters": n_query_clusters(len(cells)), "n_tokens": len(fitted.spec.vocab)}
    frozen = stays and reference_cells is None
    split: dict[str, Any] = {"validation_size": validation_size, "test_size": 0.0, "seed": seed}
    model = finetune(base, task, trained_on, {}, freeze=frozen, lora=not stays and lora, **split)
    mapped = model.fitted
    if integrated:
        mapped.module.head.take_over(fitted.module.head)
    if stays:
        mapped.landmarks = fitted.landmarks
    if frozen:
        mapped.correction = fitted.correction
    if reference_cells is not None:
        model.query_cells = source
    elif stays and fitted.landmarks is not None:
        mapped.module.head = fitted.mapping_of(cells).to(mapped.device)
    digest = digest_of(merged(fitted.backbone))  # not that of the copy with vectors for new batches
    tuning = replace(mapped.spec.tuning, base={**mapped.spec.tuning.base, "sha256": digest, "reference": True})
    mapped.spec, mapped.is_trained, model.base_model = replace(mapped.spec, tuning=tuning), True, reference
    logger.info(
        "The query contains %.1f%% of the genes of the reference model, and these genes account for %.1f%% of the "
        "query counts.",
        100 * cells.overlap,
        100 * cells.counts_kept,
    )
    return model


def _checked(reference: FittedModel, given: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool, bool]:
    """Return the options about batches, whether a reference was integrated, and whether its encoder is frozen.

    Raises an OptionError if it cannot be a reference, or an argument in `given` has no effect for it.
    """
    tuning, pretraining = reference.spec.tuning, reference.pretraining
    if tuning is not None and tuning.task not in ("adaptation", "integration"):
        raise OptionError(f"was fine-tuned for {tuning.task!r}; pass its base model.", argument="reference_model")
    integrated = tuning is not None and tuning.task == "integration"
    stays = pretraining.maps_queries and not integrated
    known = tuning.task_options if tuning is not None and integrated else pretraining.config() if stays else {}
    origin = "fine-tuned for integration" if integrated else f"trained with {reference.spec.objective!r}"
    of = f"a reference model {origin}"
    lora, batch_key = given["lora"], given["batch_key"]
    if isinstance(lora, Mapping) if stays else not lora:
        raise OptionError(f"has no effect for {of}; omit lora.", lora=lora)
    if given["reference_cells"] is not None and not stays:
        raise OptionError(f"has no effect for {of}; omit reference_cells.", argument="reference_cells")
    if batch_key is not None and not known.get("batches") and given["reference_cells"] is None:
        of_batches = "that learns nothing about the batches of a query"
        why = of_batches if pretraining.config().get("batches") else "without batches"
        raise OptionError(f"has no effect for {of} {why}; omit batch_key.", batch_key=batch_key)
    return known, integrated, stays


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


def with_room(reference: Model, found: dict[str, Any]) -> Any:
    """Return a copy of a model with decoder vectors for new batches, initialized to the mean of its batch vectors."""
    fitted = reference.fitted
    spec, own = fitted.spec, merged(fitted.backbone)
    sizes = {**spec.model_options, "n_batches": len(found["batches"])}
    objective = {**spec.objective_options, **found}
    roomy = replace(spec, tuning=None, model_options=sizes, objective_options=objective)
    model = FittedModel(roomy, fitted.seed, setup=fitted.setup)
    vectors = batch_vectors(own)
    if vectors is None:
        nn.init.zeros_(batch_vectors(model.module))  # as if there were none
    state = {**model.module.state_dict(), **own.state_dict()}
    if vectors is not None:
        name = next(name for name, parameter in own.named_parameters() if parameter is vectors)
        new = vectors.detach().mean(dim=0).expand(len(found["batches"]) - len(vectors), -1)
        state[name] = torch.cat([vectors.detach(), new])
    model.module.load_state_dict(state)
    model.module.to(fitted.device)
    model.is_trained, model.n_epochs, model.seen = True, fitted.n_epochs, fitted.seen
    cls: Any = type(reference)
    made = cls.of_fitted(model)
    made.opened = reference.opened  # so that warnings about genes are issued once
    return made


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
    correction, origin = model.correction, model.card_facts.base
    base = None if model.base is None else model.base.current_origin
    if origin is None and base is not None and base.folder is not None:  # relative to the folder of the adapters
        origin = Origin(f"./{Path(os.path.relpath(base.folder, Path(dir_path).resolve())).as_posix()}")
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
            "base": None if origin is None else origin.to_json(),
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
