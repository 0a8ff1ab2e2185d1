"""Run training of a model: resume, and save checkpoints and the best epochs."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import logging
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning
import numpy as np
import pandas as pd
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from safetensors import SafetensorError

from scforge._columns import texts_of
from scforge._io import remove_model
from scforge._progress import announce
from scforge._registry import check_options
from scforge.errors import DataError, OptionError, TrainingError, first_line, spelled, warn
from scforge.estimators.serialize import StoredModel, load_weights, read_folder
from scforge.estimators.spec import SAMPLED_CELLS, ModelSpec
from scforge.finetuning.base import Predictor, Task
from scforge.finetuning.held_out import CellFingerprints
from scforge.finetuning.new_cells import LabeledCells, choose_labeled
from scforge.finetuning.supervised import SupervisedTask
from scforge.models.components.gene_vectors import check_filled
from scforge.training.autotune import choose_precision, find_batch_size
from scforge.training.checkpoint import OF_DATA, SaveOptions, SavingError, check_settings
from scforge.training.datamodule import CellDataModule
from scforge.training.devices import compiled, gradient_checkpointing, is_sharded, n_processes, root_device
from scforge.training.fitting import FitResult, SaveBest, default_max_epochs, fit
from scforge.training.objectives.base import Objective
from scforge.training.options import OF_PLAN, TrainOptions
from scforge.training.plan import NotFiniteError, TrainingPlan
from scforge.training.run_folder import RunFolder, check_state, read_state, write_state

if TYPE_CHECKING:
    from scforge.estimators.fitted import FittedModel
    from scforge.estimators.setup import Model

logger = logging.getLogger("scforge")

_AUTO = "auto"
_CONTINUED = 0.1
"""Fraction of the default learning rate at which a fine-tuned model continues training."""
_OF_DATAMODULE = ("validation_size", "batch_size", "max_tokens_per_batch", "num_threads")
_OF_OUTCOME = ("check_val_every_n_epoch", "gradient_clip_algorithm", "limit_train_batches", "val_check_interval")
"""Additional Lightning Trainer options that affect the result of a training run."""

_NOT_RESUMED = {"limit_train_batches": None, "val_check_interval": 1.0, "overfit_batches": 0.0}
"""Lightning Trainer options that do not support resuming, and their default values."""
_MAX_LENGTH = 200
"""Maximum length of a setting in characters; for longer settings, a checksum is saved instead."""

_OF_OTHERS = {
    "use_gpu": "pass accelerator='gpu' or accelerator='cpu'",
    "learning_rate": "pass lr",
    "train_size": "pass validation_size=1 - train_size",
    "seed": "set the seed of the model, Encoder(adata, seed=...)",
    "datasplitter_kwargs": "pass validation_size, or datamodule=CellDataModule(...)",
    "shuffle": "cells are shuffled in each epoch, so omit shuffle",
    "shuffle_set_split": "cells are held out at random with the seed of the model, so omit shuffle_set_split",
    "enable_checkpointing": "pass checkpoint_dir=FOLDER to save checkpoints and the best epochs",
    "use_distributed_sampler": "each process already reads its own cells, so omit use_distributed_sampler",
    "num_sanity_val_steps": "scforge runs no sanity checks of this kind, so omit num_sanity_val_steps",
}
"""A mapping from arguments of scvi-tools and Lightning to advice for scforge."""

_ADDED = {
    "objective.alignment": 0.0,
    "objective.labels_key": None,
    "objective.labels": None,
    "objective.labels_weight": 0.02,
}
"""Settings that scforge 0.1.0 does not have, with the values that train as it does."""


type _Found = tuple[Path, dict[str, Any], StoredModel]
"""The folder of a checkpoint, its training state, and the content of its model."""


def train(
    model: Model, given: Mapping[str, Any], options: Mapping[str, Any], plan_kwargs: Mapping[str, Any] | None
) -> None:
    """Train a model with the arguments of :meth:`scforge.models.Encoder.train` and additional options."""
    further = dict(options)
    if "enable_progress_bar" in further:  # as scvi-tools and its autotune call it
        given = {**given, "progress_bar": further.pop("enable_progress_bar")}
    if not isinstance(plan_kwargs, Mapping | None):
        raise OptionError("is not a dictionary of options; pass {name: value}.", plan_kwargs=plan_kwargs)
    for name, value in (plan_kwargs or {}).items():
        default = TrainOptions.model_fields[name].default if name in TrainOptions.model_fields else None
        if name in further or given.get(name) not in (None, default):
            raise OptionError(f"{name} is set both in plan_kwargs and as an argument; remove one of the two.")
        further[name] = value
    own = TrainOptions.names()
    of_trainer = set(inspect.signature(lightning.Trainer).parameters) - set(_OF_OTHERS) - set(own)
    check_options("training option", "train", sorted(further.keys() - of_trainer), own, _OF_OTHERS)
    how = TrainOptions.from_arguments({**given, **further})
    fitted = model.fitted
    check_filled(fitted.module)
    objective = fitted.spec.build_objective()  # learns of the cells, unlike that of the model, and is dropped
    data = training_data(model, objective, how)
    of_plan = how.of_plan()
    if fitted.is_trained and isinstance(objective, SupervisedTask) and how.lr is None and how.schedule is None:
        # The schedule has ended; at its peak again, the head would first lose what it has learned.
        of_plan |= {"lr": _CONTINUED * objective.defaults.lr, "schedule": "constant"}
    plan = TrainingPlan(fitted.module, objective, **of_plan)
    is_tuned = fitted.spec.tuning is not None
    try:
        _run(model, data, plan, how)
    except (NotFiniteError, SavingError):
        if is_tuned:
            calibrate(fitted, data, after_failure=True)  # the model keeps the best weights so far
        raise
    if is_tuned:
        calibrate(fitted, data)
        _keep_labeled(fitted, data)


def training_data(model: Model, objective: Objective, how: TrainOptions) -> CellDataModule:
    """Return the data module to train on, bound to the tokenizer and objective of the model."""
    fitted, own, given = model.fitted, model.datamodule, how.datamodule
    options: dict[str, Any] = {name: getattr(how, name) for name in _OF_DATAMODULE}
    options = {name: value for name, value in options.items() if value not in (None, _AUTO)}
    data = own if given is None else given
    if data is None:
        if model.adata is None:
            raise OptionError("the model was loaded without adata; pass adata to Encoder.load, or datamodule to train.")
        cells = model.open_cells(model.adata)
        columns: dict[str, Any] = {key: fitted.setup.get(key) for key in ("batch_key", "labels_key")}
        if fitted.spec.tuning is not None:  # split as in its fine-tuning
            if "validation_size" in options:
                problem = "was set by finetune and cannot be changed; omit validation_size."
                raise OptionError(problem, argument="validation_size")
            if (split := fitted.split_of(cells)) is None:
                raise DataError(
                    "the cells are not exactly the cells used for fine-tuning; call finetune(adata=...) to fine-tune "
                    "on these cells."
                )
            columns |= {"train_rows": split.train, "validation_rows": split.validation}
        data = CellDataModule(cells, seed=fitted.seed, **columns, **options)
    elif options and model.query_cells is not None and "validation_size" not in options:
        options |= {"train_rows": data.train_rows, "validation_rows": data.validation_rows}
        data = CellDataModule(data.cells, seed=fitted.seed, **options)
    elif options:
        name, value = next(iter(options.items()))
        place = "CellDataModule" if model.query_cells is None else "load_query_data"
        raise OptionError(f"cannot be changed in train; pass {name} to {place} instead.", argument=name, value=value)
    elif model.adata is None:
        model.datamodule = data
    if given is not None and given is not own and fitted.seen is not None:
        marks = CellFingerprints.of(model.open_cells(data.cells))
        learned = np.concatenate([data.train_rows, data.validation_rows])
        if n_tested := int(fitted.seen.tested(marks.numbers)[learned].sum()):
            raise OptionError(
                f"contains {n_tested} of the test cells that finetune held out; remove these cells from datamodule.",
                argument="datamodule",
            )
        if isinstance(objective, Task) and objective.learns_labels:
            fitted.seen = replace(fitted.seen, learned=fitted.seen.learned.union(marks.take(learned)))
    objective.learn_from(fitted.module)
    data.bind(fitted.tokenizer, objective, first_epoch=fitted.n_epochs, cells=model.open_cells(data.cells))
    return data


def calibrate(model: FittedModel, data: CellDataModule, *, after_failure: bool = False) -> None:
    """Calibrate the head on validation cells; after failed training, failed calibration only causes a warning."""
    # Of a sharded model, the first process alone has the whole.
    if not len(data.validation_rows) or not model.is_trained or is_sharded(model.module):
        return
    task: Any = data.objective
    predictor = Predictor(model.module, model.tokenizer, task, data.bound)
    try:
        with torch.random.fork_rng(devices=[]):
            task.calibrate(predictor, data.validation_rows)
    except Exception as error:
        if not after_failure:
            raise
        warn(f"the confidence of the model could not be calibrated: {first_line(error)}.")


def _keep_labeled(model: FittedModel, data: CellDataModule) -> None:
    """Keep labeled training cells to predict the classes of new cells, if the task does."""
    task: Any = data.objective
    tuning: Any = model.spec.tuning
    if not task.maps_new_cells or is_sharded(model.module):
        return
    classes = task.read(data.bound.column)[data.train_rows]
    chosen = choose_labeled(classes, seed=model.seed)
    base, rows, obs = model.mapping_base, data.train_rows[chosen], getattr(data.bound, "obs", None)
    embeddings = (base or model).predictor(data.bound, min(data.batch_size or 256, 256)).embedding(rows)
    keys = [data.batch_key, model.setup.get("batch_key"), getattr(model.pretraining, "batch_key", None)]
    keys += [tuning.split.get("split_by")]
    key = next((key for key in keys if obs is not None and key in obs), None)
    batches = None
    if obs is not None and key is not None:
        batches = texts_of(obs[key].iloc[rows], key=key, argument="batch_key").codes
    model.labeled = LabeledCells.calibrated(embeddings, classes[chosen], batches, in_base=base is not None)


def _run(model: Model, data: CellDataModule, plan: TrainingPlan, how: TrainOptions) -> None:
    """Train with a bound data module, or resume a training run."""
    fitted = model.fitted
    precision, batch_size, max_epochs = how.precision, how.batch_size, how.max_epochs
    if fitted.is_query and (precision in ("16-true", "bf16-true") or how.strategy == "fsdp"):
        given = f"precision={precision!r} with strategy={how.strategy!r}"
        raise OptionError(
            f"{given} would change weights that a query model shares with its reference; use precision='bf16-mixed' "
            "with strategy='auto'."
        )
    if how.checkpoint_dir is None and (how.resume == _AUTO or how.overwrite):
        name = "overwrite=True" if how.overwrite else "resume='auto'"
        raise OptionError(f"{name} requires checkpoint_dir, the folder of the training run.")
    if how.checkpoint_every_n_steps is not None and how.checkpoint_dir is None:
        raise OptionError(
            "has no effect without checkpoint_dir; pass the folder of the training run as checkpoint_dir.",
            argument="checkpoint_every_n_steps",
        )
    folder = None if how.checkpoint_dir is None else RunFolder(how.checkpoint_dir)
    rank = rank_zero_only.rank or 0
    with contextlib.ExitStack() as stack:
        if folder is not None and rank == 0:
            stack.enter_context(folder.locked())
        if folder is not None or how.resume is not None:
            for name, plain in _NOT_RESUMED.items():
                if (value := how.trainer_kwargs.get(name)) not in (None, plain):
                    raise OptionError(
                        f"does not work with checkpoint_dir or resume, because such a training run "
                        f"cannot be resumed; omit {name}.",
                        argument=name,
                        value=value,
                    )
        found = None if how.resume is None else _found(folder, how.resume, overwrite=how.overwrite)
        make_free = None
        if folder is not None and rank == 0:
            make_free = _freeing(fitted, folder, found, how.resume, overwrite=how.overwrite)
        saved = {} if found is None else found[1]["settings"]
        device = root_device(how.accelerator, how.devices)
        processes = n_processes(how.accelerator, how.devices, how.num_nodes)
        if how.gradient_checkpointing is not None:
            stack.enter_context(gradient_checkpointing(fitted.module, how.gradient_checkpointing))
        if precision == _AUTO and device.type == "cuda":  # the batch size depends on it
            precision = saved.get("precision") or choose_precision(fitted.module, data, device, processes)
        if batch_size == _AUTO:
            if processes != 1 or data.batch_size is not None or data.max_tokens_per_batch is not None:
                raise OptionError("needs one process and no other batch size limit; pass a number.", batch_size="auto")
            stack.callback(setattr, data, "batch_size", None)
            fitting = saved.get("batch_size") or find_batch_size(fitted.module, data, device, precision=precision)
            data.batch_size = fitting
        if precision == _AUTO:
            precision = saved.get("precision") or choose_precision(fitted.module, data, device, processes)
        if max_epochs is None:
            max_epochs = default_max_epochs(plan.objective.defaults, len(data.train_rows)) if how.max_steps < 0 else -1
        settings = _settings(
            fitted,
            data,
            plan,
            max_epochs=max_epochs,
            precision=precision or "32-true",
            processes=processes,
            **how.decisive(),
            **{name: str(how.trainer_kwargs[name]) for name in _OF_OUTCOME if name in how.trainer_kwargs},
            **({} if folder is None and found is None else _fingerprint(fitted.spec, data)),
        )
        if found is not None:
            path, state, stored = found
            check_settings(_comparable(saved), _comparable(settings), where=str(path))
            load_weights(fitted.module, stored.weights, source=str(path), known_finite=stored.is_checked)
        elif not fitted.is_trained:
            some = data.bound.sample(SAMPLED_CELLS, rows=data.train_rows, seed=fitted.seed)
            plan.objective.initialize(fitted.module, some, fitted.tokenizer)
        model.train_indices_, model.validation_indices_ = data.train_rows, data.validation_rows
        saving = SaveOptions(
            write=None if folder is None else _writer(fitted, folder, how.keep_last),
            every_n_steps=how.checkpoint_every_n_steps,
            best=None if folder is None or how.save_top_k == 0 else _best(fitted, folder, how.save_top_k),
            settings=settings,
            resume=None if found is None else found[1],
            begin=make_free,
        )
        if found is not None:
            patience = how.early_stopping_patience if how.early_stopping else None
            done = f"{state['epoch']} epochs, {state['step']} steps"
            is_over = saving.is_over(max_epochs, how.max_steps, patience)
            announce(f"The training in {path} is complete: {done}." if is_over else f"Resuming {path} after {done}.")
        if how.compile:
            stack.enter_context(compiled(fitted.module, how.compile))
        gpus = range(torch.cuda.device_count()) if device.type == "cuda" else ()
        stack.enter_context(torch.random.fork_rng(devices=gpus))
        # Seeds dropout and the directions of SIGReg, differently for each training run and process.
        torch.manual_seed(fitted.seed + fitted.n_epochs + 1_000_003 * rank)
        error: NotFiniteError | SavingError | None = None
        try:
            settled = how.model_copy(update={"max_epochs": max_epochs, "precision": precision})
            result = fit(plan, data, settled, saving=saving)
        except (NotFiniteError, SavingError) as failure:  # the best weights so far are in it
            result, error = failure.result, failure
    if folder is not None:
        fitted.trained_in = fitted.trained_in | {str(folder.path.resolve())}
    _take_over(fitted, result)
    if error is not None:
        raise error
    if result.interrupted:
        raise KeyboardInterrupt
    if result.signal is not None:
        logger.warning(
            "Training was stopped by %s, and a checkpoint was saved; continue with %s.",
            signal.Signals(result.signal).name,
            spelled("resume='auto'", "--resume auto"),
        )
        signal.raise_signal(result.signal)
    if rank == 0:
        fitted.embed_training_cells(data.bound, data.train_rows, min(data.batch_size or 256, 256))


def _take_over(model: FittedModel, result: FitResult) -> None:
    """Store the results of a training run in the model."""
    if result.weights:  # the module is sharded
        model.module = model.spec.build_module().eval()
        model.module.load_state_dict(result.weights)
    model.module.to(result.device, torch.float32)  # precisions such as "bf16-true" leave it in half precision
    model.stopped = result.stopped
    model.extend_history(result.history)
    model.n_epochs += result.n_epochs
    model.is_trained = model.is_trained or result.n_epochs > 0
    model.labeled = None
    if model.spec.tuning is None:
        model.landmarks = None
    if model.spec.tuning is None or model.spec.tuning.freeze is not True:
        model.correction = None


def _found(folder: RunFolder | None, resume: str | os.PathLike[str], *, overwrite: bool) -> _Found | None:
    """Return the checkpoint to resume from, or None if it does not exist."""
    if isinstance(resume, bool):
        raise OptionError("must be 'auto', the folder of a checkpoint, or None.", resume=resume)
    if overwrite:
        raise OptionError("and overwrite=True contradict each other; keep one of the two.", resume=str(resume))
    if resume == _AUTO:
        return None if folder is None else folder.latest(read_folder)
    path = Path(resume)
    check_state(path, folder)
    return path, read_state(path), read_folder(path)


def _freeing(
    model: FittedModel, folder: RunFolder, found: _Found | None, resume: Any, *, overwrite: bool
) -> Callable[[], None]:
    """Return a function that clears the folder before the first step. Raises an error if this is not allowed."""
    if found is not None and folder.holds(found[0]):
        state = found[1]
        return lambda: folder.go_back_to(state["step"], model.n_epochs + state["epoch"])
    if str(folder.path.resolve()) in model.trained_in:
        # A second training run of the same model continues with the numbers of its epochs.
        return lambda: folder.clear(states_only=True)
    folder.check_free(resumes=resume == _AUTO, overwrite=overwrite)
    return folder.clear


def _writer(model: FittedModel, folder: RunFolder, keep_last: int) -> Any:
    """Return a function that writes checkpoints as model folders."""
    before = model.n_epochs

    def write(name: str, state: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
        with _saved(model, folder, name, before + state["epoch"]):
            model.write(folder.path / name, weights=weights, extra=lambda place: write_state(place, state))
            folder.keep_last(keep_last)

    return write


def _best(model: FittedModel, folder: RunFolder, top_k: int) -> Any:
    """Return a function that creates a callback to save the best epochs as model folders."""
    before = model.n_epochs

    def save(name: str, epochs_done: int, weights: dict[str, torch.Tensor]) -> None:
        with _saved(model, folder, name, before + epochs_done):
            model.write(folder.path / name, weights=weights)

    def remove(name: str) -> None:
        if (folder.path / name).is_dir():  # a resumed training run may have removed it before
            with _saved(model, folder, name, before):
                remove_model(folder.path / name)

    return lambda monitor, mode: SaveBest(save, remove, top_k=top_k, monitor=monitor, mode=mode, first_epoch=before)


@contextlib.contextmanager
def _saved(model: FittedModel, folder: RunFolder, name: str, n_epochs: int) -> Any:
    """Set the model's epoch count while saving. Raises a SavingError if the model cannot be written."""
    before = model.is_trained, model.n_epochs
    model.is_trained, model.n_epochs = True, n_epochs
    try:
        yield
    except SavingError:
        raise
    except (OSError, SafetensorError, TrainingError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        kept = "".join(f", but {state.name} is complete" for state in folder.states()[-1:])
        how = spelled("resume='auto'", "--resume auto")
        problem = f"{name} cannot be written ({reason}){kept}; free disk space and pass {how}"
        raise SavingError(f"checkpoint_dir={str(folder.path)!r}: {problem}.") from error
    finally:
        model.is_trained, model.n_epochs = before


def _settings(model: FittedModel, data: CellDataModule, plan: TrainingPlan, **further: Any) -> dict[str, Any]:
    """Return the settings that determine the result of a training run, as a JSON-safe dict."""
    parts = model.spec.to_json()
    named = {f"{part}.{name}": value for part, options in parts.items() for name, value in options.items()}
    budget = data.max_tokens_per_batch
    size = data.batch_size or (plan.objective.defaults.batch_size if budget is None else None)
    settings = {
        **named,
        "vocab": model.spec.vocab.hash,
        "seed": model.seed,
        "epochs_before": model.n_epochs,
        "n_cells": len(data.train_rows),
        "genes_per_cell": hashlib.sha256(np.ascontiguousarray(data.bound.n_expressed, dtype=np.int64).data).hexdigest(),
        "n_validation_cells": len(data.validation_rows),
        "batch_size": size,
        "max_tokens_per_batch": budget,
        "optimizer": plan.optimizer_name,
        **{name: getattr(plan, name) for name in OF_PLAN if name != "optimizer"},
        **further,
    }
    texts = {name: json.dumps(value, default=str) for name, value in settings.items()}
    return {
        name: json.loads(text) if len(text) <= _MAX_LENGTH else hashlib.sha256(text.encode()).hexdigest()
        for name, text in texts.items()
    }


def _fingerprint(spec: ModelSpec, data: CellDataModule) -> dict[str, str | None]:
    """Return hashes of the data that training reads: counts, measured genes, columns of obs, and the split."""
    cells = data.bound
    found = {"counts": cells.counts_digest() if hasattr(cells, "counts_digest") else None}
    found["measured genes"] = None if cells.measured is None else _sha256(np.packbits(cells.measured))
    found["training cells"], found["validation cells"] = _sha256(data.train_rows), _sha256(data.validation_rows)
    parts = spec.to_json()
    options = {**parts["objective"], **parts.get("tuning", {}).get("task", {}), "batch_key": data.batch_key}
    named = [value for name, value in options.items() if name.endswith(("_key", "_keys")) and value is not None]
    for key in sorted({key for keys in named for key in ([keys] if isinstance(keys, str) else keys)}):
        column = cells.column(key).astype("category")
        # Categories by their text, because categories that no cell has do not matter, nor does their order.
        values = column.cat.categories.astype(str).to_numpy(dtype=object)
        codes, texts = pd.factorize(np.append(values, "\0")[column.cat.codes])
        found[f"obs[{key!r}]"] = _sha256(codes, *(text.encode() + b"\0" for text in texts))
    return {f"{OF_DATA}{name}": value for name, value in found.items()}


def _sha256(*parts: Any) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(np.ascontiguousarray(part) if isinstance(part, np.ndarray) else part)
    return digest.hexdigest()


def _comparable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Remove settings that may change when resuming, such as `max_epochs` with a constant learning rate."""
    settings = {name: value for name, value in settings.items() if name not in _ADDED or value != _ADDED[name]}
    if settings.get("schedule") == "constant":
        settings.pop("max_epochs", None)
    return settings
