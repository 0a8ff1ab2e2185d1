"""Predictions and evaluations of fine-tuned models, from files into files: ``scforge predict`` and ``evaluate``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from anndata import AnnData

from scforge._io import atomic_path
from scforge.data.sources import read_h5ad
from scforge.errors import OptionError
from scforge.estimators.config_data import embedded_adata
from scforge.estimators.encoder import Encoder
from scforge.estimators.model_folder import check_model_folder
from scforge.estimators.placing import device_for, move_to
from scforge.finetuning.base import Task

__all__ = ["evaluate_to", "predict_to"]

_TABLE, _CELLS = ".csv", ".h5ad"


def predict_to(
    model: str | os.PathLike[str],
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    batch_size: int = 256,
    device: str = "auto",
    overwrite: bool = False,
    **options: Any,
) -> str:
    """Predict cells of a file with a fine-tuned model, into a file.

    Parameters
    ----------
    model
        Folder of a fine-tuned model.
    source
        h5ad file, or what else :func:`scforge.data.open_cells` takes.
    output
        ``.csv`` for a table with a row a cell; ``.h5ad`` for the cells with the predictions in ``obs``, or for an
        AnnData that the task makes.
    batch_size
        Cells a batch.
    device
        Where to compute; ``"auto"`` takes a GPU if there is one.
    overwrite
        Replace `output`.
    **options
        Options of the task's ``predict``, e.g. ``threshold``.

    Returns
    -------
    What was predicted, in a few words.

    Raises
    ------
    OptionError
        If the model was not fine-tuned, an option is unknown, or the output cannot hold what is predicted.
    MissingFileError, ModelFileError, DataError
        If a file cannot be read or used.

    Examples
    --------
    >>> predict_to("annotator", "cells.h5ad", "labels.csv", threshold=0.5)  # doctest: +SKIP
    """
    path = _checked_output(output, [_TABLE, _CELLS], overwrite=overwrite, inputs=[source])
    tuned = _load(model, device)
    task = tuned.spec.build_objective()
    assert isinstance(task, Task)
    adata = _in_memory(source)
    if adata is None and path.suffix == _CELLS and not task.makes_cells:
        raise OptionError(
            f"output={str(output)!r} needs cells from an h5ad file, not {str(source)!r}; give a table, e.g. labels.csv."
        )
    if task.makes_cells and path.suffix == _TABLE:
        raise OptionError(f"output={str(output)!r}: the task makes cells, not a table; name an h5ad file.")
    found = tuned.predict(source if adata is None else adata, batch_size=batch_size, **options)
    if isinstance(found, AnnData):
        if path.suffix == _TABLE:
            raise OptionError(
                f"output={str(output)!r}: the task makes cells, not a table; give the name of an h5ad file."
            )
        _write(path, found)
        return f"{found.n_obs:,} x {found.n_vars:,} predicted values"
    if path.suffix == _CELLS:
        assert adata is not None
        _write(path, adata)
    else:
        table = pd.DataFrame(found)
        if adata is None:
            cells = tuned.cells(source)
            table.index = embedded_adata(cells, np.empty((len(cells), 0), dtype=np.float32), "none").obs_names
        _write(path, table.rename_axis("cell"))
    return f"{len(found):,} cells"


def evaluate_to(
    model: str | os.PathLike[str],
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    baselines: bool = True,
    trained_on: str | os.PathLike[str] | None = None,
    base_model: str | os.PathLike[str] | None = None,
    batch_size: int = 256,
    device: str = "auto",
    seed: int = 0,
    overwrite: bool = False,
) -> pd.DataFrame:
    """Score the predictions of a fine-tuned model on cells of a file.

    Parameters
    ----------
    model
        Folder of a fine-tuned model.
    source
        Cells with the answer. Of the cells of the fine-tuning those are scored that it held out.
    output
        ``.csv`` file for the figures; None writes none.
    baselines
        Compute baselines, which need the cells of the fine-tuning.
    trained_on
        The cells of the fine-tuning, where `source` are others.
    base_model
        Folder of the model before fine-tuning, for the baseline of its frozen embedding.
    batch_size
        Cells a batch.
    device
        Where to compute; ``"auto"`` takes a GPU if there is one.
    seed
        Seed of what is random in baselines.
    overwrite
        Replace `output`.

    Returns
    -------
    One row a method, one column a figure.

    Raises
    ------
    OptionError
        If the model was not fine-tuned, or `trained_on` are not the cells of the fine-tuning.
    MissingFileError, ModelFileError, DataError
        If a file cannot be read or used.

    Examples
    --------
    >>> evaluate_to("annotator", "cells.h5ad")  # doctest: +SKIP
    """
    inputs = [source] if trained_on is None else [source, trained_on]
    path = None if output is None else _checked_output(output, [_TABLE], overwrite=overwrite, inputs=inputs)
    learned = None if trained_on is None else _in_memory(trained_on)
    if trained_on is not None and learned is None:
        raise OptionError(f"trained_on={str(trained_on)!r} (--trained-on) is no h5ad file; give one.")
    tuned = _load(model, device, learned)
    if learned is not None and tuned._known_split() is None:
        raise OptionError(
            f"trained_on={str(trained_on)!r} (--trained-on) are not the cells of the fine-tuning, or not all of "
            "them; give those, or leave it out."
        )
    base = None
    if base_model is not None:
        base = Encoder.load(check_model_folder(base_model, f"base_model={str(base_model)!r} (--base-model)"))
        move_to(base, device_for(device))
    adata = _in_memory(source)
    found = tuned.evaluate(
        source if adata is None else adata, baselines=baselines, base=base, batch_size=batch_size, seed=seed
    )
    if path is not None:
        _write(path, found)
    return found


def _load(model: str | os.PathLike[str], device: str, adata: AnnData | None = None) -> Encoder:
    said = f"model={str(model)!r} (--model)"
    tuned = Encoder.load(check_model_folder(model, said), adata)
    if tuned.spec.tuning is None:
        raise OptionError(
            f"{said} was not fine-tuned, so it predicts nothing; run scforge finetune --base-model {model} first, or "
            "scforge embed for its embedding."
        )
    move_to(tuned, device_for(device))
    return tuned


def _in_memory(source: str | os.PathLike[str]) -> AnnData | None:
    """Read an h5ad file; None of what is read as it is needed."""
    path = os.fspath(source)
    return read_h5ad([path]) if path.endswith(_CELLS) and "://" not in path and "*" not in path else None


def _checked_output(output: Any, endings: list[str], *, overwrite: bool, inputs: list[Any]) -> Path:
    path = Path(output)
    if path.suffix not in endings:
        raise OptionError(f"output={str(output)!r} does not end in {' or '.join(endings)}; give such a name.")
    if any(path.resolve() == Path(one).resolve() for one in inputs):
        raise OptionError(f"output={str(output)!r} are the cells themselves; give another name.")
    if path.is_dir() or (path.exists() and not overwrite):
        raise OptionError(f"output={str(output)!r} exists; give another name, or replace it with --overwrite.")
    return path


def _write(path: Path, content: AnnData | pd.DataFrame) -> None:
    with atomic_path(path) as temporary:
        if isinstance(content, AnnData):
            content.write_h5ad(temporary)
        else:
            content.to_csv(temporary)
