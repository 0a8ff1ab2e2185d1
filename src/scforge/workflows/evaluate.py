"""Evaluate models from files, and write a report."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from anndata import AnnData

from scforge._constants import UNS_KEY
from scforge._text import without_formulas
from scforge.errors import OptionError, listing
from scforge.estimators.encoder import Encoder
from scforge.estimators.evaluate import evaluate_models
from scforge.eval.report import Report
from scforge.finetuning.supervised import SupervisedTask
from scforge.workflows.embed import chosen_device
from scforge.workflows.models import is_shared_name, load_named
from scforge.workflows.outputs import check_scores, output_file
from scforge.workflows.predict import in_memory
from scforge.workflows.train import write

if TYPE_CHECKING:
    from scforge.eval.base import Entry

_TABLE = ".csv"

_OF_TASKS = ("trained_on", "base_model", "groups_key", "intervals", "map_query")

_OF_EMBEDDINGS = (
    *("trained_on", "obsm_keys", "labels_key", "batch_key", "groups_key", "untrained", "intervals", "seeds"),
    *("network", "gene_key"),
)
"""Options of the evaluation of embeddings; `_OF_TASKS` contains options of the evaluation of tasks."""


type Folder = str | os.PathLike[str]


def evaluate_to(
    model: Folder | Sequence[Folder],
    source: Folder,
    output: Folder | None = None,
    *,
    benchmarks: Sequence[Entry] | None = None,
    baselines: bool | Sequence[int | str] = True,
    batch_size: int = 256,
    device: str = "auto",
    seed: int = 0,
    overwrite: bool = False,
    progress_bar: bool = True,
    **options: Any,
) -> pd.DataFrame | Report:
    """Score models on the cells in a file, with baselines.

    Without `benchmarks`, a fine-tuned model is scored on its task, and other models are scored by their embedding.

    Parameters
    ----------
    model
        Folder of a model. For embeddings, it may also be several folders, with one row each.
    source
        Labeled cells: an h5ad file, a store (for tasks), or the name of a data set
        (:func:`scforge.datasets.list_cards`). Of the cells used for fine-tuning, only test cells are scored.
    output
        A ``.csv`` file for the scores or, for embeddings, a folder for the report. For the tasks annotation,
        multi-label and regression, the differences from the baselines are written next to it, as
        ``<name>_differences.csv``. If None, nothing is written.
    benchmarks
        Benchmarks of embeddings, as in :func:`scforge.workflows.evaluate_models`.
    baselines
        Whether to compute baselines. For embeddings, it may also be a list of baselines.
    batch_size
        Number of cells per batch.
    device
        Device to compute on; ``"auto"`` uses a GPU if available.
    seed
        Random seed for baselines; for embeddings, the first seed.
    overwrite
        Whether to replace `output`.
    progress_bar
        Whether to print a line for each baseline and score of embeddings.
    **options
        ``trained_on``: h5ad file with the training cells, if they are not in `source`; used for baselines of tasks, and
        for ``generation``. For tasks: ``base_model`` (folder of the model before fine-tuning, for the baseline on its
        frozen embedding), and ``groups_key`` and ``intervals`` of :meth:`scforge.models.Encoder.evaluate`. For
        embeddings: ``obsm_keys`` (additional embeddings in the file), ``labels_key``, ``batch_key``, ``groups_key``,
        ``untrained``, ``intervals``, ``seeds`` (number of seeds), and ``network`` and ``gene_key`` of
        :func:`evaluate_models`.

    Returns
    -------
    For a task, a table with one row per method and one column per score; for embeddings, the report.

    Raises
    ------
    OptionError
        If an option is invalid here, or `trained_on` does not contain the cells used for fine-tuning.
    MissingFileError, ModelFileError, DataError
        If a file cannot be read or is invalid.

    Examples
    --------
    >>> evaluate_to("annotator", "cells.h5ad")  # doctest: +SKIP
    >>> evaluate_to("light", "pbmc3k", "report")  # doctest: +SKIP
    """
    folders = [model] if isinstance(model, str | os.PathLike) else list(model)
    if not folders:
        raise OptionError("is empty; pass the folder of a model.", model=[])
    models = dict(zip(_names(folders), (_load(folder) for folder in folders), strict=True))
    tuned = [folder for folder, one in zip(folders, models.values(), strict=True) if one.spec.tuning is not None]
    by_task = benchmarks is None and bool(tuned)
    if by_task and len(folders) > 1:
        raise OptionError(
            "(--model) was fine-tuned, and fine-tuned models are scored one at a time; pass "
            "only this model, or pass benchmarks to score the embeddings.",
            model=str(tuned[0]),
        )
    what, known = ("a task is", _OF_TASKS) if by_task else ("embeddings are", _OF_EMBEDDINGS)
    if by_task and not isinstance(baselines, bool):
        options["baselines"] = list(baselines)
    for name, value in options.items():
        if name not in known:
            raise OptionError(
                f"has no effect if {what} scored; omit {name} (known options: {listing(known)}).",
                argument=name,
                value=value,
            )
    trained_on = options.pop("trained_on", None)
    if trained_on is not None:
        learned = in_memory(trained_on)
        if learned is None:
            raise OptionError(
                "(--trained-on) is not an h5ad file; pass the path of an h5ad file.", trained_on=str(trained_on)
            )
        models = {name: _load(folder, learned) for name, folder in zip(models, folders, strict=True)}
    for one in models.values():
        one.to_device(chosen_device(device))
    options |= {"baselines": baselines, "batch_size": batch_size, "seed": seed}
    if by_task:
        return _evaluate_task(models["scforge"], source, output, trained_on, device, overwrite=overwrite, **options)
    options |= {"benchmarks": benchmarks, "progress_bar": progress_bar}
    return _evaluate_embeddings(models, source, output, overwrite=overwrite, **options)


def _evaluate_task(
    tuned: Encoder,
    source: Folder,
    output: Folder | None,
    trained_on: Folder | None,
    device: str,
    *,
    base_model: Folder | None = None,
    overwrite: bool,
    **options: Any,
) -> pd.DataFrame:
    inputs = [source] if trained_on is None else [source, trained_on]
    if output is None and options.get("groups_key") is not None:
        raise OptionError(
            "(--groups-key) requires output (-o), where the intervals are written; pass both.",
            argument="groups_key",
        )
    path = None if output is None else output_file(output, [_TABLE], overwrite=overwrite, inputs=inputs)
    differences_path = None
    if path is not None and isinstance(tuned.objective, SupervisedTask):
        differences_path = path.with_stem(f"{path.stem}_differences")
        output_file(differences_path, [_TABLE], overwrite=overwrite, inputs=inputs)
        if differences_path.exists() and not differences_path.read_bytes().startswith(b"method,"):
            raise OptionError(
                f"would replace {str(differences_path)!r}, which scforge did not write; choose another name.",
                output=str(path),
            )
    if trained_on is not None and tuned.fitted.split_of(tuned.open_cells()) is None:
        raise OptionError(
            "(--trained-on) does not contain exactly the cells used for fine-tuning; "
            "pass these cells, or omit trained_on.",
            trained_on=str(trained_on),
        )
    base = None
    if base_model is not None:
        base = load_named(base_model, f"base_model={str(base_model)!r} (--base-model)")
        base.to_device(chosen_device(device))
    adata = in_memory(source)
    options.setdefault("intervals", path is not None)
    found = tuned.evaluate(source if adata is None else adata, base=base, **options)
    if path is not None:
        write(path, without_formulas(found), overwrite=overwrite)
    if differences_path is not None:
        differences = None if adata is None else adata.uns[UNS_KEY].get("metrics_differences")
        if differences is None:  # those of an earlier evaluation do not belong to these scores
            differences_path.unlink(missing_ok=True)
        else:
            write(differences_path, without_formulas(differences.set_index("method")), overwrite=overwrite)
    return found


def _evaluate_embeddings(
    models: Mapping[str, Encoder],
    source: Folder,
    output: Folder | None,
    *,
    seed: int,
    seeds: int = 3,
    overwrite: bool,
    **options: Any,
) -> Report:
    if output is not None:
        check_scores(Path(output), overwrite=overwrite, inputs=[source])
    adata, keys = _cells_of(source)
    options |= {name: key for name, key in keys.items() if options.get(name) is None}
    report = evaluate_models(
        models,
        adata,
        seeds=range(seed, seed + seeds),
        title=f"{', '.join(models)} on {Path(source).stem}",
        key_added=None,
        **options,
    )
    if output is None:
        return report
    if Path(output).suffix == _TABLE:
        frame = report.to_frame()
        write(output, without_formulas(frame.set_index(frame.columns[0])), overwrite=overwrite)
    else:
        report.write(output, overwrite=overwrite)
    return report


def _cells_of(source: Folder) -> tuple[AnnData, dict[str, str | None]]:
    """Return the cells of a file or data set, and the columns given in the card of the data set."""
    from scforge.datasets import get_card, list_cards, load

    name = os.fspath(source)
    if name in list_cards() and not Path(name).exists():
        card = get_card(name)
        return load(name), {"labels_key": card.labels_key, "batch_key": card.batch_key, "groups_key": card.groups_key}
    adata = in_memory(source)
    if adata is None:
        raise OptionError(
            f"must be an h5ad file or the name of a data set in scforge.datasets (data sets: {listing(list_cards())}).",
            source=name,
        )
    return adata, {}


def _load(model: Folder, adata: AnnData | None = None) -> Encoder:
    return load_named(model, f"model={str(model)!r} (--model)", adata)


def _names(models: Sequence[Folder]) -> list[str]:
    """Return a name for each model, derived from its folder or repository; ``"scforge"`` for a single model."""
    if len(models) == 1:
        return ["scforge"]
    places = [Path(model) if is_shared_name(model) else Path(model).resolve() for model in models]
    names = [place.name for place in places]
    if len(set(names)) < len(names):
        names = [f"{place.parent.name}_{place.name}" for place in places]
    if len(set(names)) < len(names):
        raise OptionError(
            f"contains folders with the same name ({listing(names)}); rename the folders.", argument="model"
        )
    return names
