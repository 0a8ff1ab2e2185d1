"""Fine-tune a model from a configuration."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from anndata import AnnData
from lightning.fabric.utilities.rank_zero import rank_zero_only

from scforge._columns import texts_of
from scforge._constants import EVALUATION_FILE
from scforge._io import atomic_write_text
from scforge._text import without_formulas
from scforge.config.schema import Config
from scforge.errors import OptionError, listing, suggest
from scforge.estimators.encoder import Encoder
from scforge.models._utils import count_parameters
from scforge.workflows.check import FOUND_IN_CELLS, columns_of, named_columns
from scforge.workflows.models import load_named
from scforge.workflows.places import finetune_section, placed
from scforge.workflows.train import (
    best_epoch,
    checked_arguments,
    open_source,
    outputs_of,
    written_files,
)

if TYPE_CHECKING:
    from scforge.data.cells import Cells

logger = logging.getLogger("scforge")

_PERTURBED = ("perturbation", "condition")
_CONTROLS = ("control", "ctrl", "non-targeting", "NT")
"""Names of the perturbation column, and of control cells, in scPerturb, GEARS and pertpy."""

_OF_TUNING = ("validation_size", "test_size", "split_by", "split_key", "freeze", "lora", "head")


@dataclass(frozen=True)
class FinetuningResult:
    """Result of fine-tuning.

    Attributes
    ----------
    model
        The fine-tuned model.
    metrics
        Scores on the test cells, one row per method; None if ``finetune.evaluate`` did not request them.
    """

    model: Encoder
    metrics: pd.DataFrame | None


def finetune_from_config(
    config: Config,
    *,
    progress_bar: bool = True,
    resume: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> FinetuningResult:
    """Read the base model and the cells, fine-tune, and write the outputs of ``config.output``.

    Parameters
    ----------
    config
        Configuration with a section ``finetune``, see :func:`scforge.config.load_config`.
    progress_bar, resume, overwrite
        See :func:`scforge.workflows.train_from_config`.

    Returns
    -------
    Model and scores. With ``output.checkpoint_dir``, the model is saved in this folder as ``final``, and the scores as
    ``evaluation.csv``. With several processes, only the first process evaluates and writes.

    Raises
    ------
    ConfigError, OptionError
        If an option is invalid.
    MissingFileError, ModelFileError, DataError
        If the base model or the cells cannot be read or are invalid.

    Examples
    --------
    >>> from scforge.config import load_config
    >>> finetune_from_config(load_config("finetune.yaml")).metrics  # doctest: +SKIP
    """
    section = finetune_section(config)
    arguments = checked_arguments(config, resume=resume, overwrite=overwrite)
    with placed(config, "finetune.base_model"):
        base = load_named(section.base_model, f"finetune.base_model={section.base_model!r} (--base-model)")
    with placed(config):
        source = open_source(config.data, base.vocab, columns=named_columns(config))
        data, setup = config.data, base.registry_["setup_args"]
        if isinstance(source, AnnData) and (data.layer is not None or data.gene_key is not None):
            type(base).setup_anndata(
                source,
                layer=setup.get("layer") if data.layer is None else data.layer,
                gene_key=setup.get("gene_key") if data.gene_key is None else data.gene_key,
                **columns_of(config),
            )
        options = {**section.user_options(), **_found_in_cells(section.task, section.user_options(), source)}
        how: dict[str, Any] = {**columns_of(config), **{name: getattr(section, name) for name in _OF_TUNING}}
        batches = {
            "batch_size": config.training.batch_size,
            "max_tokens_per_batch": data.max_tokens_per_batch,
            "num_threads": data.num_threads,
        }
        # If the batch size is "auto", it is among the arguments of the training already.
        how |= {name: value for name, value in batches.items() if value not in (None, "auto")}
        how |= {**arguments, "seed": config.seed, "progress_bar": progress_bar}
        model = base.finetune({"name": section.task, **options}, source, **how)
    if rank_zero_only.rank:
        return FinetuningResult(model, None)
    outputs_of(model, source, config, overwrite=overwrite or resume is not None)
    metrics: Any = None
    if section.evaluate:
        metrics = model.evaluate(seed=config.seed, intervals=False)
        if config.output.checkpoint_dir is not None:
            path = Path(config.output.checkpoint_dir) / EVALUATION_FILE
            atomic_write_text(path, without_formulas(metrics).to_csv(), overwrite=overwrite or resume is not None)
    return FinetuningResult(model, metrics)


def finetuning_report(result: FinetuningResult, config: Config) -> list[str]:
    """Return the results of fine-tuning, the folder of the model, and the scores on the test cells, as lines.

    Parameters
    ----------
    result
        Result of :func:`finetune_from_config`.
    config
        Its configuration.
    """
    model, output = result.model, config.output
    tuning: Any = model.spec.tuning
    split: Any = model.fitted.split_of(model.open_cells())
    lines = [str(model).splitlines()[0]]
    classes = tuning.task_options.get("classes")
    lines.append(f"Task:        {tuning.task}" + (f", {len(classes)} classes: {listing(classes)}" if classes else ""))
    sizes = {"train": split.train, "validate": split.validation, "test": split.test}
    lines.append("Cells:       " + ", ".join(f"{len(rows):,} to {part}" for part, rows in sizes.items()))
    trained, all_ = (count_parameters(model.module, trainable_only=only) for only in (True, False))
    lines.append(f"Trained:     {trained:,} of {all_:,} weights ({trained / all_:.1%})")
    task = model.objective
    lines += best_epoch(model, task.monitor if len(split.validation) else "loss", task.monitor_mode)
    lines += written_files(config)
    if result.metrics is not None:
        if output.checkpoint_dir is not None:
            lines.append(f"Evaluation:  {Path(output.checkpoint_dir) / EVALUATION_FILE}")
        lines += ["", f"{len(split.test):,} test cells:", *result.metrics.round(4).to_string().splitlines()]
    return lines


def _found_in_cells(task: str, options: dict[str, Any], source: AnnData | Cells) -> dict[str, Any]:
    """Return options for the perturbation column and the control label, if the cells use a conventional name.

    Raises
    ------
    OptionError
        If the cells contain no conventional name, or several.
    """
    missing = [name for name in FOUND_IN_CELLS.get(task, ()) if options.get(name) is None]
    if not missing:
        return {}
    found: dict[str, Any] = {}
    columns = list(getattr(getattr(source, "obs", None), "columns", []))
    if "perturbation_key" in missing:
        found["perturbation_key"] = _the_one(_PERTURBED, columns, "perturbation_key", task)
    key = found.get("perturbation_key", options.get("perturbation_key"))
    if "control" in missing:
        if key is None or key not in columns:
            raise OptionError(f"is not a column of obs{suggest(key, columns, 'available')}", perturbation_key=key)
        values = source.obs[key] if isinstance(source, AnnData) else source.column(key)
        found["control"] = _the_one(
            _CONTROLS, texts_of(values, key=key, argument="perturbation_key").categories, "control", task
        )
    taken = " and ".join(f"finetune.{name}={value!r}" for name, value in found.items())
    logger.info("Using %s, as found in the cells.", taken)
    return found


def _the_one(usual: tuple[str, ...], there: list[str], option: str, task: str) -> str:
    fitting = [name for name in usual if name in there]
    if len(fitting) == 1:
        return fitting[0]
    why = f"more than one candidate: {listing(fitting)}" if fitting else f"none of {listing(usual)}"
    flag = option.replace("_", "-")
    raise OptionError(
        f"the task {task!r} requires {option}, but the cells contain {why}; set finetune.{option} (--{flag})."
    )
